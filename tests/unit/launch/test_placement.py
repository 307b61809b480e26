"""Where ranks start: contradictions of flags, hostfile, environment and recipe."""

from pathlib import Path

import pytest

from launch.environment import launcher_environment
from launch.hostfile import HostfileError
from launch.placement import (
    PlacementError,
    PlacementFlags,
    accelerator_visible,
    count_devices,
    place,
    port_is_free,
)
from launch.plan import RunOptions, make_plan
from rlhf.host import free_port


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "nodes"
    path.write_text("node1.invalid slots=2\nnode2.invalid slots=2\n")
    return path


@pytest.fixture
def gpus(tmp_path: Path) -> Path:
    devices = tmp_path / "dev"
    devices.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    return devices


def here(flags: PlacementFlags, devices: Path, **environment: str):  # noqa: ANN201
    return place(flags, deployment="any", default_num_gpus=2, environment=environment, devices=devices)


def test_local_default(tmp_path: Path) -> None:
    placement = here(PlacementFlags(), tmp_path)
    assert (placement.world_size, placement.num_gpus, placement.include, placement.is_remote) == (2, 2, "", False)
    assert here(PlacementFlags(num_gpus=3), tmp_path).world_size == 3


def test_visible_devices_are_kept(gpus: Path) -> None:
    """deepspeed deletes CUDA_VISIBLE_DEVICES when --num_gpus is given and starts at device 0."""
    placement = here(PlacementFlags(num_gpus=1), gpus, CUDA_VISIBLE_DEVICES="3,1")
    assert (placement.num_gpus, placement.include) == (None, "localhost:3")
    with pytest.raises(PlacementError, match="3 ranks are wanted.*CUDA_VISIBLE_DEVICES=3,1 shows 2"):
        here(PlacementFlags(num_gpus=3), gpus, CUDA_VISIBLE_DEVICES="3,1")
    with pytest.raises(PlacementError, match="understands device numbers only"):
        here(PlacementFlags(), gpus, CUDA_VISIBLE_DEVICES="GPU-8932f937")


