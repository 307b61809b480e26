"""Layers over the stages of a pipeline: who gets which, and what is refused."""

import itertools
import random
from typing import Any

import pytest

from rlhf.models.pipeline_split import check, deal

ZERO1 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
LLAMA = {"model_type": "llama", "num_hidden_layers": 4}


def test_layers_by_hand() -> None:
    """Four layers of 2 and a head of 3: 2 + 2 + 2 in front of 2 + 3, not 4 and 7; in three stages 4, 2 and 5."""
    assert deal([2, 2, 2, 5], 2) == [range(0, 3), range(3, 4)]
    assert deal([2, 2, 2, 5], 3) == [range(0, 2), range(2, 3), range(3, 4)]
    assert deal([2, 2, 2, 5], 1) == [range(0, 4)]
    assert deal([1, 1, 1], 2) == [range(0, 2), range(2, 3)], "of equals, the stage in front has more"
    assert deal([1, 1, 1, 9], 4) == [range(i, i + 1) for i in range(4)]


def test_no_other_deal_has_a_smaller_largest_stage() -> None:
    """Against all ways to cut."""
    rng = random.Random(1)
    for _ in range(60):
        costs = [rng.randint(1, 9) for _ in range(rng.randint(1, 8))]
        num_stages = rng.randint(1, len(costs))
        found = deal(costs, num_stages)
        assert [i for layers in found for i in layers] == list(range(len(costs))) and all(found)
        best = min(
            max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))
            for cuts in itertools.combinations(range(1, len(costs)), num_stages - 1)
        )
        assert max(sum(costs[i] for i in layers) for layers in found) == best


def test_more_stages_than_layers() -> None:
    with pytest.raises(ValueError, match="2 layers do not fill 3 stages. Use as many stages as layers or fewer"):
        deal([1, 1], 3)


@pytest.mark.parametrize(
    ("shape", "ds", "said"),
    [
        ({**LLAMA, "num_hidden_layers": 1}, {}, "parallel.pp=2: the model has 1 layers, and each stage needs one. Use"),
        ({"model_type": "gpt2", "n_layer": 1}, {}, "the model has 1 layers"),
        ({**LLAMA, "model_type": "gemma2"}, {}, "models of model_type gemma2 are not cut by layers, only opt, gpt2"),
        (LLAMA, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, "`data_types.grad_accum"),
        (LLAMA, {"wall_clock_breakdown": True}, "does not go with `wall_clock_breakdown`"),
        (LLAMA, {"flops_profiler": {"enabled": True}}, "does not go with `flops_profiler`"),
    ],
)
def test_what_is_refused(shape: dict[str, Any], ds: dict[str, Any], said: str) -> None:
    check(shape, {**ZERO1, **ds}, 1)
    check(LLAMA, ZERO1, 2)
    with pytest.raises(ValueError) as error:
        check(shape, {**ZERO1, **ds}, 2)
    assert str(error.value).startswith("parallel.pp=2") and said in str(error.value)


def test_a_model_that_is_not_known_yet_is_not_refused() -> None:
    check({}, ZERO1, 2)
    check({}, {**ZERO1, "bf16": {"enabled": True}}, 2)
