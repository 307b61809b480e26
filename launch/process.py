"""Run one launcher process with its ranks: watch it, end all of it, and say which rank failed and how. No torch.

The ranks' exit codes reach us garbled: DeepSpeed's per-node launcher turns a rank's signal 9 into exit code 247, never
says which rank it was, and the front-end exits 0 when the per-node launcher itself dies by a signal. So ranks are
watched in /proc, by a thread that wakes as one ends (how is gone once the launcher looks, which it does each second),
and whether a stage succeeded is read from the result it wrote, not from the code alone.
"""

import contextlib
import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from launch.ranks import Ranks
from rlhf import heartbeat, procfs
from rlhf.heartbeat import Stuck

_POLL_SECONDS = 0.1
_SCAN_SECONDS = 1.0
_HOST_LOOK_SECONDS = 5.0
_HOST_GRACE_SECONDS = 20.0
_NODE_LAUNCHER = b"deepspeed.launcher.launch"
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PDSH_FAILURE = re.compile(r"^pdsh@\S+: (\S+): (?:ssh exited with exit code (\d+)|(.*))$", re.MULTILINE)


@dataclass(frozen=True)
class RankExit:
    """How a rank of this machine ended; `status` as waitpid gives it, None when it was not seen."""

    rank: int
    status: int | None
    time: float = field(default=0.0, compare=False)
    """Unix time at which it was seen."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a launcher process ended."""

    returncode: int
    """As subprocess gives it: negative for a signal."""
    rank_exit: RankExit | None = None
    """The first rank of this machine that failed; None if none did or it was not seen."""
    rank_exits: tuple[RankExit, ...] = ()
    """Ranks of this machine that ended with an error, in the order in which it was seen."""
    stuck: Stuck | None = None
    """Why the stage was ended although no process had failed."""
    interrupted_by: int | None = None
    """The signal that this process got and ended the stage for."""
    num_leftover: int = 0
    """Processes of the stage that were still there after its launcher ended, and were ended too."""


@dataclass
class Interrupt:
    """The last signal this process got while `catch_signals` was on."""

    signum: int | None = None
    count: int = field(default=0)


@contextlib.contextmanager
def catch_signals() -> Iterator[Interrupt]:
    """Turn SIGINT, SIGTERM and SIGHUP into a note, so that the stage can be ended before this process ends."""
    interrupt = Interrupt()

    def note(signum: int, _frame: FrameType | None) -> None:
        interrupt.signum = signum
        interrupt.count += 1

    previous = {signum: signal.signal(signum, note) for signum in _SIGNALS}
    try:
        yield interrupt
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def run_watched(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    log_path: Path,
    interrupt: Interrupt,
    on_tick: Callable[[], None],
    ranks: Ranks | None = None,
    ends_remote_ranks: bool = False,
    keep_open: Sequence[int] = (),
) -> Outcome:
    """Start `argv` in a session of its own, wait for it, and leave no process of the session behind.

    Args:
        argv: program and arguments; no shell is involved.
        environment: of the process.
        log_path: new file that gets stdout and stderr of the launcher and its ranks.
        interrupt: of `catch_signals`; a signal ends the stage, a second one without grace.
        on_tick: called about ten times a second.
        ranks: heartbeats and output of the ranks; if they are stuck, their stacks are collected and the stage is ended.
        ends_remote_ranks: the launcher ends ranks on other machines when it gets SIGTERM, so it is asked first, alone.
        keep_open: file descriptors the launcher inherits.
    """
    with log_path.open("xb") as log:
        log.write(f"$ {' '.join(argv)}\n".encode())
        log.flush()
        child = subprocess.Popen(
            argv,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=tuple(keep_open),
        )

        def write(lines: bytes) -> None:
            log.write(lines)  # the launcher writes through the same open file, so neither overwrites the other
            log.flush()

        stuck = interrupted_by = None
        watch, hosts = _RankWatch(child.pid), _HostWatch(log_path)
        try:
            with watch:
                while child.poll() is None and interrupt.signum is None and stuck is None:
                    if ends_remote_ranks and hosts.is_over():
                        break
                    on_tick()
                    if ranks is not None:
                        ranks.look(write)
                        stuck = ranks.stuck
                    time.sleep(_POLL_SECONDS)
            interrupted_by = interrupt.signum if child.poll() is None else None
            is_running = child.poll() is None
            if ranks is not None and stuck is not None:
                ranks.collect_stacks(watch.processes)
                stuck = ranks.stuck
            if is_running and ends_remote_ranks:
                child.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=30)
        finally:
            num_leftover = _end_session(child, interrupt)
            if ranks is not None:
                ranks.copy_output(write, last=True)
    if ranks is not None and stuck is None and interrupted_by is None:
        stuck = heartbeat.read_stuck(ranks.folder)  # the ranks found it out and ended before we looked
    return Outcome(
        returncode=child.returncode,
        rank_exit=None if interrupted_by is not None else watch.first_failure,
        rank_exits=watch.failures,
        stuck=stuck,
        interrupted_by=interrupted_by,
        num_leftover=num_leftover if interrupted_by is None and stuck is None else 0,
    )


def describe_code(returncode: int) -> str:
    """Exit code in words; a signal by its name, also when DeepSpeed has turned -9 into 247 or a shell into 137."""
    if returncode < 0:
        return f"signal {_signal_name(-returncode)}"
    if 192 < returncode < 255 and _is_signal(256 - returncode):
        return f"signal {_signal_name(256 - returncode)} (exit code {returncode})"
    if 128 < returncode <= 192 and _is_signal(returncode - 128):
        return f"exit code {returncode} (a shell's code for {_signal_name(returncode - 128)})"
    return f"exit code {returncode}"


