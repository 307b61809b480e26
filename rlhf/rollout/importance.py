"""Importance weights for tokens that another implementation of the policy drew."""

import torch
from torch import Tensor


def importance_weights(old_logprob_BR: Tensor, rollout_logprob_BR: Tensor, mask_BR: Tensor, *, cap: float) -> Tensor:
    """Truncated importance weights: min(old probability / rollout probability, cap) of each token.

    A rollout engine rounds otherwise than the trainer, so its tokens come from a slightly other distribution than the
    one whose gradient is taken. Multiplied into a token's policy loss, the weight corrects that; the cap bounds the
    variance at the price of some bias. Source: Yao et al. 2025, Your efficient RL framework secretly brings you
    off-policy RL training, section on truncated importance sampling.

    Args:
        old_logprob_BR: of the tokens under the trainer's model with the weights of the rollout.
        rollout_logprob_BR: of the same tokens as the rollout engine gave them.
        mask_BR: True on response tokens.
        cap: largest weight, at least 1.

    Returns:
        float32 without gradient, in (0, cap] on response tokens, 0 elsewhere.

    Raises:
        ValueError: cap is below 1, which would also scale down tokens that both sides agree on.
    """
    if not cap >= 1:
        raise ValueError(f"cap must be >= 1, got {cap}. Use 2 or more, or leave the weights out.")
    gap_BR = old_logprob_BR.detach().float() - rollout_logprob_BR.detach().float()
    # Masked before exp: what lies in the padding may overflow.
    weight_BR = gap_BR.masked_fill(~mask_BR, 0.0).exp().clamp(max=cap)
    return torch.where(mask_BR, weight_BR, 0.0)
