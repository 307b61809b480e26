"""From the score of a response to a reward per token."""

import torch
from torch import Tensor


def kl_k1(logprob_BR: Tensor, ref_logprob_BR: Tensor) -> Tensor:
    """log p - log q per token: unbiased for KL(p || q) under samples of p, of either sign; nats."""
    return logprob_BR - ref_logprob_BR


def kl_k2(logprob_BR: Tensor, ref_logprob_BR: Tensor) -> Tensor:
    """(log p - log q)^2 / 2 per token: biased, never negative; nats.

    Its gradient at samples of p is, on average, that of KL(p || q), which k3's is near the reference alone.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    return 0.5 * (logprob_BR - ref_logprob_BR).square()


def kl_k3(logprob_BR: Tensor, ref_logprob_BR: Tensor) -> Tensor:
    """exp(log q - log p) - 1 - (log q - log p) per token: unbiased, never negative, less variance; nats.

    Source: Schulman 2020, "Approximating KL divergence", joschu.net/blog/kl-approx.html.
    """
    log_ratio_BR = ref_logprob_BR - logprob_BR
    return torch.expm1(log_ratio_BR) - log_ratio_BR


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def token_rewards(score_B: Tensor, kl_BR: Tensor, mask_BR: Tensor, *, kl_coef: float) -> Tensor:
    """Reward for emitting each token: -kl_coef KL, and the score on the response's last token.

    The last token is the stop token where there is one: the action of stopping is paid for.

    Args:
        score_B: float32, one score per response.
        kl_BR: nats per token.
        mask_BR: True on response tokens including the stop token; each row a prefix.
        kl_coef: weight of the penalty, reward units per nat.

    Returns:
        reward_BR, 0 outside the mask; an empty row gets nothing.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2; Ziegler et al. 2019, arXiv:1909.08593, eq. 2.
    """
    reward_BR = -kl_coef * kl_BR * mask_BR
    length_B = mask_BR.sum(dim=1)
    last_B = (length_B - 1).clamp(min=0)
    rows_B = torch.arange(len(score_B), device=score_B.device)
    reward_BR[rows_B, last_B] += score_B * (length_B > 0)
    return reward_BR


def shape_score(
    score_B: Tensor,
    *,
    stopped_B: Tensor,
    length_B: Tensor,
    clip: float,
    missing_stop_penalty: float,
    length_penalty: float,
) -> Tensor:
    """Clip the score to [-clip, clip] (0: not at all), then subtract the penalties for no stop and for length.

    The penalties come after the clip, so that a response cannot hide them behind an extreme score.
    """
    if clip > 0:
        score_B = score_B.clamp(-clip, clip)
    return score_B - missing_stop_penalty * (~stopped_B) - length_penalty * length_B


def overlong_penalty(length_B: Tensor, *, most: int, tokens: int, penalty: float) -> Tensor:
    """What a response pays for its length: 0 up to most - tokens, from there in equal steps up to `penalty` at most.

    Args:
        length_B: response tokens, stop token included, up to `most`.
        most: the length at which a response is cut.
        tokens: last tokens over which the penalty rises; 0: none is paid.
        penalty: paid at `most`, reward units.

    Source: soft overlong punishment, Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
    """
    if not tokens:
        return torch.zeros_like(length_B, dtype=torch.float32)
    return penalty * ((length_B - (most - tokens)) / tokens).clamp(0.0, 1.0)


class RunningScale:
    """Standard deviation of all scores so far, over all ranks (Welford, in the parallel form of Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0

    def update(self, count: float, total: float, total_of_squares: float) -> None:
        """Take in the count, sum and sum of squares of new scores, already reduced over ranks."""
        if count == 0:
            return
        batch_mean = total / count
        batch_squares = max(total_of_squares - count * batch_mean**2, 0.0)
        shift = batch_mean - self.mean
        merged = self.count + count
        self.squares += batch_squares + shift**2 * self.count * count / merged
        self.mean += shift * count / merged
        self.count = merged

    @property
    def std(self) -> float:
        """Population standard deviation; 1 while it is not known or vanishes."""
        if self.count < 2:
            return 1.0
        std = (self.squares / self.count) ** 0.5
        return std if std > 1e-8 else 1.0

    def state_dict(self) -> dict[str, float]:
        """What resume needs."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict`."""
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
