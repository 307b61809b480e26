"""A model folder's manifest: what is in it, where it came from, what it fits. No torch.

Stages meet on disk. A folder is written under another name, described, verified by reading back and then renamed, so a
folder with the right name is complete. The next stage checks files, kind, tokenizer, template and lineage before it
takes an accelerator.
"""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rlhf import heartbeat, strict

MANIFEST = "manifest.json"
SCHEMA = 1
_AGAIN = "Run the stage that wrote it again, or copy the folder again."
Kind = Literal["policy", "reward", "critic"]

# transformers picks weights by name, so one of these that is not in the manifest could be loaded in place of ours.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".index.json", "adapter_config.json")
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


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a model folder."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Contract:
    """How text becomes tokens for a model; models that see each other's tokens must agree on all of it."""

    tokenizer: str
    """Fingerprint of the tokenizer."""
    template_name: str
    """Name of the chat template."""
    template_fingerprint: str
    """Fingerprint of what the template does."""
    stop_token_id: int
    """Id of the token that ends a response."""


@dataclass(frozen=True, kw_only=True)
class Parent:
    """A model that another one was made from."""

    path: str
    """Relative to the child's folder, or a hub name."""
    digest: str
    """Its digest at that time; empty for a hub name."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`manifest.json` of a model folder."""

    folder: Path
    """Where it was read; not written."""
    kind: Kind
    stage: str
    files: dict[str, FileEntry]
    contract: Contract
    parents: tuple[Parent, ...]
    seed: int
    metrics: dict[str, float | None]
    git_commit: str | None
    versions: dict[str, str]

    @property
    def digest(self) -> str:
        """Identity of the model: a hash of its kind and of the names and contents of its files."""
        return _digest(self.kind, {name: entry.sha256 for name, entry in self.files.items()})

    def parent_folder(self, parent: Parent) -> Path:
        """Where a parent is if it has not moved relative to this folder."""
        return Path(os.path.normpath(self.folder / parent.path))


def write_manifest(
    folder: str | Path,
    *,
    kind: Kind,
    stage: str,
    contract: Contract,
    parents: Sequence[str | Path] = (),
    seed: int,
    metrics: Mapping[str, float] | None = None,
) -> Manifest:
    """Hash every file of a complete model folder and write its manifest.

    Args:
        folder: the folder, weights and tokenizer already in it.
        kind: what the model is.
        stage: which stage wrote it.
        contract: tokenizer, template and stop token.
        parents: folders (or hub names) of the models it was made from.
        seed: run.seed.
        metrics: final numbers; those that are not finite become null.
    """
    folder = Path(folder)
    manifest = Manifest(
        folder=folder,
        kind=kind,
        stage=stage,
        files=_hash_files(folder),
        contract=contract,
        parents=tuple(_parent(folder, path) for path in parents),
        seed=seed,
        metrics={name: value if math.isfinite(value) else None for name, value in (metrics or {}).items()},
        git_commit=git_commit(),
        versions=versions(),
    )
    write_json(folder / MANIFEST, _to_json(manifest))
    return manifest


