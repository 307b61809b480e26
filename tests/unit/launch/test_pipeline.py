"""`rlhf run` from decision to summary, on a stand-in for the stages (fake_stage.py). Fault rows F9, F10, F11, B21."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import command, pipeline
from launch.pipeline import run
from launch.plan import RunOptions
from launch.record import run_lock

FAKE_STAGE = Path(__file__).with_name("fake_stage.py")

RECIPE = Path(pipeline.__file__).parent / "recipes" / "tiny_cpu"
LR = {stage: yaml.safe_load((RECIPE / f"{stage}.yaml").read_text())["optim"]["lr"] for stage in ("sft", "reward")}


@pytest.fixture(autouse=True)
def fake_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake_command(module: str, config_path: Path, placement: Any, *, port: int, rank_logs: Path) -> list[str]:
        return [sys.executable, str(FAKE_STAGE), "--config", str(config_path)]

    monkeypatch.setattr(command, "stage_command", fake_command)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.delenv("FAKE_STAGE", raising=False)
    monkeypatch.setattr("rlhf.report.write_report", lambda run_dir: Path(run_dir) / "report.html")


@pytest.fixture
def options(tmp_path: Path) -> RunOptions:
    return RunOptions(recipe="tiny_cpu", out=tmp_path / "run")


def summary(options: RunOptions) -> dict[str, Any]:
    assert options.out is not None
    return json.loads((options.out / "summary.json").read_text())


def logs(options: RunOptions) -> list[str]:
    assert options.out is not None
    return sorted(path.name for path in (options.out / "logs").glob("*.log"))


def replace(options: RunOptions, **changes: Any) -> RunOptions:
    return dataclasses.replace(options, **changes)


def test_three_stages_then_all_skipped(options: RunOptions, capsys: pytest.CaptureFixture[str]) -> None:
    """F11: the same command twice runs each stage once, and every attempt has its own log."""
    assert run(options) == 0
    assert [entry["status"] for entry in summary(options)["stages"].values()] == ["done"] * 3
    first = summary(options)["stages"]["step1_sft"]
    assert 0 < first.pop("wall_seconds") < 60
    assert first == {
        "status": "done",
        "seconds": 1.5,
        "tokens_per_second": 100.0,
        "model_dir": "step1_sft/model",
        "metrics": {
            "eval_loss_before": 2.0, "eval_loss_after": 1.0, "stop_frac": 1.0, "gold_sft": 0.5, "gold_ppo": 0.75,
        },
        "attempt": 1,
        "log": "logs/step1_sft.1.log",
        "error": None,
    }  # fmt: skip
    out = capsys.readouterr().out
    assert "eval loss 2 -> 1" in out and "gold 0.5 -> 0.75" in out and "report.html" in out
    assert run(options) == 0
    assert capsys.readouterr().out.count("skipped (finished, inputs unchanged)") == 3
    assert logs(options) == ["step1_sft.1.log", "step2_reward.1.log", "step3_ppo.1.log"]


def test_changed_input_runs_its_stage_and_what_follows(options: RunOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options) == 0
    assert run(replace(options, overrides=("--reward.optim.lr", "0.123"))) == 0
    out = capsys.readouterr().out
    assert "step1_sft: skipped" in out.split("step1_sft: done")[-1]
    assert f"step2_reward: its inputs changed: optim.lr {LR['reward']} -> 0.123" in out
    assert "step3_ppo: its inputs changed: step2_reward is made anew" in out
    assert logs(options)[1:] == ["step2_reward.1.log", "step2_reward.2.log", "step3_ppo.1.log", "step3_ppo.2.log"]
    assert options.out is not None and (options.out / "previous" / "step2_reward.1" / "model").is_dir()


def test_cadence_of_logs_is_no_input(options: RunOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options) == 0
    changed = ("--sft.run.log_every=7", "--ppo.run.tensorboard=true", "--ppo.run.watchdog.rollout_seconds=5")
    changed = (*changed, "--sft.run.health.loss_explosion.action=stop", "--ppo.run.health.kl_explosion.limit=2")
    assert run(replace(options, overrides=changed)) == 0
    assert capsys.readouterr().out.count("skipped") == 3


def test_force_runs_again(options: RunOptions) -> None:
    assert run(options) == 0
    assert run(replace(options, force=True, stages=("sft",))) == 0
    assert "step1_sft.2.log" in logs(options) and "step2_reward.2.log" not in logs(options)


def test_seed_is_an_input(options: RunOptions) -> None:
    assert run(replace(options, seed=1)) == 0
    assert run(replace(options, seed=2)) == 0
    assert summary(options)["seed"] == 2
    assert len(logs(options)) == 6


@pytest.mark.parametrize(("fault", "code", "words"), [("exit3", 3, "exit code 3"), ("kill", 137, "signal SIGKILL")])
def test_f10_failure_is_reported(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, code: int,
    words: str,
) -> None:  # fmt: skip
    """F10: the cause stands on the screen: how it ended and the last 30 lines; and the exit code is not 0."""
    monkeypatch.setenv("FAKE_STAGE", f"step2_reward:{fault}")
    assert run(options) == code
    out = capsys.readouterr().out
    assert f"step2_reward failed: the launcher ended with {words}" in out
    assert "last 30 lines of" in out and "step2_reward line 39" in out and "step2_reward line 10" in out
    assert "step2_reward line 9\n" not in out and "step3_ppo:" not in out
    assert [e["status"] for e in summary(options)["stages"].values()] == ["done", "failed", "missing"]
    assert words in summary(options)["stages"]["step2_reward"]["error"]
    monkeypatch.delenv("FAKE_STAGE")
    assert run(options) == 0
    assert "step1_sft: skipped" in capsys.readouterr().out
    assert logs(options) == ["step1_sft.1.log", "step2_reward.1.log", "step2_reward.2.log", "step3_ppo.1.log"]


def test_exit_code_0_without_a_result_is_a_failure(options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    """deepspeed's front-end exits 0 when the process under it dies by a signal."""
    monkeypatch.setenv("FAKE_STAGE", "step1_sft:silent")
    assert run(options) == 1
    assert "wrote no result.json" in summary(options)["stages"]["step1_sft"]["error"]


