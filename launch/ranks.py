"""The ranks of one attempt as the launcher sees them: output, heartbeats, and whether they are stuck. No torch.

DeepSpeed's per-node launcher writes each rank's output to a file of its own. Its lines are copied, with the rank in
front, to the attempt's log: one file holds all, and the last lines of one rank can still be told from the others'.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlhf import heartbeat, procfs
from rlhf.config import WatchdogConfig
from rlhf.heartbeat import Beat, Stuck
from rlhf.watchdog import LAUNCHER_PROCESS, STACKS_SIGNAL, process_name

_LOOK_SECONDS = 1.0
_READ_BYTES = 1 << 20
_TAIL_BYTES = 1 << 16
_INNERMOST = 3


class Ranks:
    """Heartbeats and output of the ranks of one attempt; `look` is called again and again."""

    def __init__(self, folder: Path, *, world_size: int, config: WatchdogConfig) -> None:
        """Make the folder, which is new for each attempt."""
        self.folder = folder
        self.world_size = world_size
        self.config = config
        self.stuck: Stuck | None = None
        folder.mkdir(parents=True)
        self._last_look = 0.0
        self._num_looks = 0
        self._numbers: dict[int, int] = {}
        self._changed = dict.fromkeys(range(world_size), time.monotonic())
        self._offsets: dict[Path, int] = {}
        self._kills_before = procfs.out_of_memory_kills()

    @property
    def variables(self) -> dict[str, str]:
        """What ranks need to know to be watched, on every machine."""
        return {heartbeat.WATCH_DIR: str(self.folder), LAUNCHER_PROCESS: process_name(os.getpid())}

    def look(self, write: Callable[[bytes], None]) -> None:
        """Beat, copy new output, and find out whether the run is stuck; at most once a second."""
        now = time.monotonic()
        if now - self._last_look < _LOOK_SECONDS:
            return
        self._last_look = now
        self._num_looks += 1
        with contextlib.suppress(OSError):  # a full disk ends the stage by what the ranks say about it
            (self.folder / heartbeat.LAUNCHER).write_text(str(self._num_looks), encoding="utf-8")
        self.copy_output(write)
        beats = self.beats()
        for rank, beat in beats.items():
            if beat is not None and beat.number != self._numbers.get(rank):
                self._numbers[rank] = beat.number
                self._changed[rank] = now
        self.stuck = heartbeat.read_stuck(self.folder) or heartbeat.find_stuck(
            beats,
            {rank: now - changed for rank, changed in self._changed.items()},
            silent_limit=self.config.silent_seconds,
            start_limit=self.config.start_seconds,
        )

    def beats(self) -> dict[int, Beat | None]:
        """The last record of every rank."""
        return {rank: heartbeat.read_beat(self.folder, rank) for rank in range(self.world_size)}

    def collect_stacks(self, processes: Mapping[int, int], *, patience_seconds: float = 8.0) -> None:
        """Make all ranks write their stacks and end.

        The rank that is behind comes first: as soon as another one ends, deepspeed ends the rest.

        Args:
            processes: number of each rank's process, for those on this machine.
            patience_seconds: how long to wait for all ranks.
        """
        assert self.stuck is not None
        behind = processes.get(self.stuck.rank)
        if behind is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(behind, STACKS_SIGNAL)
                os.kill(behind, signal.SIGCONT)  # it may have been stopped
            self._await_stacks([self.stuck.rank], patience_seconds / 4)
        with contextlib.suppress(OSError):
            self.stuck = heartbeat.write_stuck(self.folder, self.stuck)
        self._await_stacks(range(self.world_size), patience_seconds)

    def _await_stacks(self, ranks: Sequence[int], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not all(self._has_stacks(rank) for rank in ranks):
            time.sleep(0.1)
        time.sleep(0.2)  # a dump is many small writes

    def _has_stacks(self, rank: int) -> bool:
        with contextlib.suppress(OSError):
            return heartbeat.stacks_path(self.folder, rank).stat().st_size > 0
        return False

    def copy_output(self, write: Callable[[bytes], None], *, last: bool = False) -> None:
        """Copy what ranks have written since the last call.

        Args:
            write: takes lines with the rank's number in front.
            last: copy a last line without an end too.
        """
        for rank in range(self.world_size):
            path = self.output_path(rank)
            if path is None:
                continue
            while chunk := _read_from(path, self._offsets.get(path, 0)):
                end = len(chunk) if last or len(chunk) == _READ_BYTES else chunk.rfind(b"\n") + 1
                if not end:
                    break
                self._offsets[path] = self._offsets.get(path, 0) + end
                lines = chunk[:end].splitlines()
                write(b"".join(b"%d: %s\n" % (rank, line) for line in lines))

    def output_path(self, rank: int) -> Path | None:
        """File with a rank's output; None if deepspeed has not made it (yet)."""
        return next(iter(sorted(self.folder.glob(f"*_rank{rank}.log"))), None)

    def last_lines(self, rank: int, count: int) -> list[str]:
        """The end of a rank's output."""
        path = self.output_path(rank)
        if path is None:
            return []
        tail = _read_from(path, max(0, path.stat().st_size - _TAIL_BYTES))
        return tail.decode("utf-8", "replace").rstrip().splitlines()[-count:]

    def main_stack(self, rank: int, count: int) -> list[str]:
        """Where a rank's main thread was when it was first dumped: the innermost calls and this code's; or nothing."""
        try:
            text = heartbeat.stacks_path(self.folder, rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        blocks = re.findall(r"hread (0x\w+)[^\n]*\n((?:  [^\n]*\n?)+)", text)
        # The thread that the process began with is the last of a dump.
        frames: list[str] = next((lines.splitlines() for thread, lines in blocks if thread == blocks[-1][0]), [])
        return [line for i, line in enumerate(frames) if i < _INNERMOST or "site-packages" not in line][:count]

    def out_of_memory_kills(self) -> int | None:
        """Processes of this machine that the kernel has ended for lack of memory during the attempt."""
        now = procfs.out_of_memory_kills()
        return None if now is None or self._kills_before is None else now - self._kills_before


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(_READ_BYTES)
    except OSError:
        return b""