def read_manifest(folder: str | Path) -> Manifest:
    """Read a model folder's manifest; the files are not looked at.

    Raises:
        ArtifactError: there is none, or it is not one of this version.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    if not folder.is_dir():
        raise ArtifactError(f"model folder {folder} does not exist. Run the stage that writes it, or correct the path.")
    if not path.is_file():
        raise ArtifactError(
            f"{folder} holds no {MANIFEST}: no stage wrote it, or the write was cut short. Run the stage that writes "
            "it again, or pass the `model` folder of a finished stage."
        )
    try:
        raw = strict.read_json(path)
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{folder} is damaged: {error} {_AGAIN}") from error
    try:
        if raw["schema"] != SCHEMA:
            raise ArtifactError(
                f"{path} has schema {raw['schema']!r}, this version reads {SCHEMA}. Use the version that wrote it, or "
                "run the stage again."
            )
        return _from_json(folder, raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{path} is damaged ({type(error).__name__}: {error}). {_AGAIN}") from error


def verify(folder: str | Path, *, contents: bool = True) -> Manifest:
    """Compare a model folder with its manifest.

    Args:
        folder: the folder.
        contents: compare contents too; False looks at names and sizes alone, which takes no time for large models.

    Raises:
        ArtifactError: a file is missing, truncated or changed, or there are weights that the manifest does not name.
    """
    manifest = read_manifest(folder)
    repair = f"Run {manifest.stage} again, or copy the folder again from where it is intact."
    for name, entry in manifest.files.items():
        path = manifest.folder / name
        if not path.is_file():
            raise ArtifactError(f"{path} is missing, but {MANIFEST} names it. {repair}")
        size = path.stat().st_size
        if size != entry.bytes:
            state = "truncated" if size < entry.bytes else "changed"
            raise ArtifactError(f"{path} is {state}: {size} bytes, {MANIFEST} says {entry.bytes}. {repair}")
        if contents and hash_file(path) != entry.sha256:
            raise ArtifactError(f"{path} is changed: its sha256 is not the one in {MANIFEST}. {repair}")
    strange = [name for name in _file_names(manifest.folder) if name not in manifest.files]
    for name in strange:
        if name.endswith(_WEIGHT_SUFFIXES):
            raise ArtifactError(
                f"{manifest.folder / name} is not in {MANIFEST}, and could be loaded in place of the weights that are. "
                "Remove it."
            )
    return manifest


def digest_of(folder: str | Path) -> str:
    """Digest of a model folder: from its manifest, or of its files if no stage wrote it."""
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return read_manifest(folder).digest
    return _digest("", {name: entry.sha256 for name, entry in _hash_files(folder).items()})


def check_kind(manifest: Manifest, role: str, *, allowed: Sequence[Kind]) -> None:
    """Check that a model is of the kind that its role needs.

    Raises:
        ArtifactError: it is not.
    """
    if manifest.kind not in allowed:
        writer = {"policy": "step 1 or 3", "reward": "step 2", "critic": "step 3"}[allowed[0]]
        raise ArtifactError(
            f"{role}.path={manifest.folder} is a {manifest.kind} model (written by {manifest.stage}), but {role} needs "
            f"a {' or '.join(allowed)} model. Pass a model folder of {writer}."
        )


def check_same_text(first: Manifest, second: Manifest) -> None:
    """Check that two models see the same tokens: tokenizer, template, stop token.

    Raises:
        ArtifactError: they do not.
    """
    for what, mine, other in _text_differences(first.contract, second.contract):
        raise ArtifactError(
            f"{second.folder} was trained with {what} {other}, {first.folder} uses {mine}. Run {second.stage} with the "
            f"tokenizer and template of {first.folder} (tokenizer.path, data.template), or pass a model that fits."
        )


def check_reads(manifest: Manifest, contract: Contract) -> None:
    """Check that a model sees the tokens that this run makes.

    Raises:
        ArtifactError: the run's tokenizer, template or stop token is another one.
    """
    for what, mine, other in _text_differences(contract, manifest.contract):
        raise ArtifactError(
            f"{manifest.folder} was trained with {what} {other}, this run uses {mine}. Set tokenizer.path and "
            f"data.template to those of {manifest.stage}, or pass a model that fits."
        )


def _text_differences(one: Contract, two: Contract) -> Iterator[tuple[str, str, str]]:
    """(what, of the first, of the second). A template that was a file has another name in a model folder."""
    if one.tokenizer != two.tokenizer:
        yield "tokenizer", one.tokenizer[:12], two.tokenizer[:12]
    if one.template_fingerprint != two.template_fingerprint:
        names = [f"{c.template_name} ({c.template_fingerprint[:12]})" for c in (one, two)]
        yield "chat template", names[0], names[1]
    if one.stop_token_id != two.stop_token_id:
        yield "stop token id", str(one.stop_token_id), str(two.stop_token_id)


def check_parents(manifest: Manifest) -> None:
    """Check that the models this one was made from are still the ones that lie there; a parent that is gone is fine.

    Raises:
        ArtifactError: a parent's folder now holds another model.
    """
    for parent in manifest.parents:
        folder = manifest.parent_folder(parent)
        if not parent.digest or not (folder / MANIFEST).is_file():
            continue
        now = digest_of(folder)
        if now != parent.digest:
            raise ArtifactError(
                f"{manifest.folder} is stale: it was made from {folder} when its digest was {parent.digest[:12]}, now "
                f"it is {now[:12]}. Run {manifest.stage} again."
            )


def check_contract(policy: Manifest, reward: Manifest) -> None:
    """Check all that step 3 needs of its two models before it starts.

    Raises:
        ArtifactError: wrong kind, other tokens, or a parent that has been replaced.
    """
    check_kind(policy, "actor", allowed=("policy",))
    check_kind(reward, "reward", allowed=("reward",))
    check_same_text(policy, reward)
    check_parents(policy)
    check_parents(reward)


@contextmanager
def staged_folder(target: str | Path) -> Iterator[Path]:
    """A new folder to fill beside `target`, which takes the name `target` when the block ends without an error.

    A former `target` stays whole until then. An error removes the new folder and leaves `target` as it was.
    """
    target = Path(target)
    part, old = target.with_name(f".{target.name}.part"), target.with_name(f".{target.name}.old")
    for leftover in (part, old):
        shutil.rmtree(leftover, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if target.exists():
        target.rename(old)  # a folder cannot be replaced by rename unless it is empty
    part.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _parent(folder: Path, path: str | Path) -> Parent:
    if not Path(path).is_dir():
        return Parent(path=str(path), digest="")
    return Parent(path=Path(os.path.relpath(path, folder)).as_posix(), digest=digest_of(path))


def _file_names(folder: Path) -> list[str]:
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name != MANIFEST and not name.endswith(".part"))


def _hash_files(folder: Path) -> dict[str, FileEntry]:
    return {name: entry_of(folder / name) for name in _file_names(folder)}


def entry_of(path: Path) -> FileEntry:
    """Size and sha256 of a file."""
    return FileEntry(bytes=path.stat().st_size, sha256=hash_file(path))


def hash_file(path: Path) -> str:
    """sha256 of a file's contents."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            heartbeat.tick()
            digest.update(chunk)
    return digest.hexdigest()


