"""The logits processor against hand-worked numbers and batches that vLLM reorders."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.config import SamplingConfig
from rlhf.rollout.sampling import TokenChooser
from rlhf.rollout.vllm_tokens import ROW, Draws, Slots, processor_class


def added(slot: int, row: int, output_ids: list[int]) -> tuple[int, Any, None, list[int]]:
    return slot, SimpleNamespace(extra_args={ROW: row}), None, output_ids


def batch(**changes: Any) -> Any:
    return SimpleNamespace(**{"removed": [], "added": [], "moved": [], **changes})


ONE_WAY, SWAP = SimpleNamespace(name="UNIDIRECTIONAL"), SimpleNamespace(name="SWAP")


def test_slots_follow_the_batch() -> None:
    slots = Slots()
    outputs: list[list[int]] = [[], [7], [], [7, 7]]
    slots.update(batch(added=[added(i, row, outputs[row]) for i, row in enumerate([2, 0, 1])]))
    assert slots.rows_and_positions(3) == ([2, 0, 1], [0, 0, 1])
    outputs[0].append(5)
    slots.update(None)
    assert slots.rows_and_positions(3) == ([2, 0, 1], [0, 1, 1]), "the lists are read anew"
    slots.update(batch(removed=[0], moved=[(2, 0, ONE_WAY)]))
    assert slots.rows_and_positions(2) == ([1, 0], [1, 1])
    with pytest.raises(KeyError):
        slots.rows_and_positions(3)
    slots.update(batch(moved=[(0, 1, SWAP)]))
    assert slots.rows_and_positions(2) == ([0, 1], [1, 1])
    slots.update(batch(removed=[0], added=[added(0, 3, outputs[3])]))
    assert slots.rows_and_positions(2) == ([3, 1], [2, 1])
    slots.update(batch(moved=[(1, 0, ONE_WAY)]))
    assert slots.rows_and_positions(1) == ([1], [1]), "a move replaces what was there"


def test_one_token_stays_possible_and_its_logprob_is_kept() -> None:
    # Under probabilities 1/2, 1/4, 1/4: u = 0.6 falls to token 1, u = 0.1 to token 0, u = 0.9 to token 2.
    uniform_BR = torch.tensor([[0.1, 0.6], [0.9, 0.1]], dtype=torch.float64)
    draws = Draws(TokenChooser(SamplingConfig(), ()), uniform_BR, torch.zeros(2, 2))
    processor = processor_class(object, lambda: draws)(None, torch.device("cpu"), False)
    assert not processor.is_argmax_invariant()
    processor.update_state(batch(added=[added(0, 1, []), added(1, 0, [4])]))
    logits_SV = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(2, 3)
    chosen_SV = processor.apply(logits_SV)
    infinity = -math.inf
    assert chosen_SV.tolist() == [[infinity, infinity, 0.0], [infinity, 0.0, infinity]]
    torch.testing.assert_close(draws.logprob_BR, torch.tensor([[0.0, math.log(0.25)], [math.log(0.25), 0.0]]))


def test_stop_tokens_are_excluded_by_position() -> None:
    chooser = TokenChooser(SamplingConfig(temperature=0, min_new_tokens=1), (2,))
    draws = Draws(chooser, torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2))
    logits_SV = torch.tensor([[0.0, 1.0, 5.0], [0.0, 1.0, 5.0]])
    chosen_SV = draws.choose(logits_SV, torch.tensor([0, 1]), torch.tensor([0, 1]))
    assert chosen_SV.argmax(-1).tolist() == [1, 2]
