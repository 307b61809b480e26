"""The plan against published figures: every one, by group, and the order of layouts within a sweep. No torch."""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.plan.hardware import Device
from rlhf.plan.predict import Prediction, predict
from rlhf.plan.published import Record

GOALS = {"time": (0.12, 0.30), "memory": (0.08, None), "scaling": (0.05, None)}
"""Kind -> (median, 90th percentile) of the absolute error that is aimed at."""
SWEEP = 3
"""Layouts of one model on as many devices that make a sweep."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Errors of the figures that are judged together."""

    name: str
    kind: str
    fitted: bool
    count: int
    median: float
    p90: float
    bias: float
    """Median of the errors with their sign."""

    @property
    def reached(self) -> bool:
        """Within the goal."""
        median, p90 = GOALS[self.kind]
        return self.median <= median and (p90 is None or self.p90 <= p90)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Layouts of one model on one number of devices."""

    name: str
    count: int
    correlation: float
    """Spearman's, of published and predicted time."""
    best: int
    """Place of the published best in the plan's order; 1 is first."""


@dataclass(frozen=True, kw_only=True)
class Validation:
    """All of it."""

    predictions: Sequence[Prediction]
    left_out: Sequence[tuple[Record, str]]
    groups: Sequence[Group]
    sweeps: Sequence[Sweep]

    def reasons(self) -> dict[str, int]:
        """Why figures are left out -> how many."""
        return dict(Counter(reason for _, reason in self.left_out).most_common())


def validate(records: Iterable[Record], devices: Mapping[str, Device]) -> Validation:
    """Predict every verified figure that says enough."""
    predictions: list[Prediction] = []
    left_out: list[tuple[Record, str]] = []
    for record in records:
        if not record.verified:
            left_out.append((record, "not verified"))
            continue
        try:
            predictions.append(predict(record, devices))
        except ValueError as error:
            left_out.append((record, str(error)))
    return Validation(
        predictions=predictions, left_out=left_out, groups=group_errors(predictions), sweeps=find_sweeps(predictions)
    )


def group_errors(predictions: Sequence[Prediction]) -> list[Group]:
    """By group and kind, and all unfitted ones of a kind together at the end."""
    keys = dict.fromkeys((p.group, p.kind, p.fitted) for p in predictions)
    groups = [
        _group(name, kind, [p for p in predictions if (p.group, p.kind) == (name, kind)], fitted=fitted)
        for name, kind, fitted in keys
    ]
    for kind in GOALS:
        unfitted = [p for p in predictions if p.kind == kind and not p.fitted]
        if unfitted:
            groups.append(_group("all unfitted", kind, unfitted, fitted=False))
    return groups


def _group(name: str, kind: str, members: Sequence[Prediction], *, fitted: bool) -> Group:
    errors = [p.error for p in members]
    sizes = sorted(abs(error) for error in errors)
    return Group(
        name=name, kind=kind, fitted=fitted, count=len(errors), median=statistics.median(sizes),
        p90=percentile(sizes, 0.9), bias=statistics.median(errors),
    )  # fmt: skip


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest of a sorted sequence."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def find_sweeps(predictions: Sequence[Prediction]) -> list[Sweep]:
    """Figures of one system, model, size and length that differ in layout: does the plan order them alike?"""
    sets: dict[tuple[Any, ...], dict[tuple[Any, ...], Prediction]] = {}
    for p in predictions:
        r = p.record
        if p.kind != "time" or "iteration time" not in r.metric and r.unit != "tokens/s/GPU":
            continue
        key = (r.system, r.hardware, r.metric, r.model, r.hidden, r.layers, r.heads, r.n_gpus, r.seq, r.precision)
        layout = (r.tp, r.pp, r.vpp, r.mbs, r.zero_stage, r.act_ckpt)
        sets.setdefault(key, {}).setdefault(layout, p)
    return [_sweep(key, list(members.values())) for key, members in sets.items() if len(members) >= SWEEP]


def _sweep(key: tuple[Any, ...], members: Sequence[Prediction]) -> Sweep:
    sign = 1 if "time" in members[0].record.metric else -1
    published = [sign * p.published for p in members]
    predicted = [sign * p.predicted for p in members]
    best = published.index(min(published))
    place = 1 + sum(value < predicted[best] for value in predicted)
    r = members[0].record
    heads = f", {r.heads:g} heads" if r.heads else ""
    return Sweep(
        name=f"{members[0].group}: {r.model}{heads} on {r.n_gpus:g}", count=len(members),
        correlation=spearman(published, predicted), best=place,
    )  # fmt: skip


def ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of their places."""
    return [1 + sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of ranks; 0 if one side is constant."""
    x, y = ranks(left), ranks(right)
    if len(set(x)) == 1 or len(set(y)) == 1:
        return 0.0
    return statistics.correlation(x, y)
