import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf import distributed
from rlhf.metrics import METRICS, Accumulator, JsonlSink, TensorBoardSink, lookup, markdown

ROOT = Path(__file__).parents[3]


def reduce_as_ranks(monkeypatch: pytest.MonkeyPatch, accumulators, *, totals=None, maxima=None):
    """What each rank gets, by running the ranks one after the other with the sum of all their vectors."""
    world = len(accumulators)
    totals, maxima = totals or [{}] * world, maxima or [{}] * world
    state = [(dict(a._stats), dict(a._values)) for a in accumulators]
    vectors, results, calls = [], [], []
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    for collecting in (True, False):
        for rank, accumulator in enumerate(accumulators):
            accumulator._stats, accumulator._values = map(dict, state[rank])
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)

            def all_sum(x, collecting=collecting):
                calls.append(collecting)
                if collecting:
                    vectors.append(x.clone())
                    return x
                return torch.stack(vectors).sum(0)

            monkeypatch.setattr(distributed, "all_sum", all_sum)
            reduced = accumulator.reduce(totals=totals[rank], maxima=maxima[rank])
            if not collecting:
                results.append(reduced)
    assert calls.count(False) == world  # one collective on each rank
    return results


def test_mean_is_sum_over_count_not_mean_of_means() -> None:
    stats = Accumulator()
    stats.add({"train/loss": (torch.tensor(3.0), 1)})  # mean 3 of 1 token
    stats.add({"train/loss": (torch.tensor(3.0), torch.tensor(3))})  # mean 1 of 3 tokens
    assert stats.reduce().means == {"train/loss": 1.5}
    assert stats.reduce().means == {}


def test_D26_mean_does_not_depend_on_ranks_or_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks with 1 and 3 tokens: the token-weighted mean, equal on both; values that were set are kept."""
    one, two = Accumulator(), Accumulator()
    one.add({"train/loss": (torch.tensor(3.0), 1)})
    two.add({"train/loss": (torch.tensor(1.0), 1)})
    two.add({"train/loss": (torch.tensor(2.0), 2)})
    for a in (one, two):
        a.set({"train/lr": 0.1})
    first, second = reduce_as_ranks(monkeypatch, [one, two])
    assert first.means == second.means == {"train/loss": 1.5, "train/lr": 0.1}


def test_D3_names_added_on_one_rank_only_do_not_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Accumulator(), Accumulator()
    one.add({"policy/loss": (1.0, 1), "value/loss": (2.0, 1)})
    two.add({"value/loss": (4.0, 1)})
    first, second = reduce_as_ranks(monkeypatch, [one, two])
    assert first.means == second.means == {"policy/loss": 1.0, "value/loss": 3.0}


def test_totals_are_summed_and_maxima_are_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    results = reduce_as_ranks(
        monkeypatch,
        [Accumulator() for _ in range(3)],
        totals=[{"tokens": 1.0}, {"tokens": 2.0}, {"tokens": 4.0}],
        maxima=[{"a": 1.0, "b": -9.0}, {"a": 7.0, "b": -8.0}, {"a": 3.0, "b": -7.0}],
    )
    for result in results:
        assert result.totals == {"tokens": 7.0}
        assert result.maxima == {"a": 7.0, "b": -7.0}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 50)), min_size=1, max_size=20), st.integers(1, 4))
def test_any_division_over_ranks_gives_one_mean(pairs: list[tuple[float, int]], world: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        accumulators = [Accumulator() for _ in range(world)]
        for i, (total, count) in enumerate(pairs):
            accumulators[i % world].add({"ppo/score": (torch.tensor(total, dtype=torch.float64), count)})
        expected = sum(total for total, _ in pairs) / sum(count for _, count in pairs)
        for result in reduce_as_ranks(monkeypatch, accumulators):
            assert result.means["ppo/score"] == pytest.approx(expected, abs=1e-9)


def test_a_value_that_does_not_exist_is_left_out() -> None:
    stats = Accumulator()
    stats.add({"train/pair_accuracy": (torch.tensor(0.0), torch.tensor(0))})
    assert stats.reduce().means == {}


def test_D22_bf16_sums_and_counts_keep_counting() -> None:
    """bf16 holds integers to 256 only."""
    stats = Accumulator()
    for _ in range(1000):
        stats.add({"train/loss": (torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(1, dtype=torch.bfloat16))})
    assert float(stats._stats["train/loss"][1]) == 1000
    assert stats.reduce().means["train/loss"] == 1.0


def test_no_graph_is_kept() -> None:
    stats = Accumulator()
    stats.add({"train/loss": (torch.ones(1, requires_grad=True).sum(), 1)})
    assert not stats._stats["train/loss"][0].requires_grad


@pytest.mark.parametrize("name", ["loss", "train/los", "train/lr/source", "eval/loss/", "eval/nothing/source"])
def test_unregistered_names_raise(name: str) -> None:
    with pytest.raises(ValueError, match="is not registered. Use a name of METRICS"):
        lookup(name)
    with pytest.raises(ValueError, match="is not registered"):
        Accumulator().add({name: (1.0, 1)})
    with pytest.raises(ValueError, match="is not registered"):
        Accumulator().set({name: 1.0})


def test_C23_loss_per_source_is_summed_over_ranks_before_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks' losses 1 and 3: perplexity exp(2), not the mean of exp(1) and exp(3)."""
    accumulators = [Accumulator(source_names=["hh"]) for _ in range(2)]
    for accumulator, loss in zip(accumulators, (1.0, 3.0), strict=True):
        accumulator.add({"eval/loss/hh": (loss * 5, 5)})
    for result in reduce_as_ranks(monkeypatch, accumulators):
        assert torch.tensor(result.means["eval/loss/hh"]).exp() == pytest.approx(7.389, abs=1e-3)
    with pytest.raises(ValueError, match="source"):
        accumulators[0].add({"eval/loss/other": (1.0, 1)})


def test_jsonl_lines(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, "train", {"train/loss": 2.5, "train/grad_norm": float("nan")}, time=10.0)
    sink.write(1, "eval", {"eval/loss": float("-inf")}, time=11.0)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "split": "train", "time": 10.0, "train/loss": 2.5, "train/grad_norm": None,
         "notes": {"train/grad_norm": "nan"}},
        {"step": 1, "split": "eval", "time": 11.0, "eval/loss": None, "notes": {"eval/loss": "-inf"}},
    ]  # fmt: skip


def test_tensorboard_events_hold_the_values(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sink = TensorBoardSink(tmp_path)
    sink.write(3, "train", {"train/loss": 2.5}, time=10.0)
    sink.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(3, 2.5)]


def test_optional_sinks_are_not_imported_by_the_module() -> None:
    import subprocess
    import sys

    code = "import sys, rlhf.metrics; print([m for m in ('wandb', 'tensorboard', 'deepspeed') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_registry_is_written_well() -> None:
    for name, metric in METRICS.items():
        assert name.count("/") == 1 and name == name.lower()
        assert metric.definition.endswith(".") and "\n" not in metric.definition
        if name.endswith("_frac"):
            assert metric.unit == "fraction"
        if name.endswith("_seconds"):
            assert metric.unit == "s"


def test_docs_are_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == markdown(), (
        "python -m rlhf.metrics > docs/metrics.md"
    )
