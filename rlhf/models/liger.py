"""Log-probabilities by Liger's fused linear cross-entropy, where it computes exactly what `token_stats` does.

Its Triton kernels read and write a chunk of logits fewer times. It knows no temperature and no entropy, and keeps a
reference to the head's weights from the forward to the backward pass, which under ZeRO-3 would keep them gathered.
"""

import importlib.util
from typing import Any, cast

import torch
from torch import Tensor

from rlhf.models.token_stats import token_stats


def is_installed() -> bool:
    """Whether Liger and Triton can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("liger_kernel", "triton"))


def liger_stats(
    hidden_SD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, token_S: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """As `token_stats`, whose log-probability alone is trained on: where gradients flow, the entropy is 0.

    Without gradients, without tokens and at another temperature it is `token_stats`. Chunks are Liger's own.
    """
    if temperature != 1 or not len(token_S) or not (torch.is_grad_enabled() and hidden_SD.requires_grad):
        return token_stats(hidden_SD, weight_VD, bias_V, token_S, temperature, chunk_tokens)
    from liger_kernel.ops.fused_linear_cross_entropy import (  # noqa: PLC0415  optional
        LigerFusedLinearCrossEntropyFunction as Fused,
    )

    # In order: class weights, ignored id, z-loss, smoothing, reduction, soft cap, z-loss returned, type of the sums of
    # gradients, scaling by probability, accuracy returned.
    options: tuple[Any, ...] = (None, -100, 0.0, 0.0, "none", None, False, torch.float32, False, True)
    loss_S, _, is_best_S, _ = cast(Any, Fused).apply(hidden_SD, weight_VD, token_S, bias_V, *options)
    return -loss_S, torch.zeros_like(loss_S).detach(), is_best_S.detach() > 0
