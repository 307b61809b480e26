"""Pairwise ranking loss of step 2, as sums."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.metrics import Stats


def ranking_loss_sum(
    score_B: Tensor,
    *,
    chosen_N: Tensor,
    rejected_N: Tensor,
    weight_N: Tensor,
    margin_N: Tensor,
    centring_coef: float,
) -> tuple[Tensor, Stats]:
    """Weighted sum over pairs of -log sigmoid(score_chosen - score_rejected - margin), plus centring.

    A prompt with K ranked responses gives all its pairs from one forward of K rows; with `weight_N` = 1 / (pairs of
    the prompt) each prompt counts once whatever its K (Ouyang et al. 2022, sec. 3.5, eq. 1). The loss looks at one
    score per response and at nothing else of the row.

    Args:
        score_B: float32, one score per response of the micro-batch, at its last real token.
        chosen_N: index into B of the better response of each pair.
        rejected_N: index into B of the worse one.
        weight_N: weight of each pair.
        margin_N: score difference asked for, >= 0.
        centring_coef: weight of (score_chosen + score_rejected)^2, which keeps the mean near 0.

    Returns:
        The loss sum, to be divided by the global sum of weights, and (sum, count) pairs over pairs.

    Source: Bradley-Terry as in Stiennon et al. 2020, arXiv:2009.01325, sec. 3.4.
    """
    chosen_score_N = score_B[chosen_N].float()
    rejected_score_N = score_B[rejected_N].float()
    difference_N = chosen_score_N - rejected_score_N
    # logsigmoid, not log(sigmoid): finite at a difference of -200.
    loss_N = -F.logsigmoid(difference_N - margin_N)
    loss_N = loss_N + centring_coef * (chosen_score_N + rejected_score_N).square()
    # The sum over no pair still hangs on score_B, so that an empty micro-batch has a backward pass.
    loss_sum = (loss_N * weight_N).sum() + 0.0 * score_B.float().sum()

    difference_N = difference_N.detach()
    num_pairs = torch.tensor(float(len(chosen_N)), device=score_B.device)
    stats: Stats = {
        "train/loss": (loss_sum.detach(), weight_N.sum()),
        "train/pair_accuracy": ((difference_N > 0).float().sum(), num_pairs),
        "train/margin": (difference_N.sum(), num_pairs),
    }
    return loss_sum, stats
