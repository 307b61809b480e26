"""The thread in every rank that writes its heartbeat, and ends it when the run is stuck or orphaned. No torch.

It works while the main thread is inside a collective. A process whose main thread keeps the interpreter lock for good
cannot run this thread either; a timer of the standard library, which needs no lock, dumps the stacks then and exits.
"""

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rlhf import heartbeat, procfs
from rlhf.config import WatchdogConfig
from rlhf.health import UnhealthyError

logger = logging.getLogger(__name__)

LAUNCHER_PROCESS = "RLHF_LAUNCHER"
"""Variable with the process of `rlhf run`, as `process_name` writes it."""
EXIT_STUCK = 76
"""Exit code of a rank that ended because the run was stuck."""
EXIT_ORPHANED = 77
"""Exit code of a rank whose launcher is gone."""
STACKS_SIGNAL = signal.SIGUSR2
"""Makes a rank write its stacks; it goes on."""

_BEAT_SECONDS = 1.0
_LAUNCHER_BEATS = 30
"""Looks at an unchanged launcher.beat after which the launcher on another machine counts as gone."""
_HEAD_START_SECONDS = 10.0
"""How much longer than `rlhf run` a rank waits before it says itself that the run is stuck."""
_END_SECONDS = 30.0
"""A rank that failed and cannot end by itself within this is ended."""
_NODE_LAUNCHER = b"deepspeed.launcher.launch"
_FRONT_END = b"deepspeed"


@contextlib.contextmanager
def watched(config: WatchdogConfig) -> Iterator[None]:
    """Watch this process while it runs a stage, and note the exception that ends it.

    Raises:
        SystemExit: code 78 in the place of an UnhealthyError, which is written to the log: no traceback explains it.
    """
    watchdog = _Watchdog(config)
    watchdog.start()
    try:
        yield
    except UnhealthyError as error:
        watchdog.end("failed", error)
        faulthandler.dump_traceback_later(_END_SECONDS, exit=True)
        if watchdog.rank == 0:
            logger.error("%s: %s", type(error).__name__, error)
        raise SystemExit(error.exit_code) from None
    except Exception as error:
        watchdog.end("failed", error)
        # A process group that other ranks have left can keep the interpreter from ending.
        faulthandler.dump_traceback_later(_END_SECONDS, exit=True)
        raise
    except BaseException:
        watchdog.end("ended")
        raise
    else:
        watchdog.end("ended")


def write_records_to(folder: Path) -> None:
    """Keep this rank's record in a folder from here on, unless the launcher has named one."""
    if _current is not None:
        _current.attach(folder)


def process_name(pid: int) -> str:
    """A process as one word that no other process has: machine, namespace, number and start."""
    try:
        namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        namespace = ""
    return f"{socket.gethostname()}:{namespace}:{pid}:{_started(pid)}"


def is_running(name: str) -> bool | None:
    """Whether the process of a `process_name` still runs; None if it is not one of this machine."""
    host, namespace, pid, started = name.rsplit(":", 3)
    own_host, own_namespace, _, _ = process_name(os.getpid()).rsplit(":", 3)
    if (host, namespace) != (own_host, own_namespace) or not started:
        return None
    return _started(int(pid)) == started


_current: "_Watchdog | None" = None


