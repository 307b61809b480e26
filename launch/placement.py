"""Decide where ranks start: this machine or the hosts of a hostfile, and which slots of them. No torch."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.hostfile import Host, filter_hosts, is_local, read_hostfile

LAUNCHERS = ("pdsh", "openmpi", "slurm")
DEVICE_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""What chooses devices of a rank. HIP reads its own first, CUDA the second alone."""
_ACCELERATOR_FILES = ("nvidia[0-9]*", "kfd", "dxg", "davinci[0-9]*", "accel/accel*", "dri/renderD*")
_AMD_FILE = "kfd"
_AMD_NODES = "class/kfd/kfd/topology/nodes"


class PlacementError(ValueError):
    """Flags, hostfile and recipe contradict one another."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks of a run start."""

    hosts: tuple[Host, ...]
    """Machines and slots; one host named `localhost` is this machine."""
    hostfile: Path | None = None
    """The file that `hosts` came from; None: this machine, without ssh."""
    num_gpus: int | None = None
    """--num_gpus as deepspeed gets it: slots [0, N) of each host; None when slots are named one by one."""
    include: str = ""
    """--include as deepspeed gets it."""
    exclude: str = ""
    """--exclude as deepspeed gets it."""
    master_addr: str | None = None
    """Address of rank 0; None: this machine, or the first host's first address."""
    master_port: int | None = None
    """Port of rank 0; None: a free one for each stage."""
    launcher: str = "pdsh"
    """What deepspeed starts ranks on other machines with."""
    launcher_args: str = ""
    """More arguments of pdsh, mpirun or srun."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(host.slots) for host in self.hosts)

    @property
    def is_remote(self) -> bool:
        """Whether ranks are started on other machines too."""
        return self.hostfile is not None

    def __str__(self) -> str:
        where = ", ".join(map(str, self.hosts)) if self.is_remote else "this machine"
        return f"{self.world_size} rank{'s' if self.world_size > 1 else ''} on {where}"


@dataclass(frozen=True, kw_only=True)
class PlacementFlags:
    """What the command line says about placement."""

    num_gpus: int | None = None
    hostfile: Path | None = None
    include: str = ""
    exclude: str = ""
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str = "pdsh"
    launcher_args: str = ""


def place(
    flags: PlacementFlags,
    *,
    deployment: str,
    default_num_gpus: int,
    environment: Mapping[str, str],
    devices: Path = Path("/dev"),
) -> Placement:
    """Combine flags, hostfile, environment and the recipe's wishes into a placement.

    Args:
        flags: of the command line.
        deployment: of the recipe.
        default_num_gpus: ranks on this machine when no flag says otherwise.
        environment: of the launcher; DEVICE_VARIABLES and DS_ACCELERATOR are read.
        devices: folder of device files.

    Raises:
        PlacementError, HostfileError: a contradiction, with the repair.
    """
    _check_flags(flags)
    if flags.hostfile is None:
        if deployment == "multi_node":
            raise PlacementError(
                "the recipe's deployment is multi_node, but no --hostfile is given. Pass one (launch/hostfiles has "
                "examples), or take a single_node recipe."
            )
        return _place_here(flags, default_num_gpus=default_num_gpus, environment=environment, devices=devices)
    listed = read_hostfile(flags.hostfile)
    hosts = filter_hosts(listed, include=flags.include, exclude=flags.exclude)
    _check_deployment(deployment, listed, hosts, flags.hostfile)
    if accelerator_visible(environment, devices):
        _check_visible(hosts, environment, devices)
    if flags.num_gpus is not None:
        for host in hosts:
            if flags.num_gpus > len(host.slots):
                raise PlacementError(
                    f"--num_gpus {flags.num_gpus} is above {host} of {flags.hostfile}. Lower it, or correct the "
                    "hostfile."
                )
        hosts = tuple(replace(host, slots=host.slots[: flags.num_gpus]) for host in hosts)
    _check_launcher(flags.launcher, hosts)
    if len(hosts) == 1 and is_local(hosts[0].name):
        return _here(hosts[0].slots, whole=not (flags.include or flags.exclude), flags=flags)
    return Placement(
        hosts=hosts,
        hostfile=flags.hostfile.absolute(),
        num_gpus=flags.num_gpus,
        include=flags.include,
        exclude=flags.exclude,
        master_addr=flags.master_addr,
        master_port=flags.master_port,
        launcher=flags.launcher,
        launcher_args=flags.launcher_args,
    )


def _check_flags(flags: PlacementFlags) -> None:
    """Flags that are wrong by themselves."""
    if flags.num_gpus is not None and flags.num_gpus < 1:
        raise PlacementError(f"--num_gpus must be >= 1, got {flags.num_gpus}.")
    if flags.num_gpus is not None and (flags.include or flags.exclude):
        flag = "--include" if flags.include else "--exclude"
        raise PlacementError(f"--num_gpus {flags.num_gpus} and {flag} exclude each other. Give one of them.")
    if flags.master_port is not None and not 1 <= flags.master_port <= 65535:
        raise PlacementError(f"--master_port must be in [1, 65535], got {flags.master_port}.")
    if flags.launcher not in LAUNCHERS:
        raise PlacementError(f"--launcher must be one of {', '.join(LAUNCHERS)}, got {flags.launcher}.")
    if flags.hostfile is None and (flags.launcher != "pdsh" or flags.launcher_args):
        raise PlacementError(
            "--launcher and --launcher_args are about other machines: they need --hostfile. Pass it, or drop them."
        )


def _check_launcher(launcher: str, hosts: Sequence[Host]) -> None:
    """mpirun and srun count ranks; they do not choose slots. DeepSpeed's Slurm launcher counts them over all hosts."""
    if launcher == "pdsh":
        return
    for host in hosts:
        if host.slots != tuple(range(len(host.slots))):
            raise PlacementError(
                f"--launcher {launcher} starts ranks on the first slots of a host, not on {list(host.slots)} of "
                f"{host.name}. Choose whole hosts or --num_gpus, or use --launcher pdsh."
            )
    if launcher == "slurm" and len({len(host.slots) for host in hosts}) > 1:
        raise PlacementError(
            f"--launcher slurm starts equally many ranks on each host, not {', '.join(map(str, hosts))}. Make the "
            "slots equal, or use --launcher pdsh."
        )


