"""Drawing tokens: counter-based uniforms and inverse-CDF sampling.

A random number belongs to its coordinates (seed, step, prompt, sample, position) and is not the next one of a stream,
so a response does not depend on batch mates, batch size, rank or the point of a resume.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_MASK_64 = (1 << 64) - 1
# Probabilities become integers of this many bits below the largest one: their running sum is then exact, hence equal on
# every device, and fits int64 for vocabularies up to 2**22. Tokens 2**-40 times as likely as the best are never drawn.
_WEIGHT_BITS = 40


def splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Next output of splitmix64 for each state.

    Source: Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators, fig. 17 (variant 13 of the mixer).
    """
    mixed = state + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def uniform(
    seed: int, step: int, uids: Sequence[int], sample_ids: Sequence[int], *, positions: Sequence[int] | range
) -> Tensor:
    """Uniform numbers of B responses at R positions, each a function of its five coordinates alone.

    They are made on the host, so that they are the same for every device, and for many positions at once, so that
    decoding pays for them once.

    Args:
        seed: of the run.
        step: PPO step, or another counter of rollouts.
        uids: identity of each row's prompt, any 64-bit integers.
        sample_ids: which of several responses to that prompt each row is.
        positions: response positions, the first token being 0.

    Returns:
        u_BR, float64 on the CPU, multiples of 2**-53 in [0, 1).
    """
    state = np.zeros((1, 1), dtype=np.uint64)
    for words in ([[seed]], [[step]], [[uid] for uid in uids], [[sample] for sample in sample_ids], [list(positions)]):
        word = np.array([[value & _MASK_64 for value in row] for row in words], dtype=np.uint64)
        state = splitmix64(state ^ word.reshape(len(words), -1))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def sample_tokens(logits_BV: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token of each row by inverting its cumulative distribution at u.

    Args:
        logits_BV: float32, transformed; -inf for tokens that cannot be drawn.
        u_B: float64 in [0, 1).

    Returns:
        token_B (int64) and logprob_B (float32) of the drawn token under softmax(logits_BV). A row whose logits are not
        finite gives a log-probability that is not finite.
    """
    weight_BV, logsumexp_B = _weights(logits_BV)
    integer_BV = (weight_BV * float(1 << _WEIGHT_BITS)).to(torch.int64)
    cumulative_BV = integer_BV.cumsum(-1)
    total_B = cumulative_BV[:, -1]
    # The first token whose cumulative weight exceeds the target has a weight above 0, as the target is below the total.
    target_B = torch.minimum((u_B * total_B).to(torch.int64), total_B - 1)
    token_B1 = torch.searchsorted(cumulative_BV, target_B[:, None], right=True)
    token_B1 = token_B1.clamp_(0, logits_BV.shape[-1] - 1)  # in range even for logits that are not finite
    return token_B1[:, 0], logits_BV.gather(-1, token_B1)[:, 0] - logsumexp_B


def _weights(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """exp(logits - row maximum), whose maximum is exactly 1, and the rows' log-sum-exp."""
    maximum_B1 = logits_BV.amax(-1, keepdim=True)
    weight_BV = (logits_BV - maximum_B1).exp_()
    return weight_BV, maximum_B1[:, 0] + weight_BV.sum(-1).log_()
