import math

import numpy as np
import pytest
import torch

from step3_ppo.algorithm import KLConfig
from step3_ppo.kl import KLCoefficient
from step3_ppo.loss import (
    LOG_RATIOS,
    kl_loss_sum,
    policy_loss_sum,
    sequence_log_ratio,
    token_log_ratio,
    token_shares,
    token_weights,
    value_loss_sum,
)

MASK = torch.tensor([[True, True], [True, False]])


def ppo_loss_sum(new, old, advantage, mask):
    """Ratios of tokens, one interval on both sides, every token with weight 1."""
    log_ratio = token_log_ratio(new, old, mask)
    return policy_loss_sum(log_ratio, advantage, mask.float(), mask.float(), clip_low=0.2, clip_high=0.2)


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


def test_logged_losses_are_not_crossed():
    """D3: known losses 1 and 2 are logged as 1 and 2, each under its own name."""
    mask = torch.tensor([[True]])
    _, policy = ppo_loss_sum(torch.zeros(1, 1), torch.zeros(1, 1), -torch.ones(1, 1), mask)
    _, value = value_loss_sum(torch.full((1, 1), 2.0), torch.full((1, 1), 2.0), torch.zeros(1, 1), mask, clip_value=0.2)
    assert policy["policy/loss"][0] == 1
    assert value["value/loss"][0] == 2


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


# Two responses, of 3 and 1 tokens.
RAGGED = torch.tensor([[True, True, True], [True, False, False]])


def test_a_ratio_of_the_response_hand_worked():
    """Log ratios .1, -.4, .6 have the mean .1: GSPO's s is exp(.1), in each of the three columns."""
    new = torch.tensor([[0.1, -0.4, 0.6], [-0.3, 9.0, 9.0]], requires_grad=True)
    log_ratio = sequence_log_ratio(new, torch.zeros(2, 3), RAGGED)
    torch.testing.assert_close(log_ratio, torch.tensor([[0.1, 0.1, 0.1], [-0.3, 0.0, 0.0]]))
    # s A, once for a response; its gradient is s A / length for each token.
    advantage = torch.tensor([[2.0, 2.0, 2.0], [-1.0, 0.0, 0.0]])
    weight = token_weights(RAGGED, "sequence")
    loss, _ = policy_loss_sum(log_ratio, advantage, weight, weight, clip_low=0.5, clip_high=0.5)
    assert loss.item() == pytest.approx(-2.0 * math.exp(0.1) + math.exp(-0.3))
    loss.backward()
    one, other = -2.0 * math.exp(0.1) / 3, math.exp(-0.3)
    torch.testing.assert_close(new.grad, torch.tensor([[one, one, one], [other, 0.0, 0.0]]))
    # Clipped as a whole: e^.1 > 1.05.
    _, stats = policy_loss_sum(log_ratio.detach(), advantage, weight, weight, clip_low=0.5, clip_high=0.05)
    assert stats["policy/clip_frac"][0] == 3 and stats["policy/clip_frac"][1] == 4


def test_two_half_widths_hand_worked():
    """Clip-higher: ratio 1.25, A = 1 is inside 1 + .28 and outside 1 + .2; ratio .75, A = -1 is clipped to .8."""
    log_ratio = torch.tensor([[1.25, 0.75]]).log().requires_grad_()
    advantage, ones = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2)
    loss, stats = policy_loss_sum(log_ratio, advantage, ones, ones, clip_low=0.2, clip_high=0.28)
    assert loss.item() == pytest.approx(-1.25 + 0.8)
    assert stats["policy/clip_frac"][0] == 1
    loss.backward()
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[-1.25, 0.0]]))
    loss, stats = policy_loss_sum(log_ratio, advantage, ones, ones, clip_low=0.2, clip_high=0.2)
    assert loss.item() == pytest.approx(-1.2 + 0.8) and stats["policy/clip_frac"][0] == 2


def test_dual_clip_hand_worked():
    """c = 3: ratio 10, A = -2 costs 6 and not 20, without a gradient; where A is 2, or the ratio 2, nothing changes."""
    log_ratio = torch.tensor([[10.0, 10.0, 2.0]]).log().requires_grad_()
    advantage, ones = torch.tensor([[-2.0, 2.0, -2.0]]), torch.ones(1, 3)
    arguments = {"clip_low": 0.2, "clip_high": 0.2}
    loss, stats = policy_loss_sum(log_ratio, advantage, ones, ones, dual_clip=3.0, **arguments)
    assert loss.item() == pytest.approx(6.0 - 2.4 + 4.0)
    assert stats["policy/clip_frac"][0] == 2
    loss.backward()
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[0.0, 0.0, 4.0]]))
    plain, _ = policy_loss_sum(log_ratio, advantage, ones, ones, **arguments)
    assert plain.item() == pytest.approx(20.0 - 2.4 + 4.0)


