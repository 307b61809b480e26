"""The lines of the table: who does what, and what has to be reached. No torch."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from rlhf.bench.jobs import Bench, Job, command, hugging_face, ours, trl, vllm
from rlhf.bench.readings import Dtype, Work
from rlhf.bench.record import Sample, median_of, median_ratio
from rlhf.bench.workload import Sizes, rows_of
from rlhf.plan import flops
from rlhf.plan.shapes import shape_of

Results = Mapping[str, Sequence[Sample]]
"""Rounds of each contestant, by name."""
OURS = "ours"


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One of those that do a line's work."""

    name: str
    job: Callable[[Bench, Path], Job]
    package: str = ""
    """What has to be importable; empty: nothing beside this code."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """One row of the table."""

    work: str
    contestant: str = OURS
    against: str = ""
    """The other contestant; empty: an absolute number."""
    measure: Literal["tokens", "rows", "peak_memory", "matmul_share", "startup", "seconds", "growth"]
    bound: Literal["at least", "at most"] = "at least"
    target: float
    dtype: Dtype = "fp32"
    expected: Callable[[Sizes], float] | None = None
    """Of `growth`: the ratio of step seconds that the work itself asks for."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """Contestants that are run in turns, and the rows of the table that come of it."""

    name: str
    contestants: tuple[Contestant, ...]
    goals: tuple[Goal, ...]


def value_of(goal: Goal, results: Results, peaks: Mapping[str, float], sizes: Sizes) -> float | None:
    """What the goal is about, as measured; None where a contestant is missing.

    A ratio is the median of the rounds' ratios, any other number the median of the rounds.
    """
    mine, other = results.get(goal.contestant, ()), results.get(goal.against, ())
    if goal.measure == "matmul_share":
        rate = median_of(mine, lambda sample: sample.flops_per_second)
        peak = peaks.get(f"matmul_{goal.dtype}_flops")
        return rate / peak if rate is not None and peak else None
    if goal.measure == "startup":
        return median_of(mine, lambda sample: sample.startup_seconds)
    if goal.measure == "seconds":
        return median_of(mine, lambda sample: sample.wall_seconds)
    if goal.measure == "growth":
        grown = median_ratio(mine, other, lambda sample: sample.step_seconds)
        return None if grown is None or goal.expected is None else grown / goal.expected(sizes)
    return median_ratio(mine, other, _COMPARED[goal.measure])


def reached(goal: Goal, value: float) -> bool:
    """Whether a value meets the goal."""
    return value >= goal.target if goal.bound == "at least" else value <= goal.target


_COMPARED: dict[str, Callable[[Sample], float | None]] = {
    "tokens": lambda sample: sample.tokens_per_second,
    "rows": lambda sample: sample.rows_per_second,
    "peak_memory": lambda sample: sample.peak_rss_bytes,
}


def _ours(work: Work, name: str = OURS) -> Contestant:
    return Contestant(name=name, job=lambda bench, folder: ours(bench, work, folder))


def _trl(work: Work, name: str = "TRL", *, packing: bool = False) -> Contestant:
    return Contestant(name=name, job=lambda bench, folder: trl(bench, work, folder, packing=packing), package="trl")


def _sft(dtype: Dtype) -> Line:
    work = Work(kind="sft", dtype=dtype, rows=8)
    goal = partial(Goal, work=f"SFT, {dtype}, 1 rank", measure="tokens", dtype=dtype)
    return Line(
        name=f"sft_{dtype}",
        contestants=(_ours(work), _trl(work), _trl(work, "TRL, packing", packing=True)),
        goals=(goal(against="TRL", target=1.8), goal(against="TRL, packing", target=1.1)),
    )


def _sft_ranks(*, zero3: bool) -> Line:
    work = Work(kind="sft", rows=8, ranks=2, zero3=zero3)
    stage = "ZeRO-3" if zero3 else "ZeRO-0"
    return Line(
        name=f"sft_2ranks_{'zero3' if zero3 else 'zero0'}",
        contestants=(_ours(work), _trl(work)),
        goals=(Goal(work=f"SFT, fp32, 2 ranks, {stage}", against="TRL", measure="tokens", target=1.8),),
    )


def _sft_long(dtype: Dtype) -> Line:
    work = Work(kind="long", dtype=dtype, rows=4)
    goal = Goal(work=f"SFT, {dtype}, rows of 1000 tokens", measure="matmul_share", target=0.7, dtype=dtype)
    return Line(name=f"sft_long_{dtype}", contestants=(_ours(work),), goals=(goal,))


def _reward(ranks: int) -> Line:
    work = Work(kind="pairs", rows=8, ranks=ranks)
    name = "1 rank" if ranks == 1 else f"{ranks} ranks"
    goal = Goal(work=f"Reward model, fp32, {name}", against="TRL", measure="tokens", target=2.3)
    return Line(name="rm" if ranks == 1 else f"rm_{ranks}ranks", contestants=(_ours(work), _trl(work)), goals=(goal,))


def _ppo(dtype: Dtype, target: float) -> Line:
    work = Work(kind="ppo", dtype=dtype, rows=16, answer=128)
    goal = Goal(work=f"PPO iteration, {dtype}, 16 rows of 128 new tokens", against="TRL", measure="tokens",
                target=target, dtype=dtype)  # fmt: skip
    return Line(name=f"ppo_{dtype}", contestants=(_ours(work), _trl(work)), goals=(goal,))


def _ppo_ragged() -> Line:
    work = Work(kind="ppo", rows=64)
    goal = Goal(work="PPO iteration, fp32, 64 rows, ragged stops", against="TRL", measure="tokens", target=3.0)
    return Line(name="ppo_ragged", contestants=(_ours(work), _trl(work)), goals=(goal,))


def _ppo_zero3() -> Line:
    work = Work(kind="ppo", rows=8, ranks=2, zero3=True, answer=128)
    name = "PPO iteration, fp32, ZeRO-3, 2 ranks"
    at_zero0 = "ours, ZeRO-0"
    return Line(
        name="ppo_zero3",
        contestants=(_ours(work), _trl(work), _ours(replace(work, zero3=False), at_zero0)),
        goals=(
            Goal(work=name, against="TRL", measure="tokens", target=2.0),
            Goal(work=name, against=at_zero0, measure="tokens", target=0.85),
        ),
    )


def _rollout(dtype: Dtype, *, ragged: bool) -> Line:
    work = Work(kind="rollout", dtype=dtype, rows=64 if ragged else 32, answer=0 if ragged else 128)
    shape = "ragged stops" if ragged else "fixed length"
    goal = partial(Goal, work=f"Rollout, {dtype}, batch 32, {shape}", measure="tokens", dtype=dtype)
    return Line(
        name=f"rollout_{'ragged' if ragged else 'fixed'}_{dtype}",
        contestants=(
            _ours(work),
            Contestant(name="generate", job=lambda b, folder: hugging_face(b, work, folder), package="transformers"),
            Contestant(name="vLLM", job=lambda b, folder: vllm(b, work, folder), package="vllm"),
        ),
        goals=(goal(against="generate", target=3.0 if ragged else 2.2), goal(against="vLLM", target=1.0)),
    )


def _memory() -> Line:
    work = Work(kind="ppo", rows=16, answer=128, large_vocabulary=True)
    goal = Goal(
        work="Peak memory, PPO step, 16 rows of 128 new tokens, vocabulary 50,272",
        against="TRL",
        measure="peak_memory",
        bound="at most",
        target=0.6,
    )
    return Line(name="memory", contestants=(_ours(work), _trl(work)), goals=(goal,))


def _startup() -> Line:
    stages = {
        "step 1": Work(kind="sft", rows=8),
        "step 2": Work(kind="pairs", rows=8),
        "step 3": Work(kind="ppo", rows=4, answer=16),
    }
    help_command = command([sys.executable, "-m", "rlhf.cli", "--help"])
    return Line(
        name="startup",
        contestants=(
            Contestant(name="rlhf --help", job=lambda _bench, _folder: help_command),
            *(_ours(work, name) for name, work in stages.items()),
        ),
        goals=(
            Goal(work="`rlhf --help`", contestant="rlhf --help", measure="seconds", bound="at most", target=1.0),
            *(
                Goal(
                    work=f"Start of {name} to its first step",
                    contestant=name,
                    measure="startup",
                    bound="at most",
                    target=20.0,
                )  # fmt: skip
                for name in stages
            ),
        ),
    )


def _growth() -> Line:
    base = Work(kind="ppo", rows=16, answer=64)
    longer = replace(base, answer=128)

    def answer_growth(sizes: Sizes) -> float:
        """Ratio of model FLOPs: linear in the tokens, and the attention term."""
        actor, reward = shape_of(sizes.actor()), shape_of(sizes.reward())
        prompts = [row.prompt for row in rows_of(sizes)["prompts"]]
        work = [
            sum(flops.ppo_row(actor, reward, prompt, sizes.length(answer)) for prompt in prompts)
            for answer in (base.answer, longer.answer)
        ]
        return work[1] / work[0]

    goal = partial(Goal, against="base", measure="growth", bound="at most", target=1.1)
    return Line(
        name="growth",
        contestants=(
            _ours(base, "base"),
            _ours(replace(base, rows=32), "twice the rows"),
            _ours(longer, "twice the answer"),
        ),
        goals=(
            goal(
                work="PPO step at twice the rows, over twice the time",
                contestant="twice the rows",
                expected=lambda _sizes: 2.0,
            ),  # fmt: skip
            goal(
                work="PPO step at twice the answer, over its FLOPs' growth",
                contestant="twice the answer",
                expected=answer_growth,
            ),  # fmt: skip
        ),
    )


def make_lines() -> dict[str, Line]:
    """All lines by name, in the order of the table."""
    lines = (
        _sft("fp32"),
        _sft("bf16"),
        _sft_ranks(zero3=False),
        _sft_ranks(zero3=True),
        _sft_long("fp32"),
        _sft_long("bf16"),
        _reward(1),
        _reward(2),
        _ppo("fp32", 1.8),
        _ppo("bf16", 2.5),
        _ppo_ragged(),
        _ppo_zero3(),
        _rollout("fp32", ragged=False),
        _rollout("bf16", ragged=False),
        _rollout("fp32", ragged=True),
        _rollout("bf16", ragged=True),
        _memory(),
        _startup(),
        _growth(),
    )
    return {line.name: line for line in lines}


def select(names: Sequence[str]) -> list[Line]:
    """Lines by name or by the start of their names (`sft` is all of step 1), in the order of the table.

    Raises:
        ValueError: nothing has that name.
    """
    lines = make_lines()
    for name in names:
        if not any(_is_called(line, name) for line in lines):
            raise ValueError(f"--lines: {name!r} is no line. Use one or several of {', '.join(lines)}.")
    return [line for key, line in lines.items() if not names or any(_is_called(key, name) for name in names)]


def _is_called(line: str, name: str) -> bool:
    return line == name or line.startswith(f"{name}_")
