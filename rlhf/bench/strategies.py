"""`rlhf bench strategies`: one step of a recipe under each way to run it, in turns, beside the plan. No torch."""

import argparse
import importlib.util
import shlex
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
from rlhf.bench.steps import STAGES, Recipe, Sources, measure, prepare
from rlhf.plan.setting import dtype_of, has_critic
from rlhf.sections import markdown_table, read_page, write_section
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


def strategies(number: int, ranks: int, dtype: str) -> list[Strategy]:
    """Of a step, in the order of the table; the first one is what the others are measured against.

    Args:
        number: of the step.
        ranks: that run it.
        dtype: that the recipe computes in, which is kept; from fp32 some go to bf16.
    """
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
        Strategy(name="ZeRO-3, recompute full", zero=stage3, model={"recompute": "full"}),
        Strategy(name="ZeRO-3, compile", zero=stage3, model={"compile": True}),
        Strategy(name="recompute selective", zero={"stage": 0}, model={"recompute": "selective"}),
        Strategy(name="recompute full", zero={"stage": 0}, model={"recompute": "full"}),
        Strategy(name="recompute every 2nd", zero={"stage": 0}, model={"recompute": "full", "recompute_every": 2}),
        Strategy(name="recompute budget", zero={"stage": 0}, model={"recompute": "full", "recompute_budget": 0.5}),
        Strategy(name="compile", zero={"stage": 0}, model={"compile": True}),
        Strategy(name="activations offloaded", zero={"stage": 0}, model={"offload_activations": True}),
    ]  # fmt: skip
    if dtype == "fp32":
        selective = {"recompute": "selective"}
        found += [
            Strategy(name="bf16", zero={"stage": 0}, json=_BF16),
            Strategy(name="ZeRO-3, bf16, recompute selective", zero=stage3, json=_BF16, model=selective),
        ]
    found += [
        Strategy(name="Muon", zero={"stage": 0}, stage=_optimizer(number, "muon")),
        Strategy(name="ZeRO-3, Muon", zero=stage3, stage=_optimizer(number, "muon")),
    ]
    if importlib.util.find_spec("bitsandbytes") is not None:
        eight_bit = _optimizer(number, "adamw_8bit")
        found.append(Strategy(name="ZeRO-2, 8-bit moments", zero={"stage": 2}, stage=eight_bit))
    if importlib.util.find_spec("torchao") is not None:
        json, first = (_BF16, "bf16, ") if dtype == "fp32" else ({}, "")
        found += [
            Strategy(name=f"{first}float8 {recipe}", zero={"stage": 0}, json=json, model={"float8": recipe},
                     stage={"rollout.old_logprobs": "rescore"} if number == 3 else {})
            for recipe in ("tensorwise", "rowwise")
        ]  # fmt: skip
    if ranks % 2 == 0:
        halves = {"parallel.tp": 2}
        # DeepSpeed's clip of 16-bit gradients at stage 0 does not know of shares.
        stages = (0, 1, 3) if dtype == "fp32" else (1, 3)
        found += [Strategy(name=f"ZeRO-{stage}, TP 2", zero={"stage": stage}, stage=halves) for stage in stages]
    if ranks > 1:
        shared = {"parallel.sp": ranks}
        found += [
            Strategy(name="rows shared", zero={"stage": 0}, stage=shared),
            Strategy(name="ZeRO-3, rows shared", zero=stage3, stage=shared),
            Strategy(name="ZeRO-3, rows shared, recompute full", zero=stage3, stage=shared,
                     model={"recompute": "full"}),
        ]  # fmt: skip
    if number == 1 and ranks % 2 == 0:
        found += [
            Strategy(name="PP 2", zero={"stage": 0}, stage={"parallel.pp": 2}),
            Strategy(name="ZeRO-1, PP 2", zero={"stage": 1}, stage={"parallel.pp": 2}),
        ]  # fmt: skip
    return found


