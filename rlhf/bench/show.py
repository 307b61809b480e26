"""Results of `rlhf bench step1|step2|step3` for the terminal. No torch."""

from rlhf.bench.result import NAMES, Result
from rlhf.terminal import console, make_table


def show_result(result: Result) -> None:
    """One step: rates, seconds by phase, memory; beside the plan where there is one."""
    out = console()
    out.print(
        f"[bold]{NAMES[result.number]}[/bold] of {result.recipe} on {result.ranks} x {result.hardware}, "
        f"{result.dtype}: "
        f"{len(result.step_seconds)} steps of {result.rows:g} rows, {result.tokens:,.0f} tokens"
    )
    foreseen = result.foreseen
    rates = make_table("", "measured", *(["planned", "planned / measured"] if foreseen else []))

    def add(name: str, measured: str, planned: str = "", ratio: str = "") -> None:
        rates.add_row(name, measured, *([planned, ratio] if foreseen else []))

    median = result.median_seconds
    planned_seconds = foreseen.step_seconds if foreseen else 0.0
    add("step, median", seconds(median), seconds(planned_seconds), f"{planned_seconds / median:.2f} x")
    add("step, 5 % and 95 % of steps", f"{seconds(result.percentile(0.05))} - {seconds(result.percentile(0.95))}")
    per_second = result.tokens_per_second
    planned_rate = result.tokens / planned_seconds if planned_seconds else 0.0
    add("tokens/s", f"{per_second:,.0f}", f"{planned_rate:,.0f}")
    add("tokens/s a device", f"{per_second / result.ranks:,.0f}", f"{planned_rate / result.ranks:,.0f}")
    add("rows/s", f"{result.rows_per_second:,.2f}")
    if result.flops_per_second is not None:
        add("model TFLOP/s a device", f"{result.flops_per_second / 1e12:,.3f}")
    if result.model_utilisation is not None and result.hardware_utilisation is not None:
        add("MFU", f"{result.model_utilisation:.1%}")
        add("HFU", f"{result.hardware_utilisation:.1%}")
    if result.padding_frac is not None:
        add("padding", f"{result.padding_frac:.1%}")
    if result.communication_frac is not None and result.exposed_frac is not None:
        add("in collectives, of it exposed", f"{result.communication_frac:.1%}, {result.exposed_frac:.1%}")
    peak = result.memory["peak"]
    add("peak memory", f"{peak / 1e9:.2f} GB", f"{foreseen.peak_bytes / 1e9:.2f} GB" if foreseen else "")
    out.print(rates)
    parts = {name: size for name, size in result.memory.items() if name != "peak"}
    out.print("memory: " + ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in parts.items()))
    out.print("time: " + _phases(dict(result.phases), median))
    if foreseen:
        out.print("plan: " + _phases(dict(foreseen.phases), planned_seconds))


def _phases(phases: dict[str, float], whole: float) -> str:
    return ", ".join(f"{name} {seconds(value)}" for name, value in phases.items() if value > 0.003 * whole)


def seconds(value: float) -> str:
    """With three digits."""
    return f"{value:.3g} s" if value < 100 else f"{value:,.0f} s"
