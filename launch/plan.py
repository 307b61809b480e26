"""The command line of `rlhf run` -> a plan with everything resolved, or all that is wrong with it. No torch."""

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch import command, placement
from launch.hostfile import HostfileError
from launch.placement import Placement, PlacementError, PlacementFlags
from launch.recipe import Recipe, RecipeError, Stage, find_recipe, load_recipe, resolve_stages
from rlhf import host


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command line of `rlhf run`."""

    recipe: str
    out: Path | None = None
    placement: PlacementFlags = PlacementFlags()
    resume: bool = False
    force: bool = False
    dry_run: bool = False
    seed: int | None = None
    stages: tuple[str, ...] = ()
    data: str | None = None
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run with everything resolved."""

    recipe: Recipe
    recipe_path: Path
    run_dir: Path
    stages: list[Stage]
    placement: Placement
    environment: dict[str, str]
    seed: int


class PlanError(ValueError):
    """Problems found before anything was started, one a line."""


def make_plan(options: RunOptions, environment: Mapping[str, str] | None = None) -> Plan:
    """Resolve recipe, flags and placement; everything that is wrong with them is in one PlanError."""
    shell = dict(os.environ if environment is None else environment)
    problems: list[str] = []
    try:
        recipe_path = find_recipe(options.recipe)
        recipe = load_recipe(recipe_path)
    except RecipeError as error:
        raise PlanError(str(error)) from None
    run_dir = (options.out or Path("runs") / recipe.name).absolute()
    stages, where = [], None
    try:
        stages = resolve_stages(
            recipe,
            recipe_path,
            run_dir,
            seed=options.seed,
            data_root=options.data,
            overrides=options.overrides,
            stages=options.stages,
        )
    except RecipeError as error:
        problems.append(str(error))
    ranks_environment = command.stage_environment(
        shell,
        recipe.environment,
        accelerator_visible=placement.accelerator_visible({**recipe.environment, **shell}),
        source_root=command.source_root(),
    )
    try:
        where = placement.place(
            options.placement,
            needs_hostfile=recipe.deployment == "multi_node",
            default_num_gpus=recipe.num_gpus,
            environment=ranks_environment,
        )
        for stage in stages:
            command.stage_command(stage.module, config_path(run_dir, stage), where, port=1)
    except (PlacementError, HostfileError, command.CommandError) as error:
        problems.append(str(error))
    if options.resume and options.force:
        problems.append("--resume and --force exclude each other: one continues, the other starts over. Give one.")
    if problems or where is None:
        raise PlanError("\n".join(dict.fromkeys("\n".join(problems).splitlines())))
    seed = stages[0].config.run.seed
    return Plan(
        recipe=recipe,
        recipe_path=recipe_path,
        run_dir=run_dir,
        stages=stages,
        placement=where,
        environment=ranks_environment,
        seed=seed,
    )


def config_path(run_dir: Path, stage: Stage) -> Path:
    """What a stage is started with."""
    return run_dir / "configs" / f"{stage.folder}.yaml"


def choose_port(where: Placement) -> int:
    """The port that was asked for, or a free one; on another machine a random one outside the ephemeral range."""
    if where.master_port is not None:
        return where.master_port
    return random.SystemRandom().randrange(20_000, 30_000) if where.is_remote else host.free_port()