def _optimizer(number: int, name: str) -> dict[str, str]:
    sections = ("actor_optim", "critic_optim") if number == 3 else ("optim",)
    return {f"{section}.name": name for section in sections}


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
    recipe, _ = prepare(arguments, arguments.step, overrides, sources)
    if arguments.write is not None:
        read_page(arguments.write, begin=BEGIN, end=END)
    dtype = dtype_of(next(iter(_jsons(recipe, arguments.step, sources).values())))
    chosen = select(strategies(arguments.step, arguments.num_gpus or 1, dtype), arguments.only)
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
        text = f"{_command(arguments, overrides)}\n\n{markdown(rows, arguments.step)}"
        write_section(arguments.write, text, begin=BEGIN, end=END)
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


def _trained(recipe: Recipe, number: int) -> list[tuple[str, str]]:
    """What `_TRAINED` says, without the critic where the algorithm has none."""
    return [pair for pair in _TRAINED[number] if pair[0] != "critic" or has_critic(recipe.stages["ppo"])]


def _jsons(recipe: Recipe, number: int, sources: Sources) -> dict[str, Mapping[str, Any]]:
    """Key of a trained model's DeepSpeed JSON -> its content."""
    found = {}
    for _, key in _trained(recipe, number):
        name: Any = recipe.stages[STAGES[number]]
        for part in key.split("."):
            name = name[part]
        found[key] = sources.load(name)
    return found


def _flags(strategy: Strategy, recipe: Recipe, number: int, work: Path, sources: Sources) -> Iterator[str]:
    """Writes the strategy's DeepSpeed JSONs, and gives the flags that name them and set the models' keys."""
    stage, jsons, trained = STAGES[number], _jsons(recipe, number, sources), _trained(recipe, number)
    work.mkdir(parents=True, exist_ok=True)
    for key, value in strategy.stage.items():
        if not key.startswith("critic_optim.") or ("critic", "deepspeed.critic") in trained:
            yield f"--{stage}.{key}={value}"
    for section, key in trained:
        raw = dict(jsons[key])
        if strategy.zero["stage"] != 3:
            raw.pop("hybrid_engine", None)
        path = work / f"{section}.json"
        write_json(path, {**raw, "zero_optimization": dict(strategy.zero), **strategy.json})
        yield f"--{stage}.{key}={path}"
        for option, value in strategy.model.items():
            yield f"--{stage}.{section}.{option}={str(value).lower() if isinstance(value, bool) else value}"


def _command(arguments: argparse.Namespace, overrides: Sequence[str]) -> str:
    """What makes the table, without paths of this machine."""
    words = ["rlhf", "bench", "strategies", "--recipe", str(arguments.recipe), "--num_gpus"]
    words += [str(arguments.num_gpus or 1), "--step", str(arguments.step), "--rounds", str(arguments.rounds)]
    words += ["--warmup", str(arguments.warmup), "--steps", str(arguments.steps), "--profile", str(arguments.profile)]
    words += ["--only", arguments.only] if arguments.only else []
    words += ["--hardware", Path(arguments.hardware).name] if arguments.hardware else []
    return f"`{shlex.join([*words, *overrides])}`:"


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


def _said(rows: Sequence[Row], number: int) -> str:
    """What was measured, where and how often."""
    done = next((row for row in rows if row.results), None)
    if done is None:
        return f"{NAMES[number]}: nothing ran."
    result, rounds = done.result, len(done.results)
    return (
        f"{NAMES[number]} of {result.recipe} on {result.ranks} x {result.hardware}, {result.date[:10]}: "
        f"{result.rows:g} rows a step, medians of {rounds} rounds"
    )


def show(rows: Sequence[Row], number: int) -> None:
    """The table for the terminal."""
    out = console()
    out.print(_said(rows, number))
    made = make_table(*(column.lower() for column in _COLUMNS))
    for cells in _cells(rows):
        made.add_row(*cells)
    out.print(made)


def markdown(rows: Sequence[Row], number: int) -> str:
    """The table for a page."""
    return f"{_said(rows, number)}\n\n{markdown_table([_COLUMNS, *_cells(rows)])}"


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
