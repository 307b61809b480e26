"""`rlhf bench strategies`: one step of a recipe under each way to run it, in turns, beside the plan. No torch."""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlhf.artifacts import write_json
from rlhf.bench.process import ChildError, exit_code
from rlhf.bench.result import NAMES, Result
from rlhf.bench.show import seconds
from rlhf.bench.steps import STAGES, Recipe, Sources, measure
from rlhf.sections import markdown_table, write_section
from rlhf.terminal import console, make_table

BEGIN = "<!-- rlhf bench strategies: begin -->"
END = "<!-- rlhf bench strategies: end -->"
_TRAINED = {1: (("model", "deepspeed"),), 2: (("model", "deepspeed"),),
            3: (("actor", "deepspeed.actor"), ("critic", "deepspeed.critic"))}  # fmt: skip
"""By step: the sections of the trained models and the keys of their DeepSpeed JSONs."""
_BF16 = {"bf16": {"enabled": True}}
_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """What changes of the recipe."""

    name: str
    zero: Mapping[str, Any]
    """The `zero_optimization` section of the trained models' JSONs."""
    json: Mapping[str, Any] = field(default_factory=dict)
    """Other sections of them."""
    model: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the trained models' own sections."""
    stage: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the stage."""


def strategies(number: int, ranks: int) -> list[Strategy]:
    """Of a step, in the order of the table; the first one is what the others are measured against."""
    stage3 = {"stage": 3}
    found = [Strategy(name=f"ZeRO-{stage}", zero={"stage": stage}) for stage in range(4)]
    found += [
        Strategy(name="ZeRO-2, overlapped", zero={"stage": 2, "overlap_comm": True, "contiguous_gradients": True}),
        Strategy(name="ZeRO-2, optimizer offloaded", zero={"stage": 2, **_OFFLOAD}),
        Strategy(name="ZeRO-3, all offloaded", zero={**stage3, **_OFFLOAD, "offload_param": {"device": "cpu"}}),
    ]
    if ranks > 1:
        found.append(Strategy(name="ZeRO-3, hpZ", zero={**stage3, "zero_hpz_partition_size": ranks}))
    found += [
        Strategy(name="recompute selective", zero={"stage": 0}, model={"recompute": "selective"}),
        Strategy(name="recompute full", zero={"stage": 0}, model={"recompute": "full"}),
        Strategy(name="recompute every 2nd", zero={"stage": 0}, model={"recompute": "full", "recompute_every": 2}),
        Strategy(name="compile", zero={"stage": 0}, model={"compile": True}),
        Strategy(name="bf16", zero={"stage": 0}, json=_BF16),
        Strategy(name="ZeRO-3, bf16, recompute selective", zero=stage3, json=_BF16, model={"recompute": "selective"}),
        Strategy(name="ZeRO-3, recompute full", zero=stage3, model={"recompute": "full"}),
        Strategy(name="ZeRO-3, compile", zero=stage3, model={"compile": True}),
    ]  # fmt: skip
    if number == 1 and ranks > 1:
        shared = {"parallel.sp": ranks}
        found += [
            Strategy(name="rows shared", zero={"stage": 0}, stage=shared),
            Strategy(name="ZeRO-3, rows shared", zero=stage3, stage=shared),
            Strategy(name="ZeRO-3, rows shared, bf16, recompute full", zero=stage3, json=_BF16, stage=shared,
                     model={"recompute": "full"}),
        ]  # fmt: skip
    return found


@dataclass(frozen=True, kw_only=True)
class Row:
    """A strategy and what its runs gave."""

    strategy: Strategy
    results: tuple[Result, ...]
    """One for each round."""
    error: str = ""

    @property
    def result(self) -> Result:
        """Of the round with the median step."""
        ordered = sorted(self.results, key=lambda result: result.median_seconds)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def rate(self) -> float:
        """Tokens a second and rank, median of the rounds."""
        return statistics.median(result.rate for result in self.results)


def main(arguments: argparse.Namespace, overrides: Sequence[str], sources: Sources) -> int:
    """Measure all; 0, 1 if a run failed, 2 if something cannot be used."""
    return exit_code(lambda: _run(arguments, overrides, sources))


def _run(arguments: argparse.Namespace, overrides: Sequence[str], sources: Sources) -> None:
    if arguments.rounds < 1:
        raise ValueError(f"--rounds={arguments.rounds} must be >= 1.")
    recipe = sources.read_recipe(arguments.recipe, overrides)
    stage = STAGES[arguments.step]
    if stage not in recipe.stages:
        raise ValueError(f"recipe {recipe.name} has no {NAMES[arguments.step]}.")
    chosen = select(strategies(arguments.step, arguments.num_gpus or 1), arguments.only)
    rows = [Row(strategy=strategy, results=()) for strategy in chosen]
    for number in range(arguments.rounds):
        for place, row in enumerate(rows):
            if row.error:
                continue
            sys.stdout.write(f"round {number + 1} of {arguments.rounds}, {row.strategy.name}: ")
            work = Path(arguments.work) / f"{place}_{_file_name(row.strategy.name)}"
            at = {**vars(arguments), "bench_command": f"step{arguments.step}", "work": work, "json": None}
            flags = list(_flags(row.strategy, recipe, arguments.step, work.resolve(), sources))
            try:
                result = measure(argparse.Namespace(**at), [*overrides, *flags], sources)
            except ChildError as error:
                rows[place] = replace(row, error=str(error))
                sys.stdout.write(f"FAILED\n{error}\n")
                continue
            rows[place] = replace(row, results=(*row.results, result))
    show(rows, arguments.step)
    if arguments.json is not None:
        write_json(arguments.json, as_json(rows, arguments.step))
    if arguments.write is not None:
        write_section(arguments.write, markdown(rows, arguments.step), begin=BEGIN, end=END)
    failed = [row.strategy.name for row in rows if row.error]
    if failed:
        raise ChildError(f"failed: {', '.join(failed)}; the others are in the table.")


def select(known: Sequence[Strategy], names: str) -> list[Strategy]:
    """Strategies by name, or all.

    Raises:
        ValueError: there is no such strategy.
    """
    wanted = [name.strip() for name in names.split(";") if name.strip()]
    unknown = [name for name in wanted if name not in {strategy.name for strategy in known}]
    if unknown:
        raise ValueError(
            f"--only {unknown[0]!r} is none of the strategies: {'; '.join(strategy.name for strategy in known)}."
        )
    return [strategy for strategy in known if not wanted or strategy.name in wanted]


def _flags(strategy: Strategy, recipe: Recipe, number: int, work: Path, sources: Sources) -> Iterator[str]:
    """Writes the strategy's DeepSpeed JSONs, and gives the flags that name them and set the models' keys."""
    stage = STAGES[number]
    config: Mapping[str, Any] = recipe.stages[stage]
    yield from (f"--{stage}.{key}={value}" for key, value in strategy.stage.items())
    for section, key in _TRAINED[number]:
        name: Any = config
        for part in key.split("."):
            name = name[part]
        raw = {k: v for k, v in sources.load(name).items() if k not in ("bf16", "fp16", "zero_optimization")}
        if strategy.zero["stage"] != 3:
            raw.pop("hybrid_engine", None)
        os.makedirs(work, exist_ok=True)
        path = work / f"{section}.json"
        write_json(path, {**raw, "zero_optimization": dict(strategy.zero), **strategy.json})
        yield f"--{stage}.{key}={path}"
        for option, value in strategy.model.items():
            yield f"--{stage}.{section}.{option}={str(value).lower() if isinstance(value, bool) else value}"


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Name, median step, tokens/s a rank, beside the first, peak, collectives, plan over measured."""
    done = [row for row in rows if row.results]
    first = done[0] if done else None
    for row in rows:
        if not row.results or first is None:
            yield (row.strategy.name, "failed", *["-"] * 5)
            continue
        result, foreseen = row.result, row.result.foreseen
        shared = result.communication_frac
        yield (
            row.strategy.name, seconds(result.median_seconds), f"{row.rate:,.0f}", f"{row.rate / first.rate:.2f} x",
            f"{result.memory['peak'] / 1e9:.2f} GB", "-" if shared is None else f"{shared:.0%}",
            "-" if foreseen is None else f"{foreseen.step_seconds / result.median_seconds:.2f} x",
        )  # fmt: skip


