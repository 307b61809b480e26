"""Samples: what is summed, what is the slowest rank's, what is a median."""

from typing import Any

import pytest

from rlhf.bench.record import Sample, from_json, from_steps, median_of, median_ratio, to_json

from .conftest import make_sample


def step(wall: float, cpu: float, tokens: int, **changes: Any) -> dict[str, Any]:
    return {
        "wall": wall,
        "cpu": cpu,
        "tokens": tokens,
        "rows": 2,
        "filled": tokens,
        "positions": 20,
        "phases": {},
    } | changes


def test_two_ranks_after_a_warm_up_step() -> None:
    """Wall seconds of the slower rank in each step: 3 + 5; the rest is summed over both."""
    ranks = [
        [step(100, 100, 999), step(3, 2, 10, phases={"rollout": 1.0}), step(4, 2, 20, phases={"rollout": 2.0})],
        [step(100, 100, 999), step(1, 1, 15, phases={"rollout": 0.5}), step(5, 3, 5, phases={"rollout": 4.0})],
    ]
    sample = from_steps(ranks, warmup=1)
    assert (sample.wall_seconds, sample.cpu_seconds, sample.steps, sample.ranks) == (8, 8, 2, 2)
    assert (sample.tokens, sample.rows) == (50, 8)
    assert sample.padding_frac == pytest.approx(1 - 50 / 80)
    assert sample.phases == {"rollout": 5.0}
    assert sample.tokens_per_second == 50 / 8 and sample.step_seconds == 4 and sample.cpu_per_row == 1


def test_no_positions_no_padding_share() -> None:
    assert from_steps([[step(1, 1, 5, positions=0, filled=0)]], warmup=0).padding_frac is None


@pytest.mark.parametrize("ranks", [[[step(1, 1, 1)]], [[step(1, 1, 1)] * 3, [step(1, 1, 1)] * 2], [[]]])
def test_too_few_or_unequal_steps_are_refused(ranks: list[list[dict[str, Any]]]) -> None:
    with pytest.raises(ValueError, match="steps were recorded"):
        from_steps(ranks, warmup=1)


def test_round_trip() -> None:
    sample = make_sample(phases={"update": 1.5}, padding_frac=0.25)
    assert from_json(to_json(sample)) == sample


def test_medians() -> None:
    """A slow second round slows both: the rounds' ratios are 2, 2 and 1, and that of the medians is another number."""

    def speed(sample: Sample) -> float:
        return sample.tokens_per_second

    ours = [make_sample(wall_seconds=w) for w in (1, 10, 2)]
    theirs = [make_sample(wall_seconds=w) for w in (2, 20, 2)]
    assert median_ratio(ours, theirs, speed) == 2
    assert median_of(ours, speed) == 50
    assert median_ratio(ours, theirs, lambda sample: sample.flops_per_second) is None
    assert median_ratio(ours, [], speed) is None
    assert median_of([make_sample(flops=4.0), make_sample()], lambda sample: sample.flops_per_second) == 2.0
