import math

import pytest
import torch

from step2_reward.loss import ranking_loss_sum


def pairs(*index_pairs, weights=None):
    chosen, rejected = zip(*index_pairs, strict=True) if index_pairs else ((), ())
    weights = weights or [1.0] * len(index_pairs)
    return {
        "chosen_N": torch.tensor(chosen, dtype=torch.long),
        "rejected_N": torch.tensor(rejected, dtype=torch.long),
        "weight_N": torch.tensor(weights),
        "margin_N": torch.zeros(len(index_pairs)),
    }


def test_hand_worked_loss_and_gradient():
    """Scores 1 and 0: -log sigmoid(1) = log(1 + e^-1); its gradient is -+ sigmoid(-1)."""
    score = torch.tensor([1.0, 0.0], requires_grad=True)
    loss, stats = ranking_loss_sum(score, **pairs((0, 1)), centring_coef=0.0)
    assert loss.item() == pytest.approx(math.log1p(math.exp(-1)))
    loss.backward()
    slope = 1 / (1 + math.e)
    torch.testing.assert_close(score.grad, torch.tensor([-slope, slope]))
    assert stats["train/pair_accuracy"][0] == 1
    assert stats["train/margin"][0] == 1


def test_equal_scores_cost_ln_2_whatever_the_batch():
    """C17: identical pairs give ln 2 each, divided once by the number of pairs."""
    for n in (1, 2, 4):
        index = [(2 * i, 2 * i + 1) for i in range(n)]
        loss, _ = ranking_loss_sum(torch.zeros(2 * n), **pairs(*index), centring_coef=0)
        assert loss.item() / n == pytest.approx(math.log(2))


def test_far_apart_scores_stay_finite():
    """C3: a difference of -200, also from half precision."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        score = torch.tensor([-100.0, 100.0], dtype=dtype, requires_grad=True)
        loss, _ = ranking_loss_sum(score, **pairs((0, 1)), centring_coef=0.0)
        assert loss.dtype == torch.float32
        assert loss.item() == pytest.approx(200.0)
        loss.backward()
        assert torch.isfinite(score.grad).all()


def test_four_ranked_answers_give_six_pairs_from_four_scores():
    """C15: against a plain double loop; weight 1/6 makes the prompt count once."""
    score = torch.tensor([0.3, -1.0, 2.0, 0.1], dtype=torch.float32)
    index = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    loss, _ = ranking_loss_sum(score, **pairs(*index, weights=[1 / 6] * 6), centring_coef=0.0)
    naive = sum(math.log1p(math.exp(-(score[i] - score[j]).item())) for i, j in index) / 6
    assert loss.item() == pytest.approx(naive, rel=1e-6)


def test_margin_and_centring():
    arguments = pairs((0, 1))
    arguments["margin_N"] = torch.tensor([0.5])
    loss, _ = ranking_loss_sum(torch.tensor([1.0, 2.0]), **arguments, centring_coef=0.01)
    assert loss.item() == pytest.approx(math.log1p(math.exp(1.5)) + 0.01 * 9.0)


def test_no_pairs_is_0_with_a_backward_pass():
    """D12: a micro-batch that is empty on this rank only still takes part."""
    score = torch.tensor([1.0], requires_grad=True)
    loss, stats = ranking_loss_sum(score, **pairs(), centring_coef=0.1)
    loss.backward()
    assert loss.item() == 0.0
    assert score.grad.item() == 0.0
    assert stats["train/pair_accuracy"][1] == 0
