"""What a stage's result depends on, so that a finished stage runs again if, and only if, that changed. No torch."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.recipe import Stage
from rlhf import artifacts, ds_config
from rlhf.config import ModelConfig, SourceConfig, to_dict

_NO_EFFECT = {
    "run.out_dir", "run.resume", "run.resume_weights_only", "run.log_every", "run.save_every", "run.save_minutes",
    "run.save_async", "run.keep_states", "run.keep_best", "run.tensorboard", "run.wandb_project", "data.root",
    "data.cache_dir",
}  # fmt: skip
"""Keys that change where a stage writes or reads, not what comes out; data is compared by content."""
RESUMED_AS_IS = ("config.deepspeed", "deepspeed.", "config.run.watchdog.", "config.run.health.")
"""Starts of keys that may change under a state: another ZeRO stage or micro-batch size is the same training."""
RESUMED_WITHOUT_OPTIMISER = (
    *RESUMED_AS_IS, "config.optim.", "config.actor_optim.", "config.critic_optim.", "config.max_steps", "config.epochs",
)  # fmt: skip
"""The same where only the weights are taken."""
_HASHED_BYTES = 256 * 2**20
"""Files above this size are compared by size and time of change, not by content."""


def stage_inputs(stage: Stage) -> dict[str, Any]:
    """Flat name -> JSON-able value: the resolved config, the DeepSpeed JSONs, data and models by content.

    Keys that another stage of the run feeds appear as that stage's model, not as a path, so a moved run is the same.
    """
    inputs: dict[str, Any] = {}
    for key, value in _flatten(to_dict(stage.config)):
        if key not in _NO_EFFECT and key not in stage.feeds and not key.startswith(("run.watchdog.", "run.health.")):
            inputs[f"config.{key}"] = value
    for role, name in stage.ds_configs().items():
        inputs[f"deepspeed.{role}"] = ds_config.load(name)
    for source in stage.config.data.sources:
        path = source_path(source, stage.config.data.root)
        if path is not None:
            inputs[f"data.{source.label}"] = _content(path)
    for key, folder in model_folders(stage).items():
        if folder.is_dir():
            inputs[f"model.{key}"] = artifacts.digest_of(folder)
    return json.loads(json.dumps(inputs))  # type: ignore[no-any-return]


def changes(old: Mapping[str, Any], new: Mapping[str, Any], *, free: tuple[str, ...] = ()) -> list[str]:
    """What differs between two sets of inputs, in words; keys that start with one of `free` may differ."""
    found = []
    for key in sorted({*old, *new}):
        if old.get(key) == new.get(key) or key.startswith(free):
            continue
        if key.startswith("config."):
            found.append(f"{key.removeprefix('config.')} {_short(old.get(key))} -> {_short(new.get(key))}")
        else:
            found.append(f"{key} has other contents")
    return found


def source_path(source: SourceConfig, root: str | None) -> Path | None:
    """File or folder of a source; None for hub names and built-in tasks."""
    if source.path.startswith(("hub:", "builtin:")):
        return None
    return Path(root or ".") / source.path


def model_folders(stage: Stage) -> dict[str, Path]:
    """Dotted config key -> folder, for all keys that name a model or tokenizer on disk rather than on the hub."""
    paths = {f"{key}.path": model.path for key, model in stage.models().items()}
    config: Any = stage.config
    paths["tokenizer.path"] = getattr(getattr(config, "tokenizer", None), "path", None)
    paths["normalise.policy"] = getattr(getattr(config, "normalise", None), "policy", None)
    return {key: Path(path) for key, path in paths.items() if path and not is_hub_name(path)}


def is_hub_name(path: str) -> bool:
    """Whether a model path means `owner/name` on the hub: no such folder here, and it does not look like one."""
    parts = path.split("/")
    return not Path(path).exists() and len(parts) == 2 and all(parts) and not path.startswith((".", "~"))


def model_shape(model: ModelConfig) -> dict[str, Any]:
    """The Hugging Face config of a model as far as it is here: inline, or the folder's config.json; else empty."""
    if model.config is not None:
        return model.config
    path = Path(model.path or "") / "config.json"
    try:
        shape = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return shape if isinstance(shape, dict) else {}


def _content(path: Path) -> str:
    """Hash of a file, or of a folder's files with their names; `absent` if there is none."""
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.is_file())
    elif path.is_file():
        files = [path]
    else:
        return "absent"
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(path) if file != path else ''}\0".encode())
        stat = file.stat()
        if stat.st_size > _HASHED_BYTES:
            digest.update(f"{stat.st_size} {stat.st_mtime_ns}\0".encode())
            continue
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest() if hasattr(hashlib, "file_digest") else
                          hashlib.sha256(stream.read()).digest())  # fmt: skip
    return digest.hexdigest()


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def existing_folder(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    while not path.exists():
        path = path.parent
    return path


def free_bytes(path: Path) -> int:
    """Bytes that can still be written under a path, which need not exist yet."""
    stat = os.statvfs(existing_folder(path))
    return stat.f_bavail * stat.f_frsize
