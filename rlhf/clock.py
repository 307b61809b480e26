"""Seconds and tokens of a run: of each phase since the last line, and in all."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlhf import distributed
from rlhf.models.compiled import compile_seconds

PHASES = ("input", "rollout", "score", "update", "eval")
# What cuts into the phases: nobody knows in which of them torch.compile will be at work.
PARTS = (*PHASES, "compile")


@dataclass
class Totals:
    """Sums since the run began, earlier attempts included; equal on all ranks."""

    tokens: float = 0.0
    model_flops: float = 0.0
    train_seconds: float = 0.0
    startup_seconds: float = 0.0
    wall_seconds: float = 0.0
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PARTS, "other"), 0.0))

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks per wall second of training."""
        return self.tokens / self.train_seconds if self.train_seconds else 0.0


class Clock:
    """Seconds of each phase on this rank since the last `lap`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.phase: str | None = None
        self.lap_start: float | None = None
        self.cpu_start = 0.0
        self.eval_cpu_seconds = 0.0
        self.earlier = {"wall": 0.0, "cpu": 0.0}

    @contextmanager
    def timer(self, phase: str) -> Iterator[None]:
        """Count the block for `phase`, without what is compiled in it; a timer inside another counts for the outer."""
        if phase not in PHASES:
            raise ValueError(f"timer {phase!r} is not one of {', '.join(PHASES)}. Use one of them.")
        if self.phase is not None:
            yield
            return
        distributed.synchronise()
        start, cpu_start, compile_start = time.perf_counter(), time.process_time(), compile_seconds()
        if self.lap_start is None:
            self.lap_start, self.cpu_start = start, cpu_start
        self.phase = phase
        try:
            yield
            distributed.synchronise()
        finally:
            compiling = compile_seconds() - compile_start
            self.seconds["compile"] += compiling
            self.seconds[phase] += time.perf_counter() - start - compiling
            if phase == "eval":
                self.eval_cpu_seconds += time.process_time() - cpu_start
            self.phase = None

    def lap(self) -> dict[str, float]:
        """Seconds since the last call: each phase, `compile`, `wall` (all), `train` (all but eval and compile)."""
        now = time.perf_counter()
        wall = self.earlier["wall"] + (0.0 if self.lap_start is None else now - self.lap_start)
        lap = {**self.seconds, "wall": wall, "train": wall - self.seconds["eval"] - self.seconds["compile"]}
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.earlier["wall"] = 0.0
        self.lap_start = now if self.lap_start is not None else None
        return lap

    def cpu_lap(self) -> float:
        """Processor seconds of this process's threads since the last call, evaluation left out; starts again."""
        now = time.process_time()
        seconds = 0.0 if self.lap_start is None else now - self.cpu_start - self.eval_cpu_seconds
        self.cpu_start, self.eval_cpu_seconds = now, 0.0
        seconds, self.earlier["cpu"] = seconds + self.earlier["cpu"], 0.0
        return seconds

    def state_dict(self) -> dict[str, float]:
        """Seconds since the last `lap`, which a resumed run adds to its own; the clock goes on."""
        since = {"wall": 0.0, "cpu": 0.0}
        if self.lap_start is not None:
            since["wall"] = time.perf_counter() - self.lap_start
            since["cpu"] = time.process_time() - self.cpu_start - self.eval_cpu_seconds
        return {**self.seconds, **{name: seconds + self.earlier[name] for name, seconds in since.items()}}

    def load_state_dicts(self, states: Sequence[Mapping[str, float]]) -> None:
        """Add the seconds of an earlier attempt; of several ranks, the slowest one's and all processors'."""
        for name in PARTS:
            self.seconds[name] += max((state[name] for state in states), default=0.0)
        self.earlier["wall"] += max((state["wall"] for state in states), default=0.0)
        self.earlier["cpu"] += sum(state["cpu"] for state in states)
