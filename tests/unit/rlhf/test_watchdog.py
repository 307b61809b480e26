"""The thread of a rank, in processes of its own. No torch, so each starts in half a second."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rlhf import heartbeat
from rlhf.heartbeat import read_beat, read_stuck, stacks_path
from rlhf.watchdog import EXIT_ORPHANED, EXIT_STUCK, LAUNCHER_PROCESS, is_running, process_name

HEAD = """
import os, sys, time, threading
from pathlib import Path
from rlhf import heartbeat, watchdog
from rlhf.config import WatchdogConfig
"""


def python(folder: Path | None, code: str, **environment: str) -> subprocess.Popen[str]:
    watch = {heartbeat.WATCH_DIR: str(folder)} if folder is not None else {}
    return subprocess.Popen(
        [sys.executable, "-c", HEAD + textwrap.dedent(code)],
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2", **watch, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_the_exception_that_ends_a_rank_is_in_its_record(tmp_path: Path) -> None:
    process = python(
        tmp_path,
        """
        with watchdog.watched(WatchdogConfig()):
            heartbeat.at_step(3, 9)
            with heartbeat.during("update"):
                raise MemoryError("all of it")
        """,
    )
    out, _ = process.communicate(timeout=30)
    beat = read_beat(tmp_path, 1)
    assert process.returncode == 1 and "MemoryError: all of it" in out
    assert beat is not None and (beat.state, beat.error, beat.phase, beat.step) == (
        "failed", "MemoryError: all of it", "update", 3,
    )  # fmt: skip
    assert abs(beat.error_time - time.time()) < 30


def test_a_stop_by_a_detector_is_an_exit_code_and_a_sentence(tmp_path: Path) -> None:
    process = python(
        tmp_path,
        """
        from rlhf.health import UnhealthyError
        with watchdog.watched(WatchdogConfig()):
            raise UnhealthyError("the loss is 9")
        """,
    )
    out, _ = process.communicate(timeout=60)
    beat = read_beat(tmp_path, 1)
    assert process.returncode == 78 and "Traceback" not in out and "UnhealthyError" not in out, "rank 0 says it"
    assert beat is not None and (beat.state, beat.exit_code) == ("failed", 78)
    assert beat.error == "UnhealthyError: the loss is 9"


def test_a_rank_that_ends_well_says_so(tmp_path: Path) -> None:
    process = python(tmp_path, "with watchdog.watched(WatchdogConfig()): pass")
    process.communicate(timeout=30)
    beat = read_beat(tmp_path, 1)
    assert process.returncode == 0 and beat is not None and (beat.state, beat.error) == ("ended", "")


def test_without_a_launcher_a_rank_judges_itself(tmp_path: Path) -> None:
    """It names itself where nobody else can be seen, and leaves the stacks of all its threads."""
    process = python(
        None,
        """
        def a_function_that_hangs():
            time.sleep(60)
        os.environ["WORLD_SIZE"] = "1"
        with watchdog.watched(WatchdogConfig(other_seconds=1)):
            watchdog.write_records_to(Path(sys.argv[0] or ".") / FOLDER)
            heartbeat.at_step(1, 9)
            a_function_that_hangs()
        """.replace("FOLDER", repr(str(tmp_path))),
        RANK="0",
    )
    out, _ = process.communicate(timeout=30)
    assert process.returncode == EXIT_STUCK
    assert "ends: the run is stuck: rank 0 on" in out and "limit 1 s, run.watchdog.other_seconds" in out
    assert "in a_function_that_hangs" in stacks_path(tmp_path, 0).read_text()
    found = read_stuck(tmp_path)
    assert found is not None and found.rank == 0


def test_told_by_the_shared_folder(tmp_path: Path) -> None:
    """Whatever the rank itself does: somebody has found the run stuck."""
    process = python(tmp_path, "with watchdog.watched(WatchdogConfig()): time.sleep(60)")
    wait_for_record(tmp_path)
    heartbeat.write_stuck(tmp_path, heartbeat.Stuck(rank=0, text="rank 0 sleeps"))
    out, _ = process.communicate(timeout=30)
    assert process.returncode == EXIT_STUCK and "the run is stuck: rank 0 sleeps" in out
    assert "<module>" in stacks_path(tmp_path, 1).read_text()


def test_a_rank_that_never_gives_the_interpreter_free(tmp_path: Path) -> None:
    """No thread of it can run; the timer needs none."""
    process = python(
        tmp_path,
        """
        import ctypes
        watchdog._HEAD_START_SECONDS = -3  # of 5 seconds
        with watchdog.watched(WatchdogConfig(silent_seconds=5)):
            time.sleep(1.2)
            ctypes.PyDLL(None).sleep(60)  # keeps the lock, unlike ctypes.CDLL
        """,
    )
    process.communicate(timeout=40)
    assert process.returncode == 1
    assert "Timeout (0:00:02)!" in stacks_path(tmp_path, 1).read_text()


def test_the_end_of_rlhf_run_is_noticed(tmp_path: Path) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    name = process_name(launcher.pid)
    process = python(tmp_path, "with watchdog.watched(WatchdogConfig()): time.sleep(60)", **{LAUNCHER_PROCESS: name})
    wait_for_record(tmp_path)
    assert is_running(name) is True and process.poll() is None
    launcher.kill()
    launcher.wait()
    assert is_running(name) is False
    out, _ = process.communicate(timeout=30)
    assert process.returncode == EXIT_ORPHANED and "`rlhf run` is gone" in out


def test_a_number_that_was_given_to_another_process_is_not_the_launcher() -> None:
    host, namespace, pid, started = process_name(os.getpid()).rsplit(":", 3)
    assert is_running(f"{host}:{namespace}:{pid}:{started}") is True
    assert is_running(f"{host}:{namespace}:{pid}:{int(started) + 1}") is False
    assert is_running(f"elsewhere:{namespace}:{pid}:{started}") is None
    assert is_running(f"{host}:0:{pid}:{started}") is None


def test_a_launcher_on_another_machine_is_known_by_its_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlhf import watchdog
    from rlhf.config import WatchdogConfig

    monkeypatch.setenv(heartbeat.WATCH_DIR, str(tmp_path))
    thread = watchdog._Watchdog(WatchdogConfig())
    beat = tmp_path / heartbeat.LAUNCHER
    looks = watchdog._LAUNCHER_BEATS
    assert all(thread._launcher_beats() for _ in range(2 * looks))  # a disk that is away says nothing
    beat.write_text("1")
    assert all(thread._launcher_beats() for _ in range(looks))
    beat.write_text("2")
    assert all(thread._launcher_beats() for _ in range(looks))
    assert not thread._launcher_beats()


def test_ancestors_that_are_not_deepspeed_may_end() -> None:
    """A stage started by hand goes on when its shell ends, as nohup wants it."""
    from rlhf.watchdog import _ancestors

    assert _ancestors() == ()


def wait_for_record(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while read_beat(folder, 1) is None and time.monotonic() < deadline:
        time.sleep(0.05)
