"""Output and heartbeats of ranks, read by the launcher, and what is said when one has failed."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch import ranks as ranks_module
from launch.failure import explain
from launch.process import Outcome, RankExit
from launch.ranks import Ranks
from rlhf.config import WatchdogConfig
from rlhf.heartbeat import Beat, Stuck, stacks_path, write_beat, write_stuck

KILLED = signal.SIGKILL.value  # as waitpid gives it


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path / "ranks", world_size=3, config=WatchdogConfig(silent_seconds=30, start_seconds=100))


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.write_text("$ deepspeed\n0: a\n1: b\n")
    return path


def beat(rank: int, **values: object) -> Beat:
    defaults = {"phase": "rollout", "step": 7, "num_steps": 9, "role": "actor", "phases": 5}
    return Beat(rank=rank, world_size=3, host=f"node{rank}.lan", pid=10 + rank, **{**defaults, **values})


def test_output_is_copied_line_by_line(ranks: Ranks) -> None:
    copied = bytearray()
    ranks.copy_output(copied.extend)
    assert copied == b""
    first, second = ranks.folder / "20260101_rank0.log", ranks.folder / "20260101_rank1.log"
    first.write_bytes(b"one\ntwo")
    second.write_bytes("é\n".encode())
    (ranks.folder / "20260101_rank10.log").write_bytes(b"not rank 0's\n")
    ranks.copy_output(copied.extend)
    assert copied.decode() == "0: one\n1: é\n"
    with first.open("ab") as file:
        file.write(b" and a half\nthree")
    ranks.copy_output(copied.extend)
    ranks.copy_output(copied.extend, last=True)
    assert copied.decode() == "0: one\n1: é\n0: two and a half\n0: three\n"
    assert ranks.last_lines(0, 2) == ["two and a half", "three"]
    assert ranks.last_lines(2, 2) == []


def test_a_line_longer_than_a_reading_ends_too(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "_READ_BYTES", 4)
    copied = bytearray()
    (ranks.folder / "x_rank0.log").write_bytes(b"abcdefghij\nkl\n")
    ranks.copy_output(copied.extend)
    assert copied.replace(b"0: ", b"").replace(b"\n", b"") == b"abcdefghijkl"


def look(ranks: Ranks) -> None:
    ranks._last_look = 0.0
    ranks.look(lambda lines: None)


def test_a_record_that_stands_still(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    fresh = Ranks(ranks.folder.with_name("other"), world_size=3, config=ranks.config)
    for number in (1, 2):
        for rank in range(3):
            write_beat(fresh.folder, beat(rank, number=number))
        clock[0] += 29
        look(fresh)
        assert fresh.stuck is None
    for rank in (0, 2):
        write_beat(fresh.folder, beat(rank, number=3))
    clock[0] += 29
    look(fresh)
    assert fresh.stuck is None
    for rank in (0, 2):
        write_beat(fresh.folder, beat(rank, number=4))
    clock[0] += 2
    look(fresh)
    assert fresh.stuck is not None and fresh.stuck.rank == 1
    assert (fresh.folder / "launcher.beat").read_text() == "4"


def test_a_rank_that_never_starts(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (0, 1):
        write_beat(ranks.folder, beat(rank, phase="start", step=0))
    ranks._changed[2] -= 101
    look(ranks)
    assert ranks.stuck is not None and ranks.stuck.text.startswith("rank 2 has written no record for 101 s")


def test_what_the_ranks_found_out_is_taken_over(ranks: Ranks) -> None:
    write_stuck(ranks.folder, Stuck(rank=2, text="x"))
    look(ranks)
    assert ranks.stuck == Stuck(rank=2, text="x")


def test_the_main_thread_is_the_last_of_a_dump(ranks: Ranks) -> None:
    stacks_path(ranks.folder, 1).write_text(
        'Current thread 0x0001 (most recent call first):\n  File "w.py", line 1 in _run\n\n'
        'Thread 0x0002 (most recent call first):\n  File "a.py", line 5 in wait\n  File "b.py", line 6 in train\n'
    )
    later = 'Thread 0x0002 (most recent call first):\n  File "c.py", line 7 in later\n'
    with stacks_path(ranks.folder, 1).open("a") as file:
        file.write(later)
    assert ranks.main_stack(1, 5) == ['  File "a.py", line 5 in wait', '  File "b.py", line 6 in train']
    assert ranks.main_stack(1, 1) == ['  File "a.py", line 5 in wait']
    assert ranks.main_stack(0, 5) == []
    library = "".join(f'  File "/site-packages/x.py", line {i} in g\n' for i in range(9))
    stacks_path(ranks.folder, 2).write_text(
        f'Thread 0x2 (most recent call first):\n{library}  File "b.py", line 6 in f'
    )
    assert [line.split("line ")[1] for line in ranks.main_stack(2, 9)] == ["0 in g", "1 in g", "2 in g", "6 in f"]


def failed(**values: object) -> Outcome:
    return Outcome(returncode=1, **values)  # type: ignore[arg-type]


def test_a_killed_rank(ranks: Ranks, log: Path) -> None:
    for rank in range(3):
        write_beat(ranks.folder, beat(rank, resident_bytes=3 * 10**9, available_bytes=5 * 10**8))
    (ranks.folder / "x_rank1.log").write_text("".join(f"line {i}\n" for i in range(50)))
    end = RankExit(1, KILLED, 100.0)
    failure = explain(failed(rank_exit=end, rank_exits=(end,)), ranks, log)
    assert failure.text == (
        "rank 1 ended with signal SIGKILL. When last heard of: rank 1 on node1.lan (process 11), step 7 of 9, phase "
        "rollout, role actor; it held 3.0 GB, its machine had 0.5 GB left. SIGKILL comes from the kernel's "
        "out-of-memory killer, a batch system or a person"
    )
    assert failure.lines == [f"line {i}" for i in range(20, 50)] and failure.lines_path.name == "x_rank1.log"
    # The launcher's 1 is the code of another rank, which lost its connection.
    assert (failure.step, failure.exit_code, failure.stacks) == (7, 137, {})


def test_the_kernels_killer_is_named(ranks: Ranks, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_beat(ranks.folder, beat(1))
    monkeypatch.setattr(ranks, "out_of_memory_kills", lambda: 1)
    end = RankExit(1, KILLED, 100.0)
    assert "The kernel's out-of-memory killer struck" in explain(failed(rank_exits=(end,)), ranks, log).text


@pytest.mark.parametrize(
    ("errors", "ends", "says"),
    [
        # The first exception that no other rank caused.
        ({0: ("RuntimeError: [gloo] Connection closed by peer", 9.0), 1: ("ValueError: x", 10.0)}, {}, "1 failed: Val"),
        ({0: ("ValueError: later", 11.0), 2: ("ValueError: first", 10.0)}, {}, "2 failed: ValueError: first"),
        ({0: ("RuntimeError: saving failed on rank 2: OSError", 9.0), 2: ("OSError: full", 10.0)}, {}, "2 failed: OSE"),
        # A signal before it, and one after it: deepspeed kills what does not end.
        ({0: ("ValueError: x", 20.0)}, {1: (KILLED, 10.0)}, "1 ended with signal SIGKILL"),
        ({0: ("ValueError: x", 20.0)}, {1: (KILLED, 50.0)}, "0 failed: ValueError: x"),
        ({0: ("ValueError: x", 20.0)}, {0: (KILLED, 50.0)}, "0 failed: ValueError: x"),
        ({0: ("ValueError: x", 20.0)}, {0: (signal.SIGTERM.value, 50.0)}, "0 failed: ValueError: x"),
        ({}, {0: (256, 11.0), 1: (signal.SIGSEGV.value, 12.0)}, "1 ended with signal SIGSEGV"),
        ({}, {0: (signal.SIGTERM.value, 10.0), 1: (KILLED, 12.0)}, "1 ended with signal SIGKILL"),
        ({0: ("OutOfMemoryError: CUDA out of memory.", 1.0)}, {}, "0 ran out of memory: OutOfMemoryError: CUDA"),
        ({0: ("RuntimeError: DefaultCPUAllocator: can't allocate memory", 1.0)}, {}, "0 ran out of memory"),
    ],
)
def test_who_is_at_fault(ranks: Ranks, log: Path, errors: dict, ends: dict, says: str) -> None:
    for rank in range(3):
        error, when = errors.get(rank, ("", 0.0))
        write_beat(ranks.folder, beat(rank, state="failed" if error else "running", error=error, error_time=when))
    exits = tuple(RankExit(rank, status, when) for rank, (status, when) in ends.items())
    failure = explain(failed(rank_exit=exits[0] if exits else None, rank_exits=exits), ranks, log)
    assert failure.text.startswith(f"rank {says}")
    # A rank that has raised may be ended by a signal of the launcher's before it ends itself: not what it failed of.
    own = "" if "ended with signal" not in says else says.rpartition(" ")[2]
    assert failure.exit_code == (128 + signal.Signals[own] if own else 1)


def test_a_rank_of_another_machine(ranks: Ranks, log: Path) -> None:
    """Only its host is known, and that it left no word."""
    for rank in range(3):
        write_beat(ranks.folder, beat(rank))
    write_beat(ranks.folder, beat(0, state="failed", error="RuntimeError: Connection closed by peer", error_time=1.0))
    log.write_text(log.read_text() + "pdsh@login: node2: ssh exited with exit code 247\n")
    failure = explain(failed(), ranks, log)
    assert failure.text.startswith(
        "host node2 failed: signal SIGKILL (exit code 247); rank 2 of it left no word. When last heard of: rank 2 on "
        "node2.lan"
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("mpirun noticed that process rank 1 with PID 0 on node node2 exited on signal 9 (Killed).", "SIGKILL"),
        ("srun: error: node2: task 1: Killed", "SIGKILL"),
        (
            "srun: error: node1: task 0: Terminated\nsrun: error: node2: task 1: Segmentation fault (core dumped)",
            "SIGSEGV",
        ),
        ("srun: error: node2: task 1: Exited with exit code 9", None),
    ],
)
def test_what_mpirun_and_srun_say(ranks: Ranks, log: Path, line: str, says: str | None) -> None:
    write_beat(ranks.folder, beat(1))
    log.write_text(f"{log.read_text()}{line}\n")
    text = explain(failed(), ranks, log).text
    if says:
        assert text.startswith(f"rank 1 ended with signal {says}. When last heard of: rank 1 on node1.lan")
    else:
        assert text == "the launcher ended with exit code 1"


def test_a_stuck_run(ranks: Ranks, log: Path) -> None:
    write_beat(ranks.folder, beat(1))
    stacks_path(ranks.folder, 1).write_text('Thread 0x2 (most recent call first):\n  File "a.py", line 5 in f\n')
    failure = explain(replace(failed(), stuck=Stuck(rank=1, text="rank 1 sleeps.")), ranks, log)
    assert failure.text == "the run was stuck: rank 1 sleeps." and failure.exit_code == 76
    assert failure.stacks == {1: ['  File "a.py", line 5 in f']}
    assert failure.stacks_pattern == str(ranks.folder / "rank*.stacks")
    assert failure.lines == log.read_text().splitlines()  # it has no output of its own


def test_without_any_record_the_log_is_all(ranks: Ranks, log: Path) -> None:
    failure = explain(failed(), ranks, log)
    assert (failure.text, failure.step) == ("the launcher ended with exit code 1", 0)
    assert failure.lines_path == log


def test_variables_of_the_ranks(ranks: Ranks) -> None:
    assert ranks.variables["RLHF_WATCH_DIR"] == str(ranks.folder)
    assert f":{os.getpid()}:" in ranks.variables["RLHF_LAUNCHER"]
