"""The collator's counts are those of the step that takes the batch, not of the step in which it was collated."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from rlhf.bench.peers.recorder import Recorder
from rlhf.bench.peers.trl_common import Counting, RecordSteps


def collate(examples: list[list[int]]) -> dict[str, Any]:
    longest = max(map(len, examples))
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in examples])
    return {"input_ids": torch.zeros(len(examples), longest), "attention_mask": mask}


def test_batches_are_counted_in_order_with_accumulation(tmp_path: Path) -> None:
    """Three batches are collated before the first step ends, which takes two of them."""
    counting = Counting(collate, len)
    recorder = Recorder(tmp_path)
    callback = RecordSteps(recorder, counting)
    callback.on_train_begin()
    for examples in ([[1, 2, 3], [1]], [[1, 2]], [[1] * 5, [1] * 5]):
        counting(examples)
    arguments = Namespace(gradient_accumulation_steps=2)
    callback.on_step_end(arguments)
    counting([[1]])
    callback.on_step_end(arguments)
    counts = [(step["tokens"], step["rows"], step["positions"]) for step in recorder.steps]
    assert counts == [(6, 3, 8), (11, 3, 11)]


def test_a_packed_batch_without_a_mask_is_all_tokens() -> None:
    counting = Counting(lambda _examples: {"input_ids": torch.zeros(1, 9)}, lambda _examples: 4)
    counting([None])
    assert counting.batches[0] == {"tokens": 9, "rows": 4, "filled": 9, "positions": 9}
