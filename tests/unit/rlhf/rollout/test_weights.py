"""Which way of lending is chosen, for the memory there is."""

import logging
from types import SimpleNamespace

import pytest
import torch

from rlhf import ds_config
from rlhf.rollout import weights
from rlhf.rollout.plan import Demand
from rlhf.rollout.weights import Lending, choose_lending

DEMAND = Demand(num_rows=2, num_tokens=8)


@pytest.fixture
def choose(tiny_model, monkeypatch, caplog):
    """choose_lending on a tiny model, with so much free memory and so many ranks."""

    def run(free, *, family="opt", ds_name="cpu_zero3", ranks=4, **asked):
        ds, model = ds_config.load(ds_name), tiny_model(family, tie_word_embeddings=False)
        is_sharded = ds_config.zero_stage(ds) == 3
        if is_sharded:
            for parameter in model.parameters():
                parameter.ds_id, parameter.ds_shape = 0, parameter.shape
        monkeypatch.setattr(weights, "free_bytes", lambda: free)
        monkeypatch.setattr(weights, "world_size", lambda: ranks)
        monkeypatch.setattr(weights, "group_of", lambda size: f"group of {size}")
        engine = SimpleNamespace(module=SimpleNamespace(model=model), is_sharded=is_sharded, ds=ds)
        caplog.set_level(logging.INFO, logger="rlhf")
        asked = {"weights": "auto", "tensor_parallel": None, "dtype": None, **asked}
        return choose_lending(engine, DEMAND, **asked)

    return run


def test_auto_takes_the_first_that_fits(choose, caplog):
    lending, whole = choose(10**9)
    assert lending == Lending() and "weights whole on each rank in float32; planned for each rank: 0." in caplog.text
    assert whole.weights > 0
    lending, half = choose(int(0.9 * whole.peak / weights.USABLE_FRAC))
    assert lending == Lending(group="group of 2") and "shared by 2 ranks" in caplog.text
    # Half of the weights, but the whole of what is gathered at a time, which decides here.
    assert half.weights < 0.6 * whole.weights and half.gathered == whole.gathered == whole.weights


def test_auto_falls_back_to_layers(choose, monkeypatch, caplog):
    """BLOOM cannot be split; nor can anything on one rank. DeepSpeed's live weights are what it takes then."""
    for changes in ({"family": "bloom"}, {"ranks": 1}):
        _, whole = choose(10**9, **changes)
        lending, plan = choose(int(whole.peak / weights.USABLE_FRAC) - 8, **changes)
        assert lending == Lending(layerwise=True) and "gathered layer by layer in each forward" in caplog.text
        assert plan.peak < whole.peak and plan.weights == 0
        caplog.clear()


def test_as_many_ranks_as_asked(choose):
    assert choose(10**9, tensor_parallel=4)[0] == Lending(group="group of 4")
    assert choose(10**9, tensor_parallel=1)[0] == Lending()
    assert choose(10**9, weights="layerwise")[0] == Lending(layerwise=True)
    assert choose(10**9, dtype=torch.float32)[0] == Lending(), "the trained type is no other type"
    with pytest.raises(ValueError, match="bloom cannot be split over ranks"):
        choose(10**9, family="bloom", tensor_parallel=2)


def test_what_does_not_fit_is_an_error_with_repairs(choose):
    repairs = "rollout.batch_size.*rollout.dtype.*rollout.tensor_parallel.*rollout.weights=layerwise"
    message = rf"needs \d.* on a rank \(.*keys and values \d.*\), but of 0\.0 MB that are free.*{repairs}"
    for asked in (
        {"weights": "gathered"},
        {"tensor_parallel": 2},
        {"dtype": torch.bfloat16},
        {"weights": "layerwise"},
        {},
    ):
        with pytest.raises(ValueError, match=message):
            choose(1000, **asked)


def test_whole_weights_of_the_trained_type_are_lent_as_they_are(choose):
    """No copy to pay for; another type has one."""
    lending, plan = choose(10**9, ds_name="cpu_zero0")
    assert lending == Lending() and plan.weights == plan.gathered == 0 < plan.cache
    lending, cast = choose(10**9, ds_name="cpu_zero0", dtype=torch.bfloat16)
    assert lending == Lending(dtype=torch.bfloat16) and cast.weights > cast.gathered == 0
    with pytest.raises(ValueError, match="the rollout needs"):  # nothing is sharded that could stay so
        choose(1000, ds_name="cpu_zero0")
