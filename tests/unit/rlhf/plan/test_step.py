"""Seconds of an update: each part by hand or by what must hold."""

from dataclasses import replace
from typing import Any

import pytest

from rlhf.plan import collectives, layer, memory
from rlhf.plan.efficiency import KERNEL, matmul, traffic
from rlhf.plan.layout import OURS, Layout, Stack
from rlhf.plan.shapes import MODELS, gpt
from rlhf.plan.step import STEP_HOST, exchange, slowest, step

SHAPE = gpt(8, 1024, 8, vocabulary=4096)
LAYOUT = Layout(gpus=4, length=512, micro_batch=4)
STACK = Stack()


def test_a_layer_is_its_products_attention_and_traffic(make_device: Any) -> None:
    device = make_device()
    found = layer.layer(SHAPE, LAYOUT, device, STACK)
    tokens, h = 2048, 1024
    shapes = [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h)]
    assert found.products == pytest.approx(sum(matmul(device, "bf16", tokens, n, k) for n, k in shapes))
    # Backward: for each product one for its input and one for its weights.
    both = sum(matmul(device, "bf16", tokens, k, n) + matmul(device, "bf16", n, k, tokens) for n, k in shapes)
    assert found.backward_products == pytest.approx(both)
    # Half of the pairs of 512 tokens, two products of 2 x 128 FLOPs a head.
    rate = 100e12 * 0.56
    assert found.attention == pytest.approx(4 * 8 * 512 * 512 / 2 * 4 * 128 / rate, rel=1e-6)
    # (4 + 6) h outside, 2 x 4 h inside, two bytes each.
    moved = tokens * layer.POINTWISE["eager"] * 2 * (10 * h + 8 * h)
    assert found.pointwise == pytest.approx(traffic(device, moved) + layer.CALLS["eager"] * KERNEL)


def test_recomputation_is_a_second_forward(make_device: Any) -> None:
    device = make_device()
    one = layer.layer(SHAPE, LAYOUT, device, STACK)
    full = step(SHAPE, replace(LAYOUT, recompute="full"), device, STACK)
    assert full.recomputing == pytest.approx(8 * one.forward)
    assert step(SHAPE, LAYOUT, device, STACK).recomputing == 0
    for some in ({"recompute_budget": 0.5}, {"recompute_every": 2}):
        half = step(SHAPE, replace(LAYOUT, recompute="full", **some), device, STACK)
        assert half.recomputing == pytest.approx(4 * one.forward)


def test_copies_of_activations_show_where_computing_does_not_hide_them(make_device: Any) -> None:
    """Inputs of seven of the eight layers, 4 rows x 512 tokens x 512 numbers of 2 bytes, out and back at 20 GB/s."""
    device = make_device()
    one = layer.layer(SHAPE, LAYOUT, device, STACK)
    size = 7 * LAYOUT.tokens * SHAPE.hidden * 2 / 20e9
    away = replace(LAYOUT, recompute="full", offload_activations=True)
    hidden = max(0, size - 8 * one.forward) + max(0, size - 8 * one.backward - 8 * one.forward)
    assert step(SHAPE, away, device, STACK).offload == pytest.approx(hidden)
    # All that is kept is far more than can be copied in the time.
    slow = step(SHAPE, replace(away, recompute="none"), device, STACK).offload
    kept = 7 * memory.layer_activations(SHAPE, LAYOUT, STACK) * LAYOUT.tokens / 20e9
    assert slow == pytest.approx(2 * kept - 8 * one.forward - 8 * one.backward) and slow > 0
    assert step(SHAPE, LAYOUT, device, STACK).offload == 0


def test_accumulation_repeats_the_micro_batch_and_not_the_update(make_device: Any) -> None:
    device = make_device()
    one, four = (step(SHAPE, replace(LAYOUT, accumulation=n), device, STACK) for n in (1, 4))
    assert four.computing == pytest.approx(4 * one.computing)
    assert (four.reduce, four.optimizer) == (one.reduce, one.optimizer)


