import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf.config import DataConfig, SourceConfig, SplitConfig
from rlhf.data.batching import Batching
from rlhf.data.dataset import SFTRow, TokenDataset, build_dataset
from rlhf.data.loader import Loader, eval_micro_batches
from rlhf.data.template import load_template

MakeDataset = Callable[..., TokenDataset[SFTRow]]


@pytest.fixture
def make_dataset(
    write: Callable[..., Path], data_config: Callable[..., DataConfig], tokenizer: PreTrainedTokenizerBase
) -> MakeDataset:
    """Rows of ragged length from sources of the given sizes."""

    def make(*sizes: int, weights: tuple[float, ...] = (), part: Any = "train") -> TokenDataset[SFTRow]:
        weights = weights or (1.0,) * len(sizes)
        sources = []
        for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            rows = [{"prompt": f"{number} {i}", "response": "z" * (i * 7 % 13 + 1)} for i in range(size)]
            sources.append(SourceConfig(path=str(write(f"s{number}.jsonl", rows)), weight=weight))
        split = SplitConfig(sft=1, reward=0, ppo=0, eval=0.99 if part == "eval" else 0)
        cfg = data_config(sources=sources, split=split)
        template = load_template("auto", tokenizer)
        return build_dataset(cfg, stage="sft", part=part, template=template, tokenizer=tokenizer)

    return make


def loader(dataset: TokenDataset[SFTRow], **fields: Any) -> Loader[SFTRow]:
    defaults = {
        "global_batch_size": 4,
        "batching": Batching(max_rows=2),
        "rank": 0,
        "world_size": 1,
        "seed": 1,
        "epochs": 1,
    }
    return Loader(dataset, **{**defaults, **fields})


def steps(*loaders: Loader[SFTRow]) -> list[list[int]]:
    """Row numbers of each step over the ranks given."""
    return [
        sorted(row.index for micro_batches in step for micro in micro_batches for row in micro)
        for step in zip(*loaders, strict=True)
    ]


def test_every_row_once_an_epoch_and_the_last_batch_is_smaller(make_dataset: MakeDataset) -> None:
    """B19: 10 rows in batches of 4 are batches of 4, 4 and 2; nothing is dropped."""
    one = loader(make_dataset(10))
    seen = steps(one)
    assert [len(step) for step in seen] == [4, 4, 2]
    assert sorted(sum(seen, [])) == list(range(10))
    assert len(one) == 3
    assert one.epoch == 1.0


def test_five_rows_two_ranks(make_dataset: MakeDataset) -> None:
    """B19: 5 rows, batches of 2 on 2 ranks: equally many micro-batches on both, the last one empty on one of them."""
    dataset = make_dataset(5)
    ranks = [list(loader(dataset, rank=r, world_size=2, batching=Batching(max_rows=1))) for r in range(2)]
    assert [[len(micro) for micro in step] for step in ranks[0]] == [[1, 1], [1]]
    assert [[len(micro) for micro in step] for step in ranks[1]] == [[1, 1], [0]]
    rows = [row.index for rank in ranks for step in rank for micro in step for row in micro]
    assert sorted(rows) == list(range(5))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_a_step_holds_the_same_rows_on_any_number_of_ranks(make_dataset: MakeDataset, micro_batch_size: int) -> None:
    dataset = make_dataset(10)
    expected = steps(loader(dataset))
    for world_size in (1, 2, 3):
        ranks = [
            loader(dataset, rank=r, world_size=world_size, batching=Batching(max_rows=micro_batch_size))
            for r in range(world_size)
        ]
        assert steps(*ranks) == expected


def test_order_is_a_function_of_seed_and_epoch(make_dataset: MakeDataset) -> None:
    """B15: each epoch another order, each seed another, the same seed the same."""
    dataset = make_dataset(40)

    def order(seed: int) -> list[int]:
        one = loader(dataset, global_batch_size=1, epochs=2, seed=seed)
        return [step[0] for step in steps(one)]

    first = order(1)
    assert sorted(first[:40]) == sorted(first[40:]) == list(range(40))
    assert first[:40] != first[40:]
    assert first == order(1) != order(2)
    assert first[:40] != list(range(40))


def test_batches_run_on_over_the_end_of_an_epoch(make_dataset: MakeDataset) -> None:
    seen = steps(loader(make_dataset(10), epochs=2))
    assert [len(step) for step in seen] == [4] * 5
    assert Counter(sum(seen, [])) == Counter(dict.fromkeys(range(10), 2))


@pytest.mark.parametrize(
    ("epochs", "max_steps", "sizes"),
    [(0.5, 0, [4, 1]), (1, 2, [4, 4]), (1, 9, [4, 4, 2]), (math.inf, 4, [4, 4, 4, 4]), (0.01, 0, [1])],
)
def test_length(make_dataset: MakeDataset, epochs: float, max_steps: int, sizes: list[int]) -> None:
    one = loader(make_dataset(10), epochs=epochs, max_steps=max_steps)
    assert len(one) == len(sizes)
    assert [len(step) for step in steps(one)] == sizes


