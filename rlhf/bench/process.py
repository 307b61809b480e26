"""Runs one child process with a time limit and says what it took. No torch."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.02
_GRACE_SECONDS = 10.0


class ChildError(RuntimeError):
    """A child failed or ran out of time; the message ends with the last lines of its log."""


def exit_code(command: Callable[[], None]) -> int:
    """Run a command of `rlhf bench`: 0, 1 if a child failed, 2 if something cannot be used; the reason on stderr."""
    try:
        command()
    except ChildError as error:
        sys.stderr.write(f"rlhf bench: {error}\n")
        return 1
    except (ValueError, OSError) as error:
        sys.stderr.write(f"rlhf bench: {error}\n")
        return 2
    return 0


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A child that ended with exit code 0."""

    started: float
    """Unix seconds."""
    wall_seconds: float
    cpu_seconds: float
    """User and system, of the child and the children that it waited for."""
    peak_rss_bytes: int
    """Largest resident set of any one of those processes."""


def run_child(
    argv: Sequence[str], *, environment: Mapping[str, str], log: Path, timeout: float, cwd: Path | None = None
) -> Finished:
    """Run a command to its end; its output goes to `log`.

    Raises:
        ChildError: it failed, could not be started, or ran longer than `timeout` seconds and was stopped.
    """
    started, start = time.time(), time.perf_counter()
    try:
        with log.open("wb") as output:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=dict(environment), cwd=cwd,
                start_new_session=True,
            )  # fmt: skip
    except OSError as error:
        raise ChildError(f"{argv[0]} could not be started: {error}") from error
    timed_out = False
    signals = iter(((timeout, signal.SIGTERM), (timeout + _GRACE_SECONDS, signal.SIGKILL)))
    limit, number = next(signals)
    try:
        while True:
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            if time.perf_counter() - start > limit:
                timed_out = True
                _signal(child.pid, number)
                limit, number = next(signals, (float("inf"), signal.SIGKILL))
            time.sleep(_POLL_SECONDS)
    except BaseException:
        _signal(child.pid, signal.SIGKILL)
        raise
    wall_seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    _signal(child.pid, signal.SIGKILL)  # ranks that outlived their launcher
    if timed_out:
        raise ChildError(f"{_short(argv)} ran longer than {timeout:g} s and was stopped.{_tail(log)}")
    if child.returncode:
        raise ChildError(f"{_short(argv)} ended with exit code {child.returncode}.{_tail(log)}")
    return Finished(
        started=started,
        wall_seconds=wall_seconds,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_rss_bytes=usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),  # kilobytes on Linux
    )


def _signal(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _short(argv: Sequence[str]) -> str:
    return " ".join(argv[1:3])


def _tail(log: Path, num_lines: int = 15) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:]
    return "".join(f"\n  {line}" for line in [f"The end of {log}:", *lines])