def test_bubble_of_1f1b_and_interleaved(make_device: Any) -> None:
    """(p - 1) / (v m) of the ideal time: Narayanan et al. 2021, sec. 2.2. Sends are kept out by fast links."""
    device = make_device(link_gb_s=1e9, nic_gbit_s=1e9)
    layout = Layout(gpus=4, length=512, micro_batch=4, accumulation=16, pipeline=4)
    for virtual in (1, 2):
        found = step(SHAPE, replace(layout, virtual=virtual), device, STACK)
        ideal = found.computing + found.recomputing + found.host - STEP_HOST + found.tensor
        sends = 2 * virtual * 16 + 2 * 3 / virtual
        assert found.bubble - sends * collectives.START == pytest.approx(3 / (virtual * 16) * ideal, rel=1e-3)


def test_the_slowest_stage() -> None:
    layout = Layout(gpus=12, length=8, pipeline=12)
    assert slowest(gpt(72, 64, 4), layout, 0.5) == 6.5  # the last stage has 6 layers and the head
    assert slowest(gpt(70, 64, 4), layout, 0.5) == 6  # BLOOM: the ends have a layer less
    assert slowest(gpt(70, 64, 4), layout, 1.5) == 6.5
    assert slowest(gpt(70, 64, 4), replace(layout, pipeline=1), 9.0) == 70


def test_tensor_parallelism_sums_activations_four_or_six_times(make_device: Any) -> None:
    device = make_device()
    layout = Layout(gpus=4, length=512, micro_batch=4, tensor=4)
    one = collectives.all_reduce(collectives.group(device, 4), 2 * 2048 * 1024)
    assert step(SHAPE, layout, device, STACK).tensor == pytest.approx(8 * 4 * one)
    assert step(SHAPE, replace(layout, recompute="full"), device, STACK).tensor == pytest.approx(8 * 6 * one)


def test_zero3_gathers_twice_and_scatters_once(make_device: Any) -> None:
    """Nothing hidden: 2 x 2 bytes a weight gathered, 2 scattered, a message a layer, one a bucket."""
    device = make_device()
    stack = Stack(overlap=0.0)
    members = collectives.group(device, 4)
    size = 2.0 * SHAPE.parameters
    gathers = 2 * collectives.all_gather(members, size, messages=8)
    scatter = collectives.all_gather(members, size)
    found = step(SHAPE, replace(LAYOUT, zero=3), device, stack)
    assert found.gather == pytest.approx(gathers + scatter)
    assert found.reduce == 0
    hidden = step(SHAPE, replace(LAYOUT, zero=3), device, Stack(overlap=1.0)).gather
    busy = found.computing + found.host - STEP_HOST
    assert hidden == pytest.approx(max(0.0, gathers + scatter - busy), abs=1e-12)


def test_a_second_shard_gathers_backward_inside_a_machine(make_device: Any) -> None:
    """hpZ over the four devices of a machine: one gather over all 16, one over 4."""
    device = make_device()
    layout, stack = replace(LAYOUT, gpus=16, zero=3), Stack(overlap=0.0)
    size = 2.0 * SHAPE.parameters
    wide, narrow = (collectives.all_gather(collectives.group(device, n), size, messages=8) for n in (16, 4))
    plain, second = (step(SHAPE, replace(layout, secondary=n), device, stack).gather for n in (0, 4))
    assert plain - second == pytest.approx(wide - narrow)
    weights = [memory.training(SHAPE, replace(layout, secondary=n), stack).weights for n in (0, 4)]
    assert weights[1] - weights[0] == 2 * SHAPE.parameters / 4


def test_zero_plus_plus_moves_less(make_device: Any) -> None:
    device = make_device()
    layout = replace(LAYOUT, gpus=16, zero=3)
    plain, quantised = (
        step(MODELS["opt-1.3b"], layout, device, Stack(overlap=0.0, quantised_gather=q)).gather for q in (False, True)
    )
    assert quantised < 0.5 * plain


def test_reduction_by_stage(make_device: Any) -> None:
    """ZeRO-0 sums: twice the bytes past each rank. ZeRO-1 scatters and gathers: the same bytes."""
    device = make_device()
    stack = Stack(gradient_overlap=False)
    members = collectives.group(device, 4)
    width = 2.0 * SHAPE.parameters
    assert step(SHAPE, LAYOUT, device, stack).reduce == pytest.approx(collectives.all_reduce(members, width))
    scattered = step(SHAPE, replace(LAYOUT, zero=1), device, stack).reduce
    assert scattered == pytest.approx(2 * collectives.all_gather(members, width))
    assert step(SHAPE, LAYOUT, device, STACK).reduce < 0.5 * step(SHAPE, LAYOUT, device, stack).reduce


