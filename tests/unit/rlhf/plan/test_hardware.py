"""Devices: the built-in file, a user's, and what is wrong with one."""

from pathlib import Path

import pytest

from rlhf.plan.hardware import find_device, load_devices, with_network

OWN = """
my-cpu: {architecture: cpu, cores: 2, peak_tflops: {fp32: 0.1, bf16: 0.2}, memory_gb: 16, bandwidth_gb_s: 20,
         node: 2, link_gb_s: 5, nics: 1, nic_gbit_s: 10, usd_per_hour: 0.1, source: measured}
"""


def test_built_in_devices() -> None:
    devices = load_devices()
    wanted = ["a100-40", "a100-80", "h100-sxm", "h200", "b200", "v100-32", "a6000", "mi250x-gcd", "mi300x"]
    assert set(wanted) <= set(devices)
    assert all(device.usd_per_hour > 0 and device.source for device in devices.values())
    frontier = devices["mi250x-gcd"]
    assert frontier.peak("bf16") == 191.5e12
    assert frontier.node_bandwidth == 100e9  # 4 x 200 Gbit/s


def test_a_users_file_adds_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN + "h200: " + OWN.partition(": ")[2])
    devices = load_devices(path)
    assert devices["my-cpu"].memory == 16e9 and devices["h200"].cores == 2 and "b200" in devices


def test_another_network() -> None:
    device = find_device("V100_32", load_devices())
    assert with_network(device, nics=1).node_bandwidth == 100e9 / 8


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("cores: 2", "coers: 2"), "my-cpu.coers is not a setting. Did you mean cores"),
        (("node: 2, ", ""), "my-cpu lacks node"),
        (("cores: 2", "cores: two"), "my-cpu.cores='two' has the wrong type"),
        (("memory_gb: 16", "memory_gb: 0"), "memory_gb must be > 0, got 0"),
        (("fp32: 0.1", "int8: 0.1"), "peak_tflops.int8=0.1 needs one of fp32"),
        ((OWN, "- a"), "expected `name:"),
        (("{arch", "{{arch"), "not valid YAML"),
    ],
)
def test_errors_name_what_is_wrong(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(ValueError, match=said):
        load_devices(path)


def test_unknown_device_and_type() -> None:
    devices = load_devices()
    with pytest.raises(ValueError, match="'h100-sx' is not known. Did you mean h100-sxm"):
        find_device("h100-sx", devices)
    with pytest.raises(ValueError, match="a100-80 has no fp8 peak"):
        devices["a100-80"].peak("fp8")
