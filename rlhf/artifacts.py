"""A model folder's manifest: what is in it, where it came from, what it fits. No torch.

Stages meet on disk. A folder is written under another name, described, verified by reading back and then renamed, so a
folder with the right name is complete. The next stage checks files, kind, tokenizer, template and lineage before it
takes an accelerator.
"""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any, Literal

MANIFEST = "manifest.json"
SCHEMA = 1
Kind = Literal["policy", "reward", "critic"]
KINDS: tuple[Kind, ...] = ("policy", "reward", "critic")

# The sources of a model folder's numbers; the first two are always there.
_PACKAGES = (
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "datasets",
    "peft",
    "tokenizers",
    "safetensors",
    "numpy",
)


class ArtifactError(ValueError):
    """A model folder that cannot be used; the message says which file or field, and what to do."""


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader, or a crash, sees the old file or the new one and nothing between."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that numbers depend on, as far as they are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """Commit of the checkout this code runs from, `-dirty` appended when tracked files differ; None outside of one."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here.parent), *arguments], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside some other project's checkout: that commit would say nothing about this code.
    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}-dirty" if commit and git("status", "--porcelain", "--untracked-files=no") else commit
