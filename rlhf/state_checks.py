"""Checks of states by all ranks together: written, read back, and which one is intact."""

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlhf import artifacts, distributed, states
from rlhf.artifacts import FileEntry
from rlhf.states import StateError

logger = logging.getLogger(__name__)


@contextmanager
def writing(folder: Path, step: int) -> Iterator[None]:
    """A block that writes; an OSError on any rank is a StateError on all, which says what is left and what to do."""
    fault = ""
    try:
        yield
    except OSError as error:
        fault = _explain(folder, step, error)
    except StateError as error:
        fault = str(error)
    try:
        distributed.same_on_all(not fault, fault, error=StateError)
    except StateError:
        if distributed.is_main():
            shutil.rmtree(states.part_of(folder, step), ignore_errors=True)
        raise


def _explain(folder: Path, step: int, error: OSError) -> str:
    found = states.complete(folder)
    newest = f"{found[-1].name} is intact, --resume goes on from it" if found else "there is no earlier state"
    where = folder
    while not where.exists():
        where = where.parent
    free = shutil.disk_usage(where).free / 1e6
    return (
        f"the state of step {step} could not be written under {folder}: {error}. {free:.0f} MB are free there. Make "
        f"room, lower run.keep_states or correct the permissions; {newest}."
    )


def read_back(folder: Path, step: int, written: Mapping[str, FileEntry]) -> dict[str, FileEntry]:
    """Every file of a part with its hash; those of the writers compared with what left memory. Collective.

    Raises:
        StateError: on all ranks, the disk holds something else.
    """
    part = states.part_of(folder, step)
    known: dict[str, FileEntry] = {}
    for entries in distributed.all_gather_objects(dict(written)):
        known.update(entries)
    names = distributed.broadcast_object([p.relative_to(part).as_posix() for p in part.rglob("*") if p.is_file()])
    mine = states.share_of(names, rank=distributed.rank(), world_size=distributed.world_size())
    found: dict[str, FileEntry] = {}
    with writing(folder, step):
        found.update({name: artifacts.entry_of(part / name) for name in mine})
        wrong = [name for name, entry in found.items() if known.get(name, entry) != entry]
        wrong += sorted(known.keys() - set(names))
        if wrong:
            raise StateError(f"{part / wrong[0]} is not what was written. Check the disk.")
    return {name: entry for share in distributed.all_gather_objects(found) for name, entry in share.items()}


def newest_intact(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The newest state whose files are what was written, and its record. Collective; each rank reads its share.

    Damaged ones that are newer are renamed, with a warning that says what is wrong with each.

    Raises:
        StateError: on all ranks, there is none.
    """
    damaged: list[str] = []
    while True:
        found = distributed.broadcast_object([path.name for path in states.complete(folder)])
        if not found:
            said = "".join(f"\n  - {fault}" for fault in damaged)
            raise StateError(
                f"nothing to resume: {folder} holds no intact state.{said} Set run.resume=false to start over, or "
                "point run.out_dir at a run with a saved state (run.save_every or run.save_minutes above 0)."
            )
        state = folder / found[-1]
        record, fault = _inspect(state)
        if record is not None:
            return state, record
        damaged.append(fault)
        logger.warning("%s. It is set aside; the state before it is tried.", fault)
        with distributed.together(f"setting {state} aside"):
            if distributed.is_main():
                states.set_aside(state, "damaged")


def _inspect(state: Path) -> tuple[dict[str, Any] | None, str]:
    """The record if all files are intact, else None and what is wrong. Collective."""
    record, fault = None, ""
    if distributed.is_main():
        try:
            record = states.read_record(state)
        except StateError as error:
            fault = str(error)
    record, fault = distributed.broadcast_object((record, fault))
    if record is None:
        return None, fault
    files = states.files_of(record)
    mine = states.share_of(list(files), rank=distributed.rank(), world_size=distributed.world_size())
    found = [states.fault_of(state, name, files[name]) for name in mine]
    faults = [fault for part in distributed.all_gather_objects(found) for fault in part if fault]
    return (None, "; ".join(faults)) if faults else (record, "")
