"""What is wrong with accelerators and network cards, from recorded outputs of their tools."""

from pathlib import Path
from typing import Any

import pytest

from launch.cluster import devices
from launch.cluster.finding import Finding, odd_ones
from launch.cluster.room import configs_of, room_findings
from launch.hostfile import Host
from launch.recipe import find_recipe, load_recipe, resolve_stages
from rlhf.plan.setting import FED

OUTPUTS = Path(__file__).parent / "outputs"
HEALTHY = "".join((OUTPUTS / "nvidia_query.csv").read_text().splitlines(keepends=True)[:3])


def facts(*, torch_devices: int | None = None, **outputs: str) -> dict[str, Any]:
    """Answer of a probe; `outputs`: tool -> recorded file, or text."""
    texts = {
        tool: (OUTPUTS / name).read_text(encoding="utf-8") if (OUTPUTS / name[:99]).is_file() else name
        for tool, name in outputs.items()
    }
    tools = {tool: {"code": 0, "text": text, "error": ""} for tool, text in texts.items()}
    torch = {} if torch_devices is None else {"version": "2", "devices": torch_devices}
    return {"tools": tools, "torch": torch, "infiniband": [], "modules": [], "driver": ""}


def gpu_findings(known: dict[str, Any], slots: int, **flags: bool) -> list[Finding]:
    flags = {"needed": True, "on_cpu": False, **flags}
    return list(devices.gpu_findings(Host("node1", tuple(range(slots))), known, **flags))


def test_healthy_accelerators() -> None:
    (found,) = gpu_findings(facts(nvidia_query=HEALTHY, torch_devices=2), 2)
    assert (found.status, found.found) == ("ok", "2 x NVIDIA H100 80GB HBM3, 85 GB free or more on each")


def test_each_sick_accelerator_is_named() -> None:
    found = gpu_findings(facts(nvidia_query="nvidia_query.csv", torch_devices=4), 4)
    assert [(each.status, each.found) for each in found] == [
        ("failed", "GPU 2: 64.0 of 85.5 GB is in use"),
        ("failed", "GPU 3 has 2 memory errors that were not corrected"),
        ("warning", "GPU 3 runs on 8 PCIe lanes"),
    ]
    assert all(each.repair and each.host == "node1" for each in found)
    assert [each.status for each in gpu_findings(facts(nvidia_query="nvidia_query.csv", torch_devices=4), 2)] == ["ok"]


def test_lost_accelerators() -> None:
    found = gpu_findings(facts(nvidia_query="nvidia_query_lost.csv", torch_devices=1), 8)
    assert [each.found for each in found] == [
        "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error",
        "GPU 2: [GPU requires reset]",
        "2 accelerators",
    ]
    assert found[-1].expected == "8 for its slots"


def test_no_driver_and_no_accelerator() -> None:
    (driver, count) = gpu_findings(facts(nvidia_query="nvidia_no_driver.txt"), 1)
    assert "couldn't communicate with the NVIDIA driver" in driver.found
    assert count.found == "0 accelerators"
    (found,) = gpu_findings(facts(), 1)
    assert (found.status, found.found, found.expected) == ("failed", "0 accelerators", "1 for its slots")


def test_a_cpu_recipe_asks_for_none() -> None:
    (found,) = gpu_findings(facts(), 2, needed=False)
    assert found.status == "none"
    (found,) = gpu_findings(facts(nvidia_query="nvidia_query.csv"), 16, needed=False, on_cpu=True)
    assert found.status == "none", "ranks use the CPU, whatever the machine has"
    (found,) = gpu_findings(facts(nvidia_query="nvidia_query.csv"), 2, on_cpu=True)
    assert (found.status, found.found) == ("failed", "not used: DS_ACCELERATOR=cpu")


def test_torch_that_sees_fewer() -> None:
    (found,) = gpu_findings(facts(nvidia_query=HEALTHY, torch_devices=0), 2)
    assert found.found == "torch sees 0 of 2 accelerators" and "driver may be older" in found.repair


def test_rocm() -> None:
    (found,) = gpu_findings(facts(rocm="rocm.json", torch_devices=2), 2)
    assert found.found == "GPU 1: 150.0 of 206.1 GB is in use"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, [("failed", "mlx5_1:1 Down/Polling 10 Gbit/s InfiniBand")]),
        ({"NCCL_IB_HCA": "^mlx5_1"}, [("ok", "mlx5_0:1 Active/LinkUp 400 Gbit/s InfiniBand, mlx5_bond_0:1 "
                                             "Active/LinkUp 100 Gbit/s Ethernet")]),
        ({"NCCL_IB_HCA": "mlx4"}, [("failed", "NCCL_IB_HCA=mlx4 names none of mlx5_0, mlx5_1, mlx5_bond_0")]),
        ({"NCCL_IB_DISABLE": "1"}, [("none", "not used: NCCL_IB_DISABLE=1")]),
    ],
)  # fmt: skip
def test_infiniband(environment: dict[str, str], expected: list[tuple[str, str]]) -> None:
    found = devices.infiniband_findings("node1", facts(ibstat="ibstat.txt"), environment)
    assert [(each.status, each.found) for each in found] == expected