def _digest(kind: str, hashes: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps([kind, sorted(hashes.items())]).encode()).hexdigest()


def _to_json(manifest: Manifest) -> dict[str, Any]:
    contract = manifest.contract
    return {
        "schema": SCHEMA,
        "kind": manifest.kind,
        "stage": manifest.stage,
        "digest": manifest.digest,
        "files": {name: vars(entry) for name, entry in manifest.files.items()},
        "tokenizer": contract.tokenizer,
        "template": {"name": contract.template_name, "fingerprint": contract.template_fingerprint},
        "stop_token_id": contract.stop_token_id,
        "parents": [vars(parent) for parent in manifest.parents],
        "seed": manifest.seed,
        "metrics": manifest.metrics,
        "git_commit": manifest.git_commit,
        "versions": manifest.versions,
    }


def _from_json(folder: Path, raw: Mapping[str, Any]) -> Manifest:
    if raw["kind"] not in get_args(Kind):
        raise ArtifactError(
            f"{folder / MANIFEST} has kind {raw['kind']!r}, not one of {', '.join(get_args(Kind))}. Run the stage "
            "again."
        )
    manifest = Manifest(
        folder=folder,
        kind=raw["kind"],
        stage=raw["stage"],
        files={name: FileEntry(**entry) for name, entry in raw["files"].items()},
        contract=Contract(
            tokenizer=raw["tokenizer"],
            template_name=raw["template"]["name"],
            template_fingerprint=raw["template"]["fingerprint"],
            stop_token_id=raw["stop_token_id"],
        ),
        parents=tuple(Parent(**parent) for parent in raw["parents"]),
        seed=raw["seed"],
        metrics=raw["metrics"],
        git_commit=raw["git_commit"],
        versions=raw["versions"],
    )
    if manifest.digest != raw["digest"]:
        raise ArtifactError(f"{folder / MANIFEST} was edited: its digest does not fit. Run {manifest.stage} again.")
    return manifest