def _check_deployment(deployment: str, listed: Sequence[Host], hosts: Sequence[Host], hostfile: Path) -> None:
    """A hostfile and a recipe that disagree on the number of machines: one of them is the wrong one."""
    if deployment == "single_node" and len(hosts) > 1:
        raise PlacementError(
            f"the recipe's deployment is single_node, but {hostfile} gives {len(hosts)} hosts. Keep one of them with "
            "--include, or take a recipe for several machines."
        )
    if deployment == "multi_node" and len(listed) == 1:
        raise PlacementError(
            f"the recipe's deployment is multi_node, but {hostfile} names one host. Add the others, or take a "
            "single_node recipe."
        )


def _check_visible(hosts: Sequence[Host], environment: Mapping[str, str], devices: Path) -> None:
    """deepspeed sets CUDA_VISIBLE_DEVICES to the slots on each host, whatever it was here."""
    allowed, name = visible_devices(environment, devices), device_variable(environment, devices)
    for host in hosts:
        hidden = sorted(set(host.slots) - set(allowed if allowed is not None else host.slots))
        if hidden:
            raise PlacementError(
                f"{name}={environment[name]} hides slots {hidden} of {host}. With a hostfile the slots decide: unset "
                "the variable, or choose slots with --include."
            )


def _place_here(
    flags: PlacementFlags, *, default_num_gpus: int, environment: Mapping[str, str], devices: Path
) -> Placement:
    allowed = visible_devices(environment, devices) if accelerator_visible(environment, devices) else None
    if flags.include or flags.exclude:
        flag, text = ("--include", flags.include) if flags.include else ("--exclude", flags.exclude)
        slots = allowed or tuple(range(count_devices(environment, devices)))
        if not slots:
            raise PlacementError(
                f"{flag} {text} names accelerators, but none is visible on this machine and no --hostfile is given. "
                "Use --num_gpus for a number of CPU ranks, or pass --hostfile."
            )
        hosts = filter_hosts([Host("localhost", slots)], include=flags.include, exclude=flags.exclude)
        return _here(hosts[0].slots, whole=False, flags=flags)
    num_gpus = flags.num_gpus or default_num_gpus
    if allowed is None:
        return _here(tuple(range(num_gpus)), whole=True, flags=flags)
    # deepspeed deletes CUDA_VISIBLE_DEVICES when --num_gpus is given, so the devices are named one by one.
    if num_gpus > len(allowed):
        name = device_variable(environment, devices)
        raise PlacementError(
            f"{num_gpus} ranks are wanted on this machine, but {name}={environment[name]} shows {len(allowed)}. Pass "
            f"--num_gpus {len(allowed)}, or make more visible."
        )
    return _here(allowed[:num_gpus], whole=False, flags=flags)


