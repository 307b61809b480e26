import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.models.policy import PolicyOutput
from step1_sft.loss import sft_loss_sum


def output_of(logits_BTV: Tensor, token_ids_BT: Tensor, mask_BT: Tensor) -> PolicyOutput:
    """What the policy says, from whole logits: column t is about token t given those before it."""
    logprob_BT = torch.zeros(token_ids_BT.shape)
    logprob_BT[:, 1:] = logits_BTV[:, :-1].log_softmax(-1).gather(-1, token_ids_BT[:, 1:, None]).squeeze(-1)
    greedy_BT = torch.zeros_like(mask_BT)
    greedy_BT[:, 1:] = logits_BTV[:, :-1].argmax(-1) == token_ids_BT[:, 1:]
    return PolicyOutput(logprob_BT=logprob_BT * mask_BT, entropy_BT=logprob_BT * 0, greedy_BT=greedy_BT)


def test_hand_worked_example() -> None:
    """Two tokens with a loss, of probability 1/2 (the most likely one) and 1/4 (not): ln 2 + ln 4; one of two right."""
    logprob = torch.tensor([[0.0, math.log(0.5), math.log(0.25), 0.0]], requires_grad=True)
    greedy = torch.tensor([[True, True, False, True]])
    mask = torch.tensor([[False, True, True, False]])
    loss, stats = sft_loss_sum(PolicyOutput(logprob, torch.zeros(1, 4), greedy), mask)
    assert loss.item() == pytest.approx(math.log(8))
    loss.backward()
    torch.testing.assert_close(logprob.grad, torch.tensor([[0.0, -1.0, -1.0, 0.0]]))
    assert [x.item() for x in stats["train/loss"]] == [pytest.approx(math.log(8)), 2]
    assert [x.item() for x in stats["train/token_accuracy"]] == [1, 2]


def test_equals_torchs_cross_entropy_on_ragged_rows() -> None:
    """A1, A4: pad id == eos id, a row of one token; the eos at a row's end has its loss, padding has none."""
    generator = torch.Generator().manual_seed(0)
    pad = eos = 1
    rows = [[5, 7, 3, eos], [4], [9, 2, eos]]
    ids = torch.tensor([row + [pad] * (4 - len(row)) for row in rows])
    mask = torch.tensor([[0 < t < len(row) for t in range(4)] for row in rows])
    logits = torch.randn(3, 4, 11, generator=generator)
    loss, stats = sft_loss_sum(output_of(logits, ids, mask), mask)
    labels = ids.masked_fill(~mask, -100)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected)
    assert stats["train/loss"][1] == 5


def test_an_empty_micro_batch_is_0_with_a_gradient() -> None:
    logprob = torch.zeros(1, 1, requires_grad=True)
    loss, stats = sft_loss_sum(
        PolicyOutput(logprob, torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.bool)), torch.tensor([[False]])
    )
    assert loss.item() == 0 and loss.requires_grad
    assert stats["train/loss"][1] == 0
