"""Policy, KL and value losses of one micro-batch, as sums over its response tokens."""

import torch
from torch import Tensor

from rlhf.metrics import Stats
from step3_ppo.algorithm import KLEstimator, LossMean
from step3_ppo.rewards import KL_ESTIMATORS


def token_log_ratio(new_logprob_BR: Tensor, old_logprob_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """log_ratio_BR of each token, nats; 0 outside the mask."""
    return (new_logprob_BR - old_logprob_BR) * mask_BR


def sequence_log_ratio(new_logprob_BR: Tensor, old_logprob_BR: Tensor, mask_BR: Tensor) -> Tensor:
    """log_ratio_BR of whole responses: the mean of their tokens', the same in all their columns; 0 outside the mask.

    Source: GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7.
    """
    length_B1 = mask_BR.sum(dim=1, keepdim=True).clamp(min=1)
    return token_log_ratio(new_logprob_BR, old_logprob_BR, mask_BR).sum(dim=1, keepdim=True) / length_B1 * mask_BR


LOG_RATIOS = {"token": token_log_ratio, "sequence": sequence_log_ratio}


def policy_loss_sum(
    log_ratio_BR: Tensor,
    advantage_BR: Tensor,
    weight_BR: Tensor,
    share_BR: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Stats]:
    """Weighted sum over response tokens of -min(ratio A, clip(ratio, 1 - low, 1 + high) A).

    With a dual clip c the term is max(that min, c A) where A is negative: there it has no upper bound otherwise.

    Args:
        log_ratio_BR: log of new to old probability, of `LOG_RATIOS`; with gradient; 0 outside the responses.
        advantage_BR: detached.
        weight_BR: of `token_weights`, 0 outside the responses.
        share_BR: of `token_shares`, 0 outside the responses.
        clip_low: half-width of the interval below 1.
        clip_high: half-width above 1.
        dual_clip: c, above 1; 0: none.

    Returns:
        The loss sum, to be divided by the global sum of share_BR, and (sum, count) pairs: the loss, and over tokens
        clip_frac and kl_old, which is k3, KL of the rollout policy to the new one.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7; Yu et al. 2025 (DAPO), arXiv:2503.14476, sec. 3.1, for two
    half-widths; Ye et al. 2020, arXiv:1912.09729, for the dual clip.
    """
    mask_BR = weight_BR > 0
    # Outside the mask the ratio is 1 and the weight 0.
    ratio_BR = log_ratio_BR.exp()
    plain_BR = ratio_BR * advantage_BR
    term_BR = torch.minimum(plain_BR, ratio_BR.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_BR)
    if dual_clip:
        term_BR = torch.where(advantage_BR < 0, torch.maximum(term_BR, dual_clip * advantage_BR), term_BR)
    loss_sum = -(term_BR * weight_BR).sum()

    count = mask_BR.sum()
    with torch.no_grad():
        # Where the term is another one than the plain product, its gradient is 0.
        is_clipped_BR = (term_BR != plain_BR) & mask_BR
        kl_old = ((torch.expm1(log_ratio_BR) - log_ratio_BR) * mask_BR).sum()
    stats: Stats = {
        "policy/loss": (loss_sum.detach(), share_BR.sum()),
        "policy/clip_frac": (is_clipped_BR.sum(), count),
        "policy/kl_old": (kl_old, count),
    }
    return loss_sum, stats


def kl_loss_sum(
    new_logprob_BR: Tensor, ref_logprob_BR: Tensor, weight_BR: Tensor, *, estimator: KLEstimator
) -> tuple[Tensor, Stats]:
    """Weighted sum over response tokens of an estimator of the KL of the policy being trained to the reference.

    Args:
        new_logprob_BR: with gradient.
        ref_logprob_BR: of the same tokens.
        weight_BR: of `token_weights`, 0 outside the responses.
        estimator: k2 or k3; k1 has no gradient on average.

    Returns:
        The loss sum, nats, to be divided by the global sum of `token_shares`, and a (sum, count) pair over tokens.

    Source: Shao et al. 2024 (GRPO), arXiv:2402.03300, eq. 4 (k3).
    """
    mask_BR = weight_BR > 0
    kl_BR = KL_ESTIMATORS[estimator](torch.where(mask_BR, new_logprob_BR, 0), torch.where(mask_BR, ref_logprob_BR, 0))
    return (kl_BR * weight_BR).sum(), {"policy/kl_ref": ((kl_BR.detach() * mask_BR).sum(), mask_BR.sum())}


def token_weights(mask_BR: Tensor, loss_mean: LossMean) -> Tensor:
    """weight_BR, float32: what a token's term counts for in the sum; 0 outside the mask.

    1, or for `sequence` one over the response's length.
    """
    return mask_BR / mask_BR.sum(dim=1, keepdim=True).clamp(min=1) if loss_mean == "sequence" else mask_BR.float()


def token_shares(mask_BR: Tensor, loss_mean: LossMean, *, max_response_tokens: int) -> Tensor:
    """share_BR, float32: what a token adds to the number that the sum is divided by; 0 outside the mask.

    For `token` 1, so that all of them are the tokens; for `sequence` one over the response's length, so that they are
    the responses; for `constant` max_response_tokens times that, so that no length has an influence.

    Source: DAPO, Yu et al. 2025, arXiv:2503.14476, sec. 3.3 (token); GRPO, arXiv:2402.03300, eq. 3 (sequence);
    Dr. GRPO, Liu et al. 2025, arXiv:2503.20783 (constant).
    """
    if loss_mean == "token":
        return mask_BR.float()
    share_BR = mask_BR / mask_BR.sum(dim=1, keepdim=True).clamp(min=1)
    return share_BR * max_response_tokens if loss_mean == "constant" else share_BR


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
