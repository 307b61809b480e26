"""The processes of one `rlhf run`, found by a mark in their environment, so that one can be killed. No torch."""

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass

from rlhf import procfs

MARK = "RLHF_CHAOS"
"""Variable that all processes of a studied run inherit."""


@dataclass(frozen=True)
class Victim:
    """A process to kill."""

    name: str
    """`rank 0`, `launcher` (DeepSpeed's on this machine), `front end` (the deepspeed command) or `pipeline`."""
    pid: int


def find(mark: str) -> list[Victim]:
    """Processes with the mark, those that have ended left out."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        environment = procfs.read(entry, "environ")
        stat = procfs.stat(int(entry))
        if f"{MARK}={mark}".encode() in environment.split(b"\0") and stat is not None and stat.state not in "ZX":
            found.append(Victim(_name(procfs.read(entry, "cmdline"), environment), int(entry)))
    return found


def _name(command: bytes, environment: bytes) -> str:
    words = command.split(b"\0")
    if b"deepspeed.launcher.runner" in words:
        return "front end"
    if b"deepspeed.launcher.launch" in words:
        return "launcher"
    if b"rlhf.cli" in words:
        return "pipeline"
    rank = re.search(rb"(?:^|\0)RANK=(\d+)\0", environment)
    return f"rank {int(rank.group(1))}" if rank else "other"


def end_process(victim: Victim) -> bool:
    """End a process with SIGKILL; False if it was gone."""
    try:
        os.kill(victim.pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def wait_for_end(mark: str, timeout: float) -> list[Victim]:
    """Wait until no process has the mark; those left at the time-out are ended and returned."""
    deadline = time.monotonic() + timeout
    while (left := find(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for victim in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, signal.SIGKILL)
    return left
