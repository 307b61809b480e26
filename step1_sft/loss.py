"""Masked cross-entropy of step 1, as sums."""

from torch import Tensor

from rlhf.metrics import Stats
from rlhf.models.policy import PolicyOutput


def sft_loss_sum(output: PolicyOutput, loss_mask_BT: Tensor) -> tuple[Tensor, Stats]:
    """Negative log-likelihood of the tokens with a loss, summed, in nats.

    Args:
        output: what the policy says of the batch; its log-probs are 0 outside the mask.
        loss_mask_BT: True at tokens with a loss, stop token included.

    Returns:
        The loss sum (with gradient; 0 for an empty mask) and the (sum, count) pairs of loss and token accuracy.
    """
    loss_sum = -(output.logprob_BT * loss_mask_BT).sum()
    count = loss_mask_BT.sum()
    correct = (output.greedy_BT & loss_mask_BT).sum()
    return loss_sum, {"train/loss": (loss_sum.detach(), count), "train/token_accuracy": (correct, count)}
