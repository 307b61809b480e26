"""What a stage's loop holds: its folder, logger, seeds, timers, cadence and records.

One definition of speed, used by every printer: real tokens (no padding) of all ranks per wall second of training.
Training seconds run from the first timer (what is before is start-up) to the last train line and leave evaluation and
torch.compile's compiling out; all seconds are those of the slowest rank.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from rlhf import artifacts, distributed, heartbeat, memory, records, watchdog
from rlhf.clock import PARTS, Clock, Totals
from rlhf.config import RunConfig, save_config, to_dict
from rlhf.data.collate import Sequences
from rlhf.health import Health, Values, Verdict
from rlhf.metrics import Accumulator, JsonlSink, Sink, TensorBoardSink, WandbSink, lookup, split_finite
from rlhf.plan import flops
from rlhf.plan.shapes import Shape
from rlhf.profile import FOLDER, profiled
from rlhf.run_folder import HEARTBEAT, claim_folder, configure_logging, environment, seed_generators
from rlhf.states import StateError

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")

_SAMPLE_KEYS = {"prompt", "response", "stopped", "score", "gold"}


class StageConfig(Protocol):
    """What Run needs of a stage's config."""

    @property
    def run(self) -> RunConfig:
        """Folder, seed, cadence and sinks."""


class HasStates(Protocol):
    """An engine, trained or frozen."""

    def state_bytes(self) -> dict[str, int]:
        """Bytes on this rank of weights, gradients, optimizer."""


