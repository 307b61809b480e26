"""Ranks that hang, are stopped, or lose their launcher, under the real `deepspeed` launcher. Five launches,
one of them slow.

The program is a loop of collectives with the heartbeat of a stage; tests/pipeline/test_chaos.py does it to step 3.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launch.command import stage_command
from launch.failure import Failure, explain
from launch.hostfile import Host
from launch.placement import Placement
from launch.process import Interrupt, Outcome, run_watched
from launch.ranks import Ranks
from rlhf import procfs
from rlhf.config import WatchdogConfig
from rlhf.host import free_port
from rlhf.watchdog import EXIT_STUCK

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import torch
from rlhf import distributed, heartbeat
from rlhf.config import WatchdogConfig
from rlhf.watchdog import watched

def train(folder, rank, fault):
    distributed.init(600)
    for step in range(1, 100_000):
        heartbeat.at_step(step, 100_000)
        with heartbeat.during("rollout"):
            heartbeat.call("actor")
            distributed.all_sum(torch.ones(1))
        with heartbeat.during("update"):
            heartbeat.call("critic")
            if step == 5:
                (folder / f"rank{rank}.pid").write_text(str(os.getpid()))
            if step == 300 and rank == 1:
                print("about to", fault, flush=True)
                if fault == "sleep":
                    time.sleep(600)
                if fault == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if fault == "kill":
                    os.kill(os.getpid(), 9)
                if fault == "raise":
                    raise torch.OutOfMemoryError("tried to allocate 80 GiB")
        time.sleep(0.01)

folder = Path(sys.argv[sys.argv.index("--config") + 1])
with watched(WatchdogConfig(update_seconds=3, rollout_seconds=4, silent_seconds=6)):
    train(folder, int(os.environ["RANK"]), (folder / "fault").read_text())
"""
CONFIG = WatchdogConfig(silent_seconds=6)
PLACEMENT = Placement(hosts=(Host("localhost", (0, 1)),), num_gpus=2)


def command_of(folder: Path, fault: str) -> list[str]:
    (folder / "watched_program.py").write_text(PROGRAM)
    (folder / "fault").write_text(fault)
    return stage_command("watched_program", folder, PLACEMENT, port=free_port(), rank_logs=folder / "ranks")


def environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(folder), str(Path(__file__).resolve().parents[2])])
    return {**os.environ, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "PYTHONFAULTHANDLER": "1"}


def launched(folder: Path, fault: str) -> tuple[Outcome, Failure, float]:
    """How it ended, what is said about it, and how long that took from the fault on."""
    ranks = Ranks(folder / "ranks", world_size=2, config=CONFIG)
    seen = []

    def on_tick() -> None:
        if not seen and b"about to" in log.read_bytes():
            seen.append(time.monotonic())

    log = folder / "log"
    outcome = run_watched(
        command_of(folder, fault),
        environment={**environment(folder), **ranks.variables},
        log_path=log,
        interrupt=Interrupt(),
        on_tick=on_tick,
        ranks=ranks,
    )
    ended = time.monotonic()
    for rank in (0, 1):
        assert procfs.stat(int((folder / f"rank{rank}.pid").read_text())) is None, f"rank {rank} is still there"
    return outcome, explain(outcome, ranks, log), ended - seen[0]


def test_a_rank_that_sleeps_is_found_while_the_other_waits_in_a_collective(tmp_path: Path) -> None:
    _, failure, seconds = launched(tmp_path, "sleep")
    assert failure.exit_code == EXIT_STUCK and seconds < 60
    assert "the run was stuck: rank 1 on " in failure.text
    assert "step 300 of 100000, phase update, role critic, model call 1 has made no progress for" in failure.text
    assert "(limit 3 s, run.watchdog.update_seconds)" in failure.text
    assert "The other ranks are in all_reduce." in failure.text
    assert failure.lines[0] == "about to sleep" and failure.lines_path.name.endswith("_rank1.log")
    assert "in train" in failure.stacks[1][0]  # the call of time.sleep has no frame of its own
    assert "all_reduce" in failure.stacks[0][0] or "all_reduce" in failure.stacks[0][1]
    assert "1: about to sleep\n" in (tmp_path / "log").read_text()


def test_a_stopped_rank_is_found_and_woken_for_its_stack(tmp_path: Path) -> None:
    _, failure, seconds = launched(tmp_path, "stop")
    assert failure.exit_code == EXIT_STUCK and seconds < 60
    assert "the run was stuck: rank 1 on" in failure.text and "has not given a sign of life for" in failure.text
    assert " of 100000, phase " in failure.text  # of the second before
    assert set(failure.stacks) == {0, 1}


def test_out_of_memory_is_named(tmp_path: Path) -> None:
    """The other rank fails too, because of it."""
    outcome, failure, seconds = launched(tmp_path, "raise")
    assert (outcome.stuck, failure.exit_code) == (None, 1) and seconds < 60
    assert failure.text.startswith("rank 1 ran out of memory: OutOfMemoryError: tried to allocate 80 GiB.")
    assert "step 300 of 100000, phase update, role critic" in failure.text
    assert failure.lines[-1].endswith("OutOfMemoryError: tried to allocate 80 GiB")


# Stands for `rlhf run`: starts the program, and is killed.
RUNNER = """
import os, sys
from pathlib import Path
from launch.process import Interrupt, run_watched
from tests.distributed.test_watchdog import *
folder = Path(sys.argv[1])
ranks = Ranks(folder / "ranks", world_size=2, config=CONFIG)
run_watched(command_of(folder, "nothing"), environment={**environment(folder), **ranks.variables},
            log_path=folder / "log", interrupt=Interrupt(), on_tick=lambda: None, ranks=ranks)
"""


@pytest.mark.parametrize("victim", ["rlhf run", pytest.param("deepspeed", marks=pytest.mark.slow)])
def test_nothing_goes_on_without_its_launcher(tmp_path: Path, victim: str) -> None:
    """SIGKILL to `rlhf run` or to deepspeed's front-end, which leave no chance to end the ranks."""
    runner = subprocess.Popen([sys.executable, "-c", RUNNER, str(tmp_path)], env=environment(tmp_path))
    pids = [tmp_path / f"rank{rank}.pid" for rank in (0, 1)]
    deadline = time.monotonic() + 90
    while not all(path.exists() and path.read_text() for path in pids) and time.monotonic() < deadline:
        time.sleep(0.2)
    ranks = [int(path.read_text()) for path in pids]
    state = procfs.stat(ranks[0])
    assert state is not None
    members = procfs.members(state.session)
    front_end = next(pid for pid, member in members.items() if member.parent == runner.pid)
    os.kill(runner.pid if victim == "rlhf run" else front_end, signal.SIGKILL)
    started = time.monotonic()
    while alive(state.session) and time.monotonic() < started + 60:
        time.sleep(0.2)
    assert not alive(state.session)
    if victim == "rlhf run":
        logs = [path.read_text() for path in (tmp_path / "ranks").glob("*_rank?.log")]
        assert any("ends: `rlhf run` is gone" in log for log in logs)  # the other may see its connection end first
    runner.wait(timeout=60)


def alive(session: int) -> list[int]:
    return [pid for pid, member in procfs.members(session).items() if member.state != "Z"]
