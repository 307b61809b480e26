"""Outputs of nvidia-smi, rocm-smi and ibstat, written down in their documented formats."""

from pathlib import Path

import pytest

from launch.cluster.tools import (
    chosen_names,
    parse_ibstat,
    parse_nvidia_query,
    parse_rocm,
    parse_topology,
)

OUTPUTS = Path(__file__).parent / "outputs"


def read(name: str) -> str:
    return (OUTPUTS / name).read_text(encoding="utf-8")


def test_nvidia_query() -> None:
    listed = parse_nvidia_query(read("nvidia_query.csv"))
    assert listed.broken == ()
    assert [gpu.index for gpu in listed.gpus] == [0, 1, 2, 3]
    third, fourth = listed.gpus[2:]
    assert third.name == "NVIDIA H100 80GB HBM3" and third.driver == "550.54.15"
    assert (third.total_bytes, third.free_bytes) == (81559 * 2**20, 20480 * 2**20)
    assert (third.errors, third.lanes) == (0, (16, 16))
    assert (fourth.errors, fourth.lanes) == (2, (8, 16))


def test_nvidia_query_of_lost_devices() -> None:
    """A line that is no row, and a row of a device that must be reset; ECC that is off is no number of errors."""
    listed = parse_nvidia_query(read("nvidia_query_lost.csv"))
    assert listed.broken == (
        "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error",
        "GPU 2: [GPU requires reset]",
    )
    assert listed.gpus[0].errors is None
    assert listed.gpus[1].index == 2 and listed.gpus[1].free_bytes is None


@pytest.mark.parametrize("text", [read("nvidia_no_driver.txt"), "No devices were found\n"])
def test_nvidia_query_without_a_table(text: str) -> None:
    listed = parse_nvidia_query(text)
    assert listed.gpus == () and listed.broken == (text.strip(),)


def test_rocm() -> None:
    listed = parse_rocm(read("rocm.json"))
    assert [gpu.index for gpu in listed.gpus] == [0, 1]
    first = listed.gpus[0]
    assert (first.name, first.driver) == ("AMD Instinct MI300X OAM", "6.7.0")
    assert first.total_bytes == 206141652992 and first.free_bytes == 206141652992 - 297533440
    assert parse_rocm("ERROR:root:Driver not initialized (amdgpu not found in modules)\n").broken != ()


def test_nvidia_topology() -> None:
    """Each pair once; network cards by the names that NCCL_IB_HCA uses."""
    topology = parse_topology(read("nvidia_topology.txt"))
    assert topology.links["GPU0", "GPU3"] == "NV18"
    assert topology.links["GPU2", "mlx5_2"] == "PXB" and topology.links["GPU0", "mlx5_3"] == "SYS"
    assert topology.links["mlx5_0", "mlx5_1"] == "NODE"
    assert topology.between_gpus() == "6 NV18"
    assert topology.to_nics() == "4 PXB, 4 NODE, 8 SYS"


def test_nvidia_topology_without_a_nic_legend() -> None:
    topology = parse_topology(read("nvidia_topology_old.txt"))
    assert topology.links == {("GPU0", "GPU1"): "PIX", ("GPU0", "mlx5_0"): "PHB", ("GPU1", "mlx5_0"): "PHB"}


def test_rocm_topology() -> None:
    assert parse_topology(read("rocm_topology.txt")).links == {("GPU0", "GPU1"): "XGMI"}
    assert parse_topology("").links == {}


def test_ibstat() -> None:
    ports = parse_ibstat(read("ibstat.txt"))
    assert [str(port) for port in ports] == [
        "mlx5_0:1 Active/LinkUp 400 Gbit/s InfiniBand",
        "mlx5_1:1 Down/Polling 10 Gbit/s InfiniBand",
        "mlx5_bond_0:1 Active/LinkUp 100 Gbit/s Ethernet",
    ]
    assert parse_ibstat("ibpanic: [1234] main: stat of IB device failed\n") == []


@pytest.mark.parametrize(
    ("setting", "chosen"),
    [
        ("mlx5_1", ["mlx5_1", "mlx5_10"]),
        ("=mlx5_1", ["mlx5_1"]),
        ("^mlx5_1", ["mlx5_0"]),
        ("^=mlx5_1", ["mlx5_0", "mlx5_10"]),
        ("mlx5_0:1,mlx5_1:1", ["mlx5_0", "mlx5_1", "mlx5_10"]),
        ("ib", []),
    ],
)
def test_names_that_nccl_means(setting: str, chosen: list[str]) -> None:
    """NCCL_SOCKET_IFNAME and NCCL_IB_HCA: prefixes, `=` for whole names, `^` for all others."""
    assert chosen_names(setting, ["mlx5_0", "mlx5_1", "mlx5_10"]) == chosen