class Run:
    """One attempt at one stage. `Run.start` makes it; all ranks call its methods, in the same order."""

    def __init__(self, config: RunConfig, *, stage: str, num_steps: int, sinks: Sequence[Sink], started: float) -> None:
        self.config = config
        self.stage = stage
        self.num_steps = num_steps
        self.folder = Path(config.out_dir)
        self.metrics = Accumulator()
        self.totals = Totals()
        self.health = Health(config.health)
        self._sinks = sinks
        self._started = started
        self._clock = Clock()
        self._tokens: Tensor | int = 0
        self._flops = 0.0
        self._engines: list[HasStates] = []
        self._shape: Shape | None = None
        self._lora = 0
        self._counts = True
        self._logged_step = 0
        self._first_step = 0
        self._measured: dict[str, dict[str, float]] = {}
        self._line: tuple[int, dict[str, float]] = (-1, {})
        self._starting_up = True
        self._progress: dict[str, Any] = {"step": 0, "num_steps": num_steps, "phase": "start"}

    @classmethod
    def start(
        cls,
        cfg: StageConfig,
        *,
        stage: str,
        ds_configs: Mapping[str, Mapping[str, Any]],
        num_steps: int,
        share: int = 0,
    ) -> "Run":
        """Make the folder, write the resolved configs, open log and sinks, seed the generators.

        Args:
            cfg: the stage's config.
            stage: name of the stage, e.g. step1_sft.
            ds_configs: resolved DeepSpeed config of each role; role "" gives `ds_config.json`.
            num_steps: optimiser steps (PPO steps in step 3) of the whole run.
            share: number of this rank among those that share its rows.

        Raises:
            FileExistsError: the folder holds a run's files and run.resume is false.
            FileNotFoundError: run.resume is true and there is no state to resume from.
        """
        started = time.perf_counter()
        config, folder = cfg.run, Path(cfg.run.out_dir)
        claim_folder(folder, resume=config.resume)
        watchdog.write_records_to(folder / HEARTBEAT)
        configure_logging(folder)
        seed_generators(config.seed, share=share)
        sinks: list[Sink] = []
        if distributed.is_main():
            save_config(cfg, folder / "config.yaml")
            for role, ds_config in ds_configs.items():
                artifacts.write_json(folder / (f"ds_config_{role}.json" if role else "ds_config.json"), ds_config)
            artifacts.write_json(folder / "environment.json", environment(stage=stage, seed=config.seed))
            sinks.append(JsonlSink(folder / "metrics.jsonl"))
            if config.tensorboard:
                sinks.append(TensorBoardSink(folder / "tensorboard"))
            if config.wandb_project:
                name = f"{folder.resolve().parent.name}/{stage}"
                sinks.append(WandbSink(folder, project=config.wandb_project, name=name, config=to_dict(cfg)))
        run = cls(config, stage=stage, num_steps=num_steps, sinks=sinks, started=started)
        run._write_progress("start")
        logger.info("%s: %d steps on %d ranks, seed %d, folder %s", stage, num_steps, distributed.world_size(),
                    config.seed, folder)  # fmt: skip
        return run

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Add the block's seconds to `time/<phase>_seconds`, the accelerator synchronised at both ends."""
        if phase == "eval" and self._clock.phase is None:
            self._write_progress("eval")
        with heartbeat.during(phase), self._clock.timer(phase):
            yield

    @property
    def first_step(self) -> int:
        """Steps that an earlier attempt has made; 0 without a resume."""
        return self._first_step

    def steps(self, batches: Iterable[Batch]) -> Generator[tuple[int, Batch], None, None]:
        """The batches that are left, each with the number of steps that will have been made after it.

        Waiting for a batch counts as `time/input_seconds`.
        """
        left = iter(batches)
        self._write_progress("train")
        with ExitStack() as profiling:
            try:
                for step in range(self._first_step + 1, self.num_steps + 1):
                    heartbeat.at_step(step, self.num_steps)
                    if step == max(self._first_step, self.num_steps - self.config.profile_steps) + 1:
                        profiling.enter_context(profiled(self.folder / FOLDER))
                    with self.timer("input"):
                        batch = next(left)
                    yield step, batch
            finally:  # at once, and not when it is collected: a rollback iterates anew
                if isinstance(left, Generator):
                    left.close()

    def count_tokens(self, num_tokens: Tensor | int) -> None:
        """Count real tokens (no padding) that this rank trained on; a tensor stays on its device."""
        if self._counts:
            self._tokens = self._tokens + num_tokens

    def count_flops(self, flops: float) -> None:
        """Count model FLOPs (`rlhf.plan.flops`) of this rank's part of a step."""
        if self._counts:
            self._flops += flops

    def watch(
        self, engines: Iterable[HasStates], *, shape: Shape | None = None, lora: int = 0, counts: bool = True
    ) -> None:
        """Log the bytes of these engines' states with every train line, and count the FLOPs of training.

        Args:
            engines: of the stage.
            shape: of the model that `count_batch` is about; None: FLOPs are not counted there.
            lora: rank of its adapters, or 0.
            counts: whether this rank counts tokens and FLOPs: one alone of those that compute the same tokens does.
        """
        self._engines, self._shape, self._lora, self._counts = list(engines), shape, lora, counts

    def count_batch(self, sequences: Sequences, *, num_targets: int = 0) -> None:
        """Count what this rank has of a micro-batch that is trained on: real tokens, FLOPs and share of padding.

        Args:
            sequences: of the micro-batch.
            num_targets: tokens that go through the language head here.
        """
        self.count_tokens(sequences.num_tokens)
        if num_targets:
            self.metrics.add({"speed/target_frac": (num_targets, sequences.num_tokens)})
        if self._shape is not None:
            # An equal part of the sequences, as no rank's columns tell what attention costs, and the targets it has.
            sharers = sequences.num_sharers
            self.count_flops(
                flops.update(self._shape, sequences.lengths, targets=num_targets * sharers, lora=self._lora) / sharers
            )
        self.count_padding(sequences)

    def count_padding(self, sequences: Sequences) -> None:
        """Count a micro-batch's tokens and its share of padding."""
        self.metrics.add({
            "data/padding_frac": (sequences.num_padding, sequences.num_columns),
            "speed/micro_batch_tokens": (sequences.num_tokens, 1),
            "speed/columns_per_token": (sequences.num_columns, sequences.num_tokens),
        })  # fmt: skip

    def every(self, interval: int, step: int) -> bool:
        """Whether something that happens every `interval` steps is due after `step` steps; 0 is never."""
        return interval > 0 and step > 0 and step % interval == 0

    def seed_for(self, name: str, step: int) -> int:
        """A seed below 2^63 that depends on run.seed, `name` and `step` alone: same on all ranks and after a resume."""
        digest = hashlib.sha256(f"{self.config.seed}/{name}/{step}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def observe(self, step: int, values: Values) -> None:
        """Let the detectors look at a step, and record which of them have begun or ceased to fire.

        Args:
            step: its number.
            values: as `Health.observe` takes them, equal on all ranks.
        """
        for change in self.health.observe(step, values):
            self._record_health(change.step, change.detector, "fires" if change.fires else "ceases", change.text)

    def observe_failure(self, step: int, text: str) -> None:
        """Record that a loss or gradient was not finite; what follows is the detector's verdict."""
        change = self.health.not_finite(step, text)
        self._record_health(change.step, change.detector, "fires", change.text)

    def log(self, step: int) -> None:
        """Write the train line after `step` steps if it is due: by run.log_every, or as the last one."""
        if not self.every(self.config.log_every, step) and step != self.num_steps:
            return
        values = self._reduce(num_steps=step - self._logged_step)
        self._logged_step = step
        mean_seconds = self.totals.train_seconds / step if step else 0.0
        self._progress = {
            "step": step,
            "num_steps": self.num_steps,
            **{key: values[name] for key, name in (("loss", "train/loss"), ("score", "ppo/score")) if name in values},
            "tokens_per_second": values["speed/tokens_per_second"],
            "eta_seconds": mean_seconds * (self.num_steps - step),
        }
        self._write("train", step, values)
        self._write_progress("train")
        logger.info("%s", _line(step, self.num_steps, values))

    def log_eval(self, step: int, values: Mapping[str, float]) -> None:
        """Write the eval line of the model after `step` steps; the values are over all ranks already."""
        for name in values:
            lookup(name)
        self._write("eval", step, values)
        logger.info("eval after %d steps  %s", step, "  ".join(f"{name} {_short(v)}" for name, v in values.items()))

    def write_samples(self, when: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write rank 0's list to samples.jsonl in place of the samples of the same `when` (before or after)."""
        for sample in samples:
            if set(sample) != _SAMPLE_KEYS:
                raise ValueError(f"a sample has the keys {sorted(sample)}, but needs {sorted(_SAMPLE_KEYS)}.")
        if not distributed.is_main():
            return
        path = self.folder / "samples.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if json.loads(line)["when"] != when]
        kept += [json.dumps({"when": when, **_jsonable(sample)}, ensure_ascii=False) for sample in samples]
        _replace_text(path, "".join(f"{line}\n" for line in kept))

    def write_histograms(self, histograms: Mapping[str, Any]) -> None:
        """Add or replace entries of histograms.json, from rank 0."""
        if not distributed.is_main():
            return
        path = self.folder / "histograms.json"
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        artifacts.write_json(path, {**old, **histograms})

    def write_data_report(self, report: Mapping[str, Any], lines: Sequence[str] = ()) -> None:
        """Write data.json, what became of the rows, from rank 0; and the same as lines of text to the log.

        Training rows are read before there is a log, because the number of steps depends on them.
        """
        for line in lines:
            logger.info("%s", line)
        if distributed.is_main():
            artifacts.write_json(self.folder / "data.json", report)

    def once(self, name: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """What `measure` returned in the first attempt: a resumed run does not measure again what lies before it."""
        if name not in self._measured:
            self._measured[name] = measure()
        return self._measured[name]

    def state_dict(self, step: int) -> dict[str, Any]:
        """What a resumed run needs of this one after `step` steps, beside `window_state`; equal on all ranks."""
        self.totals.wall_seconds += self._lap_wall()
        return {
            "step": step,
            "logged_step": self._logged_step,
            "totals": vars(self.totals),
            "measured": {name: {k: str(v) for k, v in values.items()} for name, values in self._measured.items()},
            "metrics": split_finite(self._line[1])[0] if self._line[0] == step else {},
            "health": self.health.state_dict(),
            "records": records.position(self.folder) if distributed.is_main() else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the saved step: totals are restored, records of later steps are dropped.

        Raises:
            StateError: on all ranks, lines that were written before the save are gone.
        """
        self.totals = Totals(**state["totals"])
        measured = state["measured"].items()  # as text, because JSON has no inf
        self._measured = {name: {k: float(v) for k, v in values.items()} for name, values in measured}
        self._logged_step, self._first_step = int(state["logged_step"]), int(state["step"])
        self._progress.update(step=self._first_step)
        self.health.load_state_dict(state.get("health", {}))
        self._cut_records(state["records"])
        logger.info("resumed after step %d of %d", self._first_step, self.num_steps)

    def roll_back(self, state: Mapping[str, Any], verdict: Verdict, name: str) -> None:
        """Go on after the saved step as `load_state_dict`, and record why. Collective.

        Time that has passed stays counted, as wall seconds. health.jsonl keeps its lines: what they say has happened.

        Args:
            state: of `state_dict`.
            verdict: what went wrong.
            name: of the state.

        Raises:
            StateError: on all ranks, lines that were written before the save are gone.
        """
        health = self.health.state_dict()
        passed = self.totals
        kept = {name: size for name, size in state["records"].items() if name != records.HEALTH}
        self._clock.lap()
        self._clock.cpu_lap()
        self._line = (-1, {})
        self.load_state_dict({**state, "records": kept, "health": health})
        self.health.roll_back(state.get("health", {}))
        self.totals.wall_seconds = passed.wall_seconds
        self.totals.startup_seconds = passed.startup_seconds
        self._record_health(
            verdict.step, verdict.detector, "rollback", verdict.text,
            state=name, rollbacks=self.health.rollbacks, lr_scale=self.health.lr_scale,
        )  # fmt: skip

    def give_up(self, step: int, detector: str, text: str) -> None:
        """Record that a detector ends the run, and close the sinks."""
        self._record_health(step, detector, "stop", text)
        self._close("unhealthy")

    def window_state(self) -> dict[str, Any]:
        """What this rank has counted since the last train line."""
        return {
            "metrics": self.metrics.state_dict(),
            "tokens": int(self._tokens),
            "flops": self._flops,
            "clock": self._clock.state_dict(),
        }

    def load_window(self, windows: Sequence[Mapping[str, Any]]) -> None:
        """Go on with what one rank had counted; or with all that several had, on the first of another number of ranks.

        Args:
            windows: of `window_state`; none on ranks that start from nothing.
        """
        self.metrics.load_state_dicts([window["metrics"] for window in windows])
        self._tokens = sum(int(window["tokens"]) for window in windows)
        self._flops = sum(float(window.get("flops", 0.0)) for window in windows)
        self._clock.load_state_dicts([window["clock"] for window in windows])

    def stop(self) -> None:
        """Leave the run unfinished: close the sinks; `resume` in a later attempt goes on."""
        self._close("stopped")

    def _close(self, phase: str) -> None:
        self._write_progress(phase)
        for sink in self._sinks:
            sink.close()

    def _record_health(self, step: int, detector: str, event: str, text: str, **more: Any) -> None:
        """A line of health.jsonl, a warning in the log, and what fires in progress.json."""
        if not distributed.is_main():
            return
        line = {"step": step, "time": round(time.time(), 3), "detector": detector, "event": event, "text": text, **more}
        records.append(self.folder / records.HEALTH, line)
        said = [text] * bool(text) + [f"{key} {value}" for key, value in more.items()]
        logger.warning("health: %s, %s after step %d. %s", detector, event, step, ", ".join(said))
        self._write_progress("train")

    def _cut_records(self, position: Mapping[str, int]) -> None:
        fault = records.cut(self.folder, position) if distributed.is_main() else ""
        distributed.same_on_all(not fault, fault, error=StateError)

    def finish(self, metrics: Mapping[str, float], model_dir: str | Path) -> None:
        """Write result.json, which marks the stage as done, and close the sinks.

        Args:
            metrics: the stage's entries of summary.json.
            model_dir: the model folder, written as a path relative to the stage's folder.
        """
        self._reduce(num_steps=0)
        self.totals.wall_seconds += self._lap_wall()
        finite, notes = split_finite(metrics)
        result: dict[str, Any] = {
            "status": "done",
            "stage": self.stage,
            "seconds": self.totals.wall_seconds,
            "tokens_per_second": self.totals.tokens_per_second,
            "num_tokens": int(self.totals.tokens),
            "model_flops": self.totals.model_flops,
            "train_seconds": self.totals.train_seconds,
            "phase_seconds": {"startup": self.totals.startup_seconds, **self.totals.phase_seconds},
            "world_size": distributed.world_size(),
            "model_dir": os.path.relpath(model_dir, self.folder),
            "rollbacks": self.health.rollbacks,
            "metrics": finite,
        }
        if notes:
            result["notes"] = notes
        if distributed.is_main():
            artifacts.write_json(self.folder / "result.json", result)
        self._write_progress("done")
        logger.info("%s done in %.1f s: %s", self.stage, self.totals.wall_seconds, finite)
        for sink in self._sinks:
            sink.close()
        distributed.barrier()

    def _reduce(self, *, num_steps: int) -> dict[str, float]:
        """Bring the ranks' windows together, add them to the totals, and name what they say."""
        startup = 0.0
        if self._starting_up and self._clock.lap_start is not None:
            startup = self._clock.lap_start - self._started
            self._starting_up = False
        lap = self._clock.lap()
        reduced = self.metrics.reduce(
            totals={"tokens": self._tokens, "flops": self._flops, "cpu": self._clock.cpu_lap()},
            maxima={**lap, "startup": startup, **self._memory()},
        )
        self._tokens, self._flops = 0, 0.0
        tokens, seconds = reduced.totals["tokens"], dict(reduced.maxima)
        # Of the phases' slowest ranks: a fast rank that waits for a slow one's update is not doing something else.
        seconds["other"] = max(0.0, seconds["wall"] - sum(seconds[part] for part in PARTS))
        self.totals.tokens += tokens
        self.totals.model_flops += reduced.totals["flops"]
        if num_steps:  # what follows the last step is export and evaluation
            self.totals.train_seconds += seconds["train"]
        self.totals.startup_seconds += seconds["startup"]
        for phase in self.totals.phase_seconds:
            self.totals.phase_seconds[phase] += seconds[phase]
        values = dict(reduced.means)
        if num_steps:
            values["time/step_seconds"] = seconds["train"] / num_steps
            values["time/cpu_seconds"] = reduced.totals["cpu"]
        values.update(
            {f"time/{phase}_seconds": seconds[phase] for phase in self.totals.phase_seconds if seconds[phase]}
        )
        values["speed/tokens_per_second"] = tokens / seconds["train"] if seconds["train"] > 0 else 0.0
        if reduced.totals["flops"] and seconds["train"] > 0:
            per_rank = reduced.totals["flops"] / distributed.world_size()
            values["speed/model_flops_per_second"] = per_rank / seconds["train"]
        values.update({name: value for name, value in reduced.maxima.items() if name.startswith("memory/")})
        return values

    def _memory(self) -> dict[str, float]:
        """Metrics of this rank's memory: its peak, and what the watched engines hold."""
        found = {"memory/peak_bytes": float(memory.peak_bytes())}
        for engine in self._engines:
            for name, size in engine.state_bytes().items():
                found[f"memory/{name}_bytes"] = found.get(f"memory/{name}_bytes", 0.0) + size
        return found

    def _lap_wall(self) -> float:
        """Seconds of this process since `start` or the last call."""
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        return seconds

    def _write(self, split: str, step: int, values: Mapping[str, float]) -> None:
        self._line = (step, {**(self._line[1] if self._line[0] == step else {}), **values})
        now = time.time()
        for sink in self._sinks:
            sink.write(step, split, values, time=now)

    def _write_progress(self, phase: str) -> None:
        if distributed.is_main():
            self._progress = {**self._progress, "phase": phase}
            progress, _ = split_finite({key: v for key, v in self._progress.items() if key != "phase"})
            health = {"firing": self.health.firing, "rollbacks": self.health.rollbacks}
            artifacts.write_json(self.folder / "progress.json", {**progress, **health, "phase": phase})


def _replace_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _jsonable(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample with null in place of numbers that are not finite."""
    return {k: None if isinstance(v, float) and v - v != 0 else v for k, v in sample.items()}


def _short(value: float) -> str:
    return f"{value:.4g}"


def _line(step: int, num_steps: int, values: Mapping[str, float]) -> str:
    shown = [f"{name} {_short(v)}" for name, v in values.items() if not name.startswith(("time/", "memory/", "speed/"))]
    speed = f"{values['speed/tokens_per_second']:.0f} tokens/s"
    seconds = [f"{values['time/step_seconds']:.2f} s/step"] if "time/step_seconds" in values else []
    if "time/compile_seconds" in values:
        seconds.append(f"compiling {values['time/compile_seconds']:.1f} s")
    return "  ".join([f"step {step}/{num_steps}", *shown, speed, *seconds])
