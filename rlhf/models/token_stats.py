"""Log-probability and entropy of chosen tokens from hidden states and the head's weights, chunk by chunk.

One autograd function over all chunks, with its gradients in closed form: of logits, at most one chunk is ever held,
forward and backward. What a chunk needs again is multiplied again, but for the last one, which is kept from the forward
to the backward pass that begins with it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rlhf.distributed import Group
from rlhf.models.linear import multiply


@dataclass(frozen=True)
class VocabularyPart:
    """The rows of a head that this rank of a group has; behind the vocabulary's end follow rows without meaning."""

    group: Group
    first: int
    """Token of the first row."""
    num_real: int
    """Rows that are tokens."""
    vocab_size: int
    """Of the whole."""

    @classmethod
    def of(cls, group: Group, *, num_rows: int, vocab_size: int) -> "VocabularyPart":
        """Of a head that has equally many rows on each rank."""
        first = group.rank * num_rows
        return cls(group, first, min(max(vocab_size - first, 0), num_rows), vocab_size)

    def place(self, token_S: Tensor) -> tuple[Tensor, Tensor]:
        """Row of each token here, and whether it is a row here; else the row is 0."""
        row_S = token_S - self.first
        is_mine_S = (row_S >= 0) & (row_S < self.num_real)
        return row_S.masked_fill(~is_mine_S, 0), is_mine_S


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        token_S: Tensor,
        temperature: float,
        chunk_tokens: int,
        part: VocabularyPart | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = len(hidden_SD)
        row_S, is_mine_S = (token_S, None) if part is None else part.place(token_S)
        logprob_S = torch.empty(num_tokens, dtype=torch.float32, device=hidden_SD.device)
        entropy_S, lse_S = torch.empty_like(logprob_S), torch.empty_like(logprob_S)
        greedy_S = torch.empty(num_tokens, dtype=torch.bool, device=hidden_SD.device)
        kept: Tensor | None = None
        weight_CV = torch.empty(0, device=hidden_SD.device)  # one block for all chunks
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits_CV = _logits(hidden_SD[chunk], weight_VD, bias_V, temperature, part)
            maximum_C1 = logits_CV.amax(dim=-1, keepdim=True)
            if part is not None:
                part.group.max_(maximum_C1)
            logits_CV -= maximum_C1
            chosen_C = logits_CV.gather(-1, row_S[chunk, None]).squeeze(-1)
            weight_CV = torch.exp(logits_CV, out=weight_CV.resize_(logits_CV.shape))
            sum_C = weight_CV.sum(dim=-1)
            # H = log sum - sum p x, with x the logits less their maximum; a logit of -inf has weight 0.
            moment_C = torch.linalg.vecdot(weight_CV, logits_CV.clamp_(min=torch.finfo(torch.float32).min))
            if part is not None:
                chosen_C = torch.where(cast(Tensor, is_mine_S)[chunk], chosen_C, 0.0)
                chosen_C, sum_C, moment_C = part.group.sum_(torch.stack([chosen_C, sum_C, moment_C]))
            log_sum_C = sum_C.log()
            logprob_S[chunk] = chosen_C - log_sum_C
            entropy_S[chunk] = log_sum_C - moment_C / sum_C
            greedy_S[chunk] = chosen_C == 0
            lse_S[chunk] = log_sum_C + maximum_C1.squeeze(-1)
            if start + chunk_tokens >= num_tokens and any(ctx.needs_input_grad):
                kept = weight_CV.div_(sum_C[:, None])
        ctx.save_for_backward(hidden_SD, weight_VD, bias_V, row_S, is_mine_S, lse_S, entropy_S, kept)
        ctx.temperature, ctx.chunk_tokens, ctx.part = temperature, chunk_tokens, part
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(greedy_S)
        return logprob_S, entropy_S, greedy_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_SD, weight_VD, bias_V, row_S, is_mine_S, lse_S, entropy_S, kept = ctx.saved_tensors
        logprob_grad_S, entropy_grad_S = grads[:2]
        hidden_grad_SD = torch.empty_like(hidden_SD)
        # Sums over chunks in float32, whatever the type of the weights.
        weight_grad_VD = torch.zeros(weight_VD.shape, dtype=torch.float32, device=weight_VD.device)
        bias_grad_V = (
            torch.zeros(bias_V.shape, dtype=torch.float32, device=bias_V.device) if bias_V is not None else None
        )
        starts = range(0, len(hidden_SD), ctx.chunk_tokens)
        for start in reversed(starts):
            chunk = slice(start, start + ctx.chunk_tokens)
            if kept is not None:
                prob_CV, kept = kept, None
            else:
                prob_CV = _logits(hidden_SD[chunk], weight_VD, bias_V, ctx.temperature, ctx.part)
                prob_CV = prob_CV.sub_(lse_S[chunk, None]).exp_()
            grad_CV = _logits_grad(
                prob_CV,
                row_S[chunk],
                None if is_mine_S is None else is_mine_S[chunk],
                entropy_S[chunk],
                None if logprob_grad_S is None else logprob_grad_S[chunk],
                None if entropy_grad_S is None else entropy_grad_S[chunk],
            )
            if ctx.temperature != 1:
                grad_CV /= ctx.temperature
            if bias_grad_V is not None:
                bias_grad_V += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(weight_VD.dtype)
            hidden_grad_SD[chunk] = multiply(grad_CV, weight_VD.t())
            if grad_CV.dtype == torch.float32:
                weight_grad_VD.addmm_(grad_CV.T, hidden_SD[chunk])  # a product apart would be as large as the weights
            else:
                weight_grad_VD += grad_CV.T @ hidden_SD[chunk]
        if ctx.part is not None:
            ctx.part.group.sum_(hidden_grad_SD)
        return (
            hidden_grad_SD,
            weight_grad_VD.to(weight_VD.dtype),
            None if bias_V is None else cast(Tensor, bias_grad_V).to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


def _logits(
    hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float, part: VocabularyPart | None
) -> Tensor:
    """float32, the caller's to overwrite; -inf behind the vocabulary's end."""
    logits_CV = multiply(hidden_CD, weight_VD, bias_V).float()
    if part is not None:
        logits_CV[:, part.num_real :] = -math.inf
    return logits_CV.div_(temperature) if temperature != 1 else logits_CV


def _logits_grad(
    prob_CV: Tensor,
    row_C: Tensor,
    is_mine_C: Tensor | None,
    entropy_C: Tensor,
    logprob_grad_C: Tensor | None,
    entropy_grad_C: Tensor | None,
) -> Tensor:
    """g (onehot - p) for the log-probability, -h p (log p + H) for the entropy; overwrites prob_CV."""
    scale_C = torch.zeros_like(entropy_C) if logprob_grad_C is None else logprob_grad_C
    if entropy_grad_C is None:
        grad_CV = prob_CV.mul_(-scale_C[:, None])
    else:
        # 0 log 0 is 0: the smallest normal number stands in for a vanished probability.
        log_CV = prob_CV.clamp(min=torch.finfo(torch.float32).tiny).log_()
        factor_CV = log_CV.add_(entropy_C[:, None]).mul_(entropy_grad_C[:, None]).add_(scale_C[:, None])
        grad_CV = prob_CV.mul_(factor_CV.neg_())
    mine_C = scale_C if is_mine_C is None else scale_C.masked_fill(~is_mine_C, 0)
    return grad_CV.scatter_add_(-1, row_C[:, None], mine_C[:, None])


TokenStats = Callable[[Tensor, Tensor, Tensor | None, Tensor, float, int], tuple[Tensor, Tensor, Tensor]]


def token_stats(
    hidden_SD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    token_S: Tensor,
    temperature: float,
    chunk_tokens: int,
    part: VocabularyPart | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of S tokens: logprob_S and entropy_S (float32, nats, with gradients) and greedy_S (token is a most likely one).

    No token gives empty results, and zero gradients. With a part, all ranks of its group get the same numbers of the
    same tokens, and the gradient of hidden_SD is the whole one on each; collective in the group, forward and backward.

    Args:
        hidden_SD: before the head; equal on all ranks of a group.
        weight_VD: of the head, or this rank's rows of it.
        bias_V: as the weight.
        token_S: ids of the whole vocabulary.
        temperature: logits are divided by it.
        chunk_tokens: most tokens whose logits exist at once.
        part: which rows of the head these are; None: all.
    """
    arguments = (hidden_SD, weight_VD, bias_V, token_S, temperature, chunk_tokens, part)
    return cast(tuple[Tensor, Tensor, Tensor], _TokenStats.apply(*arguments))  # type: ignore[no-untyped-call]