def test_lora_drops_the_weights_gradient(make_device: Any) -> None:
    device = make_device()
    shape, layout = gpt(2, 8192, 64), replace(LAYOUT, micro_batch=16)
    plain, adapted = (layer.layer(shape, replace(layout, lora=rank), device, STACK) for rank in (0, 64))
    assert adapted.backward_products < 0.7 * plain.backward_products
    assert plain.products < adapted.products < 1.3 * plain.products
    assert memory.trained_parameters(shape, replace(layout, lora=64)) == shape.lora_parameters(64)


def test_a_small_model_waits_for_the_host(make_device: Any) -> None:
    tiny = gpt(8, 64, 4, vocabulary=64)
    one = replace(LAYOUT, micro_batch=1, length=8)
    found, slow = (step(tiny, one, make_device(host_scale=scale), STACK) for scale in (1.0, 3.0))
    assert found.host > found.computing
    assert slow.total > 2 * found.total


def test_more_devices_are_faster_and_less_than_linear(make_device: Any) -> None:
    """Weak scaling: tokens a second and device fall, never rise, from machine to machine."""
    device = make_device()
    for zero in (0, 1, 2, 3):
        rates = []
        for gpus in (4, 8, 32, 128):
            layout = replace(LAYOUT, gpus=gpus, zero=zero)
            rates.append(layout.global_batch / gpus / step(MODELS["opt-1.3b"], layout, device, STACK).total)
        assert rates == sorted(rates, reverse=True), zero


def test_a_group_that_shares_rows_exchanges_heads_twice_a_pass(make_device: Any) -> None:
    """4 ranks, 1024 tokens each: queries, keys, values and outputs of 1024 numbers of two bytes; 3/4 leave the rank."""
    device, shared = make_device(), replace(LAYOUT, length=1024, context=4)
    members = collectives.group(device, 4)
    moved = 2 * 1024 * (4 * 1024) * 3 / 4 / members.rate
    assert exchange(SHAPE, shared, device) == pytest.approx(2 * members.start(members.hops) + moved)
    assert exchange(SHAPE, LAYOUT, device) == 0
    one = exchange(SHAPE, shared, device)
    # Forward and backward, and once more where the layer is computed again; selective recomputation keeps attention.
    for recompute, passes in (("none", 2), ("selective", 2), ("full", 3)):
        layout = replace(shared, recompute=recompute)
        assert step(SHAPE, layout, device, OURS).tensor == pytest.approx(8 * passes * one)


def test_an_overflow_check_waits_for_every_tensor(make_device: Any) -> None:
    """8 layers of 16 tensors, three calls of 9 us each; only of fp16, only without ZeRO, 12 tensors with adapters."""
    device = make_device(peak_tflops={"fp16": 100.0, "bf16": 100.0})
    looked = Stack(serial_overflow_check=True)

    def added(**changes: Any) -> float:
        layout = replace(LAYOUT, **{"zero": 0, "dtype": "fp16", **changes})
        return step(SHAPE, layout, device, looked).total - step(SHAPE, layout, device, STACK).total

    assert added() == pytest.approx(8 * 16 * 3 * 9e-6)
    assert added(lora=8) == pytest.approx(8 * 12 * 3 * 9e-6)
    assert added(zero=1) == added(dtype="bf16") == 0.0


def test_packing_costs_what_it_reads_and_writes(make_device: Any) -> None:
    """Half a billion bytes of memory a second make all else nothing: three bytes for each of two gathers, 3.5 for the
    gradient, at 0.75 of the rate."""
    packed = replace(STACK, quantised_gather=True, overlap=0.0)
    layout = replace(LAYOUT, zero=3)
    slow, fast = (step(SHAPE, layout, make_device(bandwidth_gb_s=rate), packed).gather for rate in (0.5, 1.0))
    assert slow - fast == pytest.approx(SHAPE.parameters * 9.5 / 0.75e9)
