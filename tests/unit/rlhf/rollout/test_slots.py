"""Continuous batching: which tokens go through the model when, and what rows share."""

import pytest
import torch
import torch.nn.functional as F

from rlhf.config import SamplingConfig
from rlhf.rollout import packed, slots
from rlhf.rollout.decode import RolloutStats, generate

EOS = 1
# Ragged, one of length 1, eos (= pad) inside.
PROMPTS = [[5, 9, EOS, 7], [3], [8] * 11, [EOS, 40], [12, 13, 14], [60, 61], [9] * 6]
STOPS = tuple(range(1, 9))


def answer(model, prompts=PROMPTS, **changes):
    arguments = {
        "uids": [100 + i for i in range(len(prompts))],
        "sample_ids": [0] * len(prompts),
        "sampling": SamplingConfig(),
        "stop_token_ids": STOPS,
        "max_new_tokens": 12,
        "seed": 1,
        "step": 3,
        "pad_id": EOS,
        "batch_size": 3,
        **changes,
    }
    return generate(model, prompts, **arguments)


def watch(model):
    """Tokens of each forward, split into those of decoding rows and prompt tokens, and the logits computed."""
    forwards = []

    def before(_, args, kwargs):
        positions = kwargs["position_ids"][0].tolist()
        prompts = kwargs["layout"].prompts
        num_prompt = sum(prompts.lengths) if prompts else 0
        ids = kwargs["input_ids"][0].tolist()
        split = len(ids) - num_prompt
        forwards.append({"decode": ids[:split], "prompt": ids[split:], "positions": positions})

    def after(_, args, output):
        forwards[-1]["logits"] = output.logits.shape[1]

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after)
    return forwards


def simulate(lengths, prompts, num_slots):
    """Rows decoding and prompts entering in each forward, from the responses' lengths alone."""
    queue = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    left, expected = [], []
    while queue or left:
        entering = [queue.pop(0) for _ in range(min(num_slots - len(left), len(queue)))]
        expected.append((len(left), sorted(len(prompts[i]) for i in entering)))
        left = [n - 1 for n in [*left, *(lengths[i] for i in entering)] if n > 1]
    return expected


@pytest.mark.parametrize("num_slots", [1, 3, 7])
def test_a_finished_row_makes_room_at_once(tiny_model, num_slots):
    """No forward holds a finished row, padding or an idle slot while a prompt waits; logits only where one is drawn."""
    model = tiny_model("opt")
    forwards = watch(model)
    lengths = [len(response.token_ids) for response in answer(model, batch_size=num_slots)]
    assert len(set(lengths)) > 2 and 12 in lengths
    expected = simulate(lengths, PROMPTS, num_slots)
    assert [(len(f["decode"]), len(f["prompt"])) for f in forwards] == [(d, sum(p)) for d, p in expected]
    assert [f["logits"] for f in forwards] == [d + len(p) for d, p in expected]


def test_positions_go_on_in_each_row(tiny_model):
    model = tiny_model("gpt2")
    forwards = watch(model)
    (response,) = answer(model, [PROMPTS[0]], stop_token_ids=(), max_new_tokens=4)
    assert [f["positions"] for f in forwards] == [[0, 1, 2, 3], [4], [5], [6]]
    assert [token for f in forwards for token in f["decode"]] == response.token_ids[:-1]


@pytest.mark.parametrize("budget", [1, 5, 12, 1000])
def test_prompts_come_in_by_a_budget_of_tokens(tiny_model, family, budget):
    """At most the budget in a forward, or one prompt; the responses stay."""
    model = tiny_model(family)
    expected = [response.token_ids for response in answer(model)]
    if family != "bloom":  # which is left-padded: its prompts go through at once
        forwards = watch(model)
    assert [response.token_ids for response in answer(model, batch_size=7, prefill_tokens=budget)] == expected
    if family != "bloom":
        entered = [f["prompt"] for f in forwards if f["prompt"]]
        assert all(len(tokens) <= budget or tokens in PROMPTS for tokens in entered)
        assert sum(map(len, entered)) == sum(map(len, PROMPTS))
        assert len(entered) == {1: 7, 5: 5, 12: 3, 1000: 1}[budget]


