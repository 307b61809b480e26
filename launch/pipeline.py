"""Run the stages of a recipe one after the other: decide, start, watch, hand on, sum up. No torch.

A run folder holds `step1_sft`, `step2_reward`, `step3_ppo` (written by the stages), `configs/` (what each was started
with), `logs/<stage>.<attempt>.log`, `launch.json` (what each attempt's inputs were and how it ended), `summary.json`,
the report, and `previous/` (folders of earlier attempts; nothing is deleted).
"""

import json
import shlex

import yaml
from rich.console import Console
from rich.text import Text

from launch import command, preflight, process
from launch.decide import decide_all
from launch.display import make_console
from launch.placement import PlacementFlags
from launch.plan import Plan, PlanError, RunOptions, choose_port, config_path, make_plan, rank_folder
from launch.record import next_attempt, run_lock
from launch.runner import Runner
from launch.stopping import SoftStop
from rlhf import ds_config
from rlhf.config import to_dict

EXIT_USAGE = 2


def run(options: RunOptions) -> int:
    """Run a recipe; returns the exit code: 0 when every stage is done, 75 if it
    was asked to stop and has saved its state, 2 for problems found before the start."""
    console = make_console()
    try:
        plan = make_plan(options)
        if options.dry_run:
            _dry_run(plan, options, console)
            return 0
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        with run_lock(plan.run_dir) as lock, process.catch_signals() as interrupt:
            soft_stop = SoftStop(interrupt)
            with soft_stop.listening():
                return Runner(plan, options, console, soft_stop, lock).run()
    except PlanError as error:
        lines = str(error).splitlines()
        console.print(Text(f"rlhf run: nothing was started. {len(lines)} problem{'s' if len(lines) > 1 else ''}:"))
        for line in lines:
            console.print(Text(f"  - {line}"), soft_wrap=True)
        return EXIT_USAGE


def check_recipe(recipe: str, *, data: str | None, flags: PlacementFlags) -> int:
    """Print all that would stop a run of the recipe on this machine; 0 if nothing would, else 2."""
    console = make_console()
    try:
        plan = make_plan(RunOptions(recipe=recipe, data=data, placement=flags))
        problems = preflight.check(
            plan.recipe, plan.stages, plan.placement, run_dir=plan.run_dir, environment=plan.environment
        )
        problems += [] if problems else preflight.unreachable_hosts(plan.placement)
        if problems:
            raise PlanError("\n".join(map(str, problems)))
    except PlanError as error:
        for line in str(error).splitlines():
            console.print(Text(f"  - {line}"), soft_wrap=True)
        return EXIT_USAGE
    console.print(
        Text(f"{plan.recipe.name}: {', '.join(stage.folder for stage in plan.stages)} on {plan.placement}: no problem")
    )
    return 0


def _dry_run(plan: Plan, options: RunOptions, console: Console) -> None:
    """Print what a run would do; write nothing."""

    def say(text: str = "") -> None:
        console.print(Text(text), soft_wrap=True)

    say(f"recipe {plan.recipe.name}, version {plan.recipe.version}: {plan.recipe.description}")
    say(f"{plan.placement}, seed {plan.seed}, folder {plan.run_dir}")
    if plan.placement.is_remote:
        say(f"hostfile {plan.placement.hostfile}: {', '.join(map(str, plan.placement.hosts))}")
    decisions, problems = decide_all(plan, options, contents=False)
    finished = [name for name, decision in decisions.items() if decision.action == "skip"]
    problems += preflight.check(
        plan.recipe, plan.stages, plan.placement, run_dir=plan.run_dir, environment=plan.environment, finished=finished
    )
    problems = list(dict.fromkeys(problems))
    if any(not problem.here for problem in problems):
        raise PlanError("\n".join(map(str, problems)))
    for stage in plan.stages:
        decision = decisions[stage.name]
        path = config_path(plan.run_dir, stage)
        say()
        say(f"== {stage.folder}: {'skipped' if decision.action == 'skip' else 'runs'} ({decision.reason})")
        say(f"# {path}")
        say(yaml.safe_dump(to_dict(stage.config), sort_keys=False, width=100).rstrip())
        for role, name in stage.ds_configs().items():
            say(f"# DeepSpeed JSON of {role}: {name}")
            say(json.dumps(ds_config.load(name)))
        folder = rank_folder(plan.run_dir, stage, next_attempt(plan.run_dir, stage))
        argv = command.stage_command(
            stage.module, path, plan.placement, port=choose_port(plan.placement), rank_logs=folder
        )
        say(f"$ {shlex.join(argv)}")
    if problems:
        say()
        say("Here a run would stop before its first process:")
        for problem in problems:
            say(f"  - {problem.text}")