def test_local_include(gpus: Path, tmp_path: Path) -> None:
    assert here(PlacementFlags(include="localhost:0,2"), gpus).include == "localhost:0,2"
    assert here(PlacementFlags(exclude="localhost:0"), gpus).include == "localhost:1,2,3"
    with pytest.raises(HostfileError, match=r"slots \[0, 1, 2, 3\], not \[9\]"):
        here(PlacementFlags(include="localhost:9"), gpus)
    with pytest.raises(PlacementError, match="none is visible"):
        here(PlacementFlags(include="localhost:0"), tmp_path / "nothing")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_gpus": 0}, "--num_gpus must be >= 1"),
        ({"num_gpus": 1, "include": "localhost:0"}, "exclude each other"),
        ({"master_port": 70000}, r"--master_port must be in"),
        ({"launcher": "mpich"}, "--launcher must be one of pdsh, openmpi, slurm, got mpich"),
        ({"launcher": "slurm"}, "they need --hostfile"),
        ({"launcher_args": "-x"}, "they need --hostfile"),
    ],
)
def test_contradictions(tmp_path: Path, flags: dict, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        here(PlacementFlags(**flags), tmp_path)


def test_f2_multi_node_without_hostfile() -> None:
    with pytest.raises(PlacementError, match="multi_node, but no --hostfile"):
        place(PlacementFlags(), deployment="multi_node", default_num_gpus=8, environment={})


def test_hostfile(hostfile: Path, tmp_path: Path) -> None:
    placement = here(PlacementFlags(hostfile=hostfile), tmp_path)
    assert (placement.world_size, placement.is_remote, placement.num_gpus) == (4, True, None)
    assert here(PlacementFlags(hostfile=hostfile, num_gpus=1), tmp_path).world_size == 2
    with pytest.raises(PlacementError, match="--num_gpus 3 is above node1.invalid slots=2"):
        here(PlacementFlags(hostfile=hostfile, num_gpus=3), tmp_path)
    assert here(PlacementFlags(hostfile=hostfile, include="node2.invalid:1"), tmp_path).world_size == 1


@pytest.mark.parametrize(
    ("deployment", "lines", "include", "message"),
    [
        ("single_node", 2, "", r"single_node, but .*nodes gives 2 hosts. Keep one of them with --include"),
        ("single_node", 2, "node1.invalid", None),
        ("multi_node", 1, "", r"multi_node, but .*nodes names one host"),
        ("multi_node", 2, "node1.invalid", None),
        ("multi_node", 2, "", None),
        ("any", 2, "", None),
        ("any", 1, "", None),
    ],
)
def test_f2_deployment_and_hostfile_agree(
    tmp_path: Path, deployment: str, lines: int, include: str, message: str | None
) -> None:
    path = tmp_path / "nodes"
    path.write_text("".join(f"node{i + 1}.invalid slots=2\n" for i in range(lines)))
    flags = PlacementFlags(hostfile=path, include=include)

    def placed() -> None:
        place(flags, deployment=deployment, default_num_gpus=2, environment={"DS_ACCELERATOR": "cpu"})

    if message is None:
        placed()
    else:
        with pytest.raises(PlacementError, match=message):
            placed()


def test_visible_devices_and_a_hostfile(hostfile: Path, gpus: Path, tmp_path: Path) -> None:
    """deepspeed overwrites the variable on each host: agree with it, or refuse."""
    flags = PlacementFlags(hostfile=hostfile)
    assert here(flags, gpus, CUDA_VISIBLE_DEVICES="0,1,2,3").world_size == 4  # as in a Slurm job of whole machines
    with pytest.raises(PlacementError, match=r"CUDA_VISIBLE_DEVICES=2,3 hides slots \[0, 1\] of node1.invalid"):
        here(flags, gpus, CUDA_VISIBLE_DEVICES="2,3")
    only = PlacementFlags(hostfile=hostfile, include="node1.invalid:1@node2.invalid:1")
    assert here(only, gpus, CUDA_VISIBLE_DEVICES="1").world_size == 2
    assert here(flags, gpus, CUDA_VISIBLE_DEVICES="").world_size == 4  # CPU ranks
    assert here(flags, tmp_path / "nothing", CUDA_VISIBLE_DEVICES="2").world_size == 4
    own = tmp_path / "own"
    own.write_text("127.0.0.1 slots=2\n")
    with pytest.raises(PlacementError, match=r"hides slots \[0, 1\]"):
        here(PlacementFlags(hostfile=own), gpus, CUDA_VISIBLE_DEVICES="2,3")


def test_hostfile_of_this_machine_needs_no_ssh(tmp_path: Path) -> None:
    path = tmp_path / "nodes"
    path.write_text("127.0.0.1 slots=2\n")
    placement = here(PlacementFlags(hostfile=path), tmp_path)
    assert (placement.is_remote, placement.num_gpus, str(placement)) == (False, 2, "2 ranks on this machine")


def test_accelerator_visible(gpus: Path, tmp_path: Path) -> None:
    assert accelerator_visible({}, gpus)
    assert not accelerator_visible({}, tmp_path / "nothing")
    assert not accelerator_visible({"DS_ACCELERATOR": "cpu"}, gpus)
    assert not accelerator_visible({"CUDA_VISIBLE_DEVICES": ""}, gpus)
    assert accelerator_visible({"DS_ACCELERATOR": "cuda"}, tmp_path / "nothing")


@pytest.fixture
def gcds(tmp_path: Path) -> tuple[Path, Path]:
    """A machine of two MI250X: two processors and four dies in the driver's topology, one of which is another job's."""
    devices, nodes = tmp_path / "amd", tmp_path / "sys" / "class" / "kfd" / "kfd" / "topology" / "nodes"
    (devices / "dri").mkdir(parents=True)
    for name in ("kfd", "dri/renderD128", "dri/renderD129", "dri/renderD130", "dri/renderD131"):
        (devices / name).touch()
    for number, gpu_id in enumerate(["0", "0", "4121", "23018", "51771", "7713"]):
        (nodes / str(number)).mkdir(parents=True)
        (nodes / str(number) / "gpu_id").write_text(f"{gpu_id}\n")
    (nodes / "6").mkdir()
    (nodes / "6" / "gpu_id").mkdir()  # not permitted, as for the device of another container: reading fails
    return devices, tmp_path / "sys"


def test_dies_are_counted(gcds: tuple[Path, Path], gpus: Path, tmp_path: Path) -> None:
    """Each GCD is a device; processors of the topology and devices of others are none. Slurm may leave some."""
    assert count_devices({}, *gcds) == 4
    assert count_devices({"ROCR_VISIBLE_DEVICES": "2,3,"}, *gcds) == 2
    assert count_devices({"ROCR_VISIBLE_DEVICES": "0,1,2,3,4,5"}, *gcds) == 4
    assert count_devices({"ROCR_VISIBLE_DEVICES": ""}, *gcds) == 4
    assert count_devices({}, gpus, tmp_path / "none") == 4
    assert count_devices({}, tmp_path / "none", tmp_path / "none") == 0


def test_hip_s_variable_counts_on_amd_machines(gcds: tuple[Path, Path], gpus: Path) -> None:
    """HIP reads it before CUDA's; NVIDIA does not read it."""
    devices, _ = gcds
    both = {"HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    assert here(PlacementFlags(num_gpus=1), devices, **both).include == "localhost:3"
    assert here(PlacementFlags(num_gpus=1), gpus, **both).include == "localhost:0"
    with pytest.raises(PlacementError, match="3 ranks are wanted.*HIP_VISIBLE_DEVICES=3,1 shows 2"):
        here(PlacementFlags(num_gpus=3), devices, **both)
    assert not accelerator_visible({"HIP_VISIBLE_DEVICES": "-1"}, devices)
    assert accelerator_visible({"HIP_VISIBLE_DEVICES": "-1"}, gpus)


def test_the_launcher_does_not_hide_devices_twice(tmp_path: Path) -> None:
    """Devices are named to deepspeed, which sets CUDA_VISIBLE_DEVICES; HIP would read its own instead."""
    environment = {"HOME": str(tmp_path), "HIP_VISIBLE_DEVICES": "3,1", "CUDA_VISIBLE_DEVICES": "1", "A": "1"}
    plan = make_plan(RunOptions(recipe="tiny_cpu", out=tmp_path / "r"), environment)
    found = launcher_environment(plan, plan.placement, rank_logs=tmp_path, variables={})
    assert found["A"] == "1" and not {"HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & set(found)


def test_a_login_node_without_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not send the machines of a hostfile to their CPUs, unless recipe or user do."""
    monkeypatch.setattr("launch.placement.accelerator_visible", lambda *_: False)
    path = tmp_path / "nodes"
    path.write_text("node1 slots=1\nnode2 slots=1\n")

    def accelerator(recipe: str, **variables: str) -> str | None:
        options = RunOptions(recipe=recipe, out=tmp_path / "r", placement=PlacementFlags(hostfile=path))
        return make_plan(options, {"HOME": str(tmp_path), **variables}).environment.get("DS_ACCELERATOR")

    assert accelerator("opt_13b_350m_multi_node") is None
    assert accelerator("opt_13b_350m_multi_node", DS_ACCELERATOR="cpu") == "cpu"
    assert accelerator("tiny_cpu") == "cpu"


def test_ports() -> None:
    import socket

    port = free_port()
    assert port_is_free(port)
    with socket.socket() as holder:
        holder.bind(("", port))
        holder.listen()
        assert not port_is_free(port)


def test_launchers_that_count_ranks(hostfile: Path, tmp_path: Path) -> None:
    """mpirun and srun have no way to start on slot 1 alone; DeepSpeed's Slurm launcher none for unequal hosts."""
    for launcher in ("openmpi", "slurm"):
        placement = here(PlacementFlags(hostfile=hostfile, launcher=launcher, launcher_args="-x", num_gpus=1), tmp_path)
        assert (placement.launcher, placement.launcher_args, placement.world_size) == (launcher, "-x", 2)
        with pytest.raises(PlacementError, match=rf"--launcher {launcher} .* not on \[1\] of node1.invalid"):
            here(PlacementFlags(hostfile=hostfile, launcher=launcher, include="node1.invalid:1"), tmp_path)
    uneven = {"hostfile": hostfile, "include": "node1.invalid@node2.invalid:0"}
    with pytest.raises(PlacementError, match="equally many ranks on each host, not node1.invalid slots=2, node2"):
        here(PlacementFlags(launcher="slurm", **uneven), tmp_path)
    assert here(PlacementFlags(launcher="openmpi", **uneven), tmp_path).world_size == 3
    assert here(PlacementFlags(launcher="pdsh", hostfile=hostfile, include="node1.invalid:1"), tmp_path).is_remote