_COLUMNS = ("Strategy", "Median step", "Tokens/s a rank", "Beside the first", "Peak memory", "In collectives",
            "Planned / measured")  # fmt: skip


def show(rows: Sequence[Row], number: int) -> None:
    """The table for the terminal."""
    out = console()
    done = next((row.result for row in rows if row.results), None)
    if done is not None:
        out.print(f"[bold]{NAMES[number]}[/bold] of {done.recipe} on {done.ranks} x {done.hardware}")
    made = make_table(*(column.lower() for column in _COLUMNS))
    for cells in _cells(rows):
        made.add_row(*cells)
    out.print(made)


def markdown(rows: Sequence[Row], number: int) -> str:
    """The table for a page."""
    done = next((row.result for row in rows if row.results), None)
    said = "" if done is None else (
        f"{done.date[:10]}, {NAMES[number]} of {done.recipe} on {done.ranks} ranks, {done.hardware}, "
        f"{done.rows:g} rows a step; medians of {len(rows[0].results)} rounds.\n\n"
    )  # fmt: skip
    return said + markdown_table([_COLUMNS, *_cells(rows)])


def as_json(rows: Sequence[Row], number: int) -> dict[str, Any]:
    """Plain values."""
    return {
        "step": number,
        "strategies": [
            {
                "name": row.strategy.name, "error": row.error,
                "tokens_per_second_per_rank": row.rate if row.results else None,
                "step_seconds": [result.median_seconds for result in row.results],
                "peak_bytes": row.result.memory["peak"] if row.results else None,
                "communication_frac": row.result.communication_frac if row.results else None,
                "planned_step_seconds":
                    row.result.foreseen.step_seconds if row.results and row.result.foreseen else None,
            }
            for row in rows
        ],
    }  # fmt: skip
