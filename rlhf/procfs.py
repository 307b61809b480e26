"""What /proc says about a process; empty where there is no such process or no /proc. No torch."""

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True)
class Stat:
    """The fields of /proc/PID/stat that are used here."""

    state: str
    """R, S, D, T (stopped), Z (zombie) and so on."""
    parent: int
    session: int
    started: str
    """In ticks since the machine's start: two processes of one number differ in it."""
    exit_status: int
    """As waitpid gives it; of a zombie."""


def stat(pid: int) -> Stat | None:
    """State of a process; None if there is none."""
    # The second field, the command, may itself hold blanks and brackets.
    fields = read(pid, "stat").decode("utf-8", "replace").rpartition(")")[2].split()
    if len(fields) < 20:
        return None
    return Stat(fields[0], int(fields[1]), int(fields[3]), fields[19], int(fields[-1]))


def read(pid: int | str, name: str) -> bytes:
    """A file of a process; of the calling one if it is "self"."""
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


def members(session: int) -> dict[int, Stat]:
    """Processes of a session, zombies included."""
    found = {}
    try:
        entries = os.listdir(_PROC)
    except OSError:  # the process group is all that is known
        return {}
    for entry in entries:
        if entry.isdigit() and (state := stat(int(entry))) is not None and state.session == session:
            found[int(entry)] = state
    return found


def out_of_memory_kills() -> int | None:
    """Processes that the kernel has ended for lack of memory since the machine's start; None if it does not say."""
    try:
        lines = (_PROC / "vmstat").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, ValueError, StopIteration):
        return None
