"""Clock, disk, addresses, interfaces, memory of a machine. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from launch.cluster.finding import EVERYWHERE, Finding
from launch.cluster.tools import chosen_names
from launch.hostfile import Host

_SOCKET_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SHM_BYTES = 64 * 2**20
Facts = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Difference of a machine's clock from the one here."""

    offset_seconds: float
    """Positive: it is ahead."""
    error_seconds: float
    """Half of the fastest question and answer: how far the offset may be off."""


def clock_findings(host: str, clock: Clock, *, most_seconds: float) -> Iterator[Finding]:
    """Clocks decide which file is newer, and heartbeats are compared by them."""
    found = f"{clock.offset_seconds:+.3f} s (to {clock.error_seconds:.3f} s)"
    if abs(clock.offset_seconds) - clock.error_seconds > most_seconds:
        yield Finding(
            check="clock", host=host, status="failed", found=found, expected=f"within {most_seconds:g} s of here",
            repair="Let both machines follow one time server (chronyc tracking, timedatectl).",
        )  # fmt: skip
    else:
        yield Finding(check="clock", host=host, status="ok", found=found)


@dataclass(frozen=True, kw_only=True)
class Disk:
    """What was seen of the folder that the run writes to."""

    folder: str
    free_bytes: int | None = None
    """None: it could not be written to."""
    error: str = ""
    sees_ours: bool = False
    """The file written here was read there."""
    seen_here: bool = False
    """The file written there was read here."""


def disk_findings(host: str, disk: Disk, *, wanted_bytes: int, shared: bool) -> Iterator[Finding]:
    """Writable, with room, and, where there are several machines, one and the same."""
    if disk.free_bytes is None:
        yield Finding(
            check="run folder", host=host, status="failed", found=f"cannot write to {disk.folder}: {disk.error}",
            expected="a folder of a shared disk that every machine writes to" if shared else "a folder to write to",
            repair="Mount it there, give the right to write, or pass another --out.",
        )  # fmt: skip
        return
    if shared and not (disk.sees_ours and disk.seen_here):
        way = "written here is not there" if not disk.sees_ours else "written there is not here"
        yield Finding(
            check="run folder", host=host, status="failed", found=f"{disk.folder} is another disk: a file {way}",
            expected="one shared disk", repair="Mount the shared disk at this path there, or pass --out on one.",
        )  # fmt: skip
        return
    free = f"{disk.free_bytes / 1e9:.1f} GB free"
    if disk.free_bytes < wanted_bytes:
        yield Finding(
            check="run folder", host=host, status="failed", found=f"{free} in {disk.folder}",
            expected=f"{wanted_bytes / 1e9:.1f} GB for the states and models of the run",
            repair="Make room, pass another --out, or lower run.keep_states.",
        )  # fmt: skip
        return
    is_shared = ", shared" if shared else ""
    yield Finding(check="run folder", host=host, status="ok", found=f"{disk.folder}: writable{is_shared}, {free}")


def interface_findings(host: str, facts: Facts, environment: Mapping[str, str], *, several: bool) -> Iterator[Finding]:
    """The interfaces that ranks talk over."""
    interfaces = facts["interfaces"]
    chosen = {name: environment[name] for name in _SOCKET_VARIABLES if environment.get(name)}
    for variable, setting in chosen.items():
        if variable.startswith("GLOO"):  # a list of whole names
            names = [word for word in setting.split(",") if word in interfaces]
        else:
            names = chosen_names(setting, list(interfaces))
        with_address = [name for name in names if interfaces[name]["addresses"]]
        if with_address:
            said = ", ".join(f"{name} {_described(interfaces[name])}" for name in with_address)
            yield Finding(check="interfaces", host=host, status="ok", found=f"{variable}: {said}")
            continue
        there = ", ".join(f"{name} {_described(entry)}" for name, entry in interfaces.items())
        yield Finding(
            check="interfaces", host=host, status="failed",
            found=f"{variable}={setting} names {'one without an address' if names else 'none of its interfaces'}",
            expected=f"one of {there}", repair=f"Set {variable} to a name that every machine has, or unset it.",
        )  # fmt: skip
    if "GLOO_SOCKET_IFNAME" in chosen:
        return
    address = facts["own_address"]
    if several and (not address or address.startswith("127.")):
        stands_for = f"stands for {address}, which other machines cannot reach" if address else "stands for no address"
        yield Finding(
            check="interfaces", host=host, status="failed", found=f"its own name, {facts['hostname']}, {stands_for}",
            expected="the address by which the others reach it, which gloo announces",
            repair="Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of the cluster, or mend /etc/hosts.",
        )  # fmt: skip
    else:
        names = [f"{name} {_described(entry)}" for name, entry in interfaces.items() if address in entry["addresses"]]
        yield Finding(check="interfaces", host=host, status="ok" if names else "none",
                      found=", ".join(names) or "none is asked for")  # fmt: skip


