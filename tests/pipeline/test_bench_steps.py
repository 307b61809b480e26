"""The commands of docs/measuring.md as a user runs them, on one rank and on two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cluster.session import ssh_command
from rlhf.bench.result import read_results
from rlhf.bench.ssh import measure_ssh
from rlhf.plan.hardware import load_devices
from tests import hosts as emulated

pytestmark = pytest.mark.slow
LACKING = emulated.lacking(namespaces=False)


def rlhf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlhf.cli", *arguments], capture_output=True, text=True, timeout=900, check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def hardware(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("machine") / "mine.yaml"
    done = rlhf("bench", "machine", "--name", "mine", "--out", str(path), "--num_gpus", "2", "--seconds", "0.02",
                "--disk", str(path.parent))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all-gather of 2 ranks" in done.stdout and "disk, write" in done.stdout
    return path


@pytest.mark.skipif(bool(LACKING), reason=LACKING)
def test_ssh_is_timed_to_a_real_server_and_one_that_is_down_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").mkdir()
    with emulated.loopback(tmp_path / "hosts", count=1) as hosts:
        (name,) = hosts.names
        found = measure_ssh([name], ssh_command, environment=hosts.environment, timeout=60, size=1 << 24)[name]
        assert 0.005 < found["seconds"] < 20 and 1e-3 < found["gb_s"] < 50
        hostfile = tmp_path / "hostfile"
        hostfile.write_text("alias2 slots=1\nnowhere.invalid slots=1\n")
        done = subprocess.run(
            [sys.executable, "-m", "rlhf.cli", "bench", "machine", "--name", "mine", "--out",
             str(tmp_path / "mine.yaml"), "--hostfile", str(hostfile)],
            capture_output=True, text=True, timeout=120, check=False, env=hosts.environment,
        )  # fmt: skip
    assert done.returncode == 2 and not (tmp_path / "mine.yaml").exists()
    assert done.stderr.startswith("rlhf bench: host nowhere.invalid: `ssh ... nowhere.invalid true` ended with exit")
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_the_machine_is_one_that_a_plan_can_be_made_for(hardware: Path) -> None:
    device = load_devices(hardware)["mine"]
    assert device.node == 2 and device.is_serial and device.measured is not None
    assert device.peak("fp32") > 1e9 and set(device.measured.collectives) == {"2"}
    assert set(device.measured.gather_layer) == {"1", "2"}
    assert device.measured.gather_seconds(1) > device.measured.update_layer, (
        "ZeRO-3's hooks cost more than a tiny layer"
    )
    done = rlhf("plan", "--recipe", "tiny_cpu", "--hardware", str(hardware), "--gpu", "mine")
    assert done.returncode == 0, done.stderr


def test_steps_are_measured_beside_their_plan(hardware: Path, tmp_path: Path) -> None:
    out, work = tmp_path / "mine.json", tmp_path / "work"
    for step in ("step1", "step3"):
        done = rlhf("bench", step, "--recipe", "tiny_cpu", "--num_gpus", "2", "--warmup", "1", "--steps", "2",
                    "--profile", "1", "--hardware", str(hardware), "--work", str(work), "--json", str(out))  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "planned / measured" in done.stdout
    found = read_results(out)
    assert set(found) == {1, 3}
    for result in found.values():
        assert result.ranks == 2 and len(result.step_seconds) == 2 and result.padding_frac == 0
        assert result.foreseen is not None and 0.2 < result.foreseen.step_seconds / result.median_seconds < 5
        assert result.communication_frac is not None and 0 < result.communication_frac < 1
        assert 0 < result.memory["optimizer"] < result.memory["peak"]
        assert result.model_utilisation is not None and 0 < result.model_utilisation < 1
    assert (work / "run" / "step3_ppo" / "profile" / "rank0.json.gz").is_file()
    compared = rlhf("bench", "compare", str(out), str(out), "--plot", str(tmp_path / "plot.png"))
    assert compared.returncode == 0 and compared.stdout.count("1.00 x") >= 2
    # The models of that run serve another measurement.
    again = rlhf("bench", "step2", "--recipe", "tiny_cpu", "--num_gpus", "1", "--warmup", "0", "--steps", "1",
                 "--profile", "0", "--models", str(work / "run"), "--work", str(tmp_path / "other"))  # fmt: skip
    assert again.returncode == 0, again.stdout + again.stderr


def test_both_curves_are_measured(hardware: Path, tmp_path: Path) -> None:
    out = tmp_path / "scale.json"
    done = rlhf("bench", "scale", "--recipe", "tiny_cpu", "--step", "2", "--ranks", "1,2", "--warmup", "1", "--steps",
                "2", "--profile", "0", "--hardware", str(hardware), "--work", str(tmp_path / "work"),
                "--json", str(out), "--plot", str(tmp_path / "scale.svg"))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    weak, strong = json.loads(out.read_text())["curves"]
    assert [point["rows"] for point in weak["points"]] == [16, 32]
    assert [point["rows"] for point in strong["points"]] == [16, 16]
    for curve in (weak, strong):
        assert curve["points"][0]["efficiency"] == 1.0 and 0.1 < curve["points"][1]["efficiency"] < 1.5
        assert curve["points"][1]["planned_efficiency"] is not None


def test_strategies_are_measured_in_turns(hardware: Path, tmp_path: Path) -> None:
    page, out = tmp_path / "page.md", tmp_path / "ways.json"
    page.write_text("<!-- rlhf bench strategies: begin -->\n<!-- rlhf bench strategies: end -->\n")
    done = rlhf("bench", "strategies", "--recipe", "tiny_cpu", "--num_gpus", "2", "--rounds", "2", "--warmup", "1",
                "--steps", "2", "--profile", "1", "--only", "ZeRO-0;ZeRO-3, bf16, recompute selective",
                "--hardware", str(hardware), "--work", str(tmp_path / "work"), "--json", str(out),
                "--write", str(page))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    plain, sharded = json.loads(out.read_text())["strategies"]
    assert len(plain["step_seconds"]) == len(sharded["step_seconds"]) == 2
    assert sharded["tokens_per_second_per_rank"] < plain["tokens_per_second_per_rank"]
    assert plain["planned_step_seconds"] > 0 and 0 < sharded["communication_frac"] < 1
    assert page.read_text().count(" GB | ") == 2 and "1.00 x" in page.read_text()


def test_a_stage_that_fails_is_said_with_the_end_of_its_log(tmp_path: Path) -> None:
    """No rows remain: that is found by the stage."""
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"prompt": "", "response": ""}\n')
    done = rlhf("bench", "step1", "--recipe", "tiny_cpu", "--num_gpus", "1", "--work", str(tmp_path),
                f'--sft.data.sources=[{{"path": "{empty}"}}]')  # fmt: skip
    assert done.returncode == 1 and "The end of" in done.stderr and "has no usable row" in done.stderr, done.stderr


def test_bad_values_are_one_error_before_anything_runs(tmp_path: Path) -> None:
    for arguments, said in (
        (("step1", "--recipe", "tiny_cpu", "--sft.nonsense", "1"), "nonsense"),
        (("scale", "--recipe", "tiny_cpu", "--ranks", "2,1"), "--ranks '2,1' must be different numbers from 1"),
        (("compare", "a.json", "b.json"), "a.json"),
        (("machine", "--name", "A B", "--out", "x.yaml"), "--name 'A B' must be made of small letters"),
        (("machine", "--name", "a", "--out", str(Path(__file__))), "holds something that this command did not write"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "rlhf.cli", "bench", *arguments], capture_output=True, text=True, check=False,
            timeout=60, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())
