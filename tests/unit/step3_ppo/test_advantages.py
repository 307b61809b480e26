import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from step3_ppo.advantages import SPREAD, flat_groups, gae, group_advantages, rewards_to_go


def naive_gae(reward, value, length, gamma, lam):
    """The O(R^2) definition, one row, python floats."""
    delta = [reward[t] + gamma * (value[t + 1] if t + 1 < length else 0.0) - value[t] for t in range(length)]
    return [sum((gamma * lam) ** k * delta[t + k] for k in range(length - t)) for t in range(length)]


def test_hand_worked_example_and_the_stop_action_is_trained():
    """D1, A6: rewards [0, 0, 1], values [.1, .2, .3], gamma 1, lambda .95; the last token is the stop token.

    delta = [.1, .1, .7]; A_2 = .7, A_1 = .1 + .95 x .7 = .765, A_0 = .1 + .95 x .765 = .82675.
    """
    reward = torch.tensor([[0.0, 0.0, 1.0, 9.0]])
    value = torch.tensor([[0.1, 0.2, 0.3, 7.0]])
    mask = torch.tensor([[True, True, True, False]])
    advantage, returns = gae(reward, value, mask, gamma=1.0, lam=0.95)
    torch.testing.assert_close(advantage, torch.tensor([[0.82675, 0.765, 0.7, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.92675, 0.965, 1.0, 0.0]]))


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    gamma=st.floats(0, 1),
    lam=st.floats(0, 1),
    seed=st.integers(0, 10_000),
)
def test_equals_the_quadratic_sum_on_ragged_rows(lengths, gamma, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths) + 2)
    reward = torch.randn(shape, generator=generator, dtype=torch.float64)
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    advantage, returns = gae(reward, value, mask, gamma=gamma, lam=lam)
    for row, length in enumerate(lengths):
        expected = naive_gae(reward[row].tolist(), value[row].tolist(), length, gamma, lam)
        torch.testing.assert_close(advantage[row, :length], torch.tensor(expected, dtype=torch.float64))
        assert advantage[row, length:].abs().sum() == 0
        torch.testing.assert_close(returns[row, :length], advantage[row, :length] + value[row, :length])


def test_lambda_1_gamma_1_is_the_sampled_return_minus_the_value():
    reward = torch.tensor([[1.0, -2.0, 5.0]])
    value = torch.tensor([[0.3, 0.2, 0.1]])
    mask = torch.ones_like(reward, dtype=torch.bool)
    _, returns = gae(reward, value, mask, gamma=1.0, lam=1.0)
    torch.testing.assert_close(returns, torch.tensor([[4.0, 3.0, 5.0]]))


def test_shapes_and_ranges_are_checked():
    x = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="differ in shape"):
        gae(x, torch.zeros(1, 3), x.bool(), gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"\[0, 1\], got 1.5"):
        gae(x, x, x.bool(), gamma=1.5, lam=1.0)


