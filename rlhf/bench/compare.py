"""`rlhf bench compare A.json B.json`: two machines, or two settings, side by side. No torch."""

import argparse
import random
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.artifacts import write_json
from rlhf.bench.process import exit_code
from rlhf.bench.result import NAMES, Result, read_results
from rlhf.bench.show import seconds
from rlhf.report_plots import ACCENT, GREY, INK, check_suffix, write_panels
from rlhf.terminal import console, make_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAWS = 2000
"""Resamplings of the steps, for the spread of a ratio."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One step in two files."""

    first: Result
    second: Result
    low: float
    high: float
    """Between which 90 % of the ratios lie when steps are drawn anew from those that were measured."""

    @property
    def ratio(self) -> float:
        """Tokens a second and device of the second over those of the first."""
        return self.second.rate / self.first.rate

    @property
    def differences(self) -> list[str]:
        """What is not the same beside the machine, so that the ratio is about it too."""
        pairs = {
            "recipe": (self.first.recipe, self.second.recipe),
            "rows a step": (f"{self.first.rows:g}", f"{self.second.rows:g}"),
            "ranks": (str(self.first.ranks), str(self.second.ranks)),
            "type": (self.first.dtype, self.second.dtype),
            "settings": (" ".join(self.first.settings) or "-", " ".join(self.second.settings) or "-"),
            "commit": (str(self.first.git_commit), str(self.second.git_commit)),
        }
        found = [f"{name} {a} and {b}" for name, (a, b) in pairs.items() if a != b]
        for package in sorted({*self.first.versions, *self.second.versions}):
            a, b = self.first.versions.get(package, "none"), self.second.versions.get(package, "none")
            found += [f"{package} {a} and {b}"] * (a != b)
        return found


def main(arguments: argparse.Namespace) -> int:
    """Print, draw, write; 0, or 2 if a file cannot be used."""
    return exit_code(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    if arguments.plot is not None:
        check_suffix(arguments.plot)
    found = compare(read_results(arguments.first), read_results(arguments.second))
    if not found:
        raise ValueError(f"{arguments.first} and {arguments.second} have no step in common. Measure the same steps.")
    show(found, arguments.first, arguments.second)
    if arguments.plot is not None:
        title = f"{found[0].first.recipe}: {_short(found[0].first)} and {_short(found[0].second)}"
        write_panels(arguments.plot, title, [partial(_panel, c=c) for c in found])
    if arguments.json is not None:
        write_json(arguments.json, as_json(found))


def compare(first: dict[int, Result], second: dict[int, Result]) -> list[Comparison]:
    """The steps that both have."""
    return [_compare(first[number], second[number]) for number in sorted(first.keys() & second.keys())]


def _compare(first: Result, second: Result) -> Comparison:
    rng = random.Random(0)

    def drawn(result: Result) -> Result:
        return replace(result, step_seconds=rng.choices(result.step_seconds, k=len(result.step_seconds)))

    ratios = sorted(drawn(second).rate / drawn(first).rate for _ in range(DRAWS))
    return Comparison(first=first, second=second, low=ratios[DRAWS // 20], high=ratios[-DRAWS // 20 - 1])


def show(found: Sequence[Comparison], first: Path, second: Path) -> None:
    """One table, and below it what else differs."""
    out = console()
    names = (first.stem, second.stem)
    for name, result in zip(names, (found[0].first, found[0].second), strict=True):
        out.print(f"[bold]{name}[/bold]: {result.recipe} on {result.ranks} x {result.hardware}, {result.date}")
    made = make_table("", "step", names[0], names[1], "ratio", "90 % of draws")
    for c in found:
        a, b = c.first, c.second
        made.add_row(
            NAMES[a.number], "tokens/s a device", f"{a.rate:,.0f}", f"{b.rate:,.0f}",
            f"{c.ratio:.2f} x", f"{c.low:.2f} - {c.high:.2f}",
        )  # fmt: skip
        made.add_row("", "median step", seconds(a.median_seconds), seconds(b.median_seconds))
        for phase in {**a.phases, **b.phases}:
            x, y = a.phases.get(phase, 0.0), b.phases.get(phase, 0.0)
            if max(x / a.median_seconds, y / b.median_seconds) > 0.01:
                made.add_row("", phase, seconds(x), seconds(y), f"{x / y:.2f} x" if x and y else "")
        if a.model_utilisation is not None and b.model_utilisation is not None:
            made.add_row("", "MFU", f"{a.model_utilisation:.1%}", f"{b.model_utilisation:.1%}")
        made.add_row("", "peak memory", f"{a.memory['peak'] / 1e9:.2f} GB", f"{b.memory['peak'] / 1e9:.2f} GB")
    out.print(made)
    for c in found:
        if c.differences:
            out.print(f"{NAMES[c.first.number]} differs beside the machine: {'; '.join(c.differences)}")


def as_json(found: Sequence[Comparison]) -> dict[str, Any]:
    """Plain values."""
    return {
        "steps": {
            str(c.first.number): {
                "ratio": c.ratio, "low": c.low, "high": c.high, "differences": c.differences,
                "tokens_per_second_per_device": [c.first.rate, c.second.rate],
                "phases": [dict(c.first.phases), dict(c.second.phases)],
                "hardware": [c.first.hardware, c.second.hardware],
            }
            for c in found
        }
    }  # fmt: skip


def _panel(axes: "Axes", *, c: Comparison) -> None:
    """The rates of both, the steps between 5 % and 95 % as whiskers."""
    for place, (result, colour) in enumerate(((c.first, GREY), (c.second, ACCENT))):
        middle = result.rate
        low, high = (middle * result.median_seconds / result.percentile(share) for share in (0.95, 0.05))
        axes.bar(place, middle, width=0.6, color=colour, ecolor=INK, capsize=4,
                 yerr=[[max(0.0, middle - low)], [max(0.0, high - middle)]])  # fmt: skip
        axes.annotate(f"{middle:,.0f}", (place, max(high, middle)), ha="center", va="bottom", color=INK, fontsize=8,
                      xytext=(0, 3), textcoords="offset points")  # fmt: skip
    axes.set_xticks([0, 1], [textwrap.fill(_short(result), 20) for result in (c.first, c.second)])
    axes.set_title(f"{NAMES[c.first.number]}: {c.ratio:.2f} x", loc="left", fontsize=9, color=INK)
    axes.set_ylabel("tokens/s a device")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.12)


def _short(result: Result) -> str:
    return f"{result.ranks} x {result.hardware.partition('@')[0].strip()}"
