"""How DeepSpeed's engines write a state's files: hashed on their way to the disk, in the step or on a thread beside it.

DeepSpeed hands each dictionary of tensors to its checkpoint engine. A `StateWriter` takes that place for one state. It
notes the sha256 of the bytes as they leave memory, so that reading the file back shows whether the disk holds what was
meant. An error is kept until `wait`, because DeepSpeed's ranks wait for one another between two files.
"""

import hashlib
import io
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch

from rlhf import heartbeat
from rlhf.artifacts import FileEntry


class StateWriter:
    """Writes the files of one state on one rank; has the methods of DeepSpeed's checkpoint engines."""

    def __init__(self, root: Path, *, beside: bool) -> None:
        """Prepare.

        Args:
            root: folder of the state; entries are named relative to it.
            beside: copy to memory in the step, and write on a thread while training goes on. Takes host memory of the
                size of this rank's files.
        """
        self.root = root
        self.entries: dict[str, FileEntry] = {}
        self._error: OSError | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="state") if beside else None
        self._writing: list[Future[None]] = []

    def save(self, state_dict: Any, path: str) -> None:
        """Write one file, or copy what will be written."""
        if self._error is not None:
            return
        if self._thread is None:
            self._write(Path(path), lambda file: torch.save(state_dict, file))
            heartbeat.tick()
            return
        copy = io.BytesIO()
        torch.save(state_dict, copy)
        self._writing.append(self._thread.submit(self._write, Path(path), lambda file: file.write(copy.getbuffer())))

    def _write(self, path: Path, write: Callable[[BinaryIO], Any]) -> None:
        hashing = None
        try:
            with path.open("wb") as raw:
                hashing = _Hashing(raw)
                write(hashing)  # type: ignore[arg-type]
                raw.flush()
                os.fsync(raw.fileno())
        except OSError as error:
            self._error = error
        except RuntimeError as error:  # torch's writer finds its file incomplete and says nothing of the reason
            self._error = hashing.error if hashing is not None and hashing.error is not None else OSError(str(error))
        else:
            name = path.relative_to(self.root).as_posix()
            self.entries[name] = FileEntry(bytes=hashing.num_bytes, sha256=hashing.digest.hexdigest())

    @property
    def is_busy(self) -> bool:
        """Whether files are still being written."""
        return any(not writing.done() for writing in self._writing)

    def wait(self) -> None:
        """Wait until all files are written.

        Raises:
            OSError: one could not be written.
        """
        for writing in self._writing:
            writing.result()
        self._writing = []
        if self._thread is not None:
            self._thread.shutdown()
        if self._error is not None:
            raise self._error

    # What else DeepSpeed asks of a checkpoint engine.

    def makedirs(self, path: str, exist_ok: bool = False) -> None:  # noqa: FBT001, FBT002  DeepSpeed's signature
        """Make a folder."""
        try:
            os.makedirs(path, exist_ok=exist_ok)
        except OSError as error:
            self._error = error

    def create(self, info: Any) -> None:
        """A state begins."""

    def commit(self, info: Any) -> bool:
        """DeepSpeed has handed over all files; they count after `wait` and a check."""
        return True

    def is_decoupled(self) -> bool:
        """Whether DeepSpeed has to commit before its next step; completion is settled by checkpoint.py."""
        return False

    def preserves_storage_sharing(self) -> bool:
        """Whether a view would be written with all of its storage, so that DeepSpeed copies views first."""
        return True

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Whether this rank writes what all ranks have."""
        return dp_rank == 0


class _Hashing(io.RawIOBase):
    """A file that counts and hashes what passes."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self.file = file
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        self.digest.update(data)
        self.num_bytes += len(data)
        return len(data)
