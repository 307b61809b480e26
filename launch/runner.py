"""One call of `rlhf run` on a locked run folder: start each stage, watch it, say how it ended. No torch."""

import dataclasses
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from launch import command, preflight, process
from launch.cluster.check import CheckOptions, check_machines
from launch.cluster.finding import failed
from launch.cluster.show import show_report
from launch.decide import Decision, decide_all
from launch.display import StageProgress, closing_table, read_progress
from launch.environment import launcher_environment
from launch.failure import Failure, explain
from launch.inputs import stage_inputs
from launch.plan import Plan, PlanError, RunOptions, choose_port, config_path, rank_folder
from launch.ranks import Ranks
from launch.recipe import Stage
from launch.record import build_summary, has_state, next_attempt, read_record, read_result, set_aside
from launch.restart import GiveUpError, Restarts, check_fewer_ranks, without
from launch.stopping import SoftStop
from rlhf import artifacts
from rlhf.config import save_config
from rlhf.stopping import EXIT_STOPPED


class Runner:
    """One call of `rlhf run` on a locked run folder."""

    def __init__(self, plan: Plan, options: RunOptions, console: Console, soft_stop: SoftStop, lock: int) -> None:
        self.plan, self.options, self.console = plan, options, console
        self.soft_stop, self.interrupt, self.lock = soft_stop, soft_stop.interrupt, lock
        self.placement = plan.placement
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
            if self.soft_stop.signum is not None:
                self._say(f"stopped on request before {stage.folder}; the same command with --resume goes on there.")
                self._summarise()
                return EXIT_STOPPED
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
        if (
            len(finished) < len(plan.stages)
            and plan.placement.is_remote
            and self.options.check
            and plan.placement.launcher != "slurm"
        ):
            self._check_machines(finished)
        return decisions

    def _check_machines(self, finished: Sequence[str]) -> None:
        """What `rlhf check` does; a slow link is told, and no reason to stop."""
        self._say("checking the machines; --no-check leaves it out")
        report = check_machines(self.plan, CheckOptions(), self.interrupt, finished=finished)
        show_report(self.console, self.plan, report)
        if problems := failed(report.findings):
            raise PlanError("\n".join(map(str, problems)))

    def _run_stage(self, stage: Stage, decision: Decision) -> int:
        """Run a stage, again where --restarts allows it; returns the exit code."""
        resumes, reason = decision.action == "resume", decision.reason
        weights_only = resumes and self.options.resume_weights_only
        restarts = Restarts(most=self.options.restarts, delay_seconds=self.options.restart_delay)
        while True:
            code, failure = self._attempt(stage, resumes=resumes, weights_only=weights_only, reason=reason)
            weights_only = False
            if failure is None:
                return code
            try:
                delay = restarts.next_delay(step=failure.step, exit_code=code)
                if self.options.elastic:
                    self._drop_lost_hosts(stage)
            except GiveUpError as error:
                self._give_up(stage, str(error))
                return code
            resumes = has_state(stage.out_dir)
            reason = "continues from its saved state" if resumes else "no state was saved, so it starts over"
            self._say(f"{stage.folder}: restart {restarts.done} of {restarts.most} in {delay:g} s")
            self._wait(delay)
            if self.interrupt.signum is not None:
                return self._stopped(stage, self.interrupt.signum)

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.interrupt.signum is None:
            time.sleep(0.1)

    def _drop_lost_hosts(self, stage: Stage) -> None:
        lost = preflight.hosts_without_answer(self.placement)
        if not lost:
            return
        self.placement = without(self.placement, lost)
        check_fewer_ranks(stage, self.placement)
        self._say(f"--elastic: {', '.join(lost)} does not answer; going on with {self.placement}")

    def _attempt(self, stage: Stage, *, resumes: bool, weights_only: bool, reason: str) -> tuple[int, Failure | None]:
        """Start a stage once and watch it; returns an exit code, and what is to be said if it failed."""
        run_dir, attempt = self.plan.run_dir, next_attempt(self.plan.run_dir, stage)
        if not resumes:
            set_aside(run_dir, stage)
        run_config = dataclasses.replace(stage.config.run, resume=resumes, resume_weights_only=weights_only)
        config = dataclasses.replace(stage.config, run=run_config)
        path = config_path(run_dir, stage)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_config(config, path)
        # Models of earlier stages are there now, so what this stage reads is known.
        inputs = stage_inputs(stage)
        folder = rank_folder(run_dir, stage, attempt)
        log_path = folder.with_name(f"{folder.name}.log")
        ranks = Ranks(folder, world_size=self.placement.world_size, config=config.run.watchdog)
        argv = command.stage_command(
            stage.module, path, self.placement, port=choose_port(self.placement), rank_logs=folder
        )
        self._say(f"{stage.folder}: {reason}; attempt {attempt}, log {log_path}")
        record: dict[str, Any] = {"status": "running", "attempt": attempt, "started": time.time(), "command": argv}
        record["inputs"] = inputs
        self._note(stage, record)
        started = time.monotonic()
        began = time.time()

        def tick() -> None:
            progress.tick()
            self.soft_stop.tick()

        with (
            StageProgress(self.console, stage.folder, stage.out_dir / "progress.json") as progress,
            self.soft_stop.stage(stage.out_dir, not_before=began),
        ):
            outcome = process.run_watched(
                argv,
                environment=launcher_environment(
                    self.plan, self.placement, rank_logs=folder, variables=ranks.variables
                ),
                log_path=log_path,
                interrupt=self.interrupt,
                on_tick=tick,
                ranks=ranks,
                ends_remote_ranks=self.placement.is_remote,
                keep_open=(self.lock,),
            )
        seconds = time.monotonic() - started
        result = read_result(stage.out_dir)
        if outcome.interrupted_by is not None:
            self._note(stage, {**record, "status": "interrupted", "wall_seconds": seconds})
            self.outcomes[stage.folder] = {"status": "interrupted", "seconds": seconds}
            return self._stopped(stage, outcome.interrupted_by), None
        if read_progress(stage.out_dir / "progress.json", not_before=began).get("phase") == "stopped":
            self._note(stage, {**record, "status": "stopped", "wall_seconds": seconds})
            return self._saved(stage, seconds), None
        if outcome.returncode == 0 and result is not None and outcome.num_leftover == 0:
            self._note(stage, {**record, "status": "done", "wall_seconds": seconds})
            self.outcomes.pop(stage.folder, None)
            self._say(f"{stage.folder}: done in {seconds:.1f} s")
            return 0, None
        self._note(stage, {**record, "status": "failed", "wall_seconds": seconds})
        failure = explain(outcome, ranks, log_path)
        missing = ", but the stage wrote no result.json" if outcome.returncode == 0 and result is None else ""
        # All ranks of a run whose network is cut wait for one another; none is at fault.
        away = preflight.hosts_without_answer(self.placement) if outcome.stuck is not None else []
        unanswered = f" No answer from {', '.join(away)} now" if away else ""
        self._tell(stage, failure, f"{failure.text}{missing}{unanswered}", seconds=seconds)
        return failure.exit_code, failure

    def _tell(self, stage: Stage, failure: Failure, how: str, *, seconds: float) -> None:
        """Say which rank failed, its last lines, and every rank's stack if it was stuck."""
        self.outcomes[stage.folder] = {"status": "failed", "seconds": seconds, "error": how}
        self._say(f"{stage.folder} failed: {how.rstrip('.')}.")
        for rank, stack in failure.stacks.items():
            self._say(f"rank {rank} was at, innermost call first:")
            for line in stack:
                self._say(f"  {line}")
        if failure.stacks:
            self._say(f"all threads of all ranks: {failure.stacks_pattern}")
        self._say(f"last {len(failure.lines)} lines of {failure.lines_path}:")
        for line in failure.lines:
            self._say(f"  {line}")
        self._summarise()

    def _give_up(self, stage: Stage, why: str) -> None:
        if why:
            self._say(f"{stage.folder}: {why}")
        hint = " --resume continues from the saved state." if has_state(stage.out_dir) else ""
        self._say(f"Finished stages are kept; the same command goes on at {stage.folder}.{hint}")

    def _saved(self, stage: Stage, seconds: float) -> int:
        """The stage was asked to stop, by this launcher or by a signal of its own, and has saved its state."""
        self.outcomes[stage.folder] = {"status": "stopped", "seconds": seconds}
        self._say(f"{stage.folder}: stopped on request, state saved; the same command with --resume goes on.")
        self._summarise()
        return EXIT_STOPPED

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
