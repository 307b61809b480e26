"""Rollouts: a decoding step reads the weights and the caches once."""

from dataclasses import replace
from typing import Any

import pytest

from rlhf.plan import layer
from rlhf.plan.efficiency import KERNEL, matmul, traffic
from rlhf.plan.hardware import load_devices
from rlhf.plan.layout import Layout
from rlhf.plan.rollout import DECODE_HOST, Work, decode_step, gather, gather_layers, rollout, score
from rlhf.plan.shapes import MODELS, gpt

H100 = load_devices()["h100-sxm"]
LAYOUT = Layout(gpus=8, length=512, micro_batch=16, zero=3)


def test_a_decoding_step_reads_weights_and_caches() -> None:
    """Without a host, OPT-13B at one row: 25.7 GB of weights at 0.75 of 3.35 TB/s, and 0.82 MB a token of cache."""
    shape = MODELS["opt-13b"]
    found = decode_step(shape, LAYOUT, H100, 1, 400, host=0.0)
    weights = 2 * (shape.parameters - shape.positions * shape.hidden)
    reading = (weights + 400 * 2 * shape.cache_elements) / (3350e9 * 0.75)
    assert found == pytest.approx(reading + 161 * KERNEL, rel=0.01)


def test_the_host_bounds_small_models(make_device: Any) -> None:
    shape = gpt(4, 64, 4, vocabulary=64)
    device = make_device(host_scale=2.0)
    head = matmul(device, "bf16", 1, 64, 64)
    assert decode_step(shape, LAYOUT, device, 1, 10) == pytest.approx(4 * 2 * DECODE_HOST + head)


def test_batches_follow_one_another() -> None:
    shape = MODELS["opt-1.3b"]
    one, four = (rollout(shape, LAYOUT, H100, Work(rows=rows, batch=16, prompt=256, response=256)) for rows in (16, 64))
    assert four.decode == pytest.approx(4 * one.decode)
    assert four.prefill == pytest.approx(4 * one.prefill)
    assert four.gather == one.gather  # the weights are gathered once


def test_sharded_weights_are_gathered_for_every_token_of_every_batch() -> None:
    shape = MODELS["opt-1.3b"]
    whole = Work(rows=64, batch=16, prompt=256, response=100)
    once, often = (rollout(shape, LAYOUT, H100, replace(whole, gathered=gathered)) for gathered in (True, False))
    assert often.gather == pytest.approx(4 * 100 * gather_layers(shape, LAYOUT, H100))
    assert gather_layers(shape, LAYOUT, H100) > 7 / 8 * 2 * shape.parameters / 450e9
    assert (often.decode, often.prefill) == (once.decode, once.prefill)


def test_nothing_is_gathered_below_zero3() -> None:
    assert gather(MODELS["opt-13b"], Layout(gpus=8, length=8, zero=2), H100) == 0
    assert gather(MODELS["opt-13b"], LAYOUT, H100) > 7 / 8 * 2 * 12.8e9 / 450e9


def test_scoring_is_a_forward_pass(make_device: Any) -> None:
    device = make_device()
    shape = gpt(4, 1024, 8, vocabulary=4096)
    layout = Layout(gpus=1, length=512, micro_batch=8)
    one = layer.layer(shape, layout, device, layer.Stack())
    assert score(shape, layout, device, 8, head=False) == pytest.approx(4 * one.forward)
    assert score(shape, layout, device, 32, head=False) == pytest.approx(16 * one.forward)
    head = layer.head(shape, layout, device, layer.Stack()) / 3
    assert score(shape, layout, device, 8) == pytest.approx(4 * one.forward + head, rel=0.05)


def test_longer_rows_read_more() -> None:
    shape = MODELS["opt-13b"]
    short, long = (decode_step(shape, LAYOUT, H100, 64, length, host=0.0) for length in (100, 1100))
    assert long - short == pytest.approx(traffic(H100, 2 * 64 * 1000 * shape.cache_elements))
