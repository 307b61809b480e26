"""The folder of a run's saved states: which are complete, which are intact, which are kept. No torch.

    state/tokenizer/                  of the run's models, written once
    state/step_00000120/state.json    the record: values of the run and its parts, and size and sha256 of every file
    state/step_00000120/<engine>/     DeepSpeed's files
    state/step_00000120/ranks/        random generators and open metrics of each rank

A state is written as `.step_00000120.part`, read back, given its record and then its name: one with the right name is
complete. A name that ends in `.damaged` is a state whose files no longer are what was written; `.unhealthy`, one that
was saved when training had begun to go wrong.
"""

import itertools
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhf import strict
from rlhf.artifacts import FileEntry, hash_file, write_json

STATE = "state"
RECORD = "state.json"
TOKENIZER = "tokenizer"
SCHEMA = 2


class StateError(RuntimeError):
    """A state that cannot be written, read or continued from; the message says which file or value, and what to do."""


def states_of(run_folder: str | Path) -> Path:
    """The folder of a run's states."""
    return Path(run_folder) / STATE


def complete(folder: Path) -> list[Path]:
    """States that were written to the end, oldest first."""
    found = [path for path in folder.glob("step_*") if (path / RECORD).is_file() and path.name[5:].isdigit()]
    return sorted(found)


def step_of(state: Path) -> int:
    """Steps made when a complete state was saved."""
    return int(state.name[5:])


def path_of(folder: Path, step: int) -> Path:
    """Where the state after `step` steps lies."""
    return folder / f"step_{step:08d}"


def part_of(folder: Path, step: int) -> Path:
    """Where it is written first."""
    return folder / f".step_{step:08d}.part"


def discard_parts(folder: Path) -> None:
    """Remove what interrupted saves have left."""
    for path in folder.glob(".step_*"):
        shutil.rmtree(path, ignore_errors=True)


def publish(part: Path, target: Path, record: Mapping[str, Any]) -> None:
    """Give a part its record and its name; a former state of that name is replaced."""
    write_json(part / RECORD, {"schema": SCHEMA, **record})
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    _sync_folder(target.parent)


def read_record(state: Path) -> dict[str, Any]:
    """The record of a state; its files are not looked at.

    Raises:
        StateError: there is none, it cannot be read, or another version wrote it.
    """
    path = state / RECORD
    try:
        record = strict.read_json(path)
        if record["schema"] != SCHEMA:
            raise StateError(
                f"{path} has schema {record['schema']!r}, this version reads {SCHEMA}. Use the version that wrote it."
            )
        for key in ("step", "world_size", "files", "engines", "run", "parts", "fits"):
            record[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path} cannot be read ({type(error).__name__}: {error}).") from None
    return record  # type: ignore[no-any-return]


def files_of(record: Mapping[str, Any]) -> dict[str, FileEntry]:
    """What the record says about each file."""
    return {name: FileEntry(**entry) for name, entry in record["files"].items()}


def fault_of(state: Path, name: str, entry: FileEntry) -> str | None:
    """What is wrong with one file, or None: missing, truncated, or other contents."""
    path = state / name
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != entry.bytes:
        return f"{path} is {'truncated' if size < entry.bytes else 'changed'}: {size} bytes, {entry.bytes} were written"
    return f"{path} is changed: its sha256 is not that of what was written" if hash_file(path) != entry.sha256 else None


def share_of(names: Sequence[str], *, rank: int, world_size: int) -> list[str]:
    """The files that one rank reads back, so that all ranks together read each once."""
    return sorted(names)[rank::world_size]


def set_aside(state: Path, why: Literal["damaged", "unhealthy"]) -> Path:
    """Take a state out of those that count, without deleting it."""
    target = state.with_name(f"{state.name}.{why}")
    shutil.rmtree(target, ignore_errors=True)
    state.rename(target)
    return target


def rotate(
    folder: Path, *, keep: int, keep_good: int = 0, best: tuple[str, Literal["up", "down"]] | None = None
) -> list[Path]:
    """Delete all but the newest states, the newest good ones and the best one; returns what was deleted.

    Args:
        folder: of the states.
        keep: number of newest states to keep.
        keep_good: number of newest states to keep among those that are good.
        best: metric, and whether more (`up`) or less of it is better; states whose record has it compete.
    """
    found = complete(folder)
    good = (path for path in reversed(found) if is_good(path))
    kept = {*found[-keep:], *itertools.islice(good, keep_good)}
    if best is not None and (winner := best_of(folder, *best)) is not None:
        kept.add(winner)
    dropped = [path for path in found if path not in kept]
    for path in dropped:
        delete(path)
    return dropped


def delete(state: Path) -> None:
    """Remove a state: without its record it no longer counts, whatever the rest of the deletion comes to."""
    (state / RECORD).unlink(missing_ok=True)
    shutil.rmtree(state, ignore_errors=True)


def is_good(state: Path) -> bool:
    """Whether it can be read and was saved while no detector that acts was over its limit (`rlhf/health.py`)."""
    try:
        return bool(read_record(state)["run"].get("health", {}).get("good", True))
    except StateError:
        return False


def best_of(folder: Path, metric: str, direction: Literal["up", "down"]) -> Path | None:
    """The state with the best value of a metric, the oldest of equals; None if none has a value."""
    scored = []
    for path in complete(folder):
        value = read_record(path)["run"].get("metrics", {}).get(metric)
        if value is not None and math.isfinite(value):
            scored.append((value, path))
    if not scored:
        return None
    target = (max if direction == "up" else min)(value for value, _ in scored)
    return next(path for value, path in scored if value == target)


def differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What differs between two flat descriptions, in words."""
    found = []
    for key in sorted({*saved, *own}):
        if saved.get(key) == own.get(key):
            continue
        one, two = saved.get(key), own.get(key)
        if isinstance(one, Mapping) and isinstance(two, Mapping):
            found += [f"{key}: {line}" for line in _few(differences(one, two))]
        else:
            found.append(f"{key} is {_short(one)} in the state, {_short(two)} in this run")
    return found


def _few(lines: list[str], most: int = 4) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
