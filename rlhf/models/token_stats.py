"""Log-probability and entropy of chosen tokens from hidden states and the head's weights, chunk by chunk.

One autograd function over all chunks, with its gradients in closed form: of logits, at most one chunk is ever held,
forward and backward. What a chunk needs again is multiplied again, but for the last one, which is kept from the forward
to the backward pass that begins with it.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from rlhf.models.linear import multiply


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
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = len(hidden_SD)
        logprob_S = torch.empty(num_tokens, dtype=torch.float32, device=hidden_SD.device)
        entropy_S, lse_S = torch.empty_like(logprob_S), torch.empty_like(logprob_S)
        greedy_S = torch.empty(num_tokens, dtype=torch.bool, device=hidden_SD.device)
        kept: Tensor | None = None
        weight_CV = torch.empty(0, device=hidden_SD.device)  # one block for all chunks
        for start in range(0, num_tokens, chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits_CV = _logits(hidden_SD[chunk], weight_VD, bias_V, temperature)
            maximum_C1 = logits_CV.amax(dim=-1, keepdim=True)
            logits_CV -= maximum_C1
            chosen_C = logits_CV.gather(-1, token_S[chunk, None]).squeeze(-1)
            weight_CV = torch.exp(logits_CV, out=weight_CV.resize_(logits_CV.shape))
            sum_C = weight_CV.sum(dim=-1)
            log_sum_C = sum_C.log()
            logprob_S[chunk] = chosen_C - log_sum_C
            # H = log sum - sum p x, with x the logits less their maximum; a logit of -inf has weight 0.
            mean_C = torch.linalg.vecdot(weight_CV, logits_CV.clamp_(min=torch.finfo(torch.float32).min)) / sum_C
            entropy_S[chunk] = log_sum_C - mean_C
            greedy_S[chunk] = chosen_C == 0
            lse_S[chunk] = log_sum_C + maximum_C1.squeeze(-1)
            if start + chunk_tokens >= num_tokens and any(ctx.needs_input_grad):
                kept = weight_CV.div_(sum_C[:, None])
        ctx.save_for_backward(hidden_SD, weight_VD, bias_V, token_S, lse_S, entropy_S, kept)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(greedy_S)
        return logprob_S, entropy_S, greedy_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_SD, weight_VD, bias_V, token_S, lse_S, entropy_S, kept = ctx.saved_tensors
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
                prob_CV = _logits(hidden_SD[chunk], weight_VD, bias_V, ctx.temperature)
                prob_CV = prob_CV.sub_(lse_S[chunk, None]).exp_()
            grad_CV = _logits_grad(
                prob_CV,
                token_S[chunk],
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
        return (
            hidden_grad_SD,
            weight_grad_VD.to(weight_VD.dtype),
            None if bias_V is None else cast(Tensor, bias_grad_V).to(bias_V.dtype),
            None,
            None,
            None,
        )


def _logits(hidden_CD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float) -> Tensor:
    """float32, the caller's to overwrite."""
    logits_CV = multiply(hidden_CD, weight_VD, bias_V).float()
    return logits_CV.div_(temperature) if temperature != 1 else logits_CV


def _logits_grad(
    prob_CV: Tensor, token_C: Tensor, entropy_C: Tensor, logprob_grad_C: Tensor | None, entropy_grad_C: Tensor | None
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
    return grad_CV.scatter_add_(-1, token_C[:, None], scale_C[:, None])


TokenStats = Callable[[Tensor, Tensor, Tensor | None, Tensor, float, int], tuple[Tensor, Tensor, Tensor]]

token_stats = cast(TokenStats, _TokenStats.apply)
"""Of S tokens: logprob_S and entropy_S (float32, nats, with gradients) and greedy_S (token is a most likely one).

Arguments: hidden_SD, weight_VD and bias_V of the head, token_S, temperature (logits are divided by it), and the most
tokens of a chunk. No token gives empty results, and zero gradients.
"""
