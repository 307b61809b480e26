"""What must hold before the first update; a run in which it does not is stopped, because its KL and ratio are noise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.distributed import together
from step3_ppo.experience import ScoredSequence

# Largest mean |difference| of log-probs per token, nats, between two forwards of the same weights. In 16-bit types rows
# of another shape round differently by about one unit in the last place of a logit. In float8 other neighbours in a
# micro-batch are other scales, and what another type rounds by less, float8 may round to its next number.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "float16": 5e-3, "float8": 5e-2}


class PolicyMismatchError(RuntimeError):
    """Two forwards of the same policy disagree."""


def check_same_policy(what: str, one: Sequence[Tensor], two: Sequence[Tensor], *, dtype: str) -> float:
    """Check that two lists of log-probs of the same tokens are equal to rounding.

    Args:
        what: the two, for the message.
        one: log-probs, any shapes, nats.
        two: of the same tokens.
        dtype: type that the models compute in.

    Returns:
        The mean absolute difference per token.

    Raises:
        PolicyMismatchError: it is over the tolerance of the type, or not a number.
    """
    count = sum(x.numel() for x in one)
    gap = float(sum((a.double() - b.double()).abs().sum() for a, b in zip(one, two, strict=True))) / max(count, 1)
    if not gap <= TOLERANCE[dtype]:
        raise PolicyMismatchError(
            f"{what}: log-probs of the same weights differ by {gap:.2e} nats per token, allowed are "
            f"{TOLERANCE[dtype]:.0e} in {dtype}. KL and policy ratio would be noise. Likely causes: dropout or noise "
            "in a custom model, a reference that is not the actor's start, or an attention kernel that mishandles "
            "padding (try attention: eager)."
        )
    return gap


def kl_is_zero(sequences: Sequence[ScoredSequence], *, dtype: str) -> None:
    """Check that the reference says of every token what the actor, not yet updated, says.

    Raises:
        PolicyMismatchError: it does not.
    """
    check_same_policy(
        "actor and reference before the first update",
        [s.old_logprob_R for s in sequences],
        [s.ref_logprob_R for s in sequences],
        dtype=dtype,
    )


def ratio_is_one(new_logprob_BR: Tensor, old_logprob_BR: Tensor, mask_BR: Tensor, *, dtype: str) -> None:
    """Check that the update's forward says of every token what scoring said, before the first update. Collective.

    Raises:
        PolicyMismatchError: it does not; a RuntimeError on the ranks whose own tokens pass.
    """
    with together("the check of the policy ratio"):
        check_same_policy(
            "scoring and update before the first update",
            [torch.masked_select(new_logprob_BR.detach(), mask_BR)],
            [torch.masked_select(old_logprob_BR, mask_BR)],
            dtype=dtype,
        )
