"""Attention inside the sequences of a packed row: against a naive oracle, forward and backward."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.data.packing import PackedLayout

RAGGED = [[5], [1], [1, 1, 1], [7, 1, 3, 3, 12, 9, 2], [2, 2, 2, 2], [10, 9, 8]]


def naive(query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor, lengths: list[int], scaling: float) -> Tensor:
    """Softmax over the tokens before each token of its own sequence, one query at a time; out_BTHd."""
    num_heads, groups = query_BHTd.shape[1], query_BHTd.shape[1] // key_BKTd.shape[1]
    out = torch.zeros(1, query_BHTd.shape[2], num_heads, query_BHTd.shape[3], dtype=query_BHTd.dtype)
    rows = []
    start = 0
    for length in lengths:
        for t in range(start, start + length):
            heads = []
            for h in range(num_heads):
                keys, values = key_BKTd[0, h // groups, start : t + 1], value_BKTd[0, h // groups, start : t + 1]
                weights = torch.softmax(keys @ query_BHTd[0, h, t] * scaling, 0)
                heads.append(weights @ values)
            rows.append(torch.stack(heads))
        start += length
    return out + torch.stack(rows)[None]


@pytest.mark.parametrize("lengths", RAGGED)
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("scaling", [None, 1.0])
def test_attention_and_its_gradients_equal_one_query_at_a_time(
    lengths: list[int], key_heads: int, scaling: float | None
) -> None:
    torch.manual_seed(0)
    total = sum(lengths)
    query, key, value = (
        torch.randn(1, total, heads, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for heads in (4, key_heads, key_heads)
    )
    found = PackedLayout(lengths).attend(query, key, value, scaling=scaling, dropout=0.0)
    expected = naive(query, key, value, lengths, scaling or 8**-0.5)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    weight = torch.randn_like(expected)
    found_grads = torch.autograd.grad((found * weight).sum(), (query, key, value))
    expected_grads = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    for one, two in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=0)


@pytest.mark.parametrize("key_heads", [4, 2])
def test_a_shared_prompt_is_computed_once_and_counts_for_every_sequence(key_heads: int) -> None:
    """Prompts of 3 and 1 tokens with responses of 2, 1, 5 and of 4: against each sequence written out by itself."""
    torch.manual_seed(0)
    columns = [np.array(c) for c in ([0, 1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15])]
    layout = PackedLayout([len(c) for c in columns], columns=columns)
    assert layout.is_shared
    query, key, value = (
        torch.randn(1, 16, heads, 8, dtype=torch.float64).transpose(1, 2).requires_grad_()
        for heads in (4, key_heads, key_heads)
    )
    found = layout.attend(query, key, value, scaling=None, dropout=0.0)
    expected = torch.zeros_like(found)
    for sequence in columns:
        part = naive(*(x[:, :, sequence] for x in (query, key, value)), [len(sequence)], 8**-0.5)
        expected = expected.index_copy(1, torch.from_numpy(sequence), part)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    weight = torch.randn_like(expected)
    found_grads = torch.autograd.grad((found * weight).sum(), (query, key, value))
    expected_grads = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    for one, two in zip(found_grads, expected_grads, strict=True):
        torch.testing.assert_close(one, two, atol=1e-12, rtol=0)


def test_groups_hold_like_lengths_and_every_token_once() -> None:
    """Worked by hand: 8 and 6 share a group (6 = 0.75 x 8), 5 starts the next, in which 4 stays; 1 is alone."""
    layout = PackedLayout([1, 8, 5, 6, 4])
    assert layout.group_shapes == [(2, 8), (2, 5), (1, 1)]
    assert layout.token_P.tolist() == [
        *range(1, 9), *(14, 15, 16, 17, 18, 19, 19, 19),
        *range(9, 14), *(20, 21, 22, 23, 23),
        0,
    ]  # fmt: skip
    assert layout.unread_Q.tolist() == [14, 15, 25] and not layout.is_shared
    assert layout.token_P[layout.slot_T].tolist() == list(range(24))


def test_the_token_before_each_one_follows_its_sequence() -> None:
    """Two tokens of a prompt, answers of 2 and 1 tokens, then another sequence: both answers follow token 1."""
    columns = [np.array(c) for c in ([0, 1, 2, 3], [0, 1, 4], [5, 6])]
    before_T = PackedLayout([4, 3, 2], columns=columns).before_T
    assert before_T[[1, 2, 3, 4, 6]].tolist() == [0, 1, 2, 1, 5]
    assert PackedLayout([3, 2]).before_T[[1, 2, 4]].tolist() == [0, 1, 3]


def test_places_sequence_by_sequence_for_the_kernel_that_takes_them_so() -> None:
    """None where the row is that already; else the tokens in order, and where each token stands first."""
    assert PackedLayout([3, 2]).sequence_P is None
    shared = PackedLayout([3, 3], columns=[np.array([0, 1, 2]), np.array([0, 1, 3])])
    assert shared.sequence_P is not None and shared.place_T is not None
    assert shared.sequence_P.tolist() == [0, 1, 2, 0, 1, 3] and shared.place_T.tolist() == [0, 1, 2, 5]
    moved = PackedLayout([2, 1], columns=[np.array([1, 2]), np.array([0])])
    assert moved.sequence_P is not None and moved.sequence_P.tolist() == [1, 2, 0] and not moved.is_shared


def test_equal_lengths_need_no_gather() -> None:
    assert PackedLayout([4, 4, 4]).in_order
    assert not PackedLayout([3, 4]).in_order


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_a_row_without_tokens_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PackedLayout(lengths)
