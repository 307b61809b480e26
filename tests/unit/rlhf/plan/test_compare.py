"""The same work on two devices."""

from dataclasses import replace
from typing import Any

import pytest

from rlhf.plan.compare import as_json, compare
from rlhf.plan.hardware import load_devices
from rlhf.plan.setting import Choices, from_models

DEVICES = load_devices()


def setting(gpu: str = "a100-80", **choices: Any) -> Any:
    return from_models("opt-13b", "opt-350m", DEVICES[gpu], 8, Choices(**choices))


def test_a_device_beside_itself() -> None:
    for found in compare(setting(), DEVICES["a100-80"], [1, 2, 3]):
        assert found.ratio == 1 and found.cost_ratio == 1
        assert set(found.parts.values()) == {1.0}


def test_twice_the_rate_is_half_the_time() -> None:
    """All but the constant starts of kernels and messages; at one and a half times the price it costs 3/4."""
    first = DEVICES["a100-80"]
    second = replace(
        first, name="double", peak_tflops={name: 2 * rate for name, rate in first.peak_tflops.items()},
        bandwidth_gb_s=2 * first.bandwidth_gb_s, link_gb_s=2 * first.link_gb_s, host_scale=first.host_scale / 2,
        usd_per_hour=1.5 * first.usd_per_hour,
    )  # fmt: skip
    sft, reward, ppo = compare(setting(), second, [1, 2, 3])
    # A reward model of 350M is small: constant starts of its kernels are a tenth of its step.
    assert sft.ratio == pytest.approx(2, rel=0.02) and reward.ratio == pytest.approx(1.8, rel=0.02)
    assert sft.cost_ratio == pytest.approx(0.75, rel=0.02)
    assert sft.parts["computing"] == pytest.approx(2, rel=0.02)
    assert sft.ratio == sft.first.step_seconds / sft.second.step_seconds
    assert 1.5 < ppo.ratio < 2.05
    assert compare(setting("a100-80"), replace(second, usd_per_hour=0), [1])[0].cost_ratio is None


def test_h100_over_a100() -> None:
    """Decoding is bound by memory, 3350 over 2039 GB/s; training by products, at most 989 over 312 TFLOP/s."""
    sft, _, ppo = compare(setting(), DEVICES["h100-sxm"], [1, 2, 3])
    assert 1.8 < sft.ratio < 989 / 312
    assert 1.2 < ppo.parts["decode"] < 3350 / 2039 * 1.05
    assert ppo.parts["update actor"] > ppo.parts["decode"]
    made = as_json(setting(), DEVICES["h100-sxm"], [sft, ppo])
    assert made["devices"] == ["a100-80", "h100-sxm"] and [step["step"] for step in made["steps"]] == [1, 3]


def test_a_type_that_one_of_them_lacks() -> None:
    with pytest.raises(ValueError, match="v100-32 has no bf16 peak"):
        compare(setting(), DEVICES["v100-32"], [1])
