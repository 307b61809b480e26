"""Clipped policy and value losses of one micro-batch, as sums over its response tokens."""

import torch
from torch import Tensor

from rlhf.metrics import Stats


def policy_loss_sum(
    new_logprob_BR: Tensor,
    old_logprob_BR: Tensor,
    advantage_BR: Tensor,
    mask_BR: Tensor,
    *,
    clip_ratio: float,
) -> tuple[Tensor, Stats]:
    """Sum over response tokens of -min(ratio A, clip(ratio, 1 - c, 1 + c) A).

    Args:
        new_logprob_BR: of the response tokens under the policy being trained; with gradient.
        old_logprob_BR: of the same tokens when they were sampled, under the same sampling transforms.
        advantage_BR: whitened, detached.
        mask_BR: True on response tokens including the stop token.
        clip_ratio: c, half-width of the interval.

    Returns:
        The loss sum, to be divided by the global number of response tokens, and (sum, count) pairs over tokens; kl_old
        is k3, KL of the rollout policy to the new one.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7.
    """
    # Outside the mask both log-probs are 0, the ratio 1 and the advantage 0.
    log_ratio_BR = (new_logprob_BR - old_logprob_BR) * mask_BR
    ratio_BR = log_ratio_BR.exp()
    clipped_BR = ratio_BR.clamp(1.0 - clip_ratio, 1.0 + clip_ratio)
    loss_BR = -torch.minimum(ratio_BR * advantage_BR, clipped_BR * advantage_BR)
    loss_sum = (loss_BR * mask_BR).sum()

    count = mask_BR.sum()
    with torch.no_grad():
        # A token is clipped where the clipped term is the smaller one: there the gradient is 0.
        is_clipped_BR = (clipped_BR * advantage_BR < ratio_BR * advantage_BR) & mask_BR
        kl_old = ((torch.expm1(log_ratio_BR) - log_ratio_BR) * mask_BR).sum()
    stats: Stats = {
        "policy/loss": (loss_sum.detach(), count),
        "policy/clip_frac": (is_clipped_BR.sum(), count),
        "policy/kl_old": (kl_old, count),
    }
    return loss_sum, stats


def value_loss_sum(
    new_value_BR: Tensor,
    old_value_BR: Tensor,
    return_BR: Tensor,
    mask_BR: Tensor,
    *,
    clip_value: float,
) -> tuple[Tensor, Stats]:
    """Sum over response tokens of 1/2 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2).

    Args:
        new_value_BR: of the critic being trained; with gradient; reward units.
        old_value_BR: of the critic at rollout.
        return_BR: targets, detached.
        mask_BR: True on response tokens including the stop token.
        clip_value: c; 0 leaves the plain squared error.

    Returns:
        The loss sum, to be divided by the global number of response tokens, and (sum, count) pairs over tokens.

    Source: the value clipping of OpenAI baselines' ppo2, as in Stiennon et al. 2020 and InstructGPT.
    """
    error_BR = (new_value_BR - return_BR).square()
    is_clipped_BR = torch.zeros_like(mask_BR)
    if clip_value > 0:
        near_old_BR = old_value_BR + (new_value_BR - old_value_BR).clamp(-clip_value, clip_value)
        clipped_error_BR = (near_old_BR - return_BR).square()
        is_clipped_BR = (clipped_error_BR > error_BR) & mask_BR
        error_BR = torch.maximum(error_BR, clipped_error_BR)
    loss_sum = 0.5 * (error_BR * mask_BR).sum()
    count = mask_BR.sum()
    return loss_sum, {"value/loss": (loss_sum.detach(), count), "value/clip_frac": (is_clipped_BR.sum(), count)}
