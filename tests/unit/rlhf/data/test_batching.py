import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.batching import micro_batches

LENGTHS = st.lists(st.integers(1, 500), max_size=60)


def test_hand_worked() -> None:
    """Six rows, two ranks, two rows each: groups (9 8 7 6) and (2 1); the poorer rank gets the longer row."""
    ranks = micro_batches([1, 9, 7, 2, 8, 6], world_size=2, micro_batch_size=2)
    assert ranks == [[[1, 4], [0]], [[2, 5], [3]]]


@given(LENGTHS, st.integers(1, 5), st.integers(1, 5))
def test_every_row_once_and_equally_many_micro_batches(lengths: list[int], world_size: int, size: int) -> None:
    """B19, D12: ragged ends are kept, and no rank has a call fewer."""
    ranks = micro_batches(lengths, world_size=world_size, micro_batch_size=size)
    assert len(ranks) == world_size
    assert sorted(i for rank in ranks for micro in rank for i in micro) == list(range(len(lengths)))
    assert {len(rank) for rank in ranks} == {-(-len(lengths) // (world_size * size))}
    assert all(len(micro) <= size for rank in ranks for micro in rank)


@given(LENGTHS.filter(bool), st.integers(1, 4), st.integers(1, 4))
def test_rows_of_like_length_meet(lengths: list[int], world_size: int, size: int) -> None:
    """No row of one micro-batch is longer than the shortest of the one before on the same rank."""
    for rank in micro_batches(lengths, world_size=world_size, micro_batch_size=size):
        filled = [[lengths[i] for i in micro] for micro in rank if micro]
        assert all(min(a) >= max(b) for a, b in zip(filled, filled[1:], strict=False))


@given(st.lists(st.integers(1, 500), min_size=64, max_size=64))
def test_ranks_get_like_work(lengths: list[int]) -> None:
    """Padded tokens of two ranks differ by at most the longest micro-batch: each group gives the poorer rank more."""
    ranks = micro_batches(lengths, world_size=2, micro_batch_size=4)
    cost = [sum(len(micro) * max(lengths[i] for i in micro) for micro in rank) for rank in ranks]
    assert abs(cost[0] - cost[1]) <= 4 * max(lengths)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="got 0, 1"):
        micro_batches([1], world_size=0, micro_batch_size=1)
