import math

import pytest
import torch

from rlhf.rollout.importance import importance_weights


def test_hand_worked() -> None:
    # Ratios 1, 2, 1/2 and 8 (cut at 4); a row of length 1; what lies in the padding does not matter.
    old_BR = torch.tensor([[-1.0, -1.0, -2.0, -1.0], [-3.0, 0.0, 0.0, 0.0]])
    rollout_BR = old_BR - torch.tensor([[1.0, 2.0, 0.5, 8.0], [0.25, 1.0, 1.0, 1.0]]).log()
    old_BR[1, 1:] = torch.tensor([torch.inf, torch.nan, 500.0])
    mask_BR = torch.tensor([[True, True, True, True], [True, False, False, False]])
    weight_BR = importance_weights(old_BR.requires_grad_(), rollout_BR, mask_BR, cap=4.0)
    torch.testing.assert_close(weight_BR, torch.tensor([[1.0, 2.0, 0.5, 4.0], [0.25, 0.0, 0.0, 0.0]]))
    assert not weight_BR.requires_grad


def test_corrects_an_expectation() -> None:
    """Tokens drawn from q, weighted, give the mean under p: what the weights are for."""
    p_V, q_V, value_V = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2]), torch.tensor([1.0, -2.0, 5.0])
    token_B1 = torch.arange(3)[:, None]
    weight_B1 = importance_weights(p_V.log()[token_B1], q_V.log()[token_B1], torch.ones(3, 1).bool(), cap=2.0)
    assert float((q_V * weight_B1[:, 0] * value_V).sum()) == pytest.approx(float((p_V * value_V).sum()))


def test_low_precision_is_compared_in_float32() -> None:
    old_BR, rollout_BR = torch.tensor([[-2.0]]).bfloat16(), torch.tensor([[-2.001]])
    weight_BR = importance_weights(old_BR, rollout_BR, torch.ones(1, 1).bool(), cap=2.0)
    assert weight_BR.dtype == torch.float32
    assert float(weight_BR) == pytest.approx(math.exp(0.001), abs=1e-6)


@pytest.mark.parametrize("cap", [0.5, 0.0, -1.0, math.nan])
def test_cap_below_one_is_refused(cap: float) -> None:
    with pytest.raises(ValueError, match="cap must be >= 1"):
        importance_weights(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1).bool(), cap=cap)
