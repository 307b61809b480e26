"""Causal attention of short sequences on a CPU in 16 bits: torch's kernel forward, products of matrices backward.

torch's backward kernel for CPUs takes up to four times as long for sequences of some hundred tokens in bfloat16 as the
five products it stands for; its forward kernel, and both in float32, are good.
"""

from typing import Any, cast

import torch
from torch import Tensor

# From here on torch's backward kernel is the faster one: it leaves out the half that causality forbids.
LONGEST = 512


def pays(query_NHLd: Tensor, *, dropout: float) -> bool:
    """Whether this backward pass is faster than torch's own."""
    return (
        query_NHLd.device.type == "cpu"
        and query_NHLd.dtype in (torch.bfloat16, torch.float16)
        and query_NHLd.shape[2] <= LONGEST
        and not dropout
        and torch.is_grad_enabled()
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_NHLd: Tensor, key_NHLd: Tensor, value_NHLd: Tensor, scale: float) -> Tensor:
        out_NHLd, lse_NHL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query_NHLd, key_NHLd, value_NHLd, 0.0, True, scale=scale
        )
        ctx.save_for_backward(query_NHLd, key_NHLd, value_NHLd, out_NHLd, lse_NHL)
        ctx.scale = scale
        return cast(Tensor, out_NHLd)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_NHLd: Tensor) -> tuple[Tensor | None, ...]:
        # Scores and their gradients are differences of like numbers: those two products are made in float32.
        *tensors, lse_NHL = ctx.saved_tensors
        query_MLd, key_MLd, value_MLd, out_MLd, grad_MLd = (x.flatten(0, 1) for x in (*tensors, grad_NHLd))
        score_MLL = torch.bmm(query_MLd.float(), key_MLd.float().transpose(1, 2)).mul_(ctx.scale)
        weight_MLL = score_MLL.sub_(lse_NHL.reshape(*score_MLL.shape[:2], 1)).exp_().tril_()
        value_grad_MLd = torch.bmm(weight_MLL.to(grad_MLd.dtype).transpose(1, 2), grad_MLd)
        grad_MLd = grad_MLd.float()
        mean_ML1 = (grad_MLd * out_MLd.float()).sum(-1, keepdim=True)
        weight_grad_MLL = torch.bmm(grad_MLd, value_MLd.float().transpose(1, 2))
        score_grad_MLL = weight_grad_MLL.sub_(mean_ML1).mul_(weight_MLL).mul_(ctx.scale).to(query_MLd.dtype)
        grads = (
            torch.bmm(score_grad_MLL, key_MLd),
            torch.bmm(score_grad_MLL.transpose(1, 2), query_MLd),
            value_grad_MLd,
        )
        return *(x.view(grad_NHLd.shape) for x in grads), None


def attend(query_NHLd: Tensor, key_NHLd: Tensor, value_NHLd: Tensor, *, scaling: float | None) -> Tensor:
    """out_NHLd of causal attention; as many key heads as query heads.

    Args:
        query_NHLd: N sequences of L tokens.
        key_NHLd: as the queries.
        value_NHLd: as the queries.
        scaling: of the scores; None is 1 / sqrt(d).
    """
    scale = query_NHLd.shape[-1] ** -0.5 if scaling is None else scaling
    return cast(Tensor, _Attend.apply(query_NHLd, key_NHLd, value_NHLd, scale))  # type: ignore[no-untyped-call]
