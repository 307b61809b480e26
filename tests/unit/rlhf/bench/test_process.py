"""Children: their exit, their time and memory, and that nothing outlives a time limit."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf.bench.process import ChildError, Finished, run_child

ROOT = Path(__file__).resolve().parents[4]


def run(code: str, tmp_path: Path, *, timeout: float = 30) -> Finished:
    return run_child(
        [sys.executable, "-c", code], environment=dict(os.environ), log=tmp_path / "log.txt", timeout=timeout
    )


def test_memory_is_the_largest_of_the_child_and_its_children(tmp_path: Path) -> None:
    """In a parent of its own: on Linux a child's figure starts at its parent's, which here has torch in memory."""
    grandchild = "x = bytearray(120_000_000)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}]); print('done')"
    parent = (
        "import os, sys; from pathlib import Path; from rlhf.bench.process import run_child\n"
        f"log = Path({str(tmp_path / 'log.txt')!r})\n"
        f"argv = [sys.executable, '-c', {child!r}]\n"
        "finished = run_child(argv, environment=dict(os.environ), log=log, timeout=30)\n"
        "print(finished.peak_rss_bytes, log.read_text().strip())"
    )
    output = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    peak, said = output.split()
    assert said == "done" and 120e6 < int(peak) < 200e6


def test_processor_seconds_are_not_wall_seconds(tmp_path: Path) -> None:
    finished = run("import time; time.sleep(0.3)", tmp_path)
    assert abs(time.time() - finished.started - finished.wall_seconds) < 5
    assert finished.wall_seconds >= 0.3 and finished.cpu_seconds < 0.3


def test_failure_names_the_module_and_shows_the_log(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match=r"ended with exit code 3.\n(.|\n)*the reason"):
        run("import sys; print('the reason'); sys.exit(3)", tmp_path)
    with pytest.raises(ChildError, match="could not be started"):
        run_child(["/no/such/program"], environment={}, log=tmp_path / "log.txt", timeout=1)


def test_time_limit_ends_the_whole_group(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    grandchild = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"
    with pytest.raises(ChildError, match=r"ran longer than 0.5 s and was stopped"):
        run(code, tmp_path, timeout=0.5)
    if pid_file.exists():  # else it was stopped before it had begun
        for _ in range(100):
            if not is_running(pid_file.read_text()):
                return
            time.sleep(0.02)
        pytest.fail("the grandchild lives")


def test_nothing_outlives_its_launcher(tmp_path: Path) -> None:
    """A rank whose launcher has ended, with an exit code of 0 even."""
    grandchild = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {grandchild!r}]).pid)"
    run(code, tmp_path)
    pid = (tmp_path / "log.txt").read_text().strip()
    for _ in range(100):
        if not is_running(pid):
            return
        time.sleep(0.02)
    pytest.fail("the grandchild lives")


def is_running(pid: str) -> bool:
    """An ended process that nobody has waited for has no command line any more."""
    path = Path(f"/proc/{pid}/cmdline")
    return path.exists() and path.read_bytes() != b""
