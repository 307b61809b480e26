"""Captured decoding forwards: buffers, rounding and unused places on a CPU; captured graphs where there are any.

On a CPU the forward is called again in place of a replay, on the accelerators' attention. As a graph it gets nothing
but what stands in its buffers, and its result stands in one tensor.
"""

import pytest
import torch
from transformers import AutoConfig

from rlhf.config import SamplingConfig
from rlhf.rollout import graphs, slots
from rlhf.rollout.decode import generate

EOS = 1
PROMPTS = [[5, 9, EOS, 7], [3], [8] * 11, [EOS, 40], [12, 13, 14], [60, 61], [9] * 6]


def answer(model, prompts=PROMPTS, **changes):
    arguments = {
        "uids": [100 + i for i in range(len(prompts))],
        "sample_ids": [0] * len(prompts),
        "sampling": SamplingConfig(),
        "stop_token_ids": tuple(range(1, 9)),
        "max_new_tokens": 12,
        "seed": 1,
        "step": 3,
        "pad_id": EOS,
        "batch_size": 3,
        **changes,
    }
    return generate(model, prompts, **arguments)


def assert_equal(got, want):
    assert [(r.token_ids, r.stopped) for r in got] == [(r.token_ids, r.stopped) for r in want]
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(two.logprobs), atol=1e-5, rtol=0)


@pytest.fixture
def made(monkeypatch):
    """The graphs of each rollout, which call their forwards again."""
    found = []

    def record(forward, pool):
        assert pool in (None, "the pool")
        result = forward()
        return lambda: result.copy_(forward()), result, "the pool"

    class Again(graphs.StepGraphs):
        def __init__(self, model, cache, *, device):
            super().__init__(model, cache, device=device, record=record)
            found.append(self)

    monkeypatch.setattr(slots, "StepGraphs", Again)
    monkeypatch.setattr(slots.SlotLayout, "attend_sparse", slots.SlotLayout.attend_masked)
    monkeypatch.setattr(graphs, "LENGTH_STEP", 8)
    return found


@pytest.mark.parametrize("num_slots", [1, 3, 7])
@pytest.mark.parametrize("sync_every", [1, 3])
def test_replayed_forwards_draw_the_same(tiny_model, family, made, num_slots, sync_every):
    if family == "bloom":
        pytest.skip("BLOOM has its own attention")
    model = tiny_model(family)
    want = answer(model, batch_size=num_slots, sync_every=sync_every)
    assert not made
    assert_equal(answer(model, batch_size=num_slots, sync_every=sync_every, graphs=True), want)
    assert len(made[0]._steps) > 1


def test_empty_slots_keep_the_prompts_that_they_hold(tiny_model, made):
    """A slot whose row has finished is computed too, and must leave the keys that the next sample copies."""
    prompts = [[5, 6, 7], [40, 41], [40, 41], [5, 6, 7], [40, 41], [5, 6, 7], [40, 41], [5, 6, 7], [3]]
    changes = {"uids": [7, 8, 8, 7, 8, 7, 8, 7, 9], "sample_ids": list(range(9)), "sync_every": 2}
    model = tiny_model("llama")
    want = answer(model, prompts, batch_size=1, **changes)
    assert_equal(answer(model, prompts, batch_size=4, graphs=True, **changes), want)
    (captured,) = made
    assert any(num_slots == 4 for num_slots, _ in captured._steps)


def test_one_graph_for_each_pair_of_rounded_numbers(tiny_model, made):
    """Worked by hand: 5 slots of 8; lengths 12 to 22 of 24, the first forward being the prompts' own."""
    answer(tiny_model("opt"), [[9] * 11] * 5, batch_size=7, stop_token_ids=(), max_new_tokens=13, graphs=True)
    (captured,) = made
    assert captured.cache.num_slots == 5 and captured.cache.capacity == 24
    assert sorted(captured._steps) == [(5, 16), (5, 24)]


def test_rounded_numbers_of_slots():
    assert [graphs.rounded_slots(n) for n in (1, 2, 3, 5, 9, 16, 17, 32, 33, 64)] == [
        1,
        2,
        4,
        8,
        16,
        16,
        32,
        32,
        48,
        64,
    ]


def test_what_cannot_be_captured_is_refused(tiny_model):
    opt, bloom = (AutoConfig.for_model(name) for name in ("opt", "bloom"))
    with pytest.raises(ValueError, match="a CPU has no graphs to capture. Set rollout.graphs=false"):
        graphs.check_graphs(opt, "cpu")
    with pytest.raises(ValueError, match="bloom attends by itself.*Set rollout.graphs=false"):
        graphs.check_graphs(bloom, "cuda")
    graphs.check_graphs(opt, "cuda")
    with pytest.raises(ValueError, match="graphs=True needs whole weights.*rollout.weights=gathered"):
        answer(tiny_model("opt"), graphs=True, all_ranks_running=lambda running: running)


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [1, 3, 7])
def test_an_accelerators_graphs_draw_the_same(tiny_model, family, monkeypatch, num_slots):
    if family == "bloom":
        pytest.skip("BLOOM has its own attention")
    monkeypatch.setattr(graphs, "LENGTH_STEP", 8)
    model = tiny_model(family).to(torch.accelerator.current_accelerator())
    want = answer(model, batch_size=num_slots)
    assert_equal(answer(model, batch_size=num_slots, graphs=True), want)
