import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.schedule import lr_multiplier


def multipliers(num_steps: int, **kwargs: object) -> list[float]:
    return [lr_multiplier(step, num_steps=num_steps, **kwargs) for step in range(num_steps)]  # type: ignore[arg-type]


def test_by_hand() -> None:
    # 10 steps, warm-up 2: 1/2, 1, then 8 steps at 1/9 ... 8/9 of the way from 1 down to 0.1.
    linear = multipliers(10, schedule="linear", warmup_frac=0.2, min_lr_frac=0.1)
    assert linear[:2] == [0.5, 1.0]
    assert linear[2:] == pytest.approx([0.1 + 0.9 * (1 - k / 9) for k in range(1, 9)])
    cosine = multipliers(4, schedule="cosine", warmup_frac=0.25, min_lr_frac=0.0)
    assert cosine == pytest.approx([1.0, 0.5 * (1 + math.cos(math.pi / 4)), 0.5, 0.5 * (1 - math.cos(math.pi / 4))])
    assert multipliers(3, schedule="constant", warmup_frac=0.0) == [1.0, 1.0, 1.0]


@given(
    num_steps=st.integers(1, 60),
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    warmup_frac=st.floats(0, 0.99),
    min_lr_frac=st.floats(0, 1),
)
def test_never_zero_rises_then_falls(num_steps: int, schedule: str, warmup_frac: float, min_lr_frac: float) -> None:
    values = multipliers(num_steps, schedule=schedule, warmup_frac=warmup_frac, min_lr_frac=min_lr_frac)
    assert all(0 < value <= 1 for value in values)
    num_warmup = min(math.ceil(warmup_frac * num_steps), num_steps)
    assert values[:num_warmup] == sorted(values[:num_warmup])
    assert values[num_warmup:] == sorted(values[num_warmup:], reverse=True)
    assert all(value >= min_lr_frac - 1e-12 for value in values[num_warmup:])
    if num_warmup:
        assert values[num_warmup - 1] == 1.0


def test_after_the_end_the_last_rate_stays() -> None:
    kwargs = {"num_steps": 5, "schedule": "cosine", "warmup_frac": 0.0}
    assert lr_multiplier(9, **kwargs) == lr_multiplier(4, **kwargs) > 0  # type: ignore[arg-type]


@pytest.mark.parametrize(("step", "num_steps"), [(-1, 5), (0, 0)])
def test_out_of_range(step: int, num_steps: int) -> None:
    with pytest.raises(ValueError, match="step >= 0 and num_steps >= 1"):
        lr_multiplier(step, num_steps=num_steps, schedule="linear", warmup_frac=0.1)
