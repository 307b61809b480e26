import math

import pytest
import torch

from step3_ppo.algorithm import KLConfig
from step3_ppo.kl import KLCoefficient
from step3_ppo.loss import policy_loss_sum, token_log_ratio, value_loss_sum

MASK = torch.tensor([[True, True], [True, False]])


def ppo_loss_sum(new, old, advantage, mask):
    """Ratios of tokens, one interval on both sides, every token with weight 1."""
    log_ratio = token_log_ratio(new, old, mask)
    return policy_loss_sum(log_ratio, advantage, mask.float(), clip_low=0.2, clip_high=0.2)


def test_policy_loss_hand_worked():
    """Ratios 1.5 (A=+1: clipped to 1.2), 0.5 (A=+1: not clipped), 0.5 (A=-2: clipped to 0.8)."""
    old = torch.zeros(2, 2)
    new = torch.tensor([[math.log(1.5), math.log(0.5)], [math.log(0.5), 7.0]], requires_grad=True)
    advantage = torch.tensor([[1.0, 1.0], [-2.0, 50.0]])
    loss, stats = ppo_loss_sum(new, old, advantage, MASK)
    assert loss.item() == pytest.approx(-1.2 - 0.5 + 1.6)
    loss.backward()
    torch.testing.assert_close(new.grad, torch.tensor([[0.0, -0.5], [0.0, 0.0]]))
    assert stats["policy/clip_frac"][0] == 2
    assert stats["policy/clip_frac"][1] == 3
    expected_kl = sum(r - 1 - math.log(r) for r in (1.5, 0.5, 0.5))
    assert stats["policy/kl_old"][0].item() == pytest.approx(expected_kl, rel=1e-5)


def test_at_ratio_1_the_gradient_is_minus_the_advantage():
    """D6: before the first update clipping is inert and the surrogate is the policy gradient."""
    logprob = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
    advantage = torch.tensor([[0.3, -0.7], [2.0, 9.0]])
    loss, stats = ppo_loss_sum(logprob, logprob.detach(), advantage, MASK)
    loss.backward()
    torch.testing.assert_close(logprob.grad, -advantage * MASK)
    assert stats["policy/clip_frac"][0] == 0
    assert stats["policy/kl_old"][0] == 0


def test_sum_does_not_depend_on_micro_batching():
    """D26, D27: lengths 1 and 3, advantages +1 and -1: one micro-batch or two, the sum over the global count is one.

    Each token of the step counts once, (-1 + 3) / 4 = .5; a mean of the two responses' means would be 0.
    """
    mask = torch.tensor([[True, False, False], [True, True, True]])
    zeros = torch.zeros(2, 3)
    advantage = torch.tensor([[1.0, 0, 0], [-1.0, -1.0, -1.0]])
    together, _ = ppo_loss_sum(zeros, zeros, advantage, mask)
    apart = [
        ppo_loss_sum(zeros[i : i + 1], zeros[i : i + 1], advantage[i : i + 1], mask[i : i + 1])[0] for i in range(2)
    ]
    assert (together / 4).item() == pytest.approx(0.5)
    assert (sum(apart) / 4).item() == pytest.approx(0.5)


def test_value_loss_hand_worked():
    """V=1, old 0, clip .2, R=1: error 0 but clipped error .64 counts. V=.1, R=1: .81. Third: V=2, old 2, R=0: 4."""
    value = torch.tensor([[1.0, 0.1], [2.0, 30.0]], requires_grad=True)
    old = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    returns = torch.tensor([[1.0, 1.0], [0.0, -30.0]])
    loss, stats = value_loss_sum(value, old, returns, MASK, clip_value=0.2)
    assert loss.item() == pytest.approx(0.5 * (0.64 + 0.81 + 4.0))
    loss.backward()
    torch.testing.assert_close(value.grad, torch.tensor([[0.0, -0.9], [2.0, 0.0]]))
    assert stats["value/clip_frac"][0] == 1
    plain, _ = value_loss_sum(value, old, returns, MASK, clip_value=0.0)
    assert plain.item() == pytest.approx(0.5 * (0.0 + 0.81 + 4.0))


def test_adaptive_kl_moves_towards_the_target():
    """Error clipped to +-0.2, step error x sequences / horizon."""
    coefficient = KLCoefficient(KLConfig(coef=0.1, adaptive=True, target=6.0, horizon=1000.0))
    coefficient.update(6.6, num_sequences=100)
    assert coefficient.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    coefficient.update(1e9, num_sequences=100)
    assert coefficient.value == pytest.approx(0.1 * 1.01 * 1.02)
    coefficient.update(0.0, num_sequences=100)
    assert coefficient.value == pytest.approx(0.1 * 1.01 * 1.02 * 0.98)
    fixed = KLCoefficient(KLConfig(coef=0.1))
    fixed.update(100.0, num_sequences=100)
    assert fixed.value == 0.1
    fixed.load_state_dict(coefficient.state_dict())
    assert fixed.value == coefficient.value
