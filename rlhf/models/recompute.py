"""Activations that the backward pass computes again instead of keeping them, a decoder layer (block) at a time.

Full recomputation keeps a block's input alone (Chen et al. 2016, arXiv:1604.06174). Selective recomputation also keeps
what is dear to compute and small: the results of attention and of every second matrix product, so that norms,
activation functions and the other products are all that is computed twice (the choice of torchtitan's `op` mode,
Liang et al. 2024, arXiv:2410.06511, sec. 2.1).
"""

import functools
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from rlhf.models.backbone import known_blocks
from rlhf.models.linear import FlatLinear
from rlhf.plan.layout import recomputed_layers

# Names, since which of them exist depends on how torch was built.
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
    "aten._flash_attention_forward",
    "aten._efficient_attention_forward",
    "flash_attn._flash_attn_forward",
    "flash_attn._flash_attn_varlen_forward",
)
_PRODUCTS = ("aten.mm", "aten.addmm", "aten._scaled_mm", "mkldnn._linear_pointwise")


def recompute_blocks(model: PreTrainedModel, how: Literal["full", "selective"], *, every: int, budget: float) -> None:
    """Let blocks be computed again in the backward pass; only while it trains.

    What a budget pays for are the last ones: the backward pass frees what they hold before it computes a block again.

    Args:
        model: with blocks that are alike.
        how: what of a block is kept.
        every: the first of so many is computed again.
        budget: share of the blocks, at most, that are kept whole, [0, 1): torch's `activation_memory_budget`, 0 keeping
            what recomputation of all keeps and 1 everything.

    Raises:
        ValueError: the model has no blocks that are known as such.
    """
    blocks = known_blocks(model, setting=f"recompute is {how!r}", off="recompute: none")
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = _selective_contexts
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    recomputed = recomputed_layers(len(blocks), every=every, budget=budget)
    for number, block in enumerate(blocks):
        chosen = number in recomputed
        cast(Any, block).gradient_checkpointing = chosen
        if chosen and how == "selective":
            _flatten(block)


def _flatten(block: nn.Module) -> None:
    """A product that is kept must not be changed in place (`models.linear.multiply`)."""
    for module in block.modules():
        if type(module) is nn.Linear:
            module.__class__ = FlatLinear


def _selective_contexts() -> Any:
    """Contexts of one block's forward pass and of its repetition, which have to decide alike."""
    products = {False: 0, True: 0}

    def policy(ctx: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        kind = _kinds().get(op)
        if kind == "product":
            products[ctx.is_recompute] += 1
            if products[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if kind else CheckpointPolicy.PREFER_RECOMPUTE

    forward, repetition = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return forward, _OfKinds(repetition)


class _OfKinds(TorchDispatchMode):
    """A mode for the operations of `_kinds` alone.

    torch's own counts every operation of the repetition against those of the forward pass, and fails where there are
    more. DeepSpeed's are among them: what it makes to gather and release weights is not the same in both.
    """

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, mode: TorchDispatchMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _kinds():
            return self._mode.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


@functools.cache
def _kinds() -> dict[Any, str]:
    """Operation -> `attention` or `product`."""
    found = {}
    for kind, names in (("attention", _ATTENTION), ("product", _PRODUCTS)):
        for name in names:
            namespace, _, operation = name.partition(".")
            packet = getattr(getattr(torch.ops, namespace), operation, None)
            if packet is not None:
                found[packet.default] = kind
    return found