def test_three_means_hand_worked():
    """Terms 1, 1, 1 of one response and 5 of another: over tokens 8 / 4, over responses (1 + 5) / 2, and, with 4 tokens
    as the longest response, (3 / 4 + 5 / 4) / 2.
    """
    term = torch.tensor([[1.0, 1.0, 1.0], [5.0, 7.0, 7.0]])
    found = {}
    for how in ("token", "sequence", "constant"):
        weight, share = token_weights(RAGGED, how), token_shares(RAGGED, how, max_response_tokens=4)
        assert weight[~RAGGED].abs().sum() == 0 and share[~RAGGED].abs().sum() == 0
        found[how] = ((term * weight).sum() / share.sum()).item()
    assert found == pytest.approx({"token": 2.0, "sequence": 3.0, "constant": 1.0})


@pytest.mark.parametrize("how", ["token", "sequence", "constant"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_the_loss_against_one_response_after_the_other(how, ratio):
    """In numpy's float64, response by response and token by token; split into micro-batches the sum is the same."""
    rng = np.random.default_rng(3)
    lengths = [1, 4, 2, 5]
    new, old, advantage = (rng.normal(scale=0.4, size=(4, 5)) for _ in range(3))
    mask = np.arange(5) < np.array(lengths)[:, None]
    total, divisor = 0.0, {"token": 12, "sequence": 4, "constant": 4 * 8}[how]
    for i, length in enumerate(lengths):
        log_ratio = [new[i, t] - old[i, t] for t in range(length)]
        for t in range(length):
            r = math.exp(sum(log_ratio) / length if ratio == "sequence" else log_ratio[t])
            a = advantage[i, t]
            term = min(r * a, min(max(r, 0.7), 1.4) * a)
            if a < 0:
                term = max(term, 1.5 * a)
            total -= term / (length if how == "sequence" else 1)
    pieces = []
    for rows in ([0, 1, 2, 3], [0], [1, 2], [3]):
        m = torch.from_numpy(mask[rows])
        weight, share = token_weights(m, how), token_shares(m, how, max_response_tokens=8)
        log_ratio_BR = LOG_RATIOS[ratio](torch.from_numpy(new[rows]), torch.from_numpy(old[rows]), m)
        loss, stats = policy_loss_sum(
            log_ratio_BR, torch.from_numpy(advantage[rows]), weight, share, clip_low=0.3, clip_high=0.4, dual_clip=1.5
        )
        assert stats["policy/loss"][0] == loss and stats["policy/loss"][1] == share.sum()
        pieces.append((loss.item(), share.double().sum().item()))
    assert pieces[0] == pytest.approx((total, divisor))
    assert [sum(column) for column in zip(*pieces[1:], strict=True)] == pytest.approx([total, divisor])


def test_a_constant_divisor_has_no_length_bias():
    """Dr. GRPO: a token's gradient is the same in a short and in a long response; by response means it is not."""
    grads = {}
    for how in ("token", "sequence", "constant"):
        log_ratio = torch.zeros(2, 3, requires_grad=True)
        weight, share = token_weights(RAGGED, how), token_shares(RAGGED, how, max_response_tokens=3)
        loss, _ = policy_loss_sum(log_ratio, RAGGED.float(), weight, share, clip_low=0.2, clip_high=0.2)
        (loss / share.sum()).backward()
        grads[how] = (log_ratio.grad[0, 0] / log_ratio.grad[1, 0]).item()
    assert grads == pytest.approx({"token": 1.0, "constant": 1.0, "sequence": 1 / 3})


def test_kl_in_the_loss_hand_worked():
    """k3 of log p - log q = ln 2: 1/2 - 1 + ln 2; k2: half the square of ln 2. Slopes in log p: 1 - 1/2 and ln 2."""
    new = torch.tensor([[0.0, 0.0], [0.0, 50.0]], requires_grad=True)
    ref = torch.tensor([[-math.log(2.0), 0.0], [-math.log(2.0), -50.0]])
    for estimator, value, slope in (("k3", math.log(2) - 0.5, 0.5), ("k2", math.log(2) ** 2 / 2, math.log(2))):
        new.grad = None
        weight = token_weights(MASK, "sequence")
        loss, stats = kl_loss_sum(new, ref, weight, estimator=estimator)
        assert loss.item() == pytest.approx(0.5 * value + value, rel=1e-5)
        loss.backward()
        torch.testing.assert_close(new.grad, torch.tensor([[0.5 * slope, 0.0], [slope, 0.0]]))
        assert stats["policy/kl_ref"][0].item() == pytest.approx(2 * value, rel=1e-5)
        assert stats["policy/kl_ref"][1] == 3