@pytest.mark.parametrize("num_slots", [1, 2, 4, 9])
def test_samples_of_a_prompt_compute_it_once(tiny_model, num_slots):
    """Together, one after another in one slot, or beside a row that still decodes: the keys and values are copied."""
    prompts = [[5, 6, 7], [40, 41], [40, 41], [5, 6, 7], [40, 41], [5, 6, 7], [40, 41], [5, 6, 7], [3]]
    uids = [7, 8, 8, 7, 8, 7, 8, 7, 9]
    changes = {"uids": uids, "sample_ids": list(range(9)), "batch_size": num_slots}
    alone = [
        answer(tiny_model("llama"), [prompt], uids=[uid], sample_ids=[i])[0]
        for i, (prompt, uid) in enumerate(zip(prompts, uids, strict=True))
    ]
    model = tiny_model("llama")
    forwards = watch(model)
    together = answer(model, prompts, **changes)
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    for one, two in zip(together, alone, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(two.logprobs), atol=1e-5, rtol=0)
    assert len({tuple(r.token_ids) for r in together}) > 6, "samples differ"
    assert sum(len(f["prompt"]) for f in forwards) == 3 + 2 + 1


def test_the_same_tokens_under_another_uid_are_another_prompt(tiny_model):
    model = tiny_model("opt")
    forwards = watch(model)
    answer(model, [[5, 6], [5, 6]], uids=[1, 2])
    assert sum(len(f["prompt"]) for f in forwards) == 4


def test_many_samples_of_one_token(tiny_model):
    """Rows that end with their first token leave the next ones nothing to compute."""
    model = tiny_model("qwen2")
    forwards = watch(model)
    responses = answer(model, [[5, 6, 7]] * 6, uids=[1] * 6, sample_ids=list(range(6)), max_new_tokens=1, batch_size=2)
    assert len(forwards) == 1 and len({r.token_ids[0] for r in responses}) > 1
    assert responses[4] == answer(model, [[5, 6, 7]], uids=[1], sample_ids=[4], max_new_tokens=1)[0]


def test_a_sample_moves_into_the_slot_that_holds_its_prompt(tiny_model, monkeypatch):
    """Both slots become free at once; nothing has to be copied, and nothing is kept for prompts nobody waits for."""
    kept, copies = [], []

    class Spy(slots._Slots):
        def __init__(self, *args):
            super().__init__(*args)
            kept.append(self)
            self.cache.copy = lambda *args, **kwargs: copies.append(args)

    monkeypatch.setattr(slots, "_Slots", Spy)
    model = tiny_model("opt")
    forwards = watch(model)
    answer(model, [[5, 6, 7], [8, 9], [8, 9]], uids=[1, 2, 2], sample_ids=[0, 0, 1], max_new_tokens=1, batch_size=2)
    assert len(forwards) == 1 and not copies
    assert kept[0].holds == [(1, (5, 6, 7)), (2, (8, 9))] and not kept[0].known


@pytest.mark.parametrize("num_slots", [2, 7])
def test_slots_that_are_closed_up_or_read_by_mask_change_nothing(tiny_model, monkeypatch, family, num_slots):
    """The accelerators' attention on the CPU, and gaps closed at every chance."""
    model = tiny_model(family)
    expected = answer(model, batch_size=num_slots)
    layout = slots.SlotLayout
    monkeypatch.setattr(layout, "attend_sparse", layout.attend_masked)
    monkeypatch.setattr(layout, "excess", lambda self: (self.top - self.num_rows) * 10**9)
    for got, want in zip(answer(model, batch_size=num_slots, sync_every=3), expected, strict=True):
        assert (got.token_ids, got.stopped) == (want.token_ids, want.stopped)
        torch.testing.assert_close(torch.tensor(got.logprobs), torch.tensor(want.logprobs), atol=1e-5, rtol=0)


