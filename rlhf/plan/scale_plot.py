"""Scaling curves as a picture or a page. No torch; matplotlib is imported when one is drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf.plan.scale import Curve
from rlhf.plan.steps import STEPS
from rlhf.report_plots import ACCENT, GREY, INK, SHADES, STYLE, check_suffix, write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHOWN = 0.003
"""Losses below it everywhere are not drawn."""
_COLOURS = {"weak": ACCENT, "strong": INK}


def write_plot(path: Path, title: str, curves: Sequence[Curve]) -> None:
    """Draw efficiency, and what is lost to what, of each step; the file's ending says as what.

    Raises:
        ValueError: another ending, or nothing to draw.
    """
    check_suffix(path)
    if not any(curve.points for curve in curves):
        raise ValueError(f"--plot {path}: no number of devices fits, so there is nothing to draw.")
    write_figure(path, title, lambda shown: _draw(curves, title=shown))


def _draw(curves: Sequence[Curve], *, title: str) -> "Figure":
    import matplotlib as mpl  # noqa: PLC0415  only a plot needs it
    from matplotlib.figure import Figure  # noqa: PLC0415

    numbers = sorted({curve.number for curve in curves})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.5, 2.9 * len(numbers)), layout="constrained")
        rows = figure.subplots(len(numbers), 3, squeeze=False)
        for axes, number in zip(rows, numbers, strict=True):
            both = [curve for curve in curves if curve.number == number]
            _efficiency(axes[0], both, STEPS[number])
            for one, curve in zip(axes[1:], both, strict=True):
                _losses(one, curve)
        if title:
            figure.suptitle(title, fontsize=10, color=INK, x=0.01, ha="left")
        return figure


def _efficiency(axes: "Axes", curves: Sequence[Curve], title: str) -> None:
    for curve in curves:
        sizes = [point.gpus for point in curve.points]
        axes.plot(sizes, [100 * point.efficiency for point in curve.points], marker="o", markersize=3,
                  color=_COLOURS[curve.kind], label=f"{curve.kind} scaling")  # fmt: skip
    axes.axhline(100, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(bottom=0)
    _devices(axes, [point.gpus for curve in curves for point in curve.points])
    axes.set_title(title, loc="left", fontsize=9, color=INK)
    axes.set_ylabel("efficiency, %")
    axes.legend(loc="lower left")


def _losses(axes: "Axes", curve: Curve) -> None:
    sizes = [point.gpus for point in curve.points]
    names = [name for name in (curve.points[0].losses if sizes else ())
             if any(point.losses[name] > SHOWN for point in curve.points)]  # fmt: skip
    below = [0.0] * len(sizes)
    for name, colour in zip(names, SHADES * 2, strict=False):
        heights = [100 * max(0.0, point.losses[name]) for point in curve.points]
        axes.bar([str(size) for size in sizes], heights, bottom=below, color=colour, label=name, width=0.7)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_title(f"{curve.kind} scaling: lost to", loc="left", fontsize=9, color=INK)
    axes.set_ylabel("% of the devices' time")
    axes.set_xlabel("devices")
    axes.tick_params(axis="x", labelrotation=45 if len(sizes) > 7 else 0)
    if names:
        axes.legend(loc="upper left")


def _devices(axes: "Axes", sizes: Sequence[int]) -> None:
    ticks = sorted(set(sizes))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(size) for size in ticks], rotation=45 if len(ticks) > 7 else 0)
    axes.minorticks_off()
    axes.set_xlabel("devices")
