"""The same work on two devices. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf.plan.hardware import Device
from rlhf.plan.setting import Setting
from rlhf.plan.steps import StepPlan, plan_step


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One of the three steps on two devices, with the same layout."""

    first: StepPlan
    second: StepPlan

    @property
    def number(self) -> int:
        """Of the step."""
        return self.first.number

    @property
    def ratio(self) -> float:
        """Rate of the second over that of the first."""
        return self.first.step_seconds / self.second.step_seconds

    @property
    def parts(self) -> Mapping[str, float]:
        """Part of a step -> the same ratio; those that take no time on either are left out."""
        second = self.second.seconds
        return {name: mine / second[name] for name, mine in self.first.seconds.items() if mine and second.get(name)}

    @property
    def cost_ratio(self) -> float | None:
        """Dollars on the second over dollars on the first; None where a price is not known."""
        return self.second.cost / self.first.cost if self.first.cost and self.second.cost else None


def compare(setting: Setting, second: Device, numbers: Sequence[int]) -> list[Comparison]:
    """Plan the steps on the setting's device and on another one, with as many of them and the same layouts.

    Raises:
        ValueError: the other device does not compute in a type of the setting.
    """
    other = replace(setting, device=second)
    return [Comparison(first=plan_step(setting, n), second=plan_step(other, n)) for n in numbers]


def as_json(setting: Setting, second: Device, found: Sequence[Comparison]) -> dict[str, Any]:
    """Plain values: seconds, ratios, dollars."""
    return {
        "name": setting.name, "devices": [setting.device.name, second.name], "gpus": setting.gpus,
        "steps": [
            {
                "step": c.number, "ratio": c.ratio, "cost_ratio": c.cost_ratio, "parts": dict(c.parts),
                "step_seconds": [c.first.step_seconds, c.second.step_seconds],
                "hours": [c.first.hours, c.second.hours], "usd": [c.first.cost, c.second.cost],
                "fits": [c.first.missing <= 0, c.second.missing <= 0],
            }
            for c in found
        ],
    }  # fmt: skip
