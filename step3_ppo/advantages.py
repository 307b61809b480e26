"""Advantages and value targets."""

import torch
from torch import Tensor

from step3_ppo.algorithm import Advantage


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


# Added to a group's standard deviation, reward units, as in TRL's GRPOTrainer. Groups whose rewards lie no farther
# apart are flat: one response drawn several times scores alike but for rounding, which is not to be divided by itself.
SPREAD = 1e-4


def rewards_to_go(reward_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """advantage_BR: the rewards of a token and of those after it in its response, not discounted; 0 outside the mask.

    Args:
        reward_BR: float32, reward units.
        mask_BR: True on response tokens including the stop token; each row a prefix.

    Source: REINFORCE++, Hu 2025, arXiv:2501.03262, before its normalisation over the batch.
    """
    reward_BR = reward_BR * mask_BR
    return reward_BR.flip(1).cumsum(1).flip(1) * mask_BR


def group_advantages(reward_B: Tensor, group_size: int, *, advantage: Advantage) -> Tensor:
    """advantage_B: how much more reward a response got than its group, the responses to one prompt.

    - `leave_one_out`: R - mean of the others (RLOO, Ahmadian et al. 2024, arXiv:2402.14740).
    - `group`: R - mean of all, which is (n - 1) / n of it (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783).
    - `group_scaled`: (R - mean) / (standard deviation + SPREAD), 0 in a flat group (GRPO, Shao et al. 2024,
      arXiv:2402.03300, sec. 4.1.2; GSPO). The deviation is the population's.

    Args:
        reward_B: one reward per response; groups lie one after the other.
        group_size: n responses of each group, at least 2.
        advantage: one of the three.

    Returns:
        As reward_B. The mean over each group is 0; a constant added to the rewards of a group changes nothing; equal
        rewards give exactly 0.

    Raises:
        ValueError: the rewards are no whole number of groups.
    """
    if group_size < 2 or len(reward_B) % group_size:
        raise ValueError(
            f"{len(reward_B)} rewards are no groups of {group_size} responses. Pass whole groups of at least 2."
        )
    # In double precision the mean of equal float32 values is that value.
    reward_GN = reward_B.double().reshape(-1, group_size)
    centred_GN = reward_GN - reward_GN.mean(dim=1, keepdim=True)
    match advantage:
        case "leave_one_out":
            found_GN = centred_GN * group_size / (group_size - 1)
        case "group":
            found_GN = centred_GN
        case "group_scaled":
            scaled_GN = centred_GN / (centred_GN.square().mean(dim=1, keepdim=True).sqrt() + SPREAD)
            found_GN = torch.where(flat_groups(reward_B, group_size)[:, None], 0.0, scaled_GN)
        case _:
            raise ValueError(f"{advantage} compares no responses of a group.")
    return found_GN.flatten().to(reward_B.dtype)


def flat_groups(score_B: Tensor, group_size: int) -> Tensor:
    """flat_G: True for groups whose scores lie within SPREAD of each other: none of them is better than another.

    Args:
        score_B: one score per response; groups lie one after the other.
        group_size: responses of each group.
    """
    score_GN = score_B.reshape(-1, group_size)
    return score_GN.amax(dim=1) - score_GN.amin(dim=1) <= SPREAD