def test_weights_are_shares_of_a_source(make_dataset: MakeDataset) -> None:
    """Weight 0.5 sees each row once in two epochs, weight 2 twice in each; a small weight still draws a row."""
    dataset = make_dataset(8, 6, 3, weights=(0.5, 2.0, 0.01))
    one = loader(dataset, global_batch_size=1, epochs=2)
    rows = sum(steps(one), [])
    assert len(rows) == 2 * (4 + 12 + 1)
    epochs = [Counter(rows[:17]), Counter(rows[17:])]
    for epoch in epochs:
        assert [sum(epoch[i] for i in range(8)), [epoch[i] for i in range(8, 14)]] == [4, [2] * 6]
    assert [epochs[0][i] + epochs[1][i] for i in range(8)] == [1] * 8
    assert sum(epochs[0][i] for i in range(14, 17)) == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_resume_goes_on_with_the_next_unseen_row(make_dataset: MakeDataset, world_size: int) -> None:
    """F14: on the same or another number of ranks, over the end of an epoch too."""
    dataset = make_dataset(10)
    whole = steps(loader(dataset, epochs=3))
    for stop in (1, 3, 5):
        first = loader(dataset, epochs=3)
        iterator = iter(first)
        for _ in range(stop):
            next(iterator)
        state = first.state_dict()
        assert state["consumed_rows"] == stop * 4
        resumed = [loader(dataset, epochs=3, rank=r, world_size=world_size) for r in range(world_size)]
        for one in resumed:
            one.load_state_dict(state)
        assert steps(*resumed) == whole[stop:]
        assert len(resumed[0]) == len(whole)


def test_rows_are_skipped_and_made_up_for(make_dataset: MakeDataset) -> None:
    """After two steps back to the first, on with the fourth one's rows, as often as is needed, and with all steps."""
    dataset = make_dataset(10)
    endless = steps(loader(dataset, epochs=9))
    whole = steps(loader(dataset, epochs=2))
    assert len(whole) == 5
    first = loader(dataset, epochs=2)
    iterator = iter(first)
    seen = [next(iterator)]
    state = first.state_dict()
    seen += [next(iterator), next(iterator)]
    later = first.state_dict()
    first.load_state_dict(state)
    first.skip_past(later)
    assert first.state_dict() == {**state, "skipped_rows": 8}
    resumed = loader(dataset, epochs=2)
    resumed.load_state_dict(first.state_dict())
    again = iter(resumed)
    next(again)
    assert first.state_dict() != resumed.state_dict()
    later = resumed.state_dict()
    assert steps(first) == endless[3:7], "four steps are left, the last two of them of a third epoch"
    resumed.load_state_dict(state)
    resumed.skip_past(later)
    assert steps(resumed) == endless[4:8]
    old = {key: value for key, value in state.items() if key != "skipped_rows"}
    resumed.load_state_dict(old)
    assert resumed.skipped_rows == 0, "a state of before there were rollbacks"


def test_resume_with_another_batch_size_counts_rows(make_dataset: MakeDataset) -> None:
    dataset = make_dataset(10)
    first = loader(dataset)
    next(iter(first))
    resumed = loader(dataset, global_batch_size=3)
    resumed.load_state_dict(first.state_dict())
    order = sum(([one] for one in steps(loader(dataset, global_batch_size=1))), [])
    assert sorted(sum(steps(resumed), [])) == sorted(sum(order[4:], []))


def test_resume_with_other_rows_or_seed_is_refused(make_dataset: MakeDataset) -> None:
    state = loader(make_dataset(10)).state_dict()
    with pytest.raises(ValueError, match="seed=1, this run has 2"):
        loader(make_dataset(10), seed=2).load_state_dict(state)
    with pytest.raises(ValueError, match="it cannot continue in the same order"):
        loader(make_dataset(11)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"draws=\[10\], this run has \[5\]"):
        loader(make_dataset(10, weights=(0.5,))).load_state_dict(state)


def test_evaluation_rows_cannot_be_trained_on(make_dataset: MakeDataset) -> None:
    with pytest.raises(ValueError, match="a loader trains, but these rows are part 'eval'"):
        loader(make_dataset(10, part="eval"))


def test_endless_training_is_refused(make_dataset: MakeDataset) -> None:
    with pytest.raises(ValueError, match="epochs is infinite and max_steps is 0"):
        loader(make_dataset(10), epochs=math.inf)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("max_rows", [1, 5, 8, 100])
def test_evaluation_sees_every_row_once_over_all_ranks(
    make_dataset: MakeDataset, world_size: int, max_rows: int
) -> None:
    """C5: ranks share the rows, and all make equally many calls."""
    dataset = make_dataset(8)
    ranks = [
        list(
            eval_micro_batches(dataset, batching=Batching(max_rows=2), rank=r, world_size=world_size, max_rows=max_rows)
        )
        for r in range(world_size)
    ]
    assert len({len(rank) for rank in ranks}) == 1
    rows = sorted(row.index for rank in ranks for micro in rank for row in micro)
    assert len(rows) == len(set(rows)) == min(8, max_rows)


def test_a_part_of_the_evaluation_covers_all_sources(make_dataset: MakeDataset) -> None:
    dataset = make_dataset(10, 10)
    batches = eval_micro_batches(dataset, batching=Batching(max_rows=4), rank=0, world_size=1, max_rows=4)
    assert Counter(row.source for micro in batches for row in micro) == {0: 2, 1: 2}


def test_evaluation_of_no_rows_has_no_batches(make_dataset: MakeDataset) -> None:
    """B8: an evaluation set or a limit of 0 rows."""
    dataset = make_dataset(8)
    assert list(eval_micro_batches(dataset, batching=Batching(max_rows=2), rank=0, world_size=2, max_rows=0)) == []


def test_sources_are_mixed_anew_each_epoch(make_dataset: MakeDataset) -> None:
    one = loader(make_dataset(20, 20), global_batch_size=1, epochs=2)
    sources = [row.source for step in one for micro in step for row in micro]
    assert sources[:40] != sources[40:]
    assert len(set(sources[:10])) == 2
