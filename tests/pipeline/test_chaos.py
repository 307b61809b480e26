"""Ranks of step 3 that are killed, stopped or put to sleep in each of its phases, under `rlhf run`. Minutes.

Two launches of the first two stages, cut short, make the models; each case then starts step 3 and waits for its moment.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf import procfs
from rlhf.heartbeat import Beat, read_beat
from rlhf.watchdog import EXIT_STUCK

pytestmark = pytest.mark.slow

MODELS = (
    "--stages", "sft", "reward", "--sft.max_steps=2", "--sft.eval.generate_rows=0", "--reward.max_steps=2",
    "--reward.eval.generate_rows=0",
)  # fmt: skip
PPO = (
    "--stages", "ppo", "--ppo.eval.generate_rows=8", "--ppo.run.save_every=1",
    "--ppo.run.eval_every=1", "--ppo.run.watchdog.silent_seconds=8", "--ppo.run.watchdog.rollout_seconds=10",
    "--ppo.run.watchdog.update_seconds=10",
)  # fmt: skip


# Python runs it in every process that finds it on its path: rank 1 rests when the phase of the test begins, from step 2
# on, for two seconds so that a record (one a second) shows it, or for good.
RESTS = """
import os, sys, time
if os.environ.get("RANK") == "1":
    from rlhf import heartbeat
    enter = heartbeat._enter
    def enter_and_rest(phase):
        enter(phase)
        if phase in os.environ["REST_IN"].split() and heartbeat._activity.step >= 2:
            print("resting in", phase, flush=True)
            time.sleep(float(os.environ["REST_SECONDS"]))
    heartbeat._enter = enter_and_rest
"""


def start(run: Path, *flags: str, rest_in: str = "", rest_seconds: float = 2.0) -> subprocess.Popen[str]:
    """`rlhf run` of tiny_cpu; `rest_in`: phases in which rank 1 rests."""
    (run.parent / "sitecustomize.py").write_text(RESTS)
    path = os.pathsep.join([str(run.parent), os.environ.get("PYTHONPATH", "")])
    argv = [sys.executable, "-c", "import sys; from rlhf.cli import main; sys.exit(main())", "run"]
    return subprocess.Popen(
        [*argv, "--recipe", "tiny_cpu", "--out", str(run), *flags],
        env={**os.environ, "REST_IN": rest_in, "REST_SECONDS": str(rest_seconds), "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("models") / "run"
    process = start(run, *MODELS)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    return run


@pytest.fixture
def run(models: Path, tmp_path: Path) -> Path:
    shutil.copytree(models, tmp_path / "run")
    return tmp_path / "run"


def wait_for(run: Path, phase: str, *, rank: int = 1, attempt: int = 1, step: int = 2) -> Beat:
    """The record of a rank that has entered a phase; `start` needs no step."""
    deadline = time.monotonic() + 300
    folder = run / "logs" / f"step3_ppo.{attempt}"
    while time.monotonic() < deadline:
        beat = read_beat(folder, rank)
        if beat is not None and beat.phase == phase and (beat.step >= step or phase == "start"):
            return beat
        time.sleep(0.02)
    raise AssertionError(f"rank {rank} never was in {phase}")


def ended(process: subprocess.Popen[str], run: Path) -> tuple[str, float]:
    """What `rlhf run` printed, and seconds until it and all ranks were gone."""
    started = time.monotonic()
    out, _ = process.communicate(timeout=90)
    # A rank that the others' end met at its start may have no record yet, but its command line names the run folder.
    left = [pid for pid in os.listdir("/proc") if pid.isdigit() and str(run).encode() in procfs.read(pid, "cmdline")]
    assert not left, out
    return out, time.monotonic() - started


@pytest.mark.parametrize("phase", ["start", "rollout", "update"])
def test_a_killed_rank_is_named_with_its_phase(run: Path, phase: str) -> None:
    process = start(run, *PPO, rest_in=phase)
    beat = wait_for(run, phase)
    os.kill(beat.pid, signal.SIGKILL)
    out, seconds = ended(process, run)
    assert process.returncode == 128 + signal.SIGKILL and seconds < 60
    assert f"step3_ppo failed: rank 1 ended with signal SIGKILL. When last heard of: rank 1 on {beat.host}" in out
    assert f"phase {phase}" in out and "GB left. SIGKILL comes from" in out
    assert "last " in out and ("_rank1.log" in out or "step3_ppo.1.log" in out)
    assert json.loads((run / "summary.json").read_text())["stages"]["step3_ppo"]["status"] == "failed"


@pytest.mark.parametrize("phase", ["rollout"])
def test_a_stopped_rank_is_found(run: Path, phase: str) -> None:
    process = start(run, *PPO, rest_in=phase)
    os.kill(wait_for(run, phase).pid, signal.SIGSTOP)
    out, seconds = ended(process, run)
    assert process.returncode == EXIT_STUCK and seconds < 60 + 8
    assert "step3_ppo failed: the run was stuck: rank 1 on" in out and "not given a sign of life" in out
    assert "rank 0 was at, innermost call first:" in out and "rank 1 was at, innermost call first:" in out


@pytest.mark.parametrize("phase", ["update"])
def test_a_rank_that_sleeps_is_found(run: Path, phase: str) -> None:
    process = start(run, *PPO, rest_in=phase, rest_seconds=600.0)
    wait_for(run, phase)
    out, seconds = ended(process, run)
    assert process.returncode == EXIT_STUCK and seconds < 60 + 10
    assert "step3_ppo failed: the run was stuck: rank 1 on" in out and f"phase {phase}" in out
    assert f"run.watchdog.{phase}_seconds" in out and "The other ranks are in all_" in out
    assert f"resting in {phase}" in out, "its last lines"


@pytest.mark.parametrize("victim", ["rlhf", "deepspeed"])
def test_nothing_is_left_without_its_launcher(run: Path, victim: str) -> None:
    process = start(run, *PPO, rest_in="rollout")
    beat = wait_for(run, "rollout")
    state = procfs.stat(beat.pid)
    assert state is not None
    parent = procfs.stat(state.parent)
    assert parent is not None
    os.kill(process.pid if victim == "rlhf" else parent.parent, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(member.state != "Z" for member in procfs.members(state.session).values()):
        assert time.monotonic() < deadline, "something goes on"
        time.sleep(0.2)
    process.wait(timeout=60)


def test_restarts_go_on_from_the_saved_state(run: Path) -> None:
    flags = ("--ppo.max_steps=8", "--restarts", "2", "--restart-delay", "1")
    process = start(run, *PPO, *flags, rest_in="rollout update")
    os.kill(wait_for(run, "rollout", step=3).pid, signal.SIGKILL)
    os.kill(wait_for(run, "update", attempt=2, step=5).pid, signal.SIGKILL)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0, out
    assert out.count("step3_ppo failed: rank 1 ended with signal SIGKILL") == 2
    assert "restart 1 of 2 in 1 s" in out and "restart 2 of 2 in 2 s" in out
    assert out.count("step3_ppo: continues from its saved state; attempt") == 2
    steps = [json.loads(line) for line in (run / "step3_ppo" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in steps if line["split"] == "train"] == list(range(1, 9))
