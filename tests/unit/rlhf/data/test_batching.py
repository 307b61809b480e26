import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.data.batching import SHARED_TOKEN, Batching, micro_batches, token_micro_batches

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


def test_token_budget_by_hand() -> None:
    """24 tokens on two ranks: longest first, each to the emptiest with room.

    Of 13 tokens a rank needs one: 7 | 5, then 4 and 3 to the second and first, 3 to the second (9 against 10), 2 to the
    first. Of 8 it needs two: 7 | 5 | 4 | 3, then 3 to the last and 2 to the third; costs 7, 6, 6, 5 dealt in turn.
    """
    lengths = [7, 5, 4, 3, 3, 2]
    assert token_micro_batches(lengths, world_size=2, max_tokens=13) == [[[0, 3, 5]], [[1, 2, 4]]]
    assert token_micro_batches(lengths, world_size=2, max_tokens=8) == [[[0], [1]], [[2, 5], [3, 4]]]


def _tokens(ranks: list[list[list[int]]], lengths: list[int]) -> list[list[int]]:
    return [[sum(lengths[i] for i in micro) for micro in rank] for rank in ranks]


@given(LENGTHS, st.integers(1, 5), st.integers(1, 900))
def test_token_budget_is_kept_and_every_row_dealt_once(lengths: list[int], world_size: int, max_tokens: int) -> None:
    """B19, D12: only a row that is over the budget by itself exceeds it; no rank has a call fewer."""
    ranks = token_micro_batches(lengths, world_size=world_size, max_tokens=max_tokens)
    assert sorted(i for rank in ranks for micro in rank for i in micro) == list(range(len(lengths)))
    assert len(ranks) == world_size and len({len(rank) for rank in ranks}) == 1 and ranks[0]
    for rank in ranks:
        for micro in rank:
            assert sum(lengths[i] for i in micro) <= max_tokens or len(micro) == 1


@given(st.lists(st.integers(1, 200), min_size=64, max_size=64), st.sampled_from([0, 64]))
def test_micro_batches_and_ranks_cost_alike(lengths: list[int], hidden_size: int) -> None:
    """Bins of longest-processing-time-first differ by at most the largest row; the ranks' sums by as much."""

    def cost(row: int) -> float:
        return lengths[row] * (1 + lengths[row] / (6 * hidden_size)) if hidden_size else lengths[row]

    ranks = token_micro_batches(lengths, world_size=2, max_tokens=10**6, hidden_size=hidden_size)
    assert [len(rank) for rank in ranks] == [1, 1]
    costs = [sum(cost(i) for i in rank[0]) for rank in ranks]
    assert abs(costs[0] - costs[1]) <= max(map(cost, range(64))) + 1e-6


def test_attention_counts_where_rows_are_long() -> None:
    """600 tokens of one row cost more than 600 of six: at width 10, 600 (1 + 10) against 6 x 100 (1 + 1.67)."""
    lengths = [600, *[100] * 6]
    plain = token_micro_batches(lengths, world_size=2, max_tokens=2000)
    assert sorted(_tokens(plain, lengths)) == [[600], [600]]
    wide = token_micro_batches(lengths, world_size=2, max_tokens=2000, hidden_size=10)
    assert sorted(_tokens(wide, lengths)) == [[600], [600]]
    lengths = [600, *[100] * 20]
    assert sorted(_tokens(token_micro_batches(lengths, world_size=2, max_tokens=2000), lengths)) == [[1300], [1300]]
    wide = token_micro_batches(lengths, world_size=2, max_tokens=2000, hidden_size=10)
    assert sorted(_tokens(wide, lengths)) == [[600], [2000]]


def test_no_more_micro_batches_than_rows() -> None:
    """Rows over the budget have a micro-batch each: two, though 100 tokens would fill twenty."""
    assert token_micro_batches([50, 50], world_size=1, max_tokens=5) == [[[0], [1]]]


def test_samples_of_one_prompt_are_dealt_together() -> None:
    """Worked by hand: prompts of 10 tokens, four answers of 5 to each, two ranks.

    A family is 30 tokens in place of 60, and 42 against the budget; two families make two micro-batches of equal cost.
    In a budget of 30 a family is two halves: 20 tokens, 24 against the budget; a third row would make 33.
    """
    lengths, prompts = [15] * 8, [("a", 10)] * 4 + [("b", 10)] * 4
    plan = token_micro_batches(lengths, world_size=2, max_tokens=42, prompts=prompts)
    assert plan == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    plan = token_micro_batches(lengths, world_size=2, max_tokens=30, prompts=prompts)
    assert sorted(sorted(micro) for rank in plan for micro in rank) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [len(rank) for rank in plan] == [2, 2]


def test_a_prompt_is_divided_where_ranks_would_wait() -> None:
    """Four answers to one prompt, two ranks: together 30 tokens on one rank and none on the other; halves, 20 each."""
    plan = token_micro_batches([15] * 4, world_size=2, max_tokens=100, prompts=[("a", 10)] * 4)
    assert plan == [[[0, 1]], [[2, 3]]]


def _budgeted(rows: list[int], lengths: list[int], prompts: list[tuple[int, int]]) -> float:
    """Tokens against the budget: a prompt in full where it is met first, then SHARED_TOKEN of it."""
    seen: set[int] = set()
    tokens = 0.0
    for i in rows:
        key, size = prompts[i]
        tokens += lengths[i] - size + size * (SHARED_TOKEN if key in seen else 1)
        seen.add(key)
    return tokens


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 80)), max_size=40), st.integers(1, 4), st.integers(1, 600))
def test_sharing_keeps_the_budget(rows: list[tuple[int, int]], world_size: int, max_tokens: int) -> None:
    """Every row once, no rank a call fewer, and only a row that is over the budget by itself exceeds it."""
    prompts = [(key, 7 * key + 3) for key, _ in rows]
    lengths = [size + own for (_, size), (_, own) in zip(prompts, rows, strict=True)]
    plan = token_micro_batches(lengths, world_size=world_size, max_tokens=max_tokens, prompts=prompts)
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(rows)))
    assert len(plan) == world_size and len({len(rank) for rank in plan}) == 1
    for rank in plan:
        for micro in rank:
            assert _budgeted(micro, lengths, prompts) <= max_tokens + 1e-6 or len(micro) == 1


def test_no_rows_give_one_empty_micro_batch_each() -> None:
    assert token_micro_batches([], world_size=2, max_tokens=5) == [[[]], [[]]]


def test_batching_packs_where_it_has_a_budget() -> None:
    lengths = [4, 4, 1, 1]
    assert not Batching(max_rows=2).packed and Batching(max_rows=2, max_tokens=5).packed
    assert Batching(max_rows=2).split(lengths, world_size=1) == micro_batches(lengths, world_size=1, micro_batch_size=2)
    assert Batching(max_rows=1, max_tokens=10).split(lengths, world_size=1) == [[[0, 1, 2, 3]]]
    with pytest.raises(ValueError, match="got 1, 0"):
        token_micro_batches([1], world_size=1, max_tokens=0)
