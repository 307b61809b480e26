"""What a run folder says about its stages: attempts, results, saved states; and its lock and summary. No torch."""

import contextlib
import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from launch.display import read_progress
from launch.plan import Plan, PlanError
from launch.recipe import FOLDERS, Stage
from rlhf import states

SUMMARY_SCHEMA = 1


def build_summary(plan: Plan, outcomes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """summary.json (docs/summary.md): what each stage of the recipe came to.

    Args:
        plan: the run.
        outcomes: how stages of this call ended that did not finish.
    """
    records = read_record(plan.run_dir)
    stages: dict[str, Any] = {}
    for name in plan.recipe.stage_names:
        folder = FOLDERS[name]
        result = None if folder in outcomes else read_result(plan.run_dir / folder)
        record, outcome = records.get(folder, {}), outcomes.get(folder, {})
        attempt = record.get("attempt")
        stages[folder] = {
            "status": "done" if result else outcome.get("status", "missing"),
            "seconds": result["seconds"] if result else outcome.get("seconds"),
            "wall_seconds": record.get("wall_seconds"),
            "tokens_per_second": result["tokens_per_second"] if result else None,
            "model_dir": f"{folder}/{result['model_dir']}" if result else None,
            "metrics": result["metrics"] if result else {},
            "attempt": attempt,
            "log": f"logs/{folder}.{attempt}.log" if attempt else None,
            "error": outcome.get("error"),
        }
    return {
        "schema": SUMMARY_SCHEMA,
        "recipe": plan.recipe.name,
        "recipe_version": plan.recipe.version,
        "seed": plan.seed,
        "world_size": plan.placement.world_size,
        "stages": stages,
    }


def read_result(out_dir: Path) -> dict[str, Any] | None:
    """result.json of a finished stage; None while it is not finished."""
    try:
        result = json.loads((out_dir / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if isinstance(result, dict) and result.get("status") == "done" else None


def read_record(run_dir: Path) -> dict[str, Any]:
    """What launch.json says about the stages; empty if there is none."""
    try:
        stages = json.loads((run_dir / "launch.json").read_text(encoding="utf-8"))["stages"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(
            f"{run_dir / 'launch.json'} cannot be read ({error}). Delete it to run all stages anew, or pass another "
            "--out."
        ) from None
    return dict(stages)


def has_state(out_dir: Path) -> bool:
    """Whether a stage left a complete state to resume from."""
    return bool(states.complete(states.states_of(out_dir)))


def made_steps(out_dir: Path) -> bool:
    """Whether a stage had begun its steps, so that starting it over would lose some."""
    progress = read_progress(out_dir / "progress.json", not_before=0)
    return bool(progress.get("step")) or progress.get("phase") == "train"


def next_attempt(run_dir: Path, stage: Stage) -> int:
    """One above the largest number of the stage's logs."""
    numbers = [path.name.split(".")[-2] for path in (run_dir / "logs").glob(f"{stage.folder}.*.log")]
    return 1 + max((int(number) for number in numbers if number.isdigit()), default=0)


def set_aside(run_dir: Path, stage: Stage) -> None:
    """Move what an earlier attempt left to previous/<stage>.<number>, so that the stage starts in a new folder."""
    if not stage.out_dir.exists():
        return
    previous = run_dir / "previous"
    previous.mkdir(exist_ok=True)
    taken = {path.name for path in previous.iterdir()}
    number = next(n for n in range(1, len(taken) + 2) if f"{stage.folder}.{n}" not in taken)
    stage.out_dir.rename(previous / f"{stage.folder}.{number}")


@contextlib.contextmanager
def run_lock(run_dir: Path) -> Iterator[int]:
    """Hold a run folder; the descriptor is given to the launcher processes, so that orphans keep holding it.

    Raises:
        PlanError: another process holds it.
    """
    path = run_dir / ".lock"
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise PlanError(
                f"run folder {run_dir} is in use by {holder}, or by a stage it started. Wait for it, end it, or pass "
                "another --out."
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield file.fileno()
