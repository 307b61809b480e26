"""SIGTERM and SIGUSR1 to `rlhf run`: the running stage is asked to save and stop instead of being ended. No torch."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from launch.display import read_progress
from launch.process import Interrupt
from rlhf.stopping import REQUEST, SIGNALS


class SoftStop:
    """Hands a signal on to the stage that runs, as a file in its folder, which reaches ranks on all machines.

    A stage that makes steps can answer. One that is still starting has nothing to save: SIGTERM ends it at once,
    SIGUSR1 waits for its first step. A second SIGTERM ends the stage in any case.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt
        self.signum: int | None = None
        self.folder: Path | None = None
        self._not_before = 0.0
        self._is_sent = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals for the length of the block."""
        previous = {signum: signal.signal(signum, self._note) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _note(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGTERM and (self.folder is None or self.signum == signal.SIGTERM):
            self._end(signum)
        self.signum = signum if self.signum != signal.SIGTERM else self.signum

    def _end(self, signum: int) -> None:
        self.interrupt.signum = signum
        self.interrupt.count += 1

    @contextlib.contextmanager
    def stage(self, folder: Path, *, not_before: float) -> Iterator[None]:
        """A stage runs in this folder, whose progress is younger than a Unix time."""
        self.folder, self._not_before, self._is_sent = folder, not_before, False
        try:
            yield
        finally:
            self.folder = None

    def tick(self) -> None:
        """Ask the stage if a signal has come; called some ten times a second."""
        if self.signum is None or self._is_sent or self.folder is None:
            return
        phase = read_progress(self.folder / "progress.json", not_before=self._not_before).get("phase", "start")
        if phase != "start":
            (self.folder / REQUEST).touch()
            self._is_sent = True
        elif self.signum == signal.SIGTERM:
            self._end(self.signum)
