import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from step3_ppo.advantages import gae


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