def test_rewards_to_go_hand_worked():
    """The score on the last token, what the KL costs on each: a token answers for what comes from it on."""
    reward = torch.tensor([[-0.1, -0.2, 1.0, 9.0], [0.5, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    expected = torch.tensor([[0.7, 0.8, 1.0, 0.0], [0.5, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(rewards_to_go(reward, mask), expected)
    # The return of GAE at lambda 1 on values of 0.
    torch.testing.assert_close(gae(reward, torch.zeros_like(reward), mask, gamma=1.0, lam=1.0)[1], expected)


REWARDS = torch.tensor([1.0, 2.0, 6.0, -1.0, -1.0, 2.0])


def test_group_advantages_hand_worked():
    """Groups (1, 2, 6) and (-1, -1, 2): means 3 and 0, deviations sqrt 14/3 and sqrt 2.

    The means of the others are 4, 3.5, 1.5 and .5, .5, -1.
    """
    alone = group_advantages(REWARDS, 3, advantage="leave_one_out")
    torch.testing.assert_close(alone, torch.tensor([-3.0, -1.5, 4.5, -1.5, -1.5, 3.0]))
    torch.testing.assert_close(
        group_advantages(REWARDS, 3, advantage="group"), torch.tensor([-2.0, -1.0, 3.0, -1.0, -1.0, 2.0])
    )
    first, second = (14 / 3) ** 0.5, 2**0.5
    expected = torch.tensor([-2 / first, -1 / first, 3 / first, -1 / second, -1 / second, 2 / second])
    torch.testing.assert_close(group_advantages(REWARDS, 3, advantage="group_scaled"), expected, atol=2e-4, rtol=2e-4)


def naive_group(rewards, size, advantage):
    """One response after the other, in numpy's float64."""
    found = []
    for i, reward in enumerate(rewards):
        start = i - i % size
        group = np.asarray(rewards[start : start + size], dtype=np.float64)
        if advantage == "leave_one_out":
            found.append(reward - np.delete(group, i - start).mean())
        elif advantage == "group":
            found.append(reward - group.mean())
        else:
            found.append((reward - group.mean()) / (np.std(group) + SPREAD))
    return torch.tensor(found, dtype=torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 5),
    groups=st.integers(1, 4),
    advantage=st.sampled_from(["leave_one_out", "group", "group_scaled"]),
    seed=st.integers(0, 1000),
)
def test_group_advantages_against_one_response_after_the_other(size, groups, advantage, seed):
    rewards = np.random.default_rng(seed).normal(size=size * groups).astype(np.float32)
    found = group_advantages(torch.from_numpy(rewards), size, advantage=advantage)
    torch.testing.assert_close(found, naive_group(rewards.tolist(), size, advantage), atol=1e-5, rtol=1e-5)
    # The mean over a group is 0; what is added to all rewards of a group changes nothing.
    assert found.reshape(groups, size).mean(dim=1).abs().max() < 1e-5
    shift = torch.arange(groups).repeat_interleave(size)
    shifted = group_advantages(torch.from_numpy(rewards) + 2.0 * shift, size, advantage=advantage)
    torch.testing.assert_close(shifted, found, atol=1e-4, rtol=1e-4)
    # Twice the reward is twice the advantage, or with the deviation as unit the same one (where SPREAD is nothing).
    once, twice = (
        group_advantages(factor * torch.from_numpy(rewards), size, advantage=advantage) for factor in (1e4, 2e4)
    )
    torch.testing.assert_close(twice, once if advantage == "group_scaled" else 2.0 * once, atol=1e-3, rtol=1e-3)


def test_leave_one_out_is_the_group_mean_times_a_constant():
    """Liu et al. 2025, app. A: RLOO = n / (n - 1) x Dr. GRPO."""
    one, other = (group_advantages(REWARDS, 3, advantage=how) for how in ("leave_one_out", "group"))
    torch.testing.assert_close(one, 1.5 * other)


@pytest.mark.parametrize("advantage", ["leave_one_out", "group", "group_scaled"])
def test_equal_rewards_teach_nothing(advantage):
    """Exactly 0, not rounding noise over the deviation of rounding noise."""
    for reward in (0.1, 1e6 / 3, -7e-8):
        assert group_advantages(torch.full((21,), reward), 7, advantage=advantage).abs().max() == 0
    # One response drawn 4 times, scored in micro-batches of different shape: rounding apart.
    nearly = torch.tensor([0.7, 0.7 + 1e-7, 0.7, 0.7 - 1e-7])
    found = group_advantages(nearly, 4, advantage=advantage).abs().max()
    assert found == 0 if advantage == "group_scaled" else found < 2e-7


def test_groups_of_equal_scores_are_flat():
    scores = torch.tensor([1.0, 1.0, 1.0, 2.0, -0.5, -0.5 + SPREAD / 2, 3.0, 3.0 + 2 * SPREAD])
    assert flat_groups(scores, 2).tolist() == [True, False, True, False]
    assert flat_groups(scores[:4], 4).tolist() == [False]


@pytest.mark.parametrize(("count", "size"), [(5, 2), (4, 1)])
def test_incomplete_groups_are_errors(count, size):
    with pytest.raises(ValueError, match=f"{count} rewards are no groups of {size}"):
        group_advantages(torch.zeros(count), size, advantage="group")
