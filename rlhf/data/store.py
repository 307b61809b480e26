"""Tokenised data on disk: flat memory-mapped arrays in a folder that is named by what they were made from.

A folder appears by one rename and is never changed, so a reader needs no lock. Builders of the same key wait for one
another by a file lock; where the file system has none, the first rename wins and the loser takes what is there. Each
file's size and checksum is in `meta.json`: a folder that does not match is set aside and built again.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from rlhf import heartbeat

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

# One line per array. Segments are runs of tokens (a prompt, a response); rows are runs of segments.
DTYPES: dict[str, str] = {
    "tokens": "int32",
    "loss": "uint8",  # per token: 1 if it belongs to an assistant turn
    "segment_end": "int64",  # per segment: end in `tokens`
    "rank": "float64",  # per segment: rank of a response; 0 for a prompt
    "row_end": "int64",  # per row: end in `segment_end`
    "length": "int32",  # per row: tokens that a model reads
    "margin": "float64",  # per row
    "source": "int32",  # per row: position in the list of sources
    "uid": "int64",  # per row
    "notes": "uint8",  # per row: JSON, UTF-8, joined
    "note_end": "int64",  # per row: end in `notes`
}


class DamagedStoreError(Exception):
    """A folder whose files are not what was written."""


class Writer:
    """Appends to the arrays of a new folder; nothing is held in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = dict.fromkeys(DTYPES, 0)
        self.crc = dict.fromkeys(DTYPES, 0)
        self.files: dict[str, IO[bytes]] = {name: (folder / f"{name}.bin").open("wb") for name in DTYPES}

    def append(self, name: str, values: Any) -> None:
        """Append values to an array."""
        heartbeat.tick()
        data = np.ascontiguousarray(values, dtype=DTYPES[name])
        content = data.tobytes()
        self.count[name] += data.size
        self.crc[name] = zlib.crc32(content, self.crc[name])
        self.files[name].write(content)

    def close(self, report: dict[str, Any] | None) -> None:
        """Write everything through to disk; without a report, the folder is being given up."""
        for file in self.files.values():
            if report is not None:
                file.flush()
                os.fsync(file.fileno())
            file.close()
        if report is not None:
            meta = {"count": self.count, "crc": self.crc, "report": report}
            (self.folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


class Store:
    """Arrays of one folder, mapped into memory and read-only."""

    def __init__(self, folder: Path) -> None:
        """Open and verify a folder.

        Raises:
            DamagedStoreError: a file is missing, or its size or checksum differs.
        """
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            self.folder = folder
            self.report: dict[str, Any] = meta["report"]
            self.arrays = {name: _mapped(folder / f"{name}.bin", name, meta) for name in DTYPES}
        except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
            raise DamagedStoreError(f"{folder}: {error}") from error

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]


def open_or_build(cache_dir: Path, key: str, build: Callable[[Writer], dict[str, Any]]) -> tuple[Store, bool]:
    """The store of a key, built if it is not there or damaged.

    Args:
        cache_dir: folder of all stores.
        key: names what the store is made from.
        build: writes the arrays and returns the report.

    Returns:
        The store, and whether this process built it.

    Raises:
        OSError: the folder cannot be read or written; the message names data.cache_dir.
    """
    folder = cache_dir / key
    try:
        if folder.exists():
            with contextlib.suppress(DamagedStoreError):
                return Store(folder), False
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _lock(cache_dir / f"{key}.lock"):
            if folder.exists():
                try:
                    return Store(folder), False  # somebody else built it while we waited
                except DamagedStoreError as error:
                    logger.warning("the tokenised data is damaged and is built again: %s", error)
                    _remove(folder)
            return _build(cache_dir, key, build), True
    except OSError as error:
        is_cache = error.filename is not None and str(error.filename).startswith(str(cache_dir))
        if not is_cache and error.errno != errno.ENOSPC:
            raise
        raise type(error)(
            error.errno,
            f"data.cache_dir={cache_dir} cannot be used: {error.strerror}. Give a folder of your own in data.cache_dir",
            str(error.filename or cache_dir),
        ) from error


def default_cache_dir() -> Path:
    """`.rlhf_cache` under the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / ".rlhf_cache"


def _build(cache_dir: Path, key: str, build: Callable[[Writer], dict[str, Any]]) -> Store:
    _remove_abandoned(cache_dir, key)
    temporary = cache_dir / f"{key}.tmp.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}"
    temporary.mkdir()
    try:
        writer = Writer(temporary)
        report = None
        try:
            report = build(writer)
        finally:
            writer.close(report)
        try:
            temporary.rename(cache_dir / key)
        except OSError as error:
            # Only without locks: another builder was first, and equal keys have equal content.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Store(cache_dir / key)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclusive lock of a file; it ends with the process, however that dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that tokenises the same data (%s)", path)
            with heartbeat.waiting_for("the lock of the tokenised data"):
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise
            logger.warning("no file locks under %s: several processes may tokenise the same data", path.parent)
        yield


def _remove(folder: Path) -> None:
    """Take a folder away by one rename first: a reader sees all of it or nothing, and maps that are open stay valid."""
    aside = folder.with_name(f"{folder.name}.damaged.{uuid.uuid4().hex}")
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_abandoned(cache_dir: Path, key: str) -> None:
    """Remove what builders of this machine left behind when they were killed."""
    for path in cache_dir.glob(f"{key}.tmp.{socket.gethostname()}.*"):
        pid = path.name.split(".")[-2]
        if pid.isdigit() and int(pid) != os.getpid() and not _is_alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _mapped(path: Path, name: str, meta: dict[str, Any]) -> Array:
    dtype = np.dtype(DTYPES[name])
    size, expected = path.stat().st_size, meta["count"][name] * dtype.itemsize
    if size != expected:
        raise ValueError(f"{path.name} has {size} bytes instead of {expected}")
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    if crc != meta["crc"][name]:
        raise ValueError(f"{path.name} has another checksum than when it was written")
    if not size:
        return np.zeros(0, dtype)  # an empty file cannot be mapped
    return np.memmap(path, dtype=dtype, mode="r")
