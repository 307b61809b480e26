"""Run the stages of a recipe one after the other: decide, start, watch, hand on, sum up. No torch.

A run folder holds `step1_sft`, `step2_reward`, `step3_ppo` (written by the stages), `configs/` (what each was started
with), `logs/<stage>.<attempt>.log`, `launch.json` (what each attempt's inputs were and how it ended), `summary.json`,
the report, and `previous/` (folders of earlier attempts; nothing is deleted).
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.text import Text

from launch import command, preflight, process
from launch.cluster.check import CheckOptions, check_machines
from launch.cluster.machine import recipe_finding
from launch.cluster.show import as_json, show_report
from launch.decide import decide_all
from launch.display import make_console
from launch.plan import Plan, PlanError, RunOptions, choose_port, config_path, make_plan, rank_folder
from launch.record import next_attempt, run_lock
from launch.runner import Runner
from launch.stopping import SoftStop
from rlhf import ds_config
from rlhf.artifacts import write_json
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
        _list(console, "rlhf run: nothing was started.", str(error).splitlines())
        return EXIT_USAGE


def check_recipe(options: RunOptions, check: CheckOptions, *, json_path: Path | None = None) -> int:
    """Check a recipe and the machines it would run on; nothing of the run is started or written.

    Args:
        options: as for a run.
        check: what is measured.
        json_path: new file for the report.

    Returns:
        0 if nothing is wrong, 1 if something is, 2 if there is no such recipe, hostfile or file.
    """
    console = make_console()
    try:
        plan = make_plan(options)
        if json_path is not None and (json_path.is_dir() or not json_path.absolute().parent.is_dir()):
            what = "is a folder" if json_path.is_dir() else "its folder does not exist"
            raise PlanError(f"--json {json_path}: {what}. Name a file in a folder that is there.")
    except PlanError as error:
        _list(console, "rlhf check: nothing was checked.", str(error).splitlines())
        return EXIT_USAGE
    problems = preflight.check(
        plan.recipe, plan.stages, plan.placement, run_dir=plan.run_dir, environment=plan.environment
    )
    found = [recipe_finding(str(problem)) for problem in problems]
    with process.catch_signals() as interrupt:
        report = check_machines(plan, check, interrupt, found=found)
    show_report(console, plan, report)
    if json_path is not None:
        try:
            write_json(json_path, as_json(plan, report))
        except OSError as error:
            console.print(Text(f"rlhf check: --json {json_path} cannot be written: {error.strerror}."), soft_wrap=True)
            return EXIT_USAGE
    if interrupt.signum is not None:
        return 128 + interrupt.signum
    if any(finding.status in ("failed", "slow") for finding in report.findings):
        return 1
    console.print(
        Text(f"{plan.recipe.name}: {', '.join(stage.folder for stage in plan.stages)} on {plan.placement}: no problem"),
        soft_wrap=True,
    )
    return 0


def _list(console: Console, head: str, lines: Sequence[str]) -> None:
    console.print(Text(f"{head} {len(lines)} problem{'s' if len(lines) > 1 else ''}:"))
    for line in lines:
        console.print(Text(f"  - {line}"), soft_wrap=True)


def _dry_run(plan: Plan, options: RunOptions, console: Console) -> None:
    """Print what a run would do; write nothing."""

    def say(text: str = "") -> None:
        console.print(Text(text), soft_wrap=True)

    say(f"recipe {plan.recipe.name}, version {plan.recipe.version}: {plan.recipe.description}")
    say(f"{plan.placement}, seed {plan.seed}, folder {plan.run_dir}")
    if plan.placement.is_remote:
        say(f"hostfile {plan.placement.hostfile}: {', '.join(map(str, plan.placement.hosts))}")
    for name, value in plan.recipe.environment.items():
        own = plan.environment[name]
        say(f"{name}={own}" + ("" if own == value else f"  (of the shell; the recipe has {value})"))
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
