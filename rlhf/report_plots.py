"""Plots of the report, as SVG text to put into a page. No torch; matplotlib is imported when a plot is drawn."""

import html
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ACCENT = "#0b6b78"
INK = "#23272e"
GREY = "#7d8590"
LIGHT = "#e4e7eb"
SHADES = ("#063b42", "#0b6b78", "#4f97a1", "#92c0c7", "#c9dfe2", "#aab2bc", "#c7ccd3", "#e4e7eb")

# Any: matplotlib types each key.
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": LIGHT,
    "grid.linewidth": 0.7,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
SUFFIXES = (".png", ".svg", ".html")
_PANEL_INCHES = (3.55, 2.25)
_SMOOTH_FROM = 40


@dataclass(frozen=True)
class Series:
    """One line of a panel."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    points: bool = False
    """Few and exact (an evaluation): drawn with markers and never smoothed."""


def curve(series: Sequence[Series], *, x_label: str, y_label: str, limit: float | None = None, key: str = "") -> str:
    """Curves over steps; the first is in the accent colour, a dashed line marks `limit`.

    A long noisy line is drawn faint, with its running mean over a twentieth of its length in front.
    """
    figure, axes = _panel(_PANEL_INCHES)
    colours = iter((ACCENT, INK, GREY, "#92c0c7"))
    for one in series:
        _draw(axes, one, next(colours, GREY))
    if limit is not None:
        axes.axhline(limit, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"maximum {limit:g}", (1, limit), xycoords=("axes fraction", "data"), xytext=(0, -10),
            textcoords="offset points", ha="right", fontsize=8, color=GREY,
        )  # fmt: skip
    _frame(axes, [value for one in series for value in one.values if math.isfinite(value)], limit, y_label)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if len(series) > 1:
        axes.legend(loc="best", handlelength=1.4, borderaxespad=0.2, frameon=False, fontsize=8)
    return as_svg(figure, key or y_label)


def histogram(edges: Sequence[float], counts: Sequence[float], *, x_label: str, y_label: str) -> str:
    """Bars of counts; those left of 0 are grey: there, the pair is ranked the wrong way round."""
    figure, axes = _panel(_PANEL_INCHES)
    for left, right, count in zip(edges, edges[1:], counts, strict=False):
        axes.bar(left, count, width=(right - left) * 0.94, align="edge", color=GREY if right <= 0 else ACCENT)
    axes.axvline(0, color=INK, linewidth=0.9)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return as_svg(figure, x_label)


def calibration(predicted: Sequence[float], observed: Sequence[float], counts: Sequence[float]) -> str:
    """Observed against predicted share; the area of a dot is the number of pairs, the dashed line is perfect."""
    figure, axes = _panel(_PANEL_INCHES)
    kept = [(p, o, c) for p, o, c in zip(predicted, observed, counts, strict=True) if c and p is not None]
    axes.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    if kept:
        largest = max(count for _, _, count in kept)
        shares, seen, sizes = zip(*[(p, o, 12 + 90 * c / largest) for p, o, c in kept], strict=True)
        axes.plot(shares, seen, color=ACCENT, linewidth=1.2)
        axes.scatter(shares, seen, s=sizes, color=ACCENT, zorder=3, edgecolors="white", linewidths=0.8)
    # Pairs may be counted in one order only (chosen first): then nothing lies below one half.
    low = 0.45 if kept and min(p for p, _, _ in kept) >= 0.5 and min(o for _, o, _ in kept) >= 0.45 else -0.03
    axes.set_xlim(low, 1.03)
    axes.set_ylim(low, 1.03)
    axes.set_xlabel("predicted probability that chosen wins")
    axes.set_ylabel("observed share")
    return as_svg(figure, "calibration")


def stacked_seconds(stages: Mapping[str, Mapping[str, float]], phases: Mapping[str, str]) -> str:
    """One bar for each stage, divided by where its seconds went; `phases` gives key -> label in order."""
    figure, axes = _panel((10.9, 0.75 + 0.42 * len(stages)))
    axes.grid(visible=False)
    axes.xaxis.grid(visible=True)
    longest = max(sum(seconds.values()) for seconds in stages.values()) or 1.0
    scale, unit, unit_name = (1, "s", "seconds") if longest < 900 else (60, "min", "minutes")
    if longest >= 3 * 3600:
        scale, unit, unit_name = 3600, "h", "hours"
    longest /= scale
    for row, seconds in enumerate(stages.values()):
        left = 0.0
        for colour, phase in zip(SHADES, phases, strict=True):
            width = seconds.get(phase, 0.0) / scale
            label = phases[phase] if row == 0 else None
            axes.barh(row, width, left=left, height=0.62, color=colour, label=label, edgecolor="white", linewidth=0.6)
            if width > 0.05 * longest:
                text_colour = "white" if colour in SHADES[:3] else INK
                axes.text(
                    left + width / 2,
                    row,
                    f"{width:.{1 if scale == 3600 else 0}f} {unit}",
                    ha="center",
                    va="center",
                    fontsize=8,
                    color=text_colour,
                )
            left += width
    axes.set_yticks(range(len(stages)), list(stages), fontsize=9, color=INK)
    axes.invert_yaxis()
    axes.set_xlabel(f"wall {unit_name} (slowest rank)")
    axes.spines["left"].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=len(phases), handlelength=1, columnspacing=1.4,
                frameon=False, fontsize=8)  # fmt: skip
    return as_svg(figure, "seconds")


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of the finite values at most `width` / 2 places away, at each place: no lag behind a rising curve."""
    means = []
    for i in range(len(values)):
        near = values[max(0, i - width // 2) : i + width // 2 + 1]
        window = [value for value in near if math.isfinite(value)]
        means.append(sum(window) / len(window) if window else math.nan)
    return means


def _panel(inches: tuple[float, float]) -> "tuple[Figure, Axes]":
    # Figure without pyplot: no window system, no global list of figures.
    import matplotlib as mpl  # noqa: PLC0415  0.3 s that the launcher need not pay
    from matplotlib.figure import Figure  # noqa: PLC0415

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        return figure, figure.add_subplot()


def _frame(axes: "Axes", values: Sequence[float], limit: float | None, y_label: str) -> None:
    """Limits that do not make much of little: fractions from 0 to 1, constants against 0."""
    low, high = min(values), max([*values, limit] if limit is not None else values)
    largest = max(abs(low), abs(high))
    if y_label.startswith("fraction") and high > 0.5 and low >= 0:
        axes.set_ylim(0, 1.04)
    elif largest and high - low < 0.05 * largest:
        axes.set_ylim(min(0.0, 1.4 * low), max(0.0, 1.4 * high))
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
    axes.yaxis.get_offset_text().set_fontsize(8)


def _draw(axes: "Axes", one: Series, colour: str) -> None:
    if one.points:
        # The line only leads the eye: nothing was measured between two evaluations.
        axes.plot(one.steps, one.values, color=colour, linewidth=0.9, alpha=0.35, linestyle=(0, (2, 2)))
        axes.plot(one.steps, one.values, color=colour, marker="o", markersize=5, linewidth=0, label=one.label,
                  clip_on=False, zorder=3)  # fmt: skip
    elif len(one.values) >= _SMOOTH_FROM:
        axes.plot(one.steps, one.values, color=colour, linewidth=0.8, alpha=0.28)
        axes.plot(one.steps, running_mean(one.values, len(one.values) // 20), color=colour, label=one.label)
    else:
        axes.plot(one.steps, one.values, color=colour, label=one.label)


def as_svg(figure: "Figure", key: str) -> str:
    """SVG element alone, the same bytes each time, its ids not shared with another plot of the page."""
    import matplotlib as mpl  # noqa: PLC0415

    with mpl.rc_context({**STYLE, "svg.hashsalt": key}):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    prefix = re.sub(r"[^a-z0-9]+", "-", key.lower()).strip("-")
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    # Size by the page; the fonts are the page's too.
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" height="[^"]*"|<svg (?=[^>]*height=)', r"<svg \1", text, count=1)
    return text.strip()


def check_suffix(path: Path) -> None:
    """Check that a plot can be written as the file's ending says.

    Raises:
        ValueError: it is another one.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"--plot {path} must end in {', '.join(SUFFIXES)}.")


def write_figure(path: Path, title: str, draw: Callable[[str], "Figure"]) -> None:
    """Write a figure as a picture, or as a page with the title as its heading.

    Args:
        path: ends in one of SUFFIXES.
        title: of the page, or of the picture.
        draw: makes the figure with the title it is given; empty: without one.
    """
    check_suffix(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".html":
        path.write_text(_page(title, as_svg(draw(""), path.stem)), encoding="utf-8")
    else:
        draw(title).savefig(path, dpi=150, bbox_inches="tight", facecolor="white")


def write_panels(path: Path, title: str, panels: Sequence[Callable[["Axes"], None]]) -> None:
    """Write panels side by side, each drawn into the axes that it is given."""

    def draw(shown: str) -> "Figure":
        import matplotlib as mpl  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415

        with mpl.rc_context(STYLE):
            figure = Figure(figsize=(3.7 * len(panels), 3.0), layout="constrained")
            for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
                panel(axes)
            if shown:
                figure.suptitle(shown, fontsize=10, color=INK, x=0.01, ha="left")
            return figure

    write_figure(path, title, draw)


def _page(title: str, svg: str) -> str:
    style: dict[str, Any] = {"font-family": "system-ui, sans-serif", "margin": "2rem", "color": INK}
    css = "; ".join(f"{key}: {value}" for key, value in style.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>\n'
        f'<body style="{css}"><h1 style="font-size: 1.1rem">{html.escape(title)}</h1>\n{svg}</body></html>\n'
    )
