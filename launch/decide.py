"""Whether a stage is skipped, run from the start, or continued, and why. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import preflight
from launch.inputs import RESUMED_AS_IS, RESUMED_WITHOUT_OPTIMISER, changes, stage_inputs
from launch.plan import Plan, PlanError, RunOptions
from launch.recipe import FOLDERS, Stage
from launch.record import has_state, made_steps, read_record, read_result
from rlhf import artifacts


@dataclass(frozen=True)
class Decision:
    """What happens to one stage, and why."""

    action: str
    """`skip`, `run` or `resume`."""
    reason: str
    inputs: dict[str, Any] = field(default_factory=dict)


def decide(
    stage: Stage,
    run_dir: Path,
    *,
    resume: bool,
    force: bool,
    weights_only: bool = False,
    remade: Sequence[str] = (),
    contents: bool = True,
) -> Decision:
    """Whether a stage is skipped, run from the start, or continued.

    Args:
        stage: the stage.
        run_dir: folder of the run.
        resume: continue an unfinished stage from its saved state.
        force: run it anew in any case.
        weights_only: continue from the weights of its state alone.
        remade: stages of this call that run before it, so that what it reads will be new.
        contents: verify a finished model's contents, not only its names and sizes.

    Raises:
        PlanError: a finished model is damaged, a state belongs to other inputs, or what was done cannot be resumed.
    """
    inputs = stage_inputs(stage)
    if force:
        return Decision("run", "--force", inputs)
    record = read_record(run_dir).get(stage.folder)
    result = read_result(stage.out_dir)
    if result is None and not has_state(stage.out_dir):
        return _without_state(stage, inputs, resume=resume, started=record is not None)
    if record is None:
        return Decision("run", "what lies there was not made by this launcher", inputs)
    waiting = [f"{FOLDERS[parent]} is made anew" for parent in stage.parents if parent in remade]
    if result is not None:
        if changed := waiting or changes(record["inputs"], inputs):
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
    # How a step runs may change; the stage itself knows whether the state can be brought into that form.
    free = RESUMED_WITHOUT_OPTIMISER if weights_only else RESUMED_AS_IS
    if changed := waiting or changes(record["inputs"], inputs, free=free):
        raise PlanError(
            f"--resume: {stage.folder} has a saved state of other inputs: {'; '.join(changed)}. Restore them, or "
            "start the stage over with --force."
        )
    what = "the weights of its saved state" if weights_only else "its saved state"
    return Decision("resume", f"continues from {what}", inputs)


def _without_state(stage: Stage, inputs: dict[str, Any], *, resume: bool, started: bool) -> Decision:
    """An unfinished stage begins, unless that would lose steps that were asked to be continued."""
    if resume and made_steps(stage.out_dir):
        raise PlanError(
            f"--resume: {stage.folder} had begun its steps, but {stage.out_dir} holds no complete state: nothing to "
            "resume. Leave --resume out to start the stage over; run.save_every or run.save_minutes writes states."
        )
    return Decision(
        "run", ("ended before its first step" if resume else "not finished before") if started else "first time", inputs
    )


def decide_all(
    plan: Plan, options: RunOptions, *, contents: bool
) -> tuple[dict[str, Decision], list[preflight.Problem]]:
    """Decisions of all stages, and what stands against them."""
    decisions: dict[str, Decision] = {}
    problems = []
    if options.resume and not read_record(plan.run_dir):
        text = f"--resume: {plan.run_dir} holds no run: nothing to resume. Leave --resume out to start one."
        problems.append(preflight.Problem(text, here=True))
    for stage in plan.stages:
        remade = [name for name, decision in decisions.items() if decision.action != "skip"]
        try:
            decisions[stage.name] = decide(
                stage,
                plan.run_dir,
                resume=options.resume,
                force=options.force,
                weights_only=options.resume_weights_only,
                remade=remade,
                contents=contents,
            )
        except (PlanError, artifacts.ArtifactError) as error:
            problems.append(preflight.Problem(str(error), here=True))
            decisions[stage.name] = Decision("run", "see the problems")
        except (ValueError, OSError) as error:  # a DeepSpeed JSON that preflight names too
            problems.append(preflight.Problem(f"{stage.folder}: {error}"))
            decisions[stage.name] = Decision("run", "see the problems")
    return decisions, problems
