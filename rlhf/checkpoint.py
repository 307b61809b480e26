"""Save a run so that it can go on as if it had never stopped: when, what, and how it is taken back.

A state holds sharded weights and optimiser of every trained model, position or value of every part (loader, KL
coefficient, running scale), and of each rank the random generators and the metrics that are not written yet. Where it
lies and what makes it complete: `rlhf/states.py`. All ranks see one file system. Rank 0's errors reach all.
"""

import contextlib
import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from rlhf import artifacts, distributed, heartbeat, states
from rlhf.engine import NonFiniteError, TrainEngine
from rlhf.health import UnhealthyError, Verdict
from rlhf.metrics import lookup
from rlhf.resumable import Batches, Language, ResumableRun, Stateful
from rlhf.rng import rng_state, set_rng_state
from rlhf.state_checks import newest_intact, read_back, writing
from rlhf.state_writer import StateWriter
from rlhf.states import StateError
from rlhf.stopping import EXIT_STOPPED, StopRequest
from rlhf.universal import convert, convert_weights

logger = logging.getLogger(__name__)

Batch = TypeVar("Batch")
Converter = Callable[[Path, Mapping[str, Any], Path], None]


@dataclass
class _Pending:
    """A state that is being written."""

    step: int
    writer: StateWriter
    record: dict[str, Any]
    started: float