def _here(slots: tuple[int, ...], *, whole: bool, flags: PlacementFlags) -> Placement:
    return Placement(
        hosts=(Host("localhost", slots),),
        num_gpus=len(slots) if whole else None,
        include="" if whole else f"localhost:{','.join(map(str, slots))}",
        master_addr=flags.master_addr,
        master_port=flags.master_port,
    )


def accelerator_visible(environment: Mapping[str, str], devices: Path = Path("/dev")) -> bool:
    """Whether a rank started with this environment can see an accelerator, judged by device files, without torch."""
    if environment.get("DS_ACCELERATOR"):
        return environment["DS_ACCELERATOR"] != "cpu"
    if environment.get(device_variable(environment, devices), "0").strip() in ("", "-1"):
        return False
    return any(any(devices.glob(pattern)) for pattern in _ACCELERATOR_FILES)


def count_devices(
    environment: Mapping[str, str], devices: Path = Path("/dev"), system: Path = Path("/sys")
) -> int:  # fmt: skip
    """Number of NVIDIA devices or AMD dies (two GCDs on an MI250X) that ranks here can choose from.

    What torch counts is found by `rlhf check`, whose probe asks it; a launcher does not import torch.

    Args:
        environment: of the launcher; ROCR_VISIBLE_DEVICES, which Slurm sets, leaves so many and numbers them anew.
        devices: folder of device files.
        system: where the kernel shows devices.

    Returns:
        0 when there are none, or of another make.
    """
    nvidia = sum(1 for path in devices.glob("nvidia[0-9]*") if re.fullmatch(r"nvidia\d+", path.name))
    amd = sum(map(_is_amd_device, system.glob(f"{_AMD_NODES}/*/gpu_id")))
    chosen = [name for name in environment.get("ROCR_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return nvidia or (min(amd, len(chosen)) if chosen else amd)


def _is_amd_device(path: Path) -> bool:
    """A node of the driver's topology is a processor with gpu_id 0, or a die that this user, or container, may use."""
    try:
        return int(path.read_text(encoding="ascii")) != 0
    except (OSError, ValueError):
        return False


def device_variable(environment: Mapping[str, str], devices: Path = Path("/dev")) -> str:
    """The one of DEVICE_VARIABLES that chooses devices on this machine."""
    hip, cuda = DEVICE_VARIABLES
    return hip if hip in environment and (devices / _AMD_FILE).exists() else cuda


def visible_devices(environment: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[int, ...] | None:
    """Device numbers that DEVICE_VARIABLES leave; None when they leave all.

    Raises:
        PlacementError: they are names (GPU-..., MIG-...), which deepspeed cannot pass on.
    """
    name = device_variable(environment, devices)
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not re.fullmatch(r"\d+(\s*,\s*\d+)*", text):
        raise PlacementError(
            f"{name}={text}: the deepspeed launcher understands device numbers only. Set it to numbers, for example "
            "0,1."
        )
    return tuple(int(number) for number in text.split(","))


def port_is_free(port: int) -> bool:
    """Whether this machine can listen on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
