"""A request to save and stop: SIGTERM or SIGUSR1 to a rank, or a file that the launcher writes. No torch.

Schedulers send one of the two signals before they end a job. Through DeepSpeed's launcher a signal does not reach ranks
on other machines, a file on the shared disk does. A request is only noted; it is answered between two steps.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

EXIT_STOPPED = 75
"""Exit code of a program that was asked to stop and has saved its state: sysexits' "try again later"."""

REQUEST = "stop_request"
"""File in a stage's folder that asks for it."""

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process was asked to save and stop."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / REQUEST
        self.signum: int | None = None

    def note(self, signum: int, _frame: FrameType | None = None) -> None:
        """Handler: the first signal asks, a second SIGTERM ends the process at once."""
        if self.signum is not None and signum == signal.SIGTERM:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        self.signum = signum

    def is_there(self, *, look: bool) -> bool:
        """Whether a signal has come or, with `look`, the file lies there."""
        return self.signum is not None or (look and self.path.exists())

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals for the length of the block. Threads other than the main one cannot; they see the file."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {signum: signal.signal(signum, self.note) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
