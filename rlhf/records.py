"""Records that a run appends to, and how a resume cuts them to what they were when its state was saved. No torch."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
HEALTH = "health.jsonl"
"""What the detectors have seen and what was done about it, one JSON object a line."""


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, allow_nan=False) + "\n")


def position(folder: Path) -> dict[str, int]:
    """Bytes of each record so far, on their way to the disk."""
    sizes = {}
    for name in (METRICS, HEALTH):
        path = folder / name
        sizes[name] = 0
        if path.exists():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
            sizes[name] = path.stat().st_size
    return sizes


def cut(folder: Path, sizes: Mapping[str, int]) -> str:
    """Drop what was written after the save; returns what is wrong, if anything is."""
    for name, size in sizes.items():
        path = folder / name
        found = path.stat().st_size if path.exists() else 0
        if found < size:
            return (
                f"{path} has {found} bytes, but had {size} when the state was saved: lines are lost. Restore the file, "
                "or start a new run."
            )
        if found:
            os.truncate(path, size)
    return ""
