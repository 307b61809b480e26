"""The results as Markdown: what was to be reached, what each contestant measured, and what is missing. No torch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.bench.lines import Goal, Line, make_lines, reached, value_of
from rlhf.bench.record import Sample, from_json, median_of
from rlhf.bench.workload import SIZES
from rlhf.sections import markdown_table

BEGIN = "<!-- rlhf bench peers: begin -->"
END = "<!-- rlhf bench peers: end -->"


def markdown(report: Mapping[str, Any]) -> str:
    """Text of the section, from the content of the JSON file."""
    lines = [line for name, line in make_lines().items() if name in report["lines"]]
    parts = [_how(report), _goals(lines, report), _details(lines, report), _missing(lines, report)]
    return "\n\n".join(part for part in parts if part)


def _how(report: Mapping[str, Any]) -> str:
    machine, peaks = report["machine"], report["machine"]["peaks"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(report["versions"].items()))
    rounds = report["settings"]["rounds"]
    middle = "One round" if rounds == 1 else f"Medians of {rounds} rounds"
    quick = " Sizes are those of `--quick`: they say that the command works and nothing about speed." * (
        report["settings"]["sizes"] == "quick"
    )
    return (
        f"```bash\n{report['command']}\n```\n\n"
        f"{report['date']}, {machine['cpu']}, {machine['cores']} cores, one thread a rank: matmul "
        f"{peaks['matmul_fp32_flops'] / 1e9:.0f} GFLOP/s fp32 and {peaks['matmul_bf16_flops'] / 1e9:.0f} bf16, copy "
        f"{peaks['copy_bytes_per_second'] / 1e9:.0f} GB/s. {versions}. {middle}.{quick}"
    )


def _goals(lines: Sequence[Line], report: Mapping[str, Any]) -> str:
    rows = [["Work", "Ours", "Against", "Theirs", "Measured", "To reach", "Reached"]]
    sizes = SIZES[report["settings"]["sizes"]]
    for line in lines:
        results = samples_of(report, line.name)
        for goal in line.goals:
            value = value_of(goal, results, report["machine"]["peaks"], sizes)
            if value is None:
                continue
            rows.append([
                goal.work, _rate(goal, results.get(goal.contestant, ())), goal.against or "-",
                _rate(goal, results.get(goal.against, ())), _shown(goal, value),
                f"{goal.bound} {_shown(goal, goal.target)}", "yes" if reached(goal, value) else "no",
            ])  # fmt: skip
    return markdown_table(rows)


def _shown(goal: Goal, value: float) -> str:
    if goal.measure == "matmul_share":
        return f"{value:.0%} of matmul"
    return f"{value:.1f} s" if goal.measure in ("startup", "seconds") else f"{value:.2f} x"


def _rate(goal: Goal, samples: Sequence[Sample]) -> str:
    """What a contestant made, in the goal's own unit."""
    units: dict[str, tuple[Callable[[Sample], float | None], Callable[[float], str]]] = {
        "tokens": (lambda s: s.tokens_per_second, lambda v: f"{v:,.0f} tokens/s"),
        "rows": (lambda s: s.rows_per_second, lambda v: f"{v:.2f} rows/s"),
        "peak_memory": (lambda s: s.peak_rss_bytes, lambda v: f"{v / 1e9:.2f} GB"),
        "matmul_share": (lambda s: s.flops_per_second, lambda v: f"{v / 1e9:.1f} GFLOP/s"),
        "growth": (lambda s: s.step_seconds, lambda v: f"{v:.2f} s a step"),
    }
    if goal.measure not in units or not samples:
        return "-"
    value, show = units[goal.measure]
    middle = median_of(samples, value)
    return "-" if middle is None else show(middle)


def _details(lines: Sequence[Line], report: Mapping[str, Any]) -> str:
    rows = [[
        "Line", "Who", "Tokens/s", "Rows/s", "CPU s a row", "Padding", "Matmul share", "Peak memory", "Phases"
    ]]  # fmt: skip
    for line in lines:
        dtype = next((goal.dtype for goal in line.goals), "fp32")
        peak = report["machine"]["peaks"][f"matmul_{dtype}_flops"]
        for name, samples in samples_of(report, line.name).items():
            if samples and samples[0].tokens:
                rows.append([f"`{line.name}`", name, *_measured(samples, peak)])
    return markdown_table(rows) if len(rows) > 1 else ""


def _measured(samples: Sequence[Sample], peak: float) -> list[str]:
    columns: tuple[tuple[Callable[[Sample], float | None], Callable[[float], str]], ...] = (
        (lambda s: s.tokens_per_second, lambda v: f"{v:,.0f}"),
        (lambda s: s.rows_per_second, lambda v: f"{v:.2f}"),
        (lambda s: s.cpu_per_row, lambda v: f"{v:.3f}"),
        (lambda s: s.padding_frac, lambda v: f"{v:.1%}"),
        (lambda s: s.flops_per_second, lambda v: f"{v / peak:.0%}"),
        (lambda s: s.peak_rss_bytes, lambda v: f"{v / 1e9:.2f} GB"),
    )
    shown = []
    for value, show in columns:
        middle = median_of(samples, value)
        shown.append("-" if middle is None else show(middle))
    return [*shown, _phases(samples)]


def _phases(samples: Sequence[Sample]) -> str:
    """Share of each phase in the step's wall time."""
    names = [
        name for name in ("rollout", "score", "update", "compile", "other") if any(name in s.phases for s in samples)
    ]
    shares = []
    for name in names:
        share = median_of(samples, lambda s, name=name: s.phases.get(name, 0.0) / s.wall_seconds)  # type: ignore[misc]
        shares.append(f"{name} {share:.0%}")
    return ", ".join(shares) or "-"


def _missing(lines: Sequence[Line], report: Mapping[str, Any]) -> str:
    notes = [f"- {name}: left out, {reason}" for name, reason in sorted(report["left_out"].items())]
    for line in lines:
        for name, entry in report["lines"][line.name]["contestants"].items():
            if entry["error"]:
                notes.append(f"- `{line.name}`, {name}: {entry['error'].splitlines()[0]}")
    return "\n".join(["Not measured:", "", *notes]) if notes else ""


def samples_of(report: Mapping[str, Any], line: str) -> dict[str, list[Sample]]:
    """Rounds of each contestant of a line."""
    contestants = report["lines"][line]["contestants"]
    return {name: [from_json(sample) for sample in entry["samples"]] for name, entry in contestants.items()}


def summary(report: Mapping[str, Any], line: Line) -> list[str]:
    """What a finished line says, for the terminal."""
    results = samples_of(report, line.name)
    sizes = SIZES[report["settings"]["sizes"]]
    said = []
    for goal in line.goals:
        value = value_of(goal, results, report["machine"]["peaks"], sizes)
        against = f" against {goal.against}" if goal.against else ""
        if value is not None:
            met = "reached" if reached(goal, value) else "not reached"
            wanted = f"{goal.bound} {_shown(goal, goal.target)}"
            said.append(f"{goal.work}{against}: {_shown(goal, value)} ({wanted}: {met})")
    return said