def test_gaps_are_closed_up_once_they_cost_more(tiny_model, monkeypatch):
    """Rows keep their tokens when they move; afterwards the slots in use are the first ones."""
    tops = []
    init = slots.SlotLayout.__init__

    def remember(self, *args, **kwargs):
        init(self, *args, **kwargs)
        tops.append((self.top, self.num_rows))

    monkeypatch.setattr(slots.SlotLayout, "__init__", remember)
    monkeypatch.setattr(slots.SlotLayout, "excess", lambda self: (self.top - self.num_rows) * 10**9)
    expected = answer(tiny_model("opt"), batch_size=1, max_new_tokens=30)
    tops.clear()
    got = answer(tiny_model("opt"), batch_size=7, max_new_tokens=30)
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]
    assert any(top > rows for top, rows in tops) and tops[-1][0] == tops[-1][1]


def test_numbers_of_a_rollout(tiny_model):
    """Counted by hand from the responses: forwards, tokens, busy slots, prompt tokens."""
    model = tiny_model("opt")
    found = []
    responses = answer(model, batch_size=3, on_stats=found.append)
    (stats,) = found
    lengths = [len(response.token_ids) for response in responses]
    forwards = [decoding + len(entering) for decoding, entering in simulate(lengths, PROMPTS, 3)]
    assert isinstance(stats, RolloutStats) and stats.tokens == sum(lengths) == sum(forwards)
    assert stats.forwards == len(forwards) and stats.prefill_tokens == sum(map(len, PROMPTS))
    assert stats.occupancy == pytest.approx(sum(forwards) / (3 * len(forwards)))
    assert stats.tail_frac == pytest.approx(sum(busy == 1 for busy in forwards) / len(forwards))
    assert stats.prefill_seconds > 0 and stats.decode_seconds > 0


def test_numbers_without_prompts(tiny_model):
    found = []
    assert answer(tiny_model("opt"), [], on_stats=found.append) == []
    assert found[0] == RolloutStats(0, 0, 0.0, 0.0, 0, 0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pack_weights", [False, True])
def test_packed_weights_say_the_same(tiny_model, monkeypatch, family, dtype, pack_weights):
    """Log-probs equal a rescoring forward: 1e-4 in float32, a few roundings in bfloat16."""
    monkeypatch.setattr(packed, "FEWEST_WEIGHTS", 0)
    model = tiny_model(family).to(dtype)
    for prompt, response in zip(PROMPTS, answer(model, pack_weights=pack_weights), strict=True):
        with torch.no_grad():
            logits_1TV = model.eval()(input_ids=torch.tensor([prompt + response.token_ids])).logits.float()
        expected = F.log_softmax(logits_1TV[0, len(prompt) - 1 : -1], -1)[
            torch.arange(len(response.token_ids)), response.token_ids
        ]
        size = float(logits_1TV.abs().max())
        tolerance = 1e-4 if dtype == torch.float32 else 2**-5 * size
        torch.testing.assert_close(torch.tensor(response.logprobs), expected, atol=tolerance, rtol=0)


def test_packing_of_sharded_weights_is_refused(tiny_model):
    with pytest.raises(ValueError, match="pack_weights=True needs whole weights.*Set rollout.weights=gathered"):
        answer(tiny_model("opt"), pack_weights=True, all_ranks_running=lambda running: running)


def test_sharded_weights_are_not_packed(tiny_model):
    model = tiny_model("opt").bfloat16()
    seen = []
    model.lm_head.register_forward_hook(lambda module, *_: seen.append("forward" in vars(module)))
    answer(model, all_ranks_running=lambda running: running)
    assert seen and not any(seen)
    seen.clear()
    answer(model)
    assert set(seen) == {packed.onednn_multiplies(torch.bfloat16)}


def test_a_row_that_overflows_names_its_token(tiny_model):
    """One row's third token; the other has drawn more by then."""
    model = tiny_model("opt")
    calls = []

    def overflow(_, args, output):
        calls.append(1)
        if len(calls) == 3:
            output.logits[0, -1] = torch.nan
        return output

    model.register_forward_hook(overflow)
    with pytest.raises(FloatingPointError, match="not finite at response token 2"):
        answer(model, [[5, 6], [7]], stop_token_ids=())
