"""One call of `rlhf run` on a locked run folder: start each stage, watch it, say how it ended. No torch."""

import dataclasses
import os
import shlex
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from launch import command, preflight, process
from launch.decide import Decision, decide_all
from launch.display import StageProgress, closing_table
from launch.inputs import stage_inputs
from launch.plan import Plan, PlanError, RunOptions, choose_port, config_path
from launch.recipe import Stage
from launch.record import build_summary, has_state, next_attempt, read_record, read_result, set_aside
from rlhf import artifacts
from rlhf.config import save_config

_LOG_LINES = 30


class Runner:
    """One call of `rlhf run` on a locked run folder."""

    def __init__(
        self, plan: Plan, options: RunOptions, console: Console, interrupt: process.Interrupt, lock: int
    ) -> None:
        self.plan, self.options, self.console = plan, options, console
        self.interrupt, self.lock = interrupt, lock
        self.outcomes: dict[str, dict[str, Any]] = {}

    def run(self) -> int:
        """Run what is not finished; returns the exit code."""
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
        path = config_path(plan.run_dir, stage)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_config(config, path)
        # Models of earlier stages are there now, so what this stage reads is known.
        inputs = stage_inputs(stage)
        port = choose_port(plan.placement)
        argv = command.stage_command(stage.module, path, plan.placement, port=port)
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
