"""Memory: the ZeRO paper's table, a trillion parameters, activations of Korthikanti et al., peaks by hand."""

from dataclasses import replace
from typing import Any

import pytest

from rlhf.plan import memory
from rlhf.plan.layout import HALF_MOMENTS, MIXED, Layout, Stack, recomputed_layers
from rlhf.plan.shapes import MODELS, gpt

# Rajbhandari et al. 2020, arXiv:1910.02054, table 1: GB a device by ranks, for stages 1, 2 and 3.
ZERO = {
    7.5e9: {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88),
            256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
    128e9: {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32),
            256: (518, 263, 8), 1024: (513, 257, 2)},
    1e12: {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250),
           256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
}  # fmt: skip


@pytest.mark.parametrize(("parameters", "ranks"), [(p, n) for p, table in ZERO.items() for n in table])
def test_every_row_of_the_zero_table(parameters: float, ranks: int) -> None:
    for stage, published in zip((1, 2, 3), ZERO[parameters][ranks], strict=True):
        found = sum(memory.states(parameters, stage, ranks, MIXED)) / 1e9
        assert found == pytest.approx(published, rel=0.006, abs=0.006)  # printed with three digits


def test_what_each_stage_shards() -> None:
    """1000 weights over 4 ranks: 2000 bytes of weights and of gradients, 12000 of optimiser."""
    assert memory.states(1000, 0, 4, MIXED) == (2000, 2000, 12000)
    assert memory.states(1000, 1, 4, MIXED) == (2000, 2000, 3000)
    assert memory.states(1000, 2, 4, MIXED) == (2000, 500, 3000)
    assert memory.states(1000, 3, 4, MIXED) == (500, 500, 3000)


def test_a_trillion_parameters_take_14_terabytes() -> None:
    assert HALF_MOMENTS.total == 14
    assert sum(memory.states(1e12, 1, 1, HALF_MOMENTS)) == 14e12


def korthikanti(s: int, b: int, h: int, a: int, t: int, *, sequence: bool, selective: bool) -> float:
    """Bytes of a layer: arXiv:2205.05198, table 2."""
    pairs = 0 if selective else 5 * a * s / h
    inside = (24 + pairs) / t
    return s * b * h * ((10 / t if sequence else 10) + inside)


@pytest.mark.parametrize("tensor", [1, 8])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("selective", [False, True])
def test_activations_of_korthikanti(*, tensor: int, sequence: bool, selective: bool) -> None:
    layout = Layout(
        gpus=tensor, length=2048, micro_batch=4, tensor=tensor, sequence_parallel=sequence,
        recompute="selective" if selective else "none",
    )  # fmt: skip
    stack = Stack(attention="fused", dropout=True)
    found = memory.layer_activations(gpt(48, 6144, 64), layout, stack) * layout.tokens
    assert found == pytest.approx(korthikanti(2048, 4, 6144, 64, tensor, sequence=sequence, selective=selective))


def test_full_recomputation_keeps_the_input() -> None:
    layout = Layout(gpus=1, length=100, micro_batch=2, recompute="full")
    kept, working = memory.activations(gpt(3, 64, 4), layout, Stack())
    assert kept == 3 * 2 * 200 * 64
    # The layer at work, all of it: 4 x 2 h outside, 3 h + h of attention and 2 x 4 h of the MLP in two bytes.
    assert working == 200 * (8 * 64 + 2 * (4 * 64 + 8 * 64))


def test_a_budget_pays_for_whole_layers() -> None:
    """0.6 of four layers are two, whose backward pass comes first: then no layer at work is recomputed at the peak."""
    layout = Layout(gpus=1, length=100, micro_batch=2, recompute="full", recompute_budget=0.6)
    (none, half), (full, _) = (memory.activations(gpt(4, 64, 4), replace(layout, recompute=how, recompute_budget=0))
                               for how in ("none", "full"))  # fmt: skip
    kept, working = memory.activations(gpt(4, 64, 4), layout)
    assert kept == pytest.approx((none + full) / 2) and working == half
    counts = [len(recomputed_layers(10, budget=budget)) for budget in (0, 0.1, 0.3, 0.35, 0.7, 0.99)]
    assert counts == [10, 9, 7, 7, 3, 1]
    assert len(recomputed_layers(100, budget=0.29)) == 71, "0.29 x 100 is a little less than 29 in binary"


def test_every_second_layer_recomputed_keeps_the_mean() -> None:
    layout = Layout(gpus=1, length=100, micro_batch=2, recompute="full", recompute_every=2)
    none, full = (memory.activations(gpt(4, 64, 4), replace(layout, recompute=how, recompute_every=1))[0]
                  for how in ("none", "full"))  # fmt: skip
    assert memory.activations(gpt(4, 64, 4), layout)[0] == pytest.approx((none + full) / 2)
    assert [list(recomputed_layers(5, every=every)) for every in (1, 2, 4, 5)] == [
        [0, 1, 2, 3, 4],
        [0, 2, 4],
        [0, 4],
        [0],
    ]


def test_activations_in_host_memory_leave_two_layers() -> None:
    layout = Layout(gpus=1, length=100, micro_batch=2, recompute="full", offload_activations=True)
    assert memory.activations(gpt(4, 64, 4), layout)[0] == 2 * 2 * 200 * 64
    assert memory.activations(gpt(1, 64, 4), layout)[0] == 2 * 200 * 64
    assert memory.activations(gpt(4, 64, 4), replace(layout, offload_activations=False))[0] == 4 * 2 * 200 * 64