def test_ports_without_ibstat() -> None:
    """The kernel's own files say the same; an Ethernet port without a cable is no failure."""
    known = facts()
    port = {"device": "mlx5_2", "port": 1, "state": "Down", "physical": "Disabled", "gbit_s": 40.0, "layer": "Ethernet"}
    known["infiniband"] = [port]
    (found,) = devices.infiniband_findings("node1", known, {})
    assert (found.status, found.found) == ("warning", "mlx5_2:1 Down/Disabled 40 Gbit/s Ethernet")
    (found,) = devices.infiniband_findings("node1", facts(), {})
    assert (found.status, found.found) == ("none", "none")


def test_gpudirect() -> None:
    known = facts(nvidia_query=HEALTHY, ibstat="ibstat.txt")
    (found,) = devices.direct_findings("node1", known)
    assert (found.status, found.found) == ("warning", "nvidia_peermem is not loaded")
    (found,) = devices.direct_findings("node1", {**known, "modules": ["ib_core", "nvidia_peermem"]})
    assert (found.status, found.found) == ("ok", "nvidia_peermem")
    open_driver = {**known, "driver": "NVIDIA UNIX Open Kernel Module for x86_64 550.54.15"}
    (found,) = devices.direct_findings("node1", open_driver)
    assert (found.status, found.found) == ("ok", "by DMA-BUF")
    (found,) = devices.direct_findings("node1", facts(ibstat="ibstat.txt"))
    assert found.status == "none"


def test_the_odd_machine_is_named() -> None:
    """Driver, model, topology and port rate: the one that is unlike the others."""
    usual = facts(nvidia_query="nvidia_query.csv", nvidia_topology="nvidia_topology.txt", ibstat="ibstat.txt")
    odd = facts(
        nvidia_query=(OUTPUTS / "nvidia_query.csv").read_text().replace("550.54.15", "535.161.08"),
        nvidia_topology=(OUTPUTS / "nvidia_topology.txt").read_text().replace("NV18", "NV12"),
        ibstat=(OUTPUTS / "ibstat.txt").read_text().replace("Rate: 400", "Rate: 200"),
    )
    found = list(devices.compared_findings({"a": usual, "b": odd, "c": usual}))
    bad = {each.check: each for each in found if each.status not in ("ok", "none")}
    assert {each.host for each in bad.values()} == {"b"}
    assert bad["driver"].status == "failed"
    assert str(bad["driver"]).startswith("b: driver: 535.161.08, expected 550.54.15 as on a and 1 more. Install one")
    assert bad["topology"].found == "GPU-GPU 6 NV12; GPU-NIC 4 PXB, 4 NODE, 8 SYS"
    assert bad["InfiniBand rate"].found == "200, 100 Gbit/s"
    assert "400, 100 Gbit/s" in bad["InfiniBand rate"].expected


def test_of_equals_the_first_is_the_measure() -> None:
    found = list(odd_ones("driver", {"a": "1", "b": "2"}, status="failed", repair="."))
    assert [(each.host, each.status) for each in found] == [("a", "ok"), ("b", "failed")]


def room(tmp_path: Path, query: str, slots: int, name: str = "opt_1.3b_350m_single_gpu") -> list[Finding]:
    path = find_recipe(name)
    recipe = load_recipe(path)
    stages = resolve_stages(recipe, path, tmp_path)
    host = Host("node1", tuple(range(slots)))
    return list(room_findings(recipe.name, stages, [host], {"node1": facts(nvidia_query=query)}))


def test_the_plan_and_the_memory_that_is_free(tmp_path: Path) -> None:
    """E16, E17: a forecast per stage against the accelerator with the least room, not the data sheet."""
    assert [each.status for each in room(tmp_path, HEALTHY, 1)] == ["ok", "ok", "ok"]
    full = HEALTHY.replace("81082 MiB", "3000 MiB", 1)
    (sft, *_) = found = room(tmp_path, full, 1)
    assert {each.status for each in found} == {"failed"}
    assert sft.found.startswith("step1_sft: ") and sft.expected == "at most the 3.1 GB free on GPU 0 of node1"
    assert "rlhf plan --recipe opt_1.3b_350m_single_gpu --gpu h100-sxm --gpus 1 --steps 1" in sft.repair
    (unknown,) = room(tmp_path, HEALTHY.replace("NVIDIA H100 80GB HBM3", "ACME 1"), 1)
    assert (unknown.status, unknown.found) == ("not checked", "ACME 1 is not among the devices of rlhf plan")
    (none,) = room(tmp_path, "No devices were found", 1)
    assert none.status == "none"


def test_models_that_another_stage_feeds(tmp_path: Path) -> None:
    """Their folders are not there yet; the forecast takes the shape of the stage that writes them."""
    path = find_recipe("tiny_cpu")
    configs = configs_of(resolve_stages(load_recipe(path), path, tmp_path))
    assert configs["reward"]["model"]["path"] == configs["ppo"]["actor"]["path"] == FED
    assert [each.status for each in room(tmp_path, HEALTHY, 2, "tiny_cpu")] == ["ok", "ok", "ok"]
