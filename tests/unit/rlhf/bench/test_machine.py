"""The hardware YAML of a machine, from what its programs say."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf.bench import machine
from rlhf.bench.process import ChildError, exit_code
from rlhf.plan.hardware import load_devices

FOUND = {
    "on_cpu": True, "hardware": "A processor", "peak_tflops": {"fp32": 0.1}, "memory_gb": 8.0, "bandwidth_gb_s": 10.0,
    "products": {"fp32": [[8, 8, 8, 0.123456, 0.05]]}, "attention": {"fp32": [[32, 0.5, 0.25]]},
    "pointwise": [[64, 2.0]], "optimizer_gb_s": 3.0, "update_layer": 1e-3, "update_step": 2e-3,
    "gather_layer": {"4": 5e-3}, "gather_gb_s": {"4": 0.5}, "sharded_optimizer_gb_s": {"4": 0.25},
    "score_layer": 1e-4, "score_pass": 2e-4, "decode_layer": 3e-4, "decode_token": 4e-4, "draw_logit": 1e-9,
    "process_gb": 0.4, "disk": {"write_gb_s": 1.0, "read_gb_s": 2.0},
}  # fmt: skip


ALONE = {"gather_layer": {"1": 1e-3}, "gather_gb_s": {"1": 2.0}, "sharded_optimizer_gb_s": {"1": 1.0}, "disk": {}}
REMOTE = machine.Remote(read_hosts=lambda path: path.read_text().split(), ssh_command=lambda name: ["ssh", name])


def arguments(tmp_path: Path, **changes: Any) -> argparse.Namespace:
    values = {
        "name": "mine",
        "out": tmp_path / "mine.yaml",
        "num_gpus": 4,
        "seconds": 0.1,
        "disk": None,
        "hostfile": None,
        "timeout": 9.0,
    }
    return argparse.Namespace(**{**values, **changes})


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Both programs: a gather of nothing takes 1 ms, a large one 1 ms and a second for each 10^9 bytes past a rank."""
    asked: list[dict[str, Any]] = []

    def run(argv: Sequence[str], *, log: Path, environment: dict[str, str], **_: Any) -> None:
        assert environment == {"OMP_NUM_THREADS": "1"}
        if "rlhf.bench.probe" in argv:
            alone = "--gather" in argv
            Path(argv[argv.index("--out") + 1]).write_text(json.dumps(ALONE if alone else FOUND))
            return
        config = json.loads(Path(argv[argv.index("--config") + 1]).read_text())
        asked.append(config)
        lines = []
        for (group,) in config["rounds"]:
            moved = config["num_bytes"] * (len(group) - 1) / len(group)
            seconds = 1e-3 + (moved / 1e9 if config["num_bytes"] > 4096 else 0.0)
            lines.append(f"node: RLHF-LINK {json.dumps({'ranks': len(group), 'all_gather_seconds': seconds})}")
        log.write_text("\n".join(lines))

    monkeypatch.setattr(machine, "run_child", run)
    return asked


def test_a_device_is_written_that_a_plan_reads(
    tmp_path: Path, programs: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert machine.main(arguments(tmp_path), {"OMP_NUM_THREADS": "1"}, REMOTE) == 0
    device = load_devices(tmp_path / "mine.yaml")["mine"]
    assert device.is_serial and device.node == 4 and device.measured is not None
    assert device.measured.gather_layer == {"1": 1e-3, "4": 5e-3}
    assert device.measured.gather_gb_s == {"1": 2.0, "4": 0.5}
    assert device.measured.sharded_optimizer_gb_s == {"1": 1.0, "4": 0.25} and device.measured.disk
    assert device.measured.products["fp32"] == [[8, 8, 8, 0.1235, 0.05]] and device.measured.disk["read_gb_s"] == 2.0
    for size in ("2", "4"):
        assert device.measured.collectives[size].latency == 1e-3
        assert device.measured.collectives[size].gb_s == pytest.approx(1.0, rel=1e-3)
    assert [config["num_bytes"] for config in programs] == [4096, 1 << 25]
    assert [config["rounds"] for config in programs] == [[[[0, 1]], [[0, 1, 2, 3]]]] * 2
    out = capsys.readouterr().out
    assert "all-gather of 4 ranks" in out and "0.123 / 0.05" in out and "disk, write" in out
    assert "ssh was not timed: there is no --hostfile" in out and device.measured.ssh == {}
    assert machine.main(arguments(tmp_path, num_gpus=1), {"OMP_NUM_THREADS": "1"}, REMOTE) == 0, (
        "its own file may be replaced"
    )
    assert load_devices(tmp_path / "mine.yaml")["mine"].node == 1 and len(programs) == 2


def test_ssh_is_timed_to_each_host_of_a_hostfile_before_anything_else(
    tmp_path: Path, programs: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("node1 node2\n")
    asked: list[Any] = []

    def measure(names: Sequence[str], ssh_command: Any, **_: Any) -> dict[str, Any]:
        asked.append([ssh_command(name) for name in names])
        if len(asked) == 2:
            raise ValueError("host node1: no answer")
        return {name: {"seconds": 0.25, "gb_s": 0.5} for name in names}

    monkeypatch.setattr(machine, "measure_ssh", measure)
    settings = arguments(tmp_path, hostfile=hostfile)
    assert machine.main(settings, {"OMP_NUM_THREADS": "1"}, REMOTE) == 0
    found = load_devices(tmp_path / "mine.yaml")["mine"].measured
    assert found is not None and found.ssh["node2"].seconds == 0.25 and found.ssh["node2"].gb_s == 0.5
    out = capsys.readouterr().out
    assert "ssh to node2" in out and "250 ms, stream 0.500 GB/s" in out and "not timed" not in out
    assert asked == [[["ssh", "node1"], ["ssh", "node2"]]]

    programs.clear()
    assert machine.main(settings, {"OMP_NUM_THREADS": "1"}, REMOTE) == 2 and programs == []
    assert capsys.readouterr().err == "rlhf bench: host node1: no answer\n"


def test_a_file_of_somebody_else_is_not_replaced(tmp_path: Path, programs: list[dict[str, Any]]) -> None:
    (tmp_path / "mine.yaml").write_text("h100: {}\n")
    assert (
        machine.main(arguments(tmp_path), {"OMP_NUM_THREADS": "1"}, REMOTE) == 2
        and (tmp_path / "mine.yaml").read_text() == "h100: {}\n"
    )
    assert programs == []


@pytest.mark.parametrize("changes", [{"name": "A b"}, {"num_gpus": 0}, {"seconds": 0.0}, {"disk": Path("none")}])
def test_bad_flags_are_refused(changes: dict[str, Any], tmp_path: Path, programs: list[dict[str, Any]]) -> None:
    assert machine.main(arguments(tmp_path, **changes), {}, REMOTE) == 2
    assert programs == [] and not list(tmp_path.iterdir())


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: Exception) -> None:
        raise error

    assert exit_code(lambda: None) == 0
    assert exit_code(lambda: fail(ChildError("child"))) == 1
    assert exit_code(lambda: fail(ValueError("value"))) == exit_code(lambda: fail(OSError("file"))) == 2
    assert capsys.readouterr().err == "rlhf bench: child\nrlhf bench: value\nrlhf bench: file\n"
