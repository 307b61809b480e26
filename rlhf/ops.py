"""Masked reductions, log-probabilities, entropy, and the transforms of sampling, as pure functions of tensors.

Nothing here reduces over ranks: a caller that wants a global mean sums `masked_sum` and the count over all ranks first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.config import SamplingConfig


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sum of x where mask is True, in float32 at least; what stands elsewhere, NaN and inf included, does not count."""
    return torch.where(mask, x, 0).to(torch.promote_types(x.dtype, torch.float32)).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where mask is True; NaN if that is nowhere."""
    return masked_sum(x, mask) / mask.sum()


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Population variance (divided by the count) of x where mask is True; NaN if that is nowhere."""
    return masked_sum((x - masked_mean(x, mask)).square(), mask) / mask.sum()


def whiten_with(x: Tensor, mask: Tensor, *, mean: Tensor | float, var: Tensor | float) -> Tensor:
    """Shift and scale x by a mean and variance taken over all ranks; 0 outside the mask.

    1e-8 is added to the variance, so that equal values whiten to 0 and not to NaN.
    """
    scale = torch.as_tensor(var, dtype=x.dtype, device=x.device).add(1e-8).rsqrt()
    return torch.where(mask, (x - mean) * scale, 0)


def token_logprobs(logits_BTV: Tensor, token_ids_BT: Tensor) -> Tensor:
    """Log-probability of each token given the tokens before it, fp32, nats; 0 for a row's first token.

    The one place that shifts by one: column t is read from the logits at t - 1.
    """
    logprob_BUV = logits_BTV[:, :-1].float().log_softmax(dim=-1)
    logprob_BU = logprob_BUV.gather(-1, token_ids_BT[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(logprob_BU, (1, 0))


def entropy_from_logits(logits_SV: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, fp32; logits of -inf (excluded tokens) add nothing, also to the gradient."""
    logits_SV = logits_SV.float()
    excluded_SV = logits_SV == -torch.inf
    mean_logit_S = (logits_SV.softmax(dim=-1) * logits_SV.masked_fill(excluded_SV, 0)).sum(dim=-1)
    return logits_SV.logsumexp(dim=-1) - mean_logit_S


def position_ids_from_mask(attention_mask_BT: Tensor) -> Tensor:
    """Positions that count real tokens only, int64; padding on either side gets a position that exists (0 or the last).

    [0, 0, 1, 1, 1] gives [0, 0, 0, 1, 2], as Hugging Face's generate counts.
    """
    return (attention_mask_BT.long().cumsum(dim=-1) - 1).clamp(min=0)


def response_mask(response_length_B: Tensor, num_columns: int) -> Tensor:
    """True on the response's tokens, stop token included: mask_BR[b, i] = i < response_length_B[b]."""
    return torch.arange(num_columns, device=response_length_B.device) < response_length_B[:, None]


def to_columns(x_BT: Tensor, first_S: Tensor, length_S: Tensor, num_columns: int) -> Tensor:
    """A row of its own for each stretch of tokens: out[s, i] = x.flatten()[first_s + i] for i < length_s, then 0.

    Args:
        x_BT: of padded rows or a packed one.
        first_S: place of each stretch's first token, counted through all rows.
        length_S: tokens of each stretch.
        num_columns: of the result, at least the longest length.
    """
    mask_SR = response_mask(length_S, num_columns)
    place_SR = first_S[:, None] + torch.arange(num_columns, device=x_BT.device)
    x_SR = x_BT.flatten()[torch.where(mask_SR, place_SR, 0)]
    return torch.where(mask_SR, x_SR, torch.zeros((), dtype=x_BT.dtype, device=x_BT.device))


def transform_logits(
    logits_SV: Tensor,
    sampling: SamplingConfig,
    *,
    response_position_S: Tensor,
    stop_token_ids: Sequence[int] = (),
    keep_token_S: Tensor | None = None,
) -> Tensor:
    """The distribution that a token is drawn from, as logits; sampler and scorer both call this.

    In order: stop tokens are excluded before min_new_tokens, then temperature, top-k, top-p, as in Hugging Face's
    generate. Temperature 0 keeps the most likely token alone (the lowest id among equals).

    Args:
        logits_SV: the model's own logits, any float type.
        sampling: the transforms.
        response_position_S: index of the token in its response, 0 for the first.
        stop_token_ids: all ids that end a response.
        keep_token_S: tokens that stay in the distribution whatever the transforms say. A scorer passes the sampled
            tokens: under an updated policy they may have left the top-k, and log 0 has no gradient.

    Returns:
        float32, -inf for excluded tokens. The input is not changed.
    """
    logits_SV = logits_SV.float()
    if sampling.min_new_tokens and stop_token_ids:
        ids_K = torch.tensor(sorted(set(stop_token_ids)), device=logits_SV.device)
        early_SK = (response_position_S < sampling.min_new_tokens)[:, None].expand(-1, len(ids_K))
        if keep_token_S is not None:
            early_SK = early_SK & (ids_K != keep_token_S[:, None])
        logits_SV = logits_SV.index_copy(1, ids_K, logits_SV[:, ids_K].masked_fill(early_SK, -torch.inf))
    if sampling.temperature == 0:
        best_S = logits_SV.argmax(dim=-1)
        excluded_SV = torch.ones_like(logits_SV, dtype=torch.bool).scatter(-1, best_S[:, None], value=False)
        return logits_SV.masked_fill(_but(excluded_SV, keep_token_S), -torch.inf)
    if sampling.temperature != 1:
        logits_SV = logits_SV / sampling.temperature
    if 0 < sampling.top_k < logits_SV.shape[-1]:
        top_Sk = logits_SV.detach().topk(sampling.top_k, dim=-1, sorted=False).values
        excluded_SV = logits_SV < top_Sk.amin(-1, keepdim=True)
        logits_SV = logits_SV.masked_fill(_but(excluded_SV, keep_token_S), -torch.inf)
    if sampling.top_p < 1:
        excluded_SV = _outside_top_p(logits_SV.detach(), sampling.top_p)
        logits_SV = logits_SV.masked_fill(_but(excluded_SV, keep_token_S), -torch.inf)
    return logits_SV


# The most likely tokens among which the end of top-p is looked for before all are sorted. Trained models' 0.9 lies
# within it for nearly every token, and finding them costs a tenth of sorting a vocabulary of 50,000.
TOP_P_PREFIX = 256


def _outside_top_p(logits_SV: Tensor, top_p: float) -> Tensor:
    """True where the more likely tokens before a token reach top_p already, so never at the most likely one.

    Among equals the lower id comes first. On a CPU, rows are sorted only where the end does not lie among the
    TOP_P_PREFIX most likely tokens or among equals; the sums are the same, so no row depends on how it was found.
    """
    logsumexp_S1 = logits_SV.logsumexp(dim=-1, keepdim=True)
    if logits_SV.device.type != "cpu" or logits_SV.shape[-1] <= TOP_P_PREFIX:
        return _outside_of_sorted(logits_SV, logsumexp_S1, top_p)
    value_Sk = logits_SV.topk(TOP_P_PREFIX, dim=-1).values
    prob_Sk = (value_Sk - logsumexp_S1).exp()
    num_inside_S = (prob_Sk.cumsum(dim=-1) - prob_Sk < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    last_S1 = value_Sk.gather(-1, num_inside_S - 1)
    next_S1 = value_Sk.gather(-1, num_inside_S.clamp(max=TOP_P_PREFIX - 1))
    outside_SV = logits_SV < last_S1
    # At the end of the prefix `next` is `last` itself, and nothing is known of what follows.
    rows = (last_S1 == next_S1).squeeze(-1).nonzero().squeeze(-1)
    if len(rows):
        outside_SV[rows] = _outside_of_sorted(logits_SV[rows], logsumexp_S1[rows], top_p)
    return outside_SV


def _outside_of_sorted(logits_SV: Tensor, logsumexp_S1: Tensor, top_p: float) -> Tensor:
    sorted_SV, order_SV = logits_SV.sort(dim=-1, descending=True, stable=True)
    prob_SV = (sorted_SV - logsumexp_S1).exp()
    outside_SV = prob_SV.cumsum(dim=-1) - prob_SV >= top_p
    return torch.empty_like(outside_SV).scatter_(-1, order_SV, outside_SV)


def _but(excluded_SV: Tensor, keep_token_S: Tensor | None) -> Tensor:
    """The mask with the kept tokens taken out."""
    return excluded_SV if keep_token_S is None else excluded_SV.scatter(-1, keep_token_S[:, None], value=False)