class _Watchdog:
    def __init__(self, config: WatchdogConfig) -> None:
        self.config = config
        self.limits = {phase: float(getattr(config, f"{phase}_seconds")) for phase in heartbeat.PHASES}
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.host = socket.gethostname()
        named = os.environ.get(heartbeat.WATCH_DIR)
        self.folder: Path | None = Path(named) if named else None
        self._launcher = os.environ.get(LAUNCHER_PROCESS, "") if named else ""
        self._ancestors = _ancestors()
        self._stacks: IO[Any] = sys.stderr
        self._number = 0
        self._launcher_beat, self._launcher_looks = "", 0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        global _current
        _current = self
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open_stacks()
        self._write()
        self._thread.start()

    def attach(self, folder: Path) -> None:
        """See `write_records_to`."""
        with self._lock:
            if self.folder is None:
                folder.mkdir(parents=True, exist_ok=True)
                self.folder = folder
                self._open_stacks()
        self._write()

    def end(self, state: str, error: BaseException | None = None) -> None:
        """Write the last record and end the thread."""
        global _current
        self._stopping.set()
        self._thread.join(timeout=5)
        faulthandler.cancel_dump_traceback_later()
        message = f"{type(error).__name__}: {str(error).strip()[:500]}" if error is not None else ""
        code = error.exit_code if isinstance(error, UnhealthyError) else 0
        error_time = time.time() if error is not None else 0.0
        with contextlib.suppress(OSError):  # the record must not hide what happened
            self._write(state=state, error=message, error_time=error_time, exit_code=code)
        _current = None

    def _run(self) -> None:
        while not self._stopping.wait(_BEAT_SECONDS):
            if self.config.silent_seconds > 0:
                # Later than the launcher's limit: a stopped process that it wakes has to write its stacks first.
                limit = self.config.silent_seconds + _HEAD_START_SECONDS
                faulthandler.dump_traceback_later(limit, exit=True, file=self._stacks)
            with contextlib.suppress(OSError):  # a disk that is away for a while is no reason to end
                self._write()
            self._look_at_launcher()
            self._look_for_stuck()

    def _write(self, **changes: Any) -> None:
        with self._lock:
            if self.folder is not None:
                self._number += 1
                heartbeat.write_beat(self.folder, replace(self._beat(), **changes))

    def _beat(self) -> heartbeat.Beat:
        return heartbeat.current_beat(
            rank=self.rank, world_size=self.world_size, host=self.host, number=self._number, limits=self.limits
        )

    def _look_at_launcher(self) -> None:
        """End without one: nobody would see how the rank ends, and it would hold accelerators and a port."""
        if self._ancestors and self._ancestors != _ancestors():
            self._exit("the deepspeed process that started it is gone", EXIT_ORPHANED)
        if not self._launcher:
            return
        running = is_running(self._launcher)
        if running is None:
            running = self._launcher_beats()
        if not running:
            self._exit("`rlhf run` is gone", EXIT_ORPHANED)

    def _launcher_beats(self) -> bool:
        """Whether launcher.beat has changed in the last looks; only a look that reads it counts."""
        assert self.folder is not None
        try:
            text = (self.folder / heartbeat.LAUNCHER).read_text(encoding="utf-8")
        except OSError:
            return True
        self._launcher_looks = self._launcher_looks + 1 if text == self._launcher_beat else 0
        self._launcher_beat = text
        return self._launcher_looks < _LAUNCHER_BEATS

    def _look_for_stuck(self) -> None:
        stuck = heartbeat.read_stuck(self.folder) if self.folder is not None else None
        beat = self._beat()
        patience = _HEAD_START_SECONDS if self._launcher else 0.0
        if stuck is None and 0 < beat.limit_seconds < beat.idle_seconds - patience:
            stuck = self._judge(beat)
        if stuck is not None:
            with contextlib.suppress(OSError, ValueError):
                faulthandler.dump_traceback(file=self._stacks, all_threads=True)
            time.sleep(2 * _BEAT_SECONDS)  # when the first rank has ended, deepspeed ends the others: let them dump too
            self._exit(f"the run is stuck: {stuck.text}", EXIT_STUCK)

    def _judge(self, own: heartbeat.Beat) -> heartbeat.Stuck | None:
        if self.folder is None:
            return self._alone(own)
        beats = {rank: heartbeat.read_beat(self.folder, rank) for rank in range(self.world_size)}
        time.sleep(2 * _BEAT_SECONDS)
        later = {rank: heartbeat.read_beat(self.folder, rank) for rank in range(self.world_size)}
        # Without a launcher nobody has watched the others' records; one that stands still now does not run.
        silent = {rank: own.idle_seconds for rank, beat in later.items() if beat == beats[rank] and rank != self.rank}
        if None in later.values():  # no disk that all ranks see
            return None if own.waits_for else self._alone(own)
        stuck = heartbeat.find_stuck(later, silent, silent_limit=_BEAT_SECONDS, start_limit=_BEAT_SECONDS)
        return heartbeat.write_stuck(self.folder, stuck) if stuck is not None else None

    def _alone(self, own: heartbeat.Beat) -> heartbeat.Stuck | None:
        return heartbeat.find_stuck({self.rank: own}, {}, silent_limit=0, start_limit=0)

    def _open_stacks(self) -> None:
        assert self.folder is not None
        self._stacks = heartbeat.stacks_path(self.folder, self.rank).open("w", encoding="utf-8")
        faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True, chain=False)

    def _exit(self, why: str, code: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"[rank {self.rank}] ends: {why}\n")
            sys.stderr.flush()
        os._exit(code)


def _ancestors() -> tuple[int, ...]:
    """The per-node deepspeed process that started this one, and deepspeed's front-end over it; none if it was another.

    Whatever else may stand there, a shell or Slurm, can end without the run being over.
    """
    parent = os.getppid()
    if _NODE_LAUNCHER not in procfs.read(parent, "cmdline"):
        return ()
    state = procfs.stat(parent)
    over = state.parent if state is not None else 0
    return (parent, over) if _FRONT_END in procfs.read(over, "cmdline") else (parent,)


def _started(pid: int) -> str:
    """Start of a process; empty if it does not run."""
    state = procfs.stat(pid)
    return state.started if state is not None and state.state != "Z" else ""
