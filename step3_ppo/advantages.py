"""Advantages and value targets."""

import torch
from torch import Tensor


def gae(reward_BR: Tensor, value_BR: Tensor, mask_BR: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and value targets for right-padded responses.

    A_t = sum_k (gamma lam)^k delta_{t+k} with delta_t = r_t + gamma V_{t+1} - V_t; the value after the last token of a
    response is 0, whether it stopped or was cut: the score stands for all that follows.

    Args:
        reward_BR: float32, reward units, KL penalty already subtracted.
        value_BR: float32, same units, estimate before token t; detached.
        mask_BR: True on response tokens including the stop token; each row a prefix, possibly empty.
        gamma: discount per token, [0, 1].
        lam: 0 trusts the critic, 1 the sampled return; [0, 1].

    Returns:
        advantage_BR (not whitened) and return_BR = advantage_BR + value_BR, both 0 outside the mask.

    Raises:
        ValueError: shapes differ, or gamma or lam outside [0, 1].

    Source: Schulman et al. 2016, arXiv:1506.02438, sec. 3. Oracle: the O(R^2) sum in the test of this module.
    """
    if not reward_BR.shape == value_BR.shape == mask_BR.shape:
        raise ValueError(
            f"reward, value and mask differ in shape: {tuple(reward_BR.shape)}, {tuple(value_BR.shape)}, "
            f"{tuple(mask_BR.shape)}. Align them on response tokens."
        )
    if not (0 <= gamma <= 1 and 0 <= lam <= 1):
        raise ValueError(f"gamma and lam must be in [0, 1], got {gamma} and {lam}.")
    value_BR = value_BR * mask_BR
    reward_BR = reward_BR * mask_BR
    next_value_BR = torch.cat([value_BR[:, 1:], torch.zeros_like(value_BR[:, :1])], dim=1)
    delta_BR = reward_BR + gamma * next_value_BR - value_BR
    advantage_BR = torch.zeros_like(delta_BR)
    running_B = torch.zeros_like(delta_BR[:, 0])
    for t in reversed(range(delta_BR.shape[1])):
        running_B = delta_BR[:, t] + gamma * lam * running_B
        advantage_BR[:, t] = running_B
    return advantage_BR, advantage_BR + value_BR