def test_micro_batches_in_flight() -> None:
    """1F1B keeps as many as stages; interleaving adds (p - 1) / (p v); accumulation bounds both."""
    shape = gpt(16, 64, 4)

    def kept(accumulation: int, **changes: Any) -> float:
        layout = Layout(gpus=4, length=10, pipeline=4, accumulation=accumulation, recompute="full", **changes)
        return memory.activations(shape, layout, Stack())[0]

    one = 2 * 10 * 64 * 4
    assert kept(8) == 4 * one
    assert kept(2) == 2 * one
    assert kept(8, virtual=2) == 4 * (1 + 3 / 8) * one


def test_peak_by_hand() -> None:
    """A model of 1000 weights a layer and rank would be exact by hand; here each part is."""
    shape = gpt(2, 64, 4, vocabulary=100, positions=10)
    stack = Stack(logit_bytes=8, bucket_elements=10, live_layers=1)
    layout = Layout(gpus=4, length=10, zero=3, accumulation=2)
    found = memory.training(shape, layout, stack)
    assert found.weights == found.gradients == 2 * shape.parameters / 4
    assert found.optimizer == 12 * shape.parameters / 4
    assert found.gathered == 2 * shape.layer_parameters
    assert found.reserve == pytest.approx(memory.RESERVE * (found.total - found.reserve))
    offloaded = memory.training(shape, replace(layout, offload_optimizer=True, offload_weights=True), stack)
    assert offloaded.weights == offloaded.optimizer == offloaded.gradients == 0


def test_gradients_appear_when_activations_go() -> None:
    """With one micro-batch and no buffer of their own, gradients are not there at the peak of a long sequence."""
    shape = gpt(4, 64, 4)
    long = Layout(gpus=1, length=4096, micro_batch=8)
    assert memory.training(shape, long, Stack()).gradients == 0
    assert memory.training(shape, long, Stack(gradients_kept=True)).gradients > 0
    assert memory.training(shape, replace(long, accumulation=2), Stack()).gradients > 0
    # A short one: the peak is the end of the backward pass.
    assert memory.training(shape, Layout(gpus=1, length=1), Stack()).gradients == 2 * shape.parameters


def test_lora_keeps_states_of_adapters_alone() -> None:
    shape = gpt(2, 64, 4)
    found = memory.training(shape, Layout(gpus=1, length=8, lora=4, accumulation=2), Stack())
    adapters = shape.lora_parameters(4)
    assert found.optimizer == 12 * adapters
    assert found.weights == 2 * (shape.parameters + adapters)


def test_moments_of_other_optimisers() -> None:
    """Per weight 12 bytes with AdamW: 4 less of a layer's weights with Muon, 2 + 8/256 of moments for 8 in 8 bits."""
    shape = gpt(2, 64, 4)
    layout = Layout(gpus=1, length=8, accumulation=2)
    kept = {name: memory.training(shape, replace(layout, optimizer=name), Stack()).optimizer
            for name in ("adamw", "muon", "adamw_8bit")}  # fmt: skip
    assert kept["adamw"] - kept["muon"] == pytest.approx(4 * 2 * shape.layer_parameters)
    assert kept["adamw_8bit"] == pytest.approx((4 + 2 + 8 / 256) * shape.parameters)
    sharded = replace(layout, gpus=4, zero=1, optimizer="muon")
    assert memory.training(shape, sharded, Stack()).optimizer == pytest.approx(kept["muon"] / 4)
    adapters = replace(layout, lora=4, optimizer="muon")
    assert memory.training(shape, adapters, Stack()).optimizer == pytest.approx(8 * shape.lora_parameters(4))


def test_tensor_and_pipeline_divide() -> None:
    shape = MODELS["gpt-175b"]
    whole = memory.stage_parameters(shape, Layout(gpus=1, length=8))
    assert whole == shape.parameters
    parts = memory.stage_parameters(shape, Layout(gpus=32, length=8, tensor=4, pipeline=8))
    assert parts == (12 * shape.layer_parameters + shape.embedding_parameters) / 4
    last = memory.stage_parameters(shape, Layout(gpus=32, length=8, tensor=4, pipeline=8), last=True)
    assert last == (12 * shape.layer_parameters + 51200 * 12288 + 2 * 12288) / 4


def test_more_ranks_never_need_more() -> None:
    shape = MODELS["opt-13b"]
    for zero in (0, 1, 2, 3):
        sizes = [memory.training(shape, Layout(gpus=n, length=512, zero=zero)).states for n in (1, 2, 4, 8, 16)]
        assert sizes == sorted(sizes, reverse=True)
        assert (sizes[0] == sizes[-1]) == (zero == 0)


def test_chunked_logits_and_caches() -> None:
    shape = gpt(2, 64, 4, vocabulary=1000)
    layout = Layout(gpus=1, length=100, micro_batch=100)
    assert memory.logits(shape, layout, Stack(logit_bytes=8)) == 8 * 10000 * 1000
    assert memory.logits(shape, layout, Stack(logit_bytes=8, logit_tokens=4096)) == 8 * 4096 * 1000
    assert memory.cache(shape, layout, rows=3, length=5) == 2 * 15 * 2 * 2 * 64


def test_a_layout_that_does_not_split_is_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks do not split into tensor 4"):
        Layout(gpus=6, length=8, tensor=4)
    with pytest.raises(ValueError, match="pipeline 2 needs ZeRO 0 or 1, got 3"):
        Layout(gpus=4, length=8, pipeline=2, zero=3)
    with pytest.raises(ValueError, match="virtual 2 needs pipeline"):
        Layout(gpus=4, length=8, virtual=2)
    with pytest.raises(ValueError, match="zero must be"):
        Layout(gpus=4, length=8, zero=4)
    with pytest.raises(ValueError, match="micro_batch must be >= 1"):
        Layout(gpus=4, length=8, micro_batch=0)
