"""Whether a stage is skipped, run from the start, or continued, and why. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import preflight
from launch.inputs import changes, stage_inputs
from launch.plan import Plan, PlanError, RunOptions
from launch.recipe import FOLDERS, Stage
from launch.record import has_state, read_record, read_result
from rlhf import artifacts


@dataclass(frozen=True)
class Decision:
    """What happens to one stage, and why."""

    action: str
    """`skip`, `run` or `resume`."""
    reason: str
    inputs: dict[str, Any] = field(default_factory=dict)


def decide(
    stage: Stage, run_dir: Path, *, resume: bool, force: bool, remade: Sequence[str] = (), contents: bool = True
) -> Decision:
    """Whether a stage is skipped, run from the start, or continued.

    Args:
        stage: the stage.
        run_dir: folder of the run.
        resume: continue an unfinished stage from its saved state.
        force: run it anew in any case.
        remade: stages of this call that run before it, so that what it reads will be new.
        contents: verify a finished model's contents, not only its names and sizes.

    Raises:
        PlanError: a finished model is damaged, or a state belongs to other inputs.
    """
    inputs = stage_inputs(stage)
    if force:
        return Decision("run", "--force", inputs)
    record = read_record(run_dir).get(stage.folder)
    result = read_result(stage.out_dir)
    if result is None and not has_state(stage.out_dir):
        return Decision("run", "not finished before" if record else "first time", inputs)
    if record is None:
        return Decision("run", "what lies there was not made by this launcher", inputs)
    waiting = [FOLDERS[parent] for parent in stage.parents if parent in remade]
    changed = [f"{folder} is made anew" for folder in waiting] or changes(record["inputs"], inputs)
    if result is not None:
        if changed:
            return Decision("run", f"its inputs changed: {'; '.join(changed)}", inputs)
        try:
            artifacts.verify(stage.model_dir, contents=contents)
        except artifacts.ArtifactError as error:
            raise PlanError(
                f"{stage.folder} is finished, but its model cannot be used: {error} Or pass --force."
            ) from None
        return Decision("skip", "finished, inputs unchanged", inputs)
    if not resume:
        return Decision("run", "unfinished; its saved state is set aside (--resume would continue it)", inputs)
    if changed:
        raise PlanError(
            f"--resume: {stage.folder} has a saved state of other inputs: {'; '.join(changed)}. Restore them, or "
            "start the stage over with --force."
        )
    return Decision("resume", "continues from its saved state", inputs)


def decide_all(
    plan: Plan, options: RunOptions, *, contents: bool
) -> tuple[dict[str, Decision], list[preflight.Problem]]:
    """Decisions of all stages, and what stands against them."""
    decisions: dict[str, Decision] = {}
    problems = []
    for stage in plan.stages:
        remade = [name for name, decision in decisions.items() if decision.action != "skip"]
        try:
            decisions[stage.name] = decide(
                stage, plan.run_dir, resume=options.resume, force=options.force, remade=remade, contents=contents
            )
        except (PlanError, artifacts.ArtifactError) as error:
            problems.append(preflight.Problem(str(error), here=True))
            decisions[stage.name] = Decision("run", "see the problems")
        except (ValueError, OSError) as error:  # a DeepSpeed JSON that preflight names too
            problems.append(preflight.Problem(f"{stage.folder}: {error}"))
            decisions[stage.name] = Decision("run", "see the problems")
    return decisions, problems