def test_resume_continues_an_unfinished_stage(options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.out is not None
    starts = options.out / "step2_reward" / "starts.txt"
    monkeypatch.setenv("FAKE_STAGE", "step2_reward:state")
    assert run(options) == 1
    assert run(replace(options, resume=True)) == 1
    assert starts.read_text() == "resume=False\nresume=True\n"
    monkeypatch.delenv("FAKE_STAGE")
    assert run(replace(options, resume=True)) == 0
    assert starts.read_text().endswith("resume=True\nresume=True\n")


def test_without_resume_an_unfinished_stage_starts_over(options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.out is not None
    monkeypatch.setenv("FAKE_STAGE", "step1_sft:state")
    assert run(options) == 1
    monkeypatch.delenv("FAKE_STAGE")
    assert run(options) == 0
    assert (options.out / "step1_sft" / "starts.txt").read_text() == "resume=False\n"
    assert (options.out / "previous" / "step1_sft.1" / "state").is_dir()


def test_restarts_continue_from_the_saved_state(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert options.out is not None
    monkeypatch.setenv("FAKE_STAGE", "step2_reward:advance")
    assert run(replace(options, restarts=5, restart_delay=0)) == 0
    out = capsys.readouterr().out
    assert out.count("step2_reward failed") == 2 and "restart 2 of 5 in 0 s" in out
    assert (options.out / "step2_reward" / "starts.txt").read_text() == "resume=False\n" + 2 * "resume=True\n"
    assert [e["status"] for e in summary(options)["stages"].values()] == ["done"] * 3
    assert summary(options)["stages"]["step2_reward"]["attempt"] == 3


def test_a_stage_that_a_detector_stopped_is_not_started_again(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Known by what the rank has written down: on its way through launchers the exit code has become 1."""
    monkeypatch.setenv("FAKE_STAGE", "step1_sft:unhealthy")
    assert run(replace(options, restarts=5, restart_delay=0)) == 78
    out = capsys.readouterr().out
    assert "step1_sft failed: rank 1 failed: UnhealthyError: the loss is 9." in out
    assert "not started again: a detector of run.health stopped it, and would stop it again." in out
    assert "--resume continues from the saved state." in out
    assert logs(options) == ["step1_sft.1.log"]


def test_restarts_end_where_nothing_is_gained(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_STAGE", "step1_sft:exit3")
    assert run(replace(options, restarts=5, restart_delay=0)) == 3
    out = capsys.readouterr().out
    assert "no state was saved, so it starts over" in out
    assert "failed at step 0, the time before at step 0, so nothing was gained" in out
    assert logs(options) == ["step1_sft.1.log", "step1_sft.2.log"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"restarts": -1}, "--restarts must be >= 0"),
        ({"restart_delay": -1.0}, "--restart-delay must be in"),
        ({"elastic": True}, "--elastic leaves out lost hosts at a restart: it needs --restarts and --hostfile"),
    ],
)
def test_flags_of_restarts(
    options: RunOptions, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert run(replace(options, **changes)) == 2
    assert message in capsys.readouterr().out


def test_resume_with_other_inputs_is_refused(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_STAGE", "step1_sft:state")
    assert run(options) == 1
    assert run(replace(options, resume=True, overrides=("--sft.optim.lr=0.5",))) == 2
    assert f"saved state of other inputs: optim.lr {LR['sft']} -> 0.5" in capsys.readouterr().out


def test_resume_on_another_zero_stage_is_left_to_the_stage(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The optimiser is not: unless only the weights are taken."""
    assert options.out is not None
    starts = options.out / "step1_sft" / "starts.txt"
    monkeypatch.setenv("FAKE_STAGE", "step1_sft:state")
    assert run(options) == 1
    assert run(replace(options, resume=True, overrides=("--sft.deepspeed=cpu_zero2",))) == 1
    assert starts.read_text().splitlines()[-1] == "resume=True"
    assert run(replace(options, resume=True, overrides=("--sft.run.health.loss_explosion.action=off",))) == 1
    lr = ("--sft.optim.lr=0.5",)
    assert run(replace(options, resume=True, overrides=lr)) == 2
    assert run(replace(options, resume=True, resume_weights_only=True, overrides=lr)) == 1
    assert "continues from the weights of its saved state" in capsys.readouterr().out
    config = yaml.safe_load((options.out / "configs" / "step1_sft.yaml").read_text())
    assert config["run"]["resume"] and config["run"]["resume_weights_only"]


def test_resume_that_finds_nothing_is_refused(
    options: RunOptions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither an empty folder nor steps that were made and not saved are started over unasked."""
    assert run(replace(options, resume=True)) == 2
    assert "holds no run: nothing to resume. Leave --resume out to start one." in capsys.readouterr().out
    monkeypatch.setenv("FAKE_STAGE", "step2_reward:steps")
    assert run(options) == 1
    assert run(replace(options, resume=True)) == 2
    assert "step2_reward had begun its steps, but" in capsys.readouterr().out
    assert logs(options)[-1] == "step2_reward.1.log"
    monkeypatch.setenv("FAKE_STAGE", "step2_reward:exit3")  # in its start: nothing is lost
    assert run(options) == 3
    monkeypatch.delenv("FAKE_STAGE")
    assert run(replace(options, resume=True)) == 0
    assert "step2_reward: ended before its first step" in capsys.readouterr().out


def test_f9_truncated_model_is_not_accepted(options: RunOptions, capsys: pytest.CaptureFixture[str]) -> None:
    """F9: step 3 does not take a model file that merely exists."""
    assert options.out is not None
    assert run(replace(options, stages=("sft", "reward"))) == 0
    weights = options.out / "step1_sft" / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    assert run(options) == 2
    assert "model.safetensors is truncated" in capsys.readouterr().out
    assert run(replace(options, stages=("ppo",))) == 2
    assert "step3_ppo reads the model of step1_sft" in capsys.readouterr().out
    assert not (options.out / "logs" / "step3_ppo.1.log").exists()


def test_stage_without_its_parent_is_refused(options: RunOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(replace(options, stages=("ppo",))) == 2
    out = capsys.readouterr().out
    assert "nothing was started. 2 problems" in out
    assert "step3_ppo reads the model of step1_sft" in out and "step3_ppo reads the model of step2_reward" in out


def test_b21_resolved_recipe_is_kept_and_versioned(options: RunOptions) -> None:
    """B21: what a recipe said on the day of the run can be read in the run."""
    assert options.out is not None
    assert run(replace(options, overrides=("--sft.optim.lr=0.123", "--ppo.kl.coef=0.07"))) == 0
    assert "lr: 0.123" in (options.out / "configs" / "step1_sft.yaml").read_text()
    assert (summary(options)["recipe"], summary(options)["recipe_version"]) == ("tiny_cpu", 1)
    record = json.loads((options.out / "launch.json").read_text())["stages"]["step3_ppo"]
    assert record["status"] == "done" and record["inputs"]["config.kl.coef"] == 0.07
    assert "train_micro_batch_size_per_gpu" in record["inputs"]["deepspeed.actor"]


def test_moved_run_is_still_finished(options: RunOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(options) == 0
    assert options.out is not None
    options.out.rename(tmp_path / "elsewhere")
    assert run(replace(options, out=tmp_path / "elsewhere")) == 0
    assert capsys.readouterr().out.count("skipped") == 3


def test_two_launchers_on_one_folder(options: RunOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert options.out is not None
    options.out.mkdir()
    with run_lock(options.out):
        assert run(options) == 2
    assert f"is in use by process {os.getpid()} on" in capsys.readouterr().out
    assert run(options) == 0


def test_dry_run_writes_nothing(options: RunOptions, capsys: pytest.CaptureFixture[str]) -> None:
    assert options.out is not None
    assert run(replace(options, dry_run=True)) == 0
    assert not options.out.exists()
    out = capsys.readouterr().out
    assert f"lr: {LR['sft']}" in out and '"stage": 3' in out and out.count("\n$ ") == 3


@pytest.mark.parametrize(
    ("fault", "signum", "code", "words"),
    [
        ("hang", signal.SIGINT, 130, "stopped by SIGINT in step1_sft"),
        ("hang", signal.SIGTERM, 143, "stopped by SIGTERM in step1_sft"),
        ("patient", signal.SIGINT, 130, "stopped by SIGINT in step1_sft"),
        ("patient", signal.SIGTERM, 75, "step1_sft: stopped on request, state saved"),
        ("patient", signal.SIGUSR1, 75, "step1_sft: stopped on request, state saved"),
    ],
)
def test_signal_ends_the_stage(tmp_path: Path, fault: str, signum: signal.Signals, code: int, words: str) -> None:
    """No process is left, and the exit code says how; a stage in its steps is asked to save where the signal allows."""
    script = (
        "import sys; from pathlib import Path; from launch import command, pipeline\n"
        "from launch.plan import RunOptions\n"
        f"command.stage_command = lambda m, c, p, **kwargs: [sys.executable, {str(FAKE_STAGE)!r}, '--config', str(c)]\n"
        f"sys.exit(pipeline.run(RunOptions(recipe='tiny_cpu', out=Path({str(tmp_path / 'run')!r}))))\n"
    )
    environment = {**os.environ, "FAKE_STAGE": f"step1_sft:{fault}", "DS_ACCELERATOR": "cpu"}
    launcher = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
    pid_file = tmp_path / "run" / "step1_sft" / "pid"
    deadline = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    pid = int(pid_file.read_text())
    launcher.send_signal(signum)
    out, _ = launcher.communicate(timeout=20)
    assert launcher.returncode == code
    assert words in out
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stages"]["step1_sft"]["status"] == (
        "stopped" if code == 75 else "interrupted"
    )