def describe_failure(outcome: Outcome, log_text: str, *, end: RankExit | None = None) -> str:
    """Which rank or host failed, and how; as far as it is known. `end` is the rank to describe, if not the first."""
    end = end or outcome.rank_exit
    if end is not None:
        code = None if end.status is None else os.waitstatus_to_exitcode(end.status)
        return f"rank {end.rank} ended with {describe_code(outcome.returncode if code is None else code)}"
    hosts = _PDSH_FAILURE.findall(log_text)
    if hosts:
        name, code_text, words = hosts[0]
        return f"host {name} failed: {describe_code(int(code_text)) if code_text else words}"
    if outcome.num_leftover:
        return (
            f"the launcher ended with {describe_code(outcome.returncode)} while {outcome.num_leftover} of its "
            "processes were still running; they were ended"
        )
    return f"the launcher ended with {describe_code(outcome.returncode)}"


def exit_code(returncode: int) -> int:
    """A non-zero exit code for a failed stage: its own, 128 + n for signal n, and 1 where it claims success."""
    if returncode < 0:
        return 128 - returncode
    if 192 < returncode < 255 and _is_signal(256 - returncode):
        return 128 + 256 - returncode
    return returncode or 1


def _is_signal(number: int) -> bool:
    return number in {int(member) for member in signal.Signals}


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if _is_signal(number) else str(number)


class _RankWatch:
    """In which order the ranks of a session ended, and how."""

    def __init__(self, session: int) -> None:
        self.session = session
        self._ended: list[RankExit] = []
        self._ranks: dict[int, int] = {}
        self._last_scan = 0.0
        self._poll = select.poll()
        self._descriptors: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank exits", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.is_set():
            self.look()
            self._poll.poll(_POLL_SECONDS * 1000)  # ends as soon as a rank does
        self.look()
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    @property
    def failures(self) -> tuple[RankExit, ...]:
        """Ranks that have ended with an error."""
        return tuple(end for end in self._ended if end.status != 0)

    @property
    def processes(self) -> dict[int, int]:
        """Number of each running rank's process."""
        return {rank: pid for pid, rank in self._ranks.items()}

    @property
    def first_failure(self) -> RankExit | None:
        """The first rank that failed; ranks that got the launcher's SIGTERM count only if there is no other."""
        failed = self.failures
        own = [end for end in failed if end.status is None or not _is_clean_up(end.status)]
        return next(iter(own or failed), None)

    def look(self) -> None:
        """Note ranks that have ended since the last look."""
        if time.monotonic() - self._last_scan > _SCAN_SECONDS:
            self._last_scan = time.monotonic()
            self._scan()
        for pid in list(self._ranks):
            stat = procfs.stat(pid)
            if stat is None or stat.state == "Z":
                status = stat.exit_status if stat else None
                self._ended.append(RankExit(self._ranks.pop(pid), status, time.time()))
                if (descriptor := self._descriptors.pop(pid, None)) is not None:
                    self._poll.unregister(descriptor)
                    os.close(descriptor)

    def _scan(self) -> None:
        members = procfs.members(self.session)
        launchers = {pid for pid in members if _NODE_LAUNCHER in procfs.read(pid, "cmdline")}
        for pid, stat in members.items():
            if stat.parent in launchers and pid not in launchers and pid not in self._ranks and stat.state != "Z":
                match = re.search(rb"(?:^|\0)RANK=(\d+)\0", procfs.read(pid, "environ"))
                if match:
                    self._ranks[pid] = int(match.group(1))
                    with contextlib.suppress(OSError):  # it has just ended, or the kernel is older than Linux 5.3
                        self._descriptors[pid] = os.pidfd_open(pid)
                        self._poll.register(self._descriptors[pid], select.POLLIN)


class _HostWatch:
    """Whether a host has failed. pdsh says so, but waits for the others, whose ranks may wait for the failed one's."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self._last_look = time.monotonic()
        self._offset = 0
        self._failed_at: float | None = None

    def is_over(self) -> bool:
        """Whether a host failed a while ago, in which the others have not ended by themselves."""
        now = time.monotonic()
        if self._failed_at is None and now - self._last_look > _HOST_LOOK_SECONDS:
            self._last_look = now
            with self.log_path.open("rb") as log:
                log.seek(self._offset)
                lines = log.read().rpartition(b"\n")[0]
            self._offset += len(lines)
            if _PDSH_FAILURE.search(lines.decode("utf-8", "replace")):
                self._failed_at = now
        return self._failed_at is not None and now - self._failed_at > _HOST_GRACE_SECONDS


def _is_clean_up(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


def _alive(session: int) -> list[int]:
    return [pid for pid, stat in procfs.members(session).items() if stat.state != "Z" and pid != os.getpid()]


def _end_session(child: subprocess.Popen[bytes], interrupt: Interrupt, *, grace_seconds: float = 20.0) -> int:
    """End what is left of the child's session: SIGTERM, then SIGKILL; returns how many were left beside the child."""
    leftover = [pid for pid in _alive(child.pid) if pid != child.pid]
    if child.poll() is None or leftover:
        _signal_session(child.pid, signal.SIGTERM)
        seen, deadline = interrupt.count, time.monotonic() + grace_seconds
        while (child.poll() is None or _alive(child.pid)) and time.monotonic() < deadline and interrupt.count == seen:
            time.sleep(_POLL_SECONDS)
        deadline = time.monotonic() + grace_seconds
        while (child.poll() is None or _alive(child.pid)) and time.monotonic() < deadline:
            _signal_session(child.pid, signal.SIGKILL)
            time.sleep(_POLL_SECONDS)
    child.wait()
    return len(leftover)


def _signal_session(session: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signum)
    for pid in _alive(session):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)
