from collections.abc import Callable

import pytest
import torch

from step3_ppo.checks import TOLERANCE, PolicyMismatchError, check_same_policy, kl_is_zero, ratio_is_one
from step3_ppo.experience import ScoredSequence

Make = Callable[..., ScoredSequence]


def test_the_gap_is_a_mean_over_tokens_of_ragged_rows() -> None:
    """Differences .00002, 0, .00004 over three tokens: .00002."""
    one = [torch.tensor([-1.0, -2.0]), torch.tensor([-3.0])]
    two = [torch.tensor([-1.00002, -2.0]), torch.tensor([-2.99996])]
    assert check_same_policy("x", one, two, dtype="float32") == pytest.approx(2e-5, rel=0.05)
    assert check_same_policy("x", [], [], dtype="float32") == 0.0


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_over_the_tolerance_of_the_type_is_an_error(dtype: str) -> None:
    """D6, D7: of either sign, so that gaps cannot cancel; a NaN is no agreement."""
    limit = TOLERANCE[dtype]
    base = torch.full((4,), -2.0)
    check_same_policy("a and b", [base], [base + 0.5 * limit], dtype=dtype)
    for gap in (2 * limit, -2 * limit, float("nan")):
        with pytest.raises(PolicyMismatchError, match=r"a and b: log-probs .* differ by .* allowed are"):
            check_same_policy("a and b", [base], [base + gap], dtype=dtype)
    with pytest.raises(PolicyMismatchError):
        check_same_policy("a and b", [base], [base + 2 * limit * torch.tensor([1, -1, 1, -1])], dtype=dtype)


def test_kl_before_the_first_update(sequence: Make) -> None:
    """D7, A9."""
    same = torch.tensor([-1.0, -0.5, -2.0])
    kl_is_zero([sequence((0, 0), 3, old_logprob_R=same, ref_logprob_R=same.clone())], dtype="float32")
    with pytest.raises(PolicyMismatchError, match="actor and reference before the first update"):
        kl_is_zero([sequence((0, 0), 3, old_logprob_R=same, ref_logprob_R=same - 0.01)], dtype="float32")


def test_ratio_looks_at_response_tokens_alone() -> None:
    old = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    new = old.clone()
    new[1, 1] = 9.0
    ratio_is_one(new.requires_grad_(), old, mask, dtype="float32")
    with pytest.raises(PolicyMismatchError, match="scoring and update before the first update"):
        ratio_is_one(old + 0.1 * mask, old, mask, dtype="float32")
