"""Drawing tokens: counter-based uniforms and inverse-CDF sampling.

A random number belongs to its coordinates (seed, step, prompt, sample, position) and is not the next one of a stream,
so a response does not depend on batch mates, batch size, rank or the point of a resume.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rlhf import heartbeat
from rlhf.config import SamplingConfig
from rlhf.ops import transform_logits

_MASK_64 = (1 << 64) - 1
# Probabilities become integers of this many bits below the largest one: their running sum is then exact, hence equal on
# every device, and fits int64 for vocabularies up to 2**22. Tokens 2**-40 times as likely as the best are never drawn.
_WEIGHT_BITS = 40
# Tokens whose weights are summed before the running sum.
_BLOCK = 256
# Logits that are handled at a time on a CPU (measured: 2**15 to 2**18 are within a third of each other).
_CACHED_LOGITS = 1 << 17


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


@dataclass(frozen=True)
class TokenChooser:
    """Logits -> tokens and their log-probabilities: the transforms of sampling, then the draw."""

    sampling: SamplingConfig
    stop_token_ids: tuple[int, ...]
    """All ids that end a response."""

    def __call__(self, logits_BV: Tensor, position_B: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
        """Choose each row's next token.

        Args:
            logits_BV: the model's own, any float type.
            position_B: index of the token in its response.
            u_B: float64 in [0, 1); not used at temperature 0.

        Returns:
            As `sample_tokens`; the most likely token and log-probability 0 at temperature 0.
        """
        heartbeat.call()
        greedy = self.sampling.temperature == 0
        # Of temperature 0 the order of tokens is all that counts, and what excludes stop tokens leaves it.
        sampling = replace(self.sampling, temperature=1.0, top_k=0, top_p=1.0) if greedy else self.sampling
        parts = []
        for rows in _row_chunks(logits_BV):
            transformed_BV = transform_logits(
                logits_BV[rows], sampling, response_position_S=position_B[rows], stop_token_ids=self.stop_token_ids
            )
            parts.append(take_best(transformed_BV) if greedy else sample_tokens(transformed_BV, u_B[rows]))
        if len(parts) == 1:
            return parts[0]
        token_B, logprob_B = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return token_B, logprob_B


def _row_chunks(logits_BV: Tensor) -> list[slice]:
    """Rows that are handled at a time: on a CPU so few that what is made of them stays in its second-level cache."""
    num_rows, vocab_size = logits_BV.shape
    size = num_rows if logits_BV.device.type != "cpu" else max(1, _CACHED_LOGITS // vocab_size)
    return [slice(first, first + size) for first in range(0, num_rows, max(1, size))]


def take_best(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token, the lowest id among equals, with log-probability 0; NaN where logits are not finite."""
    logit_B, token_B = logits_BV.max(dim=-1)
    return token_B, (logit_B - logit_B).float()


def sample_tokens(logits_BV: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token of each row by inverting its cumulative distribution at u.

    Args:
        logits_BV: float32, transformed; -inf for tokens that cannot be drawn.
        u_B: float64 in [0, 1).

    Returns:
        token_B (int64) and logprob_B (float32) of the drawn token under softmax(logits_BV). A row whose logits are not
        finite gives a log-probability that is not finite.
    """
    num_rows, vocab_size = logits_BV.shape
    maximum_B1 = logits_BV.amax(-1, keepdim=True)
    weight_BV = (logits_BV - maximum_B1).exp_()  # the largest is exactly 1
    logsumexp_B = maximum_B1[:, 0] + weight_BV.sum(-1).log_()
    # The running sum goes over blocks first and then within one block. Integers: the same as over all tokens.
    num_blocks = -(-vocab_size // _BLOCK)
    integer_BNW = torch.empty((num_rows, num_blocks, _BLOCK), dtype=torch.int64, device=logits_BV.device)
    flat_BV = integer_BNW.view(num_rows, -1)
    flat_BV[:, :vocab_size] = weight_BV.mul_(float(1 << _WEIGHT_BITS))  # rounds down
    flat_BV[:, vocab_size:] = 0
    sum_BN = integer_BNW.sum(-1)
    upto_BN = sum_BN.cumsum(-1)
    total_B = upto_BN[:, -1]
    # The first token whose cumulative weight exceeds the target has a weight above 0, as the target is below the total.
    target_B1 = torch.minimum((u_B * total_B).to(torch.int64), total_B - 1)[:, None]
    block_B1 = torch.searchsorted(upto_BN, target_B1, right=True).clamp_(0, num_blocks - 1)
    target_B1 = target_B1 - (upto_BN - sum_BN).gather(-1, block_B1)
    inside_BW = integer_BNW.gather(1, block_B1[:, :, None].expand(-1, 1, _BLOCK))[:, 0].cumsum(-1)
    token_B1 = block_B1 * _BLOCK + torch.searchsorted(inside_BW, target_B1, right=True)
    token_B1 = token_B1.clamp_(0, vocab_size - 1)  # in range even for logits that are not finite
    return token_B1[:, 0], logits_BV.gather(-1, token_B1)[:, 0] - logsumexp_B
