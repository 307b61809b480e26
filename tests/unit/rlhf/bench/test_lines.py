"""Goals: what is compared, in which direction, and which lines a name selects."""

from typing import Any

import pytest

from rlhf.bench.lines import Goal, make_lines, reached, select, value_of
from rlhf.bench.workload import FULL

from .conftest import make_sample

PEAKS = {"matmul_fp32_flops": 100.0, "matmul_bf16_flops": 200.0}


def goal(**changes: Any) -> Goal:
    values: dict[str, Any] = {"work": "x", "against": "TRL", "measure": "tokens", "target": 2.0}
    return Goal(**{**values, **changes})


def test_ratio_is_ours_over_theirs() -> None:
    results = {"ours": [make_sample(wall_seconds=1)], "TRL": [make_sample(wall_seconds=3, rows=8)]}
    assert value_of(goal(), results, PEAKS, FULL) == 3
    assert value_of(goal(measure="rows"), results, PEAKS, FULL) == 1.5
    assert value_of(goal(), {"ours": results["ours"]}, PEAKS, FULL) is None


def test_memory_at_most() -> None:
    results = {"ours": [make_sample(peak_rss_bytes=30)], "TRL": [make_sample(peak_rss_bytes=60)]}
    memory = goal(measure="peak_memory", bound="at most", target=0.6)
    assert value_of(memory, results, PEAKS, FULL) == 0.5
    assert reached(memory, 0.6) and not reached(memory, 0.61)
    assert reached(goal(), 2.0) and not reached(goal(), 1.99)


def test_share_of_the_matmul_peak_is_of_one_rank_and_its_type() -> None:
    results = {"ours": [make_sample(wall_seconds=2, flops=280.0, ranks=2)]}
    share = goal(measure="matmul_share", against="")
    assert value_of(share, results, PEAKS, FULL) == 0.7
    assert value_of(goal(measure="matmul_share", against="", dtype="bf16"), results, PEAKS, FULL) == 0.35


def test_growth_is_over_what_the_work_asks_for() -> None:
    results = {"base": [make_sample(wall_seconds=2)], "more": [make_sample(wall_seconds=5)]}
    growth = goal(measure="growth", contestant="more", against="base", expected=lambda _: 2.0)
    assert value_of(growth, results, PEAKS, FULL) == 1.25


def test_absolute_seconds() -> None:
    results = {"step 1": [make_sample(startup_seconds=s) for s in (4.0, 9.0, 5.0)]}
    assert value_of(goal(measure="startup", contestant="step 1", against=""), results, PEAKS, FULL) == 5.0
    assert value_of(goal(measure="seconds", contestant="step 1", against=""), results, PEAKS, FULL) == 2.0


def test_twice_the_answer_asks_for_less_than_twice_the_work() -> None:
    """80 + 128 tokens over 80 + 64 is 1.44; attention and the head, which only answers pass, add to it."""
    longer = next(goal for goal in make_lines()["growth"].goals if goal.contestant == "twice the answer")
    assert longer.expected is not None
    assert 1.45 < longer.expected(FULL) < 1.6


def test_every_line_of_the_issue_is_there() -> None:
    assert list(make_lines()) == [
        "sft_fp32", "sft_bf16", "sft_2ranks_zero0", "sft_2ranks_zero3", "sft_long_fp32", "sft_long_bf16", "rm",
        "rm_2ranks", "ppo_fp32", "ppo_bf16", "ppo_ragged", "ppo_zero3", "rollout_fixed_fp32", "rollout_fixed_bf16",
        "rollout_ragged_fp32", "rollout_ragged_bf16", "memory", "startup", "growth",
    ]  # fmt: skip


def test_names_select_lines() -> None:
    assert [line.name for line in select(["rm", "sft_long"])] == ["sft_long_fp32", "sft_long_bf16", "rm", "rm_2ranks"]
    assert [line.name for line in select(["ppo_fp32"])] == ["ppo_fp32"]
    assert len(select([])) == len(make_lines())
    with pytest.raises(ValueError, match="'sf' is no line"):
        select(["sf"])


def test_a_goal_is_in_the_type_that_its_line_names() -> None:
    """The share of the matmul peak is taken of that type."""
    for name, line in make_lines().items():
        expected = "bf16" if name.endswith("bf16") else "fp32"
        assert all(goal.dtype == expected for goal in line.goals), name