def _described(interface: Facts) -> str:
    parts = [interface["addresses"][0] if interface["addresses"] else "(no address)", interface["state"]]
    if interface["mbit_s"]:
        parts.append(f"{interface['mbit_s'] / 1000:g} Gbit/s")
    parts.append(f"MTU {interface['mtu']}")
    return " ".join(part for part in parts if part and part != "unknown")


def memory_findings(host: Host, facts: Facts) -> Iterator[Finding]:
    """Memory, shared memory and cores of the machine itself."""
    found = f"{facts['memory_bytes'] / 1e9:.0f} GB of memory free, {facts['cores']} cores"
    if facts["shm_bytes"] < _SHM_BYTES:
        yield Finding(
            check="memory", host=host.name, status="warning",
            found=f"{facts['shm_bytes'] / 2**20:.0f} MiB free in /dev/shm", expected=f"{_SHM_BYTES / 2**20:.0f} MiB",
            repair="Ranks of one machine exchange data there. In a container: --shm-size=16g or --ipc=host.",
        )  # fmt: skip
    elif len(host.slots) > facts["cores"]:
        yield Finding(
            check="memory", host=host.name, status="warning", found=found, expected=f"{len(host.slots)} cores or more",
            repair="Its ranks will wait for one another; lower its slots.",
        )  # fmt: skip
    else:
        yield Finding(check="memory", host=host.name, status="ok", found=found)


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Whether the others reach rank 0's machine at its port."""

    first: str
    """Host of rank 0."""
    address: str
    port: int
    error: str = ""
    """Why it could not listen; "" if it could."""
    problems: Mapping[str, str]
    """Host -> why it did not get through; "" if it did."""


def reach_findings(reach: Reach) -> Iterator[Finding]:
    """The port of rank 0 is free, and every machine gets through to it."""
    if reach.error:
        yield Finding(
            check="port", host=reach.first, status="failed", found=f"port {reach.port} cannot be used: {reach.error}",
            expected="a free port for rank 0",
            repair="Choose another --master_port, or end what listens there (ss -ltnp).",
        )  # fmt: skip
        return
    yield Finding(check="port", host=reach.first, status="ok", found=f"{reach.port} is free")
    for host, problem in reach.problems.items():
        target = f"{reach.address}:{reach.port} of {reach.first}"
        if problem:
            yield Finding(
                check="reach of rank 0", host=host, status="failed", found=f"cannot connect to {target}: {problem}",
                expected="every machine to get through",
                repair="Open the ports between the machines, or pass --master_addr with an address they all reach.",
            )  # fmt: skip
        else:
            yield Finding(check="reach of rank 0", host=host, status="ok", found=f"connects to {target}")


def back_findings(host: str, name: str, answer: Facts) -> Iterator[Finding]:
    """ssh from a machine to the first one; pdsh does not need it, mpirun does."""
    if answer["code"] == 0:
        yield Finding(check="ssh back", host=host, status="ok", found=f"{name} answers")
        return
    lines = str(answer["said"]).strip().splitlines()
    yield Finding(
        check="ssh back", host=host, status="warning",
        found=f"`ssh -o BatchMode=yes {name} true` fails there: {lines[-1] if lines else answer['code']}",
        expected="an answer without a password", repair="Only MPI's launchers need it.",
    )  # fmt: skip


def recipe_finding(text: str) -> Finding:
    """A problem of the recipe, the data or this machine that `launch.preflight` has found."""
    head, colon, rest = text.partition(": ")
    return Finding(check="recipe", host=EVERYWHERE, status="failed", found=f"{head}{colon}{rest}".rstrip("."))
