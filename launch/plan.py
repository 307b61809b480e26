"""The command line of `rlhf run` -> a plan with everything resolved, or all that is wrong with it. No torch."""

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch import command, placement
from launch.env_files import with_environment_files
from launch.hostfile import HostfileError
from launch.placement import Placement, PlacementError, PlacementFlags
from launch.recipe import Recipe, RecipeError, Stage, find_recipe, load_recipe, resolve_stages
from launch.restart import MOST_DELAY_SECONDS
from rlhf import host


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The command line of `rlhf run`."""

    recipe: str
    out: Path | None = None
    placement: PlacementFlags = PlacementFlags()
    resume: bool = False
    resume_weights_only: bool = False
    restarts: int = 0
    """Starts of a stage after it has failed."""
    restart_delay: float = 10.0
    """Seconds before the first restart."""
    elastic: bool = False
    """A restart leaves out hosts that do not answer."""
    force: bool = False
    dry_run: bool = False
    seed: int | None = None
    stages: tuple[str, ...] = ()
    data: str | None = None
    environment: tuple[str, ...] | None = None
    """Files in place of the recipe's `environment_files`; None: the recipe's."""
    check: bool = True
    """Machines of a hostfile are checked before the first stage."""
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
        recipe = with_environment_files(load_recipe(recipe_path), options.environment)
    except (RecipeError, command.CommandError) as error:
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
        # A login node may have no accelerator where the machines of the hostfile do.
        accelerator_visible=placement.accelerator_visible({**recipe.environment, **shell})
        or (options.placement.hostfile is not None and recipe.needs_accelerator),
        source_root=command.source_root(),
    )
    try:
        where = placement.place(
            options.placement,
            deployment=recipe.deployment,
            default_num_gpus=recipe.num_gpus,
            environment=ranks_environment,
        )
        for stage in stages:
            path = config_path(run_dir, stage)
            command.stage_command(stage.module, path, where, port=1, rank_logs=rank_folder(run_dir, stage, 1))
        if where.is_remote:
            command.check_launcher_args(where.launcher_args)
            command.remote_variables(
                ranks_environment,
                recipe.environment,
                command.user_variable_files(),
                through_shell=where.launcher == "pdsh",
            )
    except (PlacementError, HostfileError, command.CommandError) as error:
        problems.append(str(error))
    problems += _restart_problems(options)
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


def _restart_problems(options: RunOptions) -> list[str]:
    problems = []
    if options.restarts < 0:
        problems.append(f"--restarts must be >= 0, got {options.restarts}.")
    if not 0 <= options.restart_delay <= MOST_DELAY_SECONDS:
        problems.append(f"--restart-delay must be in [0, {MOST_DELAY_SECONDS:g}], got {options.restart_delay:g}.")
    if options.elastic and (options.restarts == 0 or options.placement.hostfile is None):
        problems.append("--elastic leaves out lost hosts at a restart: it needs --restarts and --hostfile.")
    return problems


def config_path(run_dir: Path, stage: Stage) -> Path:
    """What a stage is started with."""
    return run_dir / "configs" / f"{stage.folder}.yaml"


def rank_folder(run_dir: Path, stage: Stage, attempt: int) -> Path:
    """Output and heartbeats of the ranks of one attempt."""
    return run_dir / "logs" / f"{stage.folder}.{attempt}"


def choose_port(where: Placement) -> int:
    """The port that was asked for, or a free one; on another machine a random one outside the ephemeral range."""
    if where.master_port is not None:
        return where.master_port
    return random.SystemRandom().randrange(20_000, 30_000) if where.is_remote else host.free_port()
