"""Plans, comparisons, curves and validations for the terminal. No torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from rlhf.plan.compare import Comparison
from rlhf.plan.hardware import Device
from rlhf.plan.layout import Layout
from rlhf.plan.scale import Curve
from rlhf.plan.search import Candidate, Found, reason
from rlhf.plan.setting import Setting, stack_of
from rlhf.plan.steps import STEPS, Remedy, StepPlan
from rlhf.plan.validate import GOALS, Validation
from rlhf.terminal import make_table

SHOWN = 0.005
"""Share of the whole below which a part is left out."""


def said_layout(layout: Layout) -> str:
    """A layout in a few words."""
    words = [f"ZeRO-{layout.zero}"]
    words += [f"TP {layout.tensor}"] * (layout.tensor > 1)
    words += [f"SP {layout.context}"] * (layout.context > 1)
    words += [f"PP {layout.pipeline}"] * (layout.pipeline > 1)
    words += [f"in {layout.virtual} pieces"] * (layout.virtual > 1)
    words += [f"DP {layout.data}", f"micro-batch {layout.micro_batch} x {layout.accumulation}"]
    every = f" in 1 of {layout.recompute_every} layers" * (layout.recompute_every > 1)
    every += f" in all but {layout.recompute_budget:.0%} of the layers" * (layout.recompute_budget > 0)
    words += [f"recompute {layout.recompute}{every}"] * (layout.recompute != "none")
    words += ["activations in host memory"] * layout.offload_activations
    words += [f"LoRA {layout.lora}"] * bool(layout.lora)
    words += ["offload"] * layout.offload_optimizer
    return ", ".join(words)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f}"


def show_plan(console: Console, setting: Setting, plans: Sequence[StepPlan]) -> None:
    """The three steps side by side, then where time and memory go."""
    device = setting.device
    console.print(
        f"[bold]{setting.name}[/bold] on {setting.gpus} x {device.name} ({device.memory_gb:g} GB, "
        f"{-(-setting.gpus // device.node)} machines), rows of {setting.prompt} + {setting.response} tokens"
    )
    table = make_table("", "fits", "peak GB", "step s", "tokens/s/GPU", "MFU", "HFU", "steps", "hours", "$")
    for plan in plans:
        table.add_row(
            STEPS[plan.number], "no" if plan.missing > 0 else "yes", _gb(plan.peak_memory),
            f"{plan.step_seconds:,.3g}", f"{plan.tokens_per_gpu:,.0f}", f"{plan.model_utilisation:.1%}",
            f"{plan.hardware_utilisation:.1%}", f"{plan.steps:,.0f}", f"{plan.hours:,.2f}", f"{plan.cost:,.0f}",
        )  # fmt: skip
    if len(plans) > 1:
        hours, cost = sum(p.hours for p in plans), sum(p.cost for p in plans)
        table.add_row("all", *[""] * 7, f"{hours:,.2f}", f"{cost:,.0f}")
    console.print(table)
    for plan in plans:
        spent = {name: value for name, value in plan.seconds.items() if value > SHOWN * plan.step_seconds}
        where = ", ".join(f"{name} {value:,.3g} s" for name, value in spent.items())
        console.print(f"{STEPS[plan.number]}: {said_layout(plan.layout)}\n  time: {where}")
    console.print(_memory_table(plans))
    if any(stack_of(plan.layout) is not stack_of(Layout(gpus=1, length=1)) for plan in plans):
        console.print(
            "Pipelines with interleaving, and tensor groups beside pipelines, are planned as Megatron-Core does them."
        )


def _memory_table(plans: Sequence[StepPlan]) -> Table:
    columns = [(plan, phase, part) for plan in plans for phase, part in plan.memory.items()]
    table = make_table("GB a device", *[f"{plan.number} {phase}" for plan, phase, _ in columns])
    for name in columns[0][2].parts():
        values = [part.parts()[name] for _, _, part in columns]
        if max(values) >= 0.05e9:
            table.add_row(name, *[_gb(value) for value in values])
    table.add_row("all", *[_gb(part.total) for _, _, part in columns])
    return table


def show_remedies(console: Console, plan: StepPlan, found: Sequence[Remedy]) -> None:
    """What is missing, and what would make it fit, the cheapest first."""
    phase = max(plan.memory, key=lambda name: plan.memory[name].total)
    console.print(
        f"[bold]{STEPS[plan.number]} does not fit[/bold]: {phase} needs {_gb(plan.peak_memory)} of "
        f"{_gb(plan.capacity)} GB, {_gb(plan.missing)} GB are missing."
    )
    if not found:
        console.print("  No single change nor two together make it fit: use more devices, or --search.")
    for remedy in found[:3]:
        console.print(
            f"  {remedy.change}: {_gb(remedy.plan.peak_memory)} GB, {remedy.plan.hours:,.2f} h, "
            f"${remedy.plan.cost:,.0f}"
        )


def show_search(console: Console, setting: Setting, found: Found, *, decision: str, top: int = 8) -> None:
    """The best layouts, and why the others lose."""
    console.print(f"{found.tried} layouts of step 1, {found.too_large} of them too large. {decision}.")
    if not found.ranked:
        if found.nearest is not None:
            console.print(f"None fits; the smallest, {said_layout(found.nearest.layout)}, needs "
                          f"{_gb(found.nearest.memory)} of {_gb(setting.device.memory)} GB.")  # fmt: skip
        return
    table = make_table("layout", "tokens/s/GPU", "step s", "GB", "loses by")
    best = found.ranked[0]
    for candidate in found.ranked[:top]:
        why = "" if candidate is best else f"{_slower(best, candidate):.1%}: {reason(best, candidate)}"
        table.add_row(said_layout(candidate.layout), f"{candidate.tokens_per_gpu:,.1f}",
                      f"{candidate.time.total:,.4g}", _gb(candidate.memory), why)  # fmt: skip
    console.print(table)


def _slower(best: Candidate, other: Candidate) -> float:
    return 1 - other.tokens_per_gpu / best.tokens_per_gpu


def as_json(setting: Setting, plans: Sequence[StepPlan]) -> dict[str, Any]:
    """The plan as plain values: seconds, bytes, FLOPs, dollars."""
    return {
        "name": setting.name, "device": setting.device.name, "gpus": setting.gpus,
        "steps": [_step_json(plan) for plan in plans],
        "hours": sum(plan.hours for plan in plans), "usd": sum(plan.cost for plan in plans),
    }  # fmt: skip


def _step_json(plan: StepPlan) -> Mapping[str, Any]:
    return {
        "step": plan.number, "layout": said_layout(plan.layout), "fits": plan.missing <= 0,
        "seconds": dict(plan.seconds), "step_seconds": plan.step_seconds, "steps": plan.steps, "rows": plan.rows,
        "tokens_per_second_per_gpu": plan.tokens_per_gpu, "mfu": plan.model_utilisation,
        "hfu": plan.hardware_utilisation, "hours": plan.hours, "usd": plan.cost,
        "peak_bytes": plan.peak_memory, "missing_bytes": max(0.0, plan.missing),
        "bytes": {phase: part.parts() for phase, part in plan.memory.items()},
    }  # fmt: skip


def show_comparison(console: Console, setting: Setting, second: Device, found: Sequence[Comparison]) -> None:
    """Each step on both devices, then the parts of a step."""
    first = setting.device
    console.print(
        f"[bold]{setting.name}[/bold] on {setting.gpus} x {first.name} and {setting.gpus} x {second.name}, rows of "
        f"{setting.prompt} + {setting.response} tokens, the same layouts"
    )
    sides = (first.name, second.name)
    table = make_table(
        "", *[f"{name} step s" for name in sides], "ratio", *[f"{name} h" for name in sides],
        *[f"{name} $" for name in sides],
    )  # fmt: skip
    for c in found:
        both = (c.first, c.second)
        table.add_row(
            STEPS[c.number], *[f"{p.step_seconds:,.3g}{'' if p.missing <= 0 else ' (no fit)'}" for p in both],
            f"{c.ratio:.2f} x", *[f"{p.hours:,.2f}" for p in both], *[f"{p.cost:,.0f}" for p in both],
        )  # fmt: skip
    console.print(table)
    for c in found:
        parts = {name: ratio for name, ratio in c.parts.items() if c.first.seconds[name] > SHOWN * c.first.step_seconds}
        console.print(f"{STEPS[c.number]}: " + ", ".join(f"{name} {ratio:.2f} x" for name, ratio in parts.items()))


def show_scaling(console: Console, setting: Setting, found: Sequence[Curve]) -> None:
    """Each curve as a table: rate, efficiency, and the parts that grew most."""
    console.print(f"[bold]{setting.name}[/bold] on {setting.device.name}")
    for curve in found:
        table = make_table(f"{STEPS[curve.number]}: {curve.kind}", "step s", "tokens/s/GPU", "efficiency", "lost to")
        for point in curve.points:
            lost = sorted(point.losses.items(), key=lambda item: -item[1])
            said = ", ".join(f"{name} {share:.1%}" for name, share in lost[:3] if share > SHOWN)
            table.add_row(f"{point.gpus:,}", f"{point.seconds:,.3g}", f"{point.tokens_per_gpu:,.1f}",
                          f"{point.efficiency:.1%}", said)  # fmt: skip
        console.print(table)
        for gpus, reason_ in curve.left_out.items():
            console.print(f"  {gpus:,}: {reason_}")


def show_validation(console: Console, found: Validation, *, every: bool) -> None:
    """Groups and sweeps; with `every`, each figure too."""
    if every:
        table = make_table("system", "run", "metric", "published", "plan", "error")
        for p in found.predictions:
            table.add_row(p.record.system, said_run(p.record), f"{p.record.metric} ({p.record.unit})",
                          f"{p.published:,.4g}", f"{p.predicted:,.4g}", f"{p.error:+.1%}")  # fmt: skip
        console.print(table)
    table = make_table("group", "of", "constants", "figures", "median", "p90", "bias", "within goal")
    for group in found.groups:
        table.add_row(group.name, group.kind, "fitted" if group.fitted else "judged", str(group.count),
                      f"{group.median:.1%}", f"{group.p90:.1%}", f"{group.bias:+.1%}",
                      "yes" if group.reached else "no")  # fmt: skip
    console.print(table)
    table = make_table("sweep", "layouts", "rank correlation", "place of the published best")
    for sweep in found.sweeps:
        table.add_row(sweep.name, str(sweep.count), f"{sweep.correlation:.2f}", str(sweep.best))
    console.print(table)
    goals = ", ".join(
        f"{kind} median {median:.0%}" + (f" and 90th percentile {p90:.0%}" if p90 else "")
        for kind, (median, p90) in GOALS.items()
    )
    console.print(f"Goals: {goals}. {len(found.predictions)} figures predicted, {len(found.left_out)} left out:")
    for reason_, count in found.reasons().items():
        console.print(f"  {count}: {reason_}")


def said_run(record: Any) -> str:
    """A run in a few words."""
    names = (("n_gpus", "n"), ("tp", "TP"), ("pp", "PP"), ("vpp", "v"), ("mbs", "mbs"), ("seq", "s"),
             ("zero_stage", "ZeRO-"))  # fmt: skip
    values = [f"{short}{getattr(record, name):g}" for name, short in names if getattr(record, name) is not None]
    return " ".join([record.model or "", *values, record.precision or ""]).strip()
