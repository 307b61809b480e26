"""Weak and strong scaling of a step, and where the loss comes from. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Literal

from rlhf.plan.layout import Layout
from rlhf.plan.setting import Policy, Setting, Training, with_batch
from rlhf.plan.steps import StepPlan, plan_step

Kind = Literal["weak", "strong"]
KINDS: tuple[Kind, ...] = ("weak", "strong")
STRAGGLERS = "stragglers"
BATCH_FLOOR = "batch floor"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A step on some number of devices."""

    gpus: int
    seconds: float
    """Of a step, waiting for the slowest rank included."""
    tokens_per_gpu: float
    """Tokens of the batch a second of one device."""
    efficiency: float
    """Of the smallest number of devices that fits, 1."""
    losses: Mapping[str, float]
    """Share of the devices' time that each part takes more than there; with the efficiency they make 1."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One of the three steps, scaled."""

    number: int
    kind: Kind
    points: tuple[Point, ...]
    left_out: Mapping[int, str]
    """Devices -> why there is no point."""


def curves(setting: Setting, numbers: Sequence[int], counts: Sequence[int], *, jitter: float) -> list[Curve]:
    """Both curves of each step.

    Weak scaling keeps the sequences of a device, strong scaling those of all devices together. Where a strong curve
    has more ranks than sequences, the ranks without one wait (the batch floor).

    Args:
        setting: whose batch is that of `setting.gpus` devices.
        numbers: of the steps.
        counts: of devices, ascending.
        jitter: standard deviation of a rank's step, as a share of it; each step takes as long as its slowest rank.
    """
    if not 0 <= jitter < 1:
        raise ValueError(f"--jitter must be at least 0 and below 1, got {jitter:g}.")
    return [_curve(setting, number, kind, counts, jitter=jitter) for number in numbers for kind in KINDS]


def counts_up_to(largest: int, *, smallest: int = 1) -> list[int]:
    """The smallest number, doubled as long as it stays below the largest, and the largest."""
    if not 1 <= smallest <= largest:
        raise ValueError(f"--from must be >= 1 and at most --to, got {smallest} and {largest}.")
    counts = [smallest]
    while counts[-1] * 2 < largest:
        counts.append(counts[-1] * 2)
    return [*counts, largest] if largest > counts[-1] else counts


def expected_maximum(count: int) -> float:
    """Mean of the largest of `count` standard normal numbers (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def _curve(setting: Setting, number: int, kind: Kind, counts: Sequence[int], *, jitter: float) -> Curve:
    costs: dict[int, tuple[dict[str, float], StepPlan, float]] = {}
    left_out = {}
    for gpus in counts:
        try:
            at = at_size(setting, gpus, kind)
        except ValueError as error:
            left_out[gpus] = str(error)
            continue
        plan = plan_step(at, number)
        if plan.missing > 0:
            left_out[gpus] = f"{plan.missing / 1e9:,.1f} GB of a device are missing"
            continue
        wanted = _wanted(setting, plan, number, gpus, kind)
        costs[gpus] = (_cost(plan, wanted, jitter), plan, wanted)
    if not costs:
        return Curve(number=number, kind=kind, points=(), left_out=left_out)
    start, _, _ = next(iter(costs.values()))
    points = []
    for gpus, (cost, plan, wanted) in costs.items():
        whole = sum(cost.values())
        seconds = plan.step_seconds * (1 + jitter * expected_maximum(gpus))
        points.append(Point(
            gpus=gpus, seconds=seconds, tokens_per_gpu=wanted * plan.tokens / plan.rows / seconds / gpus,
            efficiency=sum(start.values()) / whole,
            losses={name: (cost[name] - start.get(name, 0.0)) / whole for name in cost},
        ))  # fmt: skip
    return Curve(number=number, kind=kind, points=tuple(points), left_out=left_out)


def _cost(plan: StepPlan, wanted: float, jitter: float) -> dict[str, float]:
    """Part -> device-seconds for each row that is wanted."""
    each = plan.gpus / plan.rows
    cost = {name: seconds * each for name, seconds in plan.seconds.items()}
    cost[STRAGGLERS] = plan.step_seconds * each * jitter * expected_maximum(plan.gpus)
    cost[BATCH_FLOOR] = sum(cost.values()) * (plan.rows / wanted - 1)
    return cost


def _wanted(setting: Setting, plan: StepPlan, number: int, gpus: int, kind: Kind) -> float:
    """Rows of the step's batch; the plan may have rounded it up to a row for each rank."""
    if kind == "weak":
        return plan.rows
    batch = {
        1: setting.sft.layout.global_batch, 2: setting.preference.layout.global_batch, 3: setting.ppo.prompts_per_step
    }[number]  # fmt: skip
    return min(plan.rows, batch)


def at_size(setting: Setting, gpus: int, kind: Kind) -> Setting:
    """The setting on another number of devices.

    Raises:
        ValueError: the layout does not split so many devices.
    """

    def spread(layout: Layout) -> Layout:
        return _spread(layout, gpus, kind)

    def training(one: Training) -> Training:
        return replace(one, layout=spread(one.layout))

    ppo = setting.ppo
    grown = gpus / setting.gpus if kind == "weak" else 1.0
    spread_ppo: Policy = replace(
        ppo.map(spread), prompts_per_step=max(1, round(ppo.prompts_per_step * grown)),
        minibatch=max(1, round(ppo.minibatch * grown)),
    )  # fmt: skip
    return replace(
        setting, gpus=gpus, sft=training(setting.sft), preference=training(setting.preference), ppo=spread_ppo
    )


def _spread(layout: Layout, gpus: int, kind: Kind) -> Layout:
    if kind == "weak":
        return replace(layout, gpus=gpus)
    return with_batch(replace(layout, gpus=gpus), layout.global_batch)


def as_json(setting: Setting, found: Sequence[Curve]) -> dict[str, Any]:
    """Plain values: seconds, shares."""
    return {
        "name": setting.name, "device": setting.device.name,
        "curves": [
            {
                "step": curve.number, "kind": curve.kind,
                "points": [{**vars(point), "losses": dict(point.losses)} for point in curve.points],
                "left_out": {str(gpus): reason for gpus, reason in curve.left_out.items()},
            }
            for curve in found
        ],
    }  # fmt: skip
