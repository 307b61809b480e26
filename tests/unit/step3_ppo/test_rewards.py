import statistics

import pytest
import torch

from step3_ppo.rewards import RunningScale, kl_k1, kl_k2, kl_k3, overlong_penalty, shape_score, token_rewards


def test_score_sits_on_the_last_real_token_and_kl_on_each():
    """A6, D1: the stop token gets the score; nothing lands past it; a row of length 1 and an empty row."""
    mask = torch.tensor([[True, True, True, False], [True, False, False, False], [False] * 4])
    kl = torch.tensor([[0.5, -0.5, 1.0, 99.0], [2.0, 99.0, 99.0, 99.0], [99.0] * 4])
    reward = token_rewards(torch.tensor([3.0, -1.0, 5.0]), kl, mask, kl_coef=0.1)
    expected = torch.tensor([[-0.05, 0.05, 2.9, 0.0], [-1.2, 0.0, 0.0, 0.0], [0.0] * 4])
    torch.testing.assert_close(reward, expected)


def test_kl_estimators_against_the_exact_divergence():
    """Both are unbiased under samples of p; k3 is never negative; both are 0 where p = q."""
    p = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = (p * (p / q).log()).sum()
    for estimator in (kl_k1, kl_k3):
        torch.testing.assert_close((p * estimator(p.log(), q.log())).sum(), exact)
        assert estimator(p.log(), p.log()).abs().max() == 0
    assert (kl_k3(p.log(), q.log()) >= 0).all()
    assert kl_k1(p.log(), q.log()).min() < 0


def test_shaping_clips_first_and_then_subtracts_the_penalties():
    score = shape_score(
        torch.tensor([20.0, -20.0, 1.0]),
        stopped_B=torch.tensor([True, False, False]),
        length_B=torch.tensor([10, 1, 0]),
        clip=5.0,
        missing_stop_penalty=2.0,
        length_penalty=0.1,
    )
    torch.testing.assert_close(score, torch.tensor([4.0, -7.1, -1.0]))
    unclipped = shape_score(
        torch.tensor([20.0]), stopped_B=torch.tensor([True]), length_B=torch.tensor([3]),
        clip=0.0, missing_stop_penalty=2.0, length_penalty=0.0,
    )  # fmt: skip
    assert unclipped.item() == 20.0


def test_running_scale_equals_the_standard_deviation_of_all_scores():
    """D19: rewards a hundred times larger come out on the same scale."""
    batches = [[1.0, 2.0, 4.0], [100.0], [-3.0, 0.5]]
    for factor in (1.0, 100.0):
        scale = RunningScale()
        for batch in batches:
            values = [factor * x for x in batch]
            scale.update(len(values), sum(values), sum(x * x for x in values))
        everything = [factor * x for batch in batches for x in batch]
        assert scale.std == pytest.approx(statistics.pstdev(everything))
    restored = RunningScale()
    restored.load_state_dict(scale.state_dict())
    assert restored.std == scale.std
    assert RunningScale().std == 1.0


def test_k2_is_half_the_square_and_its_gradient_that_of_the_divergence():
    """A softmax of 3 logits: the mean gradient of k2 over samples of p is that of KL(p || q); k1's is 0."""
    assert kl_k2(torch.tensor([-1.0, -3.0]), torch.tensor([-2.0, -2.5])).tolist() == [0.5, 0.125]
    logits = torch.tensor([0.5, -0.3, 1.2], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logp = logits.log_softmax(-1)
    p = logp.detach().exp()
    (exact,) = torch.autograd.grad((logp.exp() * (logp - q.log())).sum(), logits, retain_graph=True)
    (of_k2,) = torch.autograd.grad((p * kl_k2(logp, q.log())).sum(), logits, retain_graph=True)
    (of_k1,) = torch.autograd.grad((p * kl_k1(logp, q.log())).sum(), logits)
    torch.testing.assert_close(of_k2, exact)
    assert of_k1.abs().max() < 1e-12


def test_overlong_penalty_hand_worked():
    """Of 10 tokens the last 4: none up to 6, a quarter of 2 for each more, 2 for a response that was cut."""
    lengths = torch.tensor([1, 6, 7, 8, 10])
    found = overlong_penalty(lengths, most=10, tokens=4, penalty=2.0)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, 0.5, 1.0, 2.0]))
    assert overlong_penalty(lengths, most=10, tokens=0, penalty=2.0).tolist() == [0.0] * 5
    # Eq. 13 of the paper, with its signs.
    for length, paid in zip(lengths.tolist(), found.tolist(), strict=True):
        equation = 0.0 if length <= 6 else (6 - length) / 4
        assert -paid == pytest.approx(2.0 * equation)
