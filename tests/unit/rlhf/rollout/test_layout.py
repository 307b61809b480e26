"""Attention against slots: each decoding row sees its own tokens and nothing else, however it is computed."""

import pytest
import torch
from torch import Tensor

from rlhf.rollout import layout as layout_module
from rlhf.rollout.cache import SlotCache
from rlhf.rollout.layout import SlotLayout

HEAD_SIZE = 8
CAPACITY = 24


def naive(query_Hd: Tensor, key_KLd: Tensor, value_KLd: Tensor, scale: float) -> Tensor:
    """One row's attention, head by head and key by key, in float64."""
    heads = []
    for h, query_d in enumerate(query_Hd.double()):
        k = h * len(key_KLd) // len(query_Hd)
        score_L = torch.stack([(query_d * key_d).sum() * scale for key_d in key_KLd[k].double()])
        weight_L = score_L.exp() / score_L.exp().sum()
        heads.append(sum(w * value_d for w, value_d in zip(weight_L, value_KLd[k].double(), strict=True)))
    return torch.stack(heads)


def filled_cache(num_slots: int, num_key_heads: int, dtype: torch.dtype = torch.float32) -> SlotCache:
    """Every place holds something, so that a place too many shows."""
    cache = SlotCache(num_slots=num_slots, capacity=CAPACITY)
    slot_N = torch.arange(num_slots).repeat_interleave(CAPACITY)
    cache.aim(slot_N, torch.arange(CAPACITY).repeat(num_slots))
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 1, num_key_heads, len(slot_N), HEAD_SIZE, generator=generator).to(dtype)
    cache.update(key, value, 0)
    return cache


@pytest.mark.parametrize("path", ["attend_sparse", "attend_masked"])
@pytest.mark.parametrize(("num_heads", "num_key_heads"), [(3, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize(("slots", "lengths"), [([0, 1, 2, 3], [5, 1, 24, 6]), ([1, 4], [1, 9]), ([5], [24])])
def test_rows_see_their_own_tokens(monkeypatch, path, num_heads, num_key_heads, slots, lengths):
    """Ragged rows, one of length 1, a full one, slots with gaps; shared key heads."""
    monkeypatch.setattr(layout_module, "LENGTH_STEP", 1)
    cache = filled_cache(6, num_key_heads)
    layout = SlotLayout(cache, slots=slots, lengths=lengths)
    query_NHd = torch.randn(len(slots), num_heads, HEAD_SIZE, generator=torch.Generator().manual_seed(1))
    for grown in (0, 1) if max(lengths) < CAPACITY else (0,):
        out_NHd = getattr(layout, path)(query_NHd, *cache.buffers[0], scale=0.3)
        for n, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            key_KLd, value_KLd = (x[slot, :, : length + grown] for x in cache.buffers[0])
            expected_Hd = naive(query_NHd[n], key_KLd, value_KLd, 0.3)
            torch.testing.assert_close(out_NHd[n].double(), expected_Hd, atol=1e-6, rtol=1e-5)
        layout.advance()


def test_by_hand():
    """Scores ln 1 and ln 3 weigh the values 1/4 and 3/4."""
    cache = SlotCache(num_slots=1, capacity=4)
    cache.aim(torch.tensor([0, 0]), torch.tensor([0, 1]))
    cache.update(torch.tensor([[[[0.0], [1.0]]]]), torch.tensor([[[[4.0], [8.0]]]]), 0)
    layout = SlotLayout(cache, slots=[0], lengths=[2])
    query_NHd = torch.tensor([[[3.0]]]).log()
    for attend in (layout.attend_sparse, layout.attend_masked):
        assert attend(query_NHd, *cache.buffers[0], scale=1.0).item() == pytest.approx(7)


@pytest.mark.parametrize("scaling", [None, 1.0])
def test_decoding_rows_and_prompts_in_one_row(scaling):
    """First the newest token of each decoding row, then prompts, causal and apart from each other."""
    num_heads, num_key_heads = 4, 2
    cache = filled_cache(5, num_key_heads)
    slots, lengths, prompt_lengths = [0, 3], [7, 1], [4, 1, 6]
    generator = torch.Generator().manual_seed(2)
    num_tokens = len(slots) + sum(prompt_lengths)
    query = torch.randn(1, num_tokens, num_heads, HEAD_SIZE, generator=generator).transpose(1, 2)
    key, value = torch.randn(2, 1, num_tokens, num_key_heads, HEAD_SIZE, generator=generator).transpose(2, 3)
    layout = SlotLayout(cache, slots=slots, lengths=lengths, prompt_lengths=prompt_lengths)
    homes = [s for s, n in zip([1, 2, 4], prompt_lengths, strict=True) for _ in range(n)]
    places = [*(n - 1 for n in lengths), *(i for n in prompt_lengths for i in range(n))]
    cache.aim(torch.tensor([*slots, *homes]), torch.tensor(places))
    out_BTHd = layout.attend(query, *cache.update(key, value, 0), scaling=scaling, dropout=0.0)
    assert out_BTHd.shape == (1, num_tokens, num_heads, HEAD_SIZE)
    scale = HEAD_SIZE**-0.5 if scaling is None else scaling
    for n, (slot, place) in enumerate(zip([*slots, *homes], places, strict=True)):
        key_KLd, value_KLd = (x[slot, :, : place + 1] for x in cache.buffers[0])
        expected_Hd = naive(query[0, :, n], key_KLd, value_KLd, scale)
        torch.testing.assert_close(out_BTHd[0, n].double(), expected_Hd, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_attended_in_float32():
    cache = filled_cache(2, 2, torch.bfloat16)
    assert {x.dtype for x in cache.buffers[0]} == {torch.float32}
    layout = SlotLayout(cache, slots=[0, 1], lengths=[9, 3])
    query_NHd = torch.randn(2, 2, HEAD_SIZE).bfloat16()
    out_NHd = layout.attend_sparse(query_NHd, *cache.buffers[0], scale=1.0)
    assert out_NHd.dtype == torch.bfloat16
    for n, length in enumerate((9, 3)):
        expected_Hd = naive(query_NHd[n], *(x[n, :, :length] for x in cache.buffers[0]), 1.0)
        torch.testing.assert_close(out_NHd[n].double(), expected_Hd, atol=0, rtol=2**-7)


def test_unwritten_places_do_not_reach_a_row():
    """What stands behind a row's length has weight 0, and is a number."""
    cache = SlotCache(num_slots=2, capacity=CAPACITY)
    cache.aim(torch.tensor([0, 1]), torch.tensor([0, 0]))
    cache.update(*torch.ones(2, 1, 1, 2, HEAD_SIZE), 0)
    layout = SlotLayout(cache, slots=[0, 1], lengths=[1, 1])
    for attend in (layout.attend_sparse, layout.attend_masked):
        assert attend(torch.ones(2, 1, HEAD_SIZE), *cache.buffers[0], scale=1.0).eq(1).all()


def test_gaps_cost_where_all_slots_are_read():
    cache = filled_cache(6, 2)
    assert SlotLayout(cache, slots=[0, 5], lengths=[3, 4]).excess() == 0
    layout = SlotLayout(cache, slots=[0, 5], lengths=[3, 4])
    layout.slot_N = layout.slot_N.to("meta")
    assert layout.excess() == 4 * 4 * cache.bytes_per_token == 4 * 4 * (2 * 2 * HEAD_SIZE * 4)