class Checkpoints:
    """The states of one run; all ranks call its methods in the same order."""

    def __init__(
        self,
        run: ResumableRun,
        engines: Mapping[str, TrainEngine],
        parts: Mapping[str, Stateful],
        *,
        language: Language,
    ) -> None:
        """Nothing is read or written yet.

        Args:
            run: of the stage.
            engines: trained models by name.
            parts: everything else that has a position or a value.
            language: of the models; saved once beside the states.

        Raises:
            ValueError: run.keep_best is no metric.
        """
        self.run, self.engines, self.parts = run, engines, parts
        self.language = language
        self.folder = states.states_of(run.folder)
        self._pending: _Pending | None = None
        self._last_save = time.monotonic()
        self._start = 0
        self._best = None
        if run.config.keep_best:
            direction = lookup(run.config.keep_best).direction
            if direction == "none":
                raise ValueError(f"run.keep_best={run.config.keep_best}: neither more nor less of it is better.")
            self._best = (run.config.keep_best, direction)

    @property
    def saves_regularly(self) -> bool:
        """Whether the config asks for states; on request one is written in any case."""
        return self.run.config.save_every > 0 or self.run.config.save_minutes > 0

    def steps(self, batches: Batches[Batch]) -> Iterator[tuple[int, Batch]]:
        """The run's steps; after each one a state is saved if it is due by count, by time or by request. Collective.

        The first state is written before the first step: a disk that cannot take it is found then. Where a detector
        turns the run back, the steps after the state that it returns to come again, with other batches.

        Args:
            batches: the loader, which is one of the parts.

        Raises:
            StateError: on all ranks, a state could not be written; earlier ones are as they were.
            SystemExit: code 75, after a request to stop and the state of that step.
            UnhealthyError: on all ranks, a detector has stopped the run.
        """
        request = StopRequest(self.run.folder)
        with request.listening():
            self._last_save = time.monotonic()
            first = self.run.first_step
            self._start = first if self.run.config.resume_weights_only else 0
            if self.saves_regularly and (first == 0 or self.run.config.resume_weights_only):
                self.save(first)
            while (verdict := (yield from self._pass(batches, request))) is not None:
                self._answer(verdict, batches)
            self.wait()

    def _pass(
        self, batches: Batches[Batch], request: StopRequest
    ) -> Generator[tuple[int, Batch], None, Verdict | None]:
        """The steps that are left; returns at the end of the run, or with what a detector has found."""
        with contextlib.closing(self.run.steps(batches)) as left:
            for step, batch in left:
                yield step, batch
                verdict = self.run.health.take_verdict()
                if verdict is not None:
                    return verdict
                self._after(step, request)
        return None

    @heartbeat.during("save")
    def _answer(self, verdict: Verdict, batches: Batches[Any]) -> None:
        """Stop the run, or take it back to its last good state and on with other rows. Collective."""
        self.wait()
        most = self.run.config.health.most_rollbacks
        if verdict.action == "stop":
            self._stop(verdict, "")
        if self.run.health.rollbacks >= most:
            self._stop(verdict, f" run.health.most_rollbacks={most} are used up.")
        bad = self._bad_states(verdict)
        if distributed.broadcast_object(len(bad) == len(states.complete(self.folder))):
            self._stop(verdict, "")
        seen = batches.state_dict()
        with distributed.together(f"removing states of {self.folder} that are not good"):
            for path in bad:
                states.delete(path)
        state, record = newest_intact(self.folder)
        self._take_parts(record["parts"])
        batches.skip_past(seen)
        self._load_engines(state, record)
        self.run.roll_back(record["run"], verdict, state.name)
        self._load_ranks(state, int(record["world_size"]), with_rng=True)
        self._scale_rates()

    def _stop(self, verdict: Verdict, why: str) -> NoReturn:
        """End the run; a resume starts from the last good state."""
        with distributed.together(f"setting states of {self.folder} aside"):
            for path in self._bad_states(verdict):
                states.set_aside(path, "unhealthy")
        self.run.give_up(verdict.step, verdict.detector, verdict.text)
        left = distributed.broadcast_object([path.name for path in states.complete(self.folder)])
        kept = f"The last good state is {self.folder / left[-1]}." if left else "There is no state to go back to."
        distributed.barrier()
        raise UnhealthyError(f"{verdict.detector} at step {verdict.step}: {verdict.text}.{why} {kept}")

    @property
    def _keep_good(self) -> int:
        """Good states that are kept: the step after the newest may yet find its weights wanting."""
        health = self.run.config.health
        return 2 if health.with_action("rollback") or set(health.with_action("stop")) - {"non_finite"} else 0

    def _bad_states(self, verdict: Verdict) -> list[Path]:
        """On rank 0, the states not to go back to: from the one on whose weights were first found over the limit.

        The start of the run, or of a resume with weights alone, is one to go back to in any case.
        """
        found = states.complete(self.folder) if distributed.is_main() else []
        limit = max(verdict.since - 1, self._start + 1)
        return [path for path in found if states.step_of(path) >= limit or not states.is_good(path)]

    def _scale_rates(self) -> None:
        for engine in self.engines.values():
            engine.lr_scale = self.run.health.lr_scale

    @contextmanager
    def guarded(self, step: int) -> Iterator[None]:
        """The work of a step: with run.health.non_finite.action=rollback a NonFiniteError ends the block, not the run.

        Raises:
            NonFiniteError: where nothing is to be rolled back.
        """
        try:
            yield
        except NonFiniteError as error:
            self.run.observe_failure(step, str(error))
            if self.run.health.config.non_finite.action == "stop":
                self.run.give_up(step, "non_finite", str(error))
                raise
            if error.accumulated:
                self.engines[error.role].discard_gradients()

    def _after(self, step: int, request: StopRequest) -> None:
        config, main = self.run.config, distributed.is_main()
        late = bool(config.save_minutes) and time.monotonic() - self._last_save >= 60 * config.save_minutes
        busy = self._pending is not None and self._pending.writer.is_busy
        # Rank 0's clock and eyes; anyone's signal; all writers.
        flags = torch.tensor([request.is_there(look=main), late and main, busy], dtype=torch.int64)
        asked, late, busy = map(bool, distributed.all_max(flags).tolist())
        if self._pending is not None and not busy:
            self.wait()
        if asked or late or (config.save_every > 0 and step % config.save_every == 0):
            self.save(step)
        if asked:
            self.wait()
            logger.warning("stopped on request after step %d of %d, state saved", step, self.run.num_steps)
            if main:
                request.path.unlink(missing_ok=True)
            self.run.stop()
            distributed.barrier()
            raise SystemExit(EXIT_STOPPED)

    @heartbeat.during("save")
    def save(self, step: int) -> None:
        """Write the state after `step` steps. With run.save_async it counts after `wait` or a later step. Collective.

        Raises:
            StateError: on all ranks.
        """
        self.wait()
        self._last_save = started = time.monotonic()
        part = states.part_of(self.folder, step)
        with writing(self.folder, step):
            if distributed.is_main():
                states.discard_parts(self.folder)
                (part / "ranks").mkdir(parents=True)
                if not (self.folder / states.TOKENIZER).is_dir():
                    with artifacts.staged_folder(self.folder / states.TOKENIZER) as folder:
                        self.language.save(folder)
        writer = StateWriter(part, beside=self.run.config.save_async)
        for name, engine in self.engines.items():
            engine.save_state(part, name, writer)
        with writing(self.folder, step):
            own = {"rng": rng_state(), "window": self.run.window_state()}
            artifacts.write_json(part / "ranks" / f"{distributed.rank()}.json", own)
        record = _frozen({
            "step": step,
            "world_size": distributed.world_size(),
            "engines": {name: engine.layout() for name, engine in self.engines.items()},
            "fits": self._fits(),
            "contract": dataclasses.asdict(self.language.contract),
            "run": self.run.state_dict(step),
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        })  # fmt: skip
        self._pending = _Pending(step, writer, record, started)
        if not self.run.config.save_async:
            self.wait()

    @heartbeat.during("save")
    def wait(self) -> None:
        """Finish the state that is being written: all files there, read back, named; then rotate. Collective.

        Raises:
            StateError: on all ranks; the state does not count.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        part, target = states.part_of(self.folder, pending.step), states.path_of(self.folder, pending.step)
        with writing(self.folder, pending.step):
            pending.writer.wait()
        files = read_back(self.folder, pending.step, pending.writer.entries)
        with writing(self.folder, pending.step):
            if distributed.is_main():
                entries = {name: vars(entry) for name, entry in sorted(files.items())}
                states.publish(part, target, {**pending.record, "files": entries})
                keep = self.run.config.keep_states
                states.rotate(self.folder, keep=keep, keep_good=self._keep_good, best=self._best)
        size = sum(entry.bytes for entry in files.values())
        logger.info("saved %s, %.1f MB, %.2f s", target, size / 1e6, time.monotonic() - pending.started)

    def resume(self) -> None:
        """Take back the newest intact state if run.resume, else nothing. Collective.

        Raises:
            StateError: on all ranks: there is none, or it does not fit this run, with all that differs.
        """
        config = self.run.config
        if not config.resume:
            return
        state, record = newest_intact(self.folder)
        weights_only = config.resume_weights_only
        faults = [] if weights_only else states.differences(record["fits"], self._fits())
        faults += _share_faults(record, self.engines, weights_only=weights_only) or _shape_faults(
            record["engines"], self.engines
        )
        faults += self._take_parts(record["parts"])
        if faults:
            lines = "".join(f"\n  - {fault}" for fault in faults)
            raise StateError(
                f"{state} does not fit this run:{lines}\nResume with the config that the run began with, or start a "
                "new run. run.resume_weights_only takes the weights alone where optimiser or schedule differ."
            )
        if weights_only:
            self._load_weights(state, record)
        else:
            self._load_engines(state, record)
        self._load_ranks(state, int(record["world_size"]), with_rng=not weights_only)
        self.run.load_state_dict(record["run"])
        self._scale_rates()
        logger.info("resumed from %s", state)

    def _fits(self) -> dict[str, Any]:
        """What has to be the same for the trajectory to be the same."""
        found: dict[str, Any] = {
            "stage": self.run.stage,
            "seed": self.run.config.seed,
            "steps of the run": self.run.num_steps,
            **{name.replace("_", " "): value for name, value in dataclasses.asdict(self.language.contract).items()},
        }
        for name, engine in self.engines.items():
            found.update({f"{name}.{key}": value for key, value in engine.describe().items()})
        return _frozen(found)

    def _take_parts(self, saved: Mapping[str, Any]) -> list[str]:
        """Give each part its state; returns what the parts have to say against it."""
        if saved.keys() != self.parts.keys():
            return [f"it was saved with {sorted(saved)}, this run has {sorted(self.parts)}"]
        faults = []
        for name, part in self.parts.items():
            try:
                part.load_state_dict(saved[name])
            except ValueError as error:
                faults.append(str(error))
        return faults

    def _load_engines(self, state: Path, record: Mapping[str, Any]) -> None:
        """Files as they are where ranks and ZeRO stage are those of the save, else by way of the universal form."""
        size = int(record["world_size"])
        for name, engine in self.engines.items():
            layout = record["engines"][name]
            same_size = size == distributed.world_size() or layout["zero_stage"] == engine.zero_stage == 0
            if same_size and layout["zero_stage"] == engine.zero_stage:
                engine.load_state(state, name)
                continue
            if engine.optim.name == "adamw_8bit":
                raise StateError(
                    f"{state} was saved on {size} ranks with ZeRO-{layout['zero_stage']}, this run has "
                    f"{distributed.world_size()} with ZeRO-{engine.zero_stage}: optim.name={engine.optim.name} keeps "
                    "moments in 8 bits, whose blocks of 256 with a scale each end where a rank's share does, so that "
                    "they cannot be cut otherwise without rounding anew. Resume with the ranks and stage of the save, "
                    "or take the weights alone with run.resume_weights_only."
                )
            logger.warning(
                "%s was saved on %d ranks with ZeRO-%d, this run has %d with ZeRO-%d: it goes on, equal to rounding",
                name, size, layout["zero_stage"], distributed.world_size(), engine.zero_stage,
            )  # fmt: skip
            self._load_converted(state, record, name, convert)

    def _load_weights(self, state: Path, record: Mapping[str, Any]) -> None:
        for name in self.engines:
            self._load_converted(state, record, name, convert_weights)
        logger.warning(
            "run.resume_weights_only: left behind are the optimisers' moments (they start anew), loss scales and "
            "random generators. Kept are weights, steps made, %s and the records.", ", ".join(sorted(self.parts)),
        )  # fmt: skip

    def _load_converted(self, state: Path, record: Mapping[str, Any], name: str, converter: Converter) -> None:
        layout = record["engines"][name]
        stages = [layout.get("pipeline", 1), self.engines[name].layout().get("pipeline", 1)]
        if max(stages) > 1:
            raise StateError(
                f"{state} was saved by a pipeline of {stages[0]} stages, this run has {stages[1]}, and ranks or ZeRO "
                "stage may differ: what a pipeline saves is not converted. Resume with the parallel section, the ranks "
                "and the JSON of the save."
            )
        with _scratch(self.folder / f".universal_{name}") as folder:
            with distributed.together(f"converting {state / name}"):
                if distributed.is_main():
                    converter(state / name, layout, folder)
            self.engines[name].load_universal(folder, step_count=layout["step_count"])

    def _load_ranks(self, state: Path, saved_size: int, *, with_rng: bool) -> None:
        """Generators and open metrics of this rank; of all of them, on rank 0, where the number of ranks differs."""
        rank = distributed.rank()

        def read(number: int) -> dict[str, Any]:
            text = (state / "ranks" / f"{number}.json").read_text(encoding="utf-8")
            return json.loads(text)  # type: ignore[no-any-return]

        same = saved_size == distributed.world_size()
        if with_rng and rank < saved_size:  # a rank that the saved run did not have keeps its own
            set_rng_state(read(rank)["rng"])
        mine = [rank] if same else range(saved_size) if rank == 0 else []
        self.run.load_window([read(number)["window"] for number in mine])


@contextmanager
def _scratch(path: Path) -> Iterator[Path]:
    """A folder that rank 0 makes and removes. Collective."""
    with distributed.together(f"making {path}"):
        if distributed.is_main():
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
    yield path
    distributed.barrier()
    if distributed.is_main():
        shutil.rmtree(path, ignore_errors=True)


def _frozen(value: dict[str, Any]) -> dict[str, Any]:
    """A copy as JSON gives it back: nothing in it changes while training goes on, and tuples are lists."""
    return json.loads(json.dumps(value))  # type: ignore[no-any-return]


def _share_faults(record: Mapping[str, Any], engines: Mapping[str, TrainEngine], *, weights_only: bool) -> list[str]:
    """Engines whose files hold shares of weights, which are not converted, that this run has otherwise."""
    faults = []
    for name, engine in engines.items():
        layout = record["engines"].get(name, {})
        saved, own = layout.get("tensor_parallel", 1), engine.tensor.size
        if saved == own == 1 or not layout:
            continue
        was = (saved, int(record["world_size"]), layout["zero_stage"])
        now = (own, distributed.world_size(), engine.zero_stage)
        if was != now:
            faults.append(
                f"{name} was saved with parallel.tp={was[0]} on {was[1]} ranks with ZeRO-{was[2]}, this run has "
                f"parallel.tp={now[0]} on {now[1]} with ZeRO-{now[2]}: shares of weights are not converted"
            )
        elif weights_only:
            faults.append(f"{name} was saved with parallel.tp={saved}, whose shares cannot be taken without moments")
    return faults


def _shape_faults(saved: Mapping[str, Any], engines: Mapping[str, TrainEngine]) -> list[str]:
    """Engines, and the names and shapes of their weights, that are not those of the state."""
    if saved.keys() != engines.keys():
        return [f"it holds the models {sorted(saved)}, this run trains {sorted(engines)}"]
    own = {f"{name}.weights": engine.layout()["shapes"] for name, engine in engines.items()}
    return states.differences({f"{name}.weights": layout["shapes"] for name, layout in saved.items()}, own)
