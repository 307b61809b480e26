"""Run the stages of a recipe one after the other: decide, start, watch, hand on, sum up. No torch.

A run folder holds `step1_sft`, `step2_reward`, `step3_ppo` (written by the stages), `configs/` (what each was started
with), `logs/<stage>.<attempt>.log`, `launch.json` (what each attempt's inputs were and how it ended), `summary.json`,
the report, and `previous/` (folders of earlier attempts; nothing is deleted).
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import random
import shlex
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.text import Text

from launch import command, placement, preflight, process
from launch.display import StageProgress, closing_table, make_console
from launch.hostfile import HostfileError
from launch.inputs import changes, stage_inputs
from launch.placement import Placement, PlacementError, PlacementFlags
from launch.recipe import FOLDERS, Recipe, RecipeError, Stage, find_recipe, load_recipe, resolve_stages
from rlhf import artifacts, ds_config, host
from rlhf.config import save_config, to_dict

SUMMARY_SCHEMA = 1
EXIT_USAGE = 2
_LOG_LINES = 30


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


@dataclass(frozen=True)
class Decision:
    """What happens to one stage, and why."""

    action: str
    """`skip`, `run` or `resume`."""
    reason: str
    inputs: dict[str, Any] = field(default_factory=dict)


class PlanError(ValueError):
    """Problems found before anything was started, one a line."""


def run(options: RunOptions) -> int:
    """Run a recipe; returns the exit code: 0 when every stage is done, 2 for problems found before the start."""
    console = make_console()
    try:
        plan = make_plan(options)
        if options.dry_run:
            _dry_run(plan, options, console)
            return 0
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        with run_lock(plan.run_dir) as lock, process.catch_signals() as interrupt:
            return _Runner(plan, options, console, interrupt, lock).run()
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
            command.stage_command(stage.module, _config_path(run_dir, stage), where, port=1)
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


class _Runner:
    """One call of `rlhf run` on a locked run folder."""

    def __init__(
        self, plan: Plan, options: RunOptions, console: Console, interrupt: process.Interrupt, lock: int
    ) -> None:
        self.plan, self.options, self.console = plan, options, console
        self.interrupt, self.lock = interrupt, lock
        self.outcomes: dict[str, dict[str, Any]] = {}

    def run(self) -> int:
        plan, started = self.plan, time.monotonic()
        decisions = self._preflight()
        self._say(f"recipe {plan.recipe.name}, version {plan.recipe.version}: {plan.recipe.description}")
        self._say(f"{plan.placement}, seed {plan.seed}, folder {plan.run_dir}")
        done: list[str] = []
        for stage in plan.stages:
            decision = decisions[stage.name]
            if decision.action == "skip":
                self._say(f"{stage.folder}: skipped ({decision.reason})")
                continue
            if self.interrupt.signum is not None:
                return self._stopped(stage, self.interrupt.signum)
            code = self._run_stage(stage, decision)
            if code:
                return code
            done.append(stage.name)
        return self._close(time.monotonic() - started)

    def _preflight(self) -> dict[str, Decision]:
        plan = self.plan
        decisions, problems = decide_all(plan, self.options, contents=True)
        finished = [name for name, decision in decisions.items() if decision.action == "skip"]
        if len(finished) < len(plan.stages) and not problems:
            problems += preflight.check(
                plan.recipe,
                plan.stages,
                plan.placement,
                run_dir=plan.run_dir,
                environment=plan.environment,
                finished=finished,
            )
            problems += [] if problems else preflight.unreachable_hosts(plan.placement)
        if problems:
            raise PlanError("\n".join(map(str, problems)))
        return decisions

    def _run_stage(self, stage: Stage, decision: Decision) -> int:
        plan = self.plan
        resumes = decision.action == "resume"
        attempt = next_attempt(plan.run_dir, stage)
        if not resumes:
            set_aside(plan.run_dir, stage)
        config = dataclasses.replace(stage.config, run=dataclasses.replace(stage.config.run, resume=resumes))
        config_path = _config_path(plan.run_dir, stage)
        config_path.parent.mkdir(parents=True, exist_ok=True)
        save_config(config, config_path)
        # Models of earlier stages are there now, so what this stage reads is known.
        inputs = stage_inputs(stage)
        port = choose_port(plan.placement)
        argv = command.stage_command(stage.module, config_path, plan.placement, port=port)
        log_path = plan.run_dir / "logs" / f"{stage.folder}.{attempt}.log"
        log_path.parent.mkdir(exist_ok=True)
        self._say(f"{stage.folder}: {decision.reason}; attempt {attempt}, log {log_path}")
        record: dict[str, Any] = {"status": "running", "attempt": attempt, "started": time.time(), "command": argv}
        self._note(stage, {**record, "inputs": inputs})
        started = time.monotonic()
        with StageProgress(self.console, stage.folder, stage.out_dir / "progress.json") as progress:
            outcome = process.run_watched(
                argv,
                environment=self._environment(),
                log_path=log_path,
                interrupt=self.interrupt,
                on_tick=progress.tick,
                ends_remote_ranks=plan.placement.is_remote,
                keep_open=(self.lock,),
            )
        seconds = time.monotonic() - started
        result = read_result(stage.out_dir)
        if outcome.interrupted_by is not None:
            self._note(stage, {**record, "inputs": inputs, "status": "interrupted", "wall_seconds": seconds})
            self.outcomes[stage.folder] = {"status": "interrupted", "seconds": seconds}
            return self._stopped(stage, outcome.interrupted_by)
        if outcome.returncode == 0 and result is not None and outcome.num_leftover == 0:
            self._note(stage, {**record, "inputs": inputs, "status": "done", "wall_seconds": seconds})
            self._say(f"{stage.folder}: done in {seconds:.1f} s")
            return 0
        self._note(stage, {**record, "inputs": inputs, "status": "failed", "wall_seconds": seconds})
        return self._failed(stage, outcome, log_path, seconds=seconds, has_result=result is not None)

    def _environment(self) -> dict[str, str]:
        """The launcher's environment; for other machines also the file that deepspeed carries variables from."""
        environment = dict(self.plan.environment)
        if not self.plan.placement.is_remote:
            environment.pop("CUDA_VISIBLE_DEVICES", None)  # its devices are in --include or --num_gpus
            return environment
        variables = command.remote_variables(environment, self.plan.recipe.environment, command.user_variable_files())
        path = self.plan.run_dir / "deepspeed_env"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # may hold tokens
            file.write("".join(f"{name}={value}\n" for name, value in variables.items()))
        environment["DS_ENV_FILE"] = str(path)
        return environment

    def _failed(
        self, stage: Stage, outcome: process.Outcome, log_path: Path, *, seconds: float, has_result: bool
    ) -> int:
        text = log_path.read_text(encoding="utf-8", errors="replace")
        how = process.describe_failure(outcome, text)
        if outcome.returncode == 0 and not has_result:
            how += ", but the stage wrote no result.json"
        self.outcomes[stage.folder] = {"status": "failed", "seconds": seconds, "error": how}
        lines = text.rstrip().splitlines()[-_LOG_LINES:]
        self._say(f"{stage.folder} failed: {how}.")
        self._say(f"last {len(lines)} lines of {log_path}:")
        for line in lines:
            self._say(f"  {line}")
        hint = " --resume continues from the saved state." if has_state(stage.out_dir) else ""
        self._say(f"Finished stages are kept; the same command goes on at {stage.folder}.{hint}")
        self._summarise()
        return process.exit_code(outcome.returncode)

    def _stopped(self, stage: Stage, signum: int) -> int:
        hint = "; add --resume to go on from its saved state" if has_state(stage.out_dir) else ""
        self._say(f"stopped by {signal.Signals(signum).name} in {stage.folder}; its processes have ended{hint}.")
        self._summarise()
        return 128 + signum

    def _close(self, seconds: float) -> int:
        summary = self._summarise()
        self.console.print()
        self.console.print(closing_table(summary))
        from rlhf.report import write_report  # noqa: PLC0415  plots are drawn at the end of a run, not for a dry run

        try:
            report = write_report(self.plan.run_dir)
        except (ValueError, OSError, KeyError) as error:
            self._say(f"all stages are done, but the report failed: {type(error).__name__}: {error}")
            self._say(f"Repair the cause and write it with: rlhf report {shlex.quote(str(self.plan.run_dir))}")
            return 1
        self._say(f"total {seconds:.1f} s")
        self._say(f"summary {self.plan.run_dir / 'summary.json'}")
        self._say(f"report {report}")
        return 0

    def _summarise(self) -> dict[str, Any]:
        summary = build_summary(self.plan, self.outcomes)
        artifacts.write_json(self.plan.run_dir / "summary.json", summary)
        return summary

    def _note(self, stage: Stage, entry: Mapping[str, Any]) -> None:
        records = {**read_record(self.plan.run_dir), stage.folder: {**entry, "updated": time.time()}}
        artifacts.write_json(self.plan.run_dir / "launch.json", {"schema": 1, "stages": records})

    def _say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)


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
    """Whether a stage left something to resume from."""
    state = out_dir / "state"
    return state.is_dir() and any(state.iterdir())


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


def choose_port(where: Placement) -> int:
    """The port that was asked for, or a free one; on another machine a random one outside the ephemeral range."""
    if where.master_port is not None:
        return where.master_port
    return random.SystemRandom().randrange(20_000, 30_000) if where.is_remote else host.free_port()


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


def _config_path(run_dir: Path, stage: Stage) -> Path:
    return run_dir / "configs" / f"{stage.folder}.yaml"


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
        config_path = _config_path(plan.run_dir, stage)
        say()
        say(f"== {stage.folder}: {'skipped' if decision.action == 'skip' else 'runs'} ({decision.reason})")
        say(f"# {config_path}")
        say(yaml.safe_dump(to_dict(stage.config), sort_keys=False, width=100).rstrip())
        for role, name in stage.ds_configs().items():
            say(f"# DeepSpeed JSON of {role}: {name}")
            say(json.dumps(ds_config.load(name)))
        argv = command.stage_command(stage.module, config_path, plan.placement, port=choose_port(plan.placement))
        say(f"$ {shlex.join(argv)}")
    if problems:
        say()
        say("Here a run would stop before its first process:")
        for problem in problems:
            say(f"  - {problem.text}")
