"""A packed row over the ranks of a group: who has which columns, who predicts which token, and attention."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.data.collate import collate_sft
from rlhf.data.dataset import SFTRow
from rlhf.data.packing import PackedLayout
from rlhf.data.split_layout import SplitLayout
from rlhf.distributed import Group


def layouts(lengths: list[int], size: int) -> list[SplitLayout]:
    return [SplitLayout(PackedLayout(lengths), Group(rank, size, None)) for rank in range(size)]


def test_columns_and_predictions_of_a_row_that_does_not_divide() -> None:
    """7 columns over 3 ranks: 3, 3, 1 and two of padding. The token behind a cut is predicted in front of it."""
    split = layouts([4, 3], 3)
    row = torch.arange(10, 17)[None]
    assert [part.own(row).tolist() for part in split] == [[[10, 11, 12]], [[13, 14, 15]], [[16, 0, 0]]]
    assert [part.num_real for part in split] == [3, 3, 1]
    # Predicted by columns 0 to 2: tokens 1, 2, 3. Token 4 begins a sequence: whose it is has no meaning.
    assert [np.flatnonzero(part.predicted[1:]).tolist() for part in split] == [[0, 1, 2], [3, 4, 5], []]
    assert (sum(part.predicted.astype(int) for part in split) == 1).all()


def test_a_row_shorter_than_the_group() -> None:
    split = layouts([1], 2)
    assert [(part.width, part.num_real) for part in split] == [(1, 1), (1, 0)]
    assert [part.own(torch.tensor([[5]])).tolist() for part in split] == [[[5]], [[0]]]


def test_a_token_behind_a_shared_prompt_is_predicted_by_the_prompts_rank() -> None:
    """Columns 0 to 1 are a prompt of two answers, 2 to 3 and 4 to 5; column 4 is predicted by column 1."""
    columns = [np.array([0, 1, 2, 3]), np.array([0, 1, 4, 5])]
    split = [SplitLayout(PackedLayout([4, 4], columns=columns), Group(rank, 2, None)) for rank in range(2)]
    assert np.flatnonzero(split[0].predicted[1:]).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(split[1].predicted).tolist() == [5]


def sft(length: int) -> SFTRow:
    return SFTRow(np.arange(length, dtype=np.int32), np.arange(length) >= 2, source=0, index=0)


@pytest.mark.parametrize("lengths", [[5, 1, 9], [3], []])
def test_batches_of_a_group_count_each_token_and_target_once(lengths: list[int]) -> None:
    rows = [sft(length) for length in lengths]
    whole = collate_sft(rows, pad_id=0, device="cpu", packed=True)
    parts = [collate_sft(rows, pad_id=0, device="cpu", packed=True, group=Group(rank, 2, None)) for rank in range(2)]
    masks = torch.stack([part.loss_mask_BT for part in parts]).sum(dim=0)
    assert masks.tolist() == whole.loss_mask_BT.long().tolist()
    assert sum(part.num_targets for part in parts) == whole.num_targets == sum(max(n - 2, 0) for n in lengths)
    assert sum(part.sequences.num_tokens for part in parts) == whole.sequences.num_tokens == sum(lengths)
    for part in parts:
        sequences = part.sequences
        assert sequences.num_sharers == 2 and sequences.num_columns == max(1, -(-sum(lengths) // 2))
        assert sequences.num_padding == sequences.num_columns - sequences.num_tokens


def test_a_group_of_one_shares_nothing() -> None:
    alone = collate_sft([sft(4)], pad_id=0, device="cpu", packed=True, group=Group(0, 1, None))
    assert isinstance(alone.sequences.layout, PackedLayout) and alone.sequences.num_sharers == 1


class Recorded:
    """What the other ranks of a group of two send is made up: this rank's own, with the parts exchanged."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def exchange(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return x


def test_attention_exchanges_twice_and_holds_no_more_than_a_share() -> None:
    """Queries, keys and values together: 7 tokens over 2 ranks, 4 heads and 2 key heads of size 8."""
    group: Any = Recorded()
    layout = SplitLayout(PackedLayout([4, 3]), group)
    query, key = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8)
    out = layout.attend(query, key, key, scaling=None, dropout=0.0)
    assert out.shape == (1, 4, 4, 8)
    assert group.shapes == [(2, 4, 2 + 1 + 1, 8), (2, 4, 2, 8)]
