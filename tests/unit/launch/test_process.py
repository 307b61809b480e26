"""Supervision with real processes: which rank failed, and nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from launch import process
from launch.process import (
    Interrupt,
    Outcome,
    RankExit,
    _RankWatch,
    catch_signals,
    describe_code,
    describe_failure,
    exit_code,
    run_watched,
)


def watched(argv: list[str], tmp_path: Path, **kwargs) -> Outcome:  # noqa: ANN003
    return run_watched(
        argv,
        environment=os.environ,
        log_path=tmp_path / "log",
        interrupt=kwargs.pop("interrupt", Interrupt()),
        on_tick=kwargs.pop("on_tick", lambda: None),
        **kwargs,
    )


@pytest.mark.parametrize(
    ("code", "words", "ours"),
    [
        (-9, "signal SIGKILL", 137),
        (247, "signal SIGKILL (exit code 247)", 137),
        (245, "signal SIGSEGV (exit code 245)", 139),
        (137, "exit code 137 (a shell's code for SIGKILL)", 137),
        (255, "exit code 255", 255),
        (3, "exit code 3", 3),
        (0, "exit code 0", 1),
    ],
)
def test_codes(code: int, words: str, ours: int) -> None:
    """DeepSpeed turns -9 into 247, and drops negative codes: no failure may become 0."""
    assert describe_code(code) == words
    assert exit_code(code) == ours


def test_log_and_success(tmp_path: Path) -> None:
    ticks = []
    outcome = watched([sys.executable, "-c", "print('hello; $HOME')"], tmp_path, on_tick=lambda: ticks.append(1))
    assert outcome == Outcome(returncode=0)
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["hello; $HOME"]
    with pytest.raises(FileExistsError):
        watched([sys.executable, "-c", ""], tmp_path)  # a log is never written over


# A stand-in for deepspeed.launcher.launch: two ranks with RANK set, and its habit of ending all when one fails.
NODE_LAUNCHER = """
import os, subprocess, sys, time
# deepspeed.launcher.launch
ranks = [subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "RANK": str(rank)})
         for rank, code in enumerate(sys.argv[1:3])]
while True:
    time.sleep(1.0)
    codes = [rank.poll() for rank in ranks]
    if any(codes) or None not in codes:
        break
for rank in ranks:
    rank.terminate()
    rank.wait()
sys.exit(next((code for code in codes if code), 0))
"""
WAIT = "import time; time.sleep(30)"


@pytest.mark.parametrize(
    ("ranks", "failed"),
    [
        ([WAIT, "import time, os; time.sleep(1.6); os.kill(os.getpid(), 9)"], "rank 1 ended with signal SIGKILL"),
        (["import time, sys; time.sleep(1.6); sys.exit(7)", WAIT], "rank 0 ended with exit code 7"),
    ],
)
def test_failing_rank_is_named(tmp_path: Path, ranks: list[str], failed: str) -> None:
    outcome = watched([sys.executable, "-c", NODE_LAUNCHER, *ranks], tmp_path)
    assert describe_failure(outcome, "") == failed


def test_an_end_is_seen_while_the_caller_is_busy(tmp_path: Path) -> None:
    """The launcher reaps a rank within a second of its end; what ended it is then known from its exit code alone."""
    dies = "import time, os; time.sleep(1.6); os.kill(os.getpid(), 9)"
    outcome = watched([sys.executable, "-c", NODE_LAUNCHER, WAIT, dies], tmp_path, on_tick=lambda: time.sleep(3.0))
    assert outcome.rank_exits[0] == RankExit(1, signal.SIGKILL)


@pytest.mark.parametrize(
    ("ended", "rank"),
    [
        ([(0, signal.SIGTERM), (1, signal.SIGKILL)], 1),  # 0 got the launcher's clean-up, both seen in one look
        ([(0, 0), (1, signal.SIGTERM)], 1),  # ended from outside
        ([(1, None), (0, 256)], 1),  # 1 was reaped between two looks; 0 then lost its connection
        ([(0, 0), (1, 0)], None),
    ],
)
def test_first_failure(ended: list[tuple[int, int | None]], rank: int | None) -> None:
    watch = _RankWatch(session=0)
    watch._ended = [RankExit(number, status) for number, status in ended]
    assert (watch.first_failure and watch.first_failure.rank) == rank


def test_orphans_are_ended_and_counted(tmp_path: Path) -> None:
    """The per-node launcher dies by SIGKILL: its ranks would go on training, and deepspeed would exit 0."""
    code = f"import subprocess, sys, os; subprocess.Popen([sys.executable, '-c', {WAIT!r}]); os._exit(0)"
    started = time.monotonic()
    outcome = watched([sys.executable, "-c", code], tmp_path)
    assert (outcome.returncode, outcome.num_leftover) == (0, 1)
    assert "1 of its processes were still running" in describe_failure(outcome, "")
    assert time.monotonic() - started < 10


def test_a_process_that_ignores_sigterm_is_killed_on_the_second_signal(tmp_path: Path) -> None:
    stubborn = textwrap.dedent("""
        import pathlib, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(sys.argv[1]).touch()
        time.sleep(60)
    """)
    ready = tmp_path / "ready"

    def on_tick() -> None:
        if ready.exists() and interrupt.signum is None:
            os.kill(os.getpid(), signal.SIGINT)
            subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -INT {os.getpid()}"])

    with catch_signals() as interrupt:
        outcome = watched([sys.executable, "-c", stubborn, str(ready)], tmp_path, interrupt=interrupt, on_tick=on_tick)
    assert (outcome.returncode, outcome.interrupted_by) == (-9, signal.SIGINT)


def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with catch_signals() as interrupt:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert interrupt.signum == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_failed_host_ends_the_others_that_wait_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pdsh says that one host is down and waits for the rest, which wait for it at the rendezvous."""
    monkeypatch.setattr(process, "_HOST_LOOK_SECONDS", 0.2)
    monkeypatch.setattr(process, "_HOST_GRACE_SECONDS", 1.0)
    code = "import time; print('pdsh@a: node2: ssh exited with exit code 255', flush=True); time.sleep(60)"
    started = time.monotonic()
    outcome = watched([sys.executable, "-c", code], tmp_path, ends_remote_ranks=True)
    assert time.monotonic() - started < 20 and outcome.returncode == -signal.SIGTERM
    assert describe_failure(outcome, (tmp_path / "log").read_text()) == "host node2 failed: exit code 255"


def test_failing_host_is_named() -> None:
    log = "node1: step 3\npdsh@login: node2: ssh exited with exit code 247\n"
    assert describe_failure(Outcome(returncode=247), log) == "host node2 failed: signal SIGKILL (exit code 247)"
    assert "rank 3" in describe_failure(Outcome(returncode=247, rank_exit=RankExit(3, None)), log)
