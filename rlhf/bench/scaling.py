"""`rlhf bench scale`: one step on several numbers of ranks, beside the plan's curve. No torch."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.artifacts import write_json
from rlhf.bench.process import exit_code
from rlhf.bench.result import NAMES, Result
from rlhf.bench.show import seconds
from rlhf.bench.steps import STAGES, Sources, measure
from rlhf.plan.scale import KINDS, Kind
from rlhf.report_plots import ACCENT, GREY, INK, check_suffix, write_panels
from rlhf.terminal import console, make_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Weak scaling keeps the rows of a rank, strong scaling those of all ranks together."""

    kind: Kind
    results: tuple[Result, ...]
    """By number of ranks, ascending."""

    @property
    def efficiencies(self) -> list[float]:
        """Rate of a rank beside that on the fewest."""
        return _beside_first([result.rate for result in self.results])

    @property
    def planned(self) -> list[float] | None:
        """The same by the plan; None without one."""
        rates = [r.tokens / r.foreseen.step_seconds / r.ranks for r in self.results if r.foreseen is not None]
        return _beside_first(rates) if len(rates) == len(self.results) else None


def _beside_first(rates: Sequence[float]) -> list[float]:
    return [rate / rates[0] for rate in rates]


def main(arguments: argparse.Namespace, overrides: Sequence[str], sources: Sources) -> int:
    """Measure both curves; 0, 1 if a run failed, 2 if something cannot be used."""
    return exit_code(lambda: _run(arguments, overrides, sources))


def _run(arguments: argparse.Namespace, overrides: Sequence[str], sources: Sources) -> None:
    counts = read_counts(arguments.ranks)
    if arguments.plot is not None:
        check_suffix(arguments.plot)
    curves = measure_curves(counts, arguments, overrides, sources)
    show(curves, arguments.step)
    if arguments.plot is not None:
        first = curves[0].results[0]
        title = f"{NAMES[arguments.step]} of {first.recipe} on {first.hardware}"
        write_panels(arguments.plot, title, [partial(_panel, curve=curve) for curve in curves])
    if arguments.json is not None:
        write_json(arguments.json, as_json(curves, arguments.step))


def read_counts(text: str) -> list[int]:
    """Numbers of ranks.

    Raises:
        ValueError: not ascending numbers from 1.
    """
    words = text.split(",")
    counts = [int(word) for word in words if word.isdigit()]
    if len(counts) != len(words) or counts != sorted(set(counts)) or counts[0] < 1:
        raise ValueError(f"--ranks {text!r} must be different numbers from 1, ascending, with commas between: 1,2,4.")
    return counts


def measure_curves(
    counts: Sequence[int], arguments: argparse.Namespace, overrides: Sequence[str], sources: Sources
) -> list[Curve]:
    """A run for each number of ranks and kind; on the fewest both kinds are the same run."""
    flags = {
        (kind, ranks): tuple(grow(kind, ranks, counts[0], arguments, overrides, sources))
        for kind in KINDS
        for ranks in counts
    }
    results: dict[tuple[int, tuple[str, ...]], Result] = {}
    for (kind, ranks), grown in flags.items():
        if (ranks, grown) in results:
            continue
        sys.stdout.write(f"{kind} scaling, {ranks} ranks: ")
        work = Path(arguments.work) / f"{kind}_{ranks}"
        at = argparse.Namespace(
            **{
                **vars(arguments),
                "num_gpus": ranks,
                "bench_command": f"step{arguments.step}",
                "work": work,
                "json": None,
            }
        )
        results[ranks, grown] = measure(at, [*overrides, *grown], sources)
    return [Curve(kind=kind, results=tuple(results[ranks, flags[kind, ranks]] for ranks in counts)) for kind in KINDS]


def grow(
    kind: Kind, ranks: int, fewest: int, arguments: argparse.Namespace, overrides: Sequence[str], sources: Sources
) -> list[str]:
    """Flags that give as many rows to each rank as the recipe gives to each of the fewest.

    Raises:
        ValueError: the rows do not divide.
    """
    if kind == "strong" or ranks == fewest:
        return []
    stage = STAGES[arguments.step]
    config = sources.read_recipe(arguments.recipe, overrides).stages[stage]
    sizes = {"global_batch_size": config["global_batch_size"]} if stage != "ppo" else {
        "rollout.prompts_per_step": config["rollout"]["prompts_per_step"],
        "update.minibatch_size": config["update"]["minibatch_size"],
    }  # fmt: skip
    flags = []
    for key, size in sizes.items():
        if size * ranks % fewest:
            raise ValueError(f"{stage}.{key}={size} of {fewest} ranks cannot be {ranks} / {fewest} times as many.")
        flags.append(f"--{stage}.{key}={size * ranks // fewest}")
    return flags


def show(curves: Sequence[Curve], number: int) -> None:
    """One table for both curves."""
    out = console()
    first = curves[0].results[0]
    out.print(f"[bold]{NAMES[number]}[/bold] of {first.recipe} on {first.hardware}, {first.dtype}")
    made = make_table("", "ranks", "rows", "median step", "tokens/s a rank", "efficiency", "planned")
    for curve in curves:
        planned = curve.planned
        for i, (result, efficiency) in enumerate(zip(curve.results, curve.efficiencies, strict=True)):
            made.add_row(
                curve.kind if i == 0 else "", str(result.ranks), f"{result.rows:g}", seconds(result.median_seconds),
                f"{result.rate:,.0f}", f"{efficiency:.0%}",
                "-" if planned is None else f"{planned[i]:.0%}",
            )  # fmt: skip
    out.print(made)


def as_json(curves: Sequence[Curve], number: int) -> dict[str, Any]:
    """Plain values."""
    return {
        "step": number,
        "curves": [
            {
                "kind": curve.kind,
                "points": [
                    {
                        "ranks": r.ranks, "rows": r.rows, "step_seconds": r.median_seconds, "efficiency": efficiency,
                        "tokens_per_second_per_rank": r.rate,
                        "planned_efficiency": None if curve.planned is None else curve.planned[i],
                        "planned_step_seconds": None if r.foreseen is None else r.foreseen.step_seconds,
                    }
                    for i, (r, efficiency) in enumerate(zip(curve.results, curve.efficiencies, strict=True))
                ],
            }
            for curve in curves
        ],
    }  # fmt: skip


def _panel(axes: "Axes", *, curve: Curve) -> None:
    sizes = [result.ranks for result in curve.results]
    axes.plot(sizes, [100 * x for x in curve.efficiencies], marker="o", markersize=4, color=ACCENT, label="measured")
    if curve.planned is not None:
        axes.plot(sizes, [100 * x for x in curve.planned], marker="o", markersize=3, color=INK,
                  linestyle=(0, (4, 3)), label="planned")  # fmt: skip
    axes.axhline(100, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(bottom=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("ranks")
    axes.set_ylabel("efficiency, %")
    axes.set_title(f"{curve.kind} scaling", loc="left", fontsize=9, color=INK)
    axes.legend(loc="lower left")
