"""Linear layers on copies of their weights, laid out for the kernels of a rollout.

Decoding multiplies few rows by all weights, over and over. oneDNN does that up to twice as fast on weights in its own
order as `F.linear` on ours, so on a CPU every linear layer gets a copy in that order for the length of a rollout.
Adapters are added to the copy: one product a layer instead of three, and the weights that are trained stay untouched.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.models.float8 import Float8Linear
from rlhf.models.linear import FEWEST_WEIGHTS, FlatLinear, onednn_multiplies, product, reorder
from rlhf.models.lora import is_adapted, merged_weight
from rlhf.models.tensor_parallel import SplitHead, SummedConv1D, SummedLinear

logger = logging.getLogger(__name__)

# Rows that the order of the weights is chosen for. From 1 to 1000 rows, products are as fast as with their own number.
PACKED_FOR_ROWS = 32
_SHARED = (SummedLinear, SummedConv1D, SplitHead)


@dataclass(frozen=True, kw_only=True)
class Packing:
    """What `packed_linears` made."""

    num_layers: int
    num_bytes: int
    """Of the copies, which live beside the weights."""
    seconds: float


@contextmanager
def packed_linears(model: nn.Module) -> Iterator[Packing]:
    """Let linear layers compute on copies of their weights: in oneDNN's order on a CPU, with adapters merged anywhere.

    Layers that gain nothing stay as they are: on an accelerator all without adapters; on a CPU small ones, and those of
    a type that oneDNN does not take here. The weights themselves are never written, and on leaving the block, also by
    an exception, each layer computes as before. Changes of weights inside the block are not seen.

    Args:
        model: whose weights are whole on this rank and are used without gradients.
    """
    start = time.perf_counter()
    replaced: list[tuple[nn.Module, str]] = []
    num_bytes = 0
    try:
        for layer in _layers_to_copy(model, device_type=next(model.parameters()).device.type):
            weight = merged_weight(layer.module) if is_adapted(layer.module) else layer.weight.detach()
            weight_OI = weight.T if isinstance(layer.linear, Conv1D) else weight
            bias = cast(Tensor | None, layer.linear.bias)
            # The instance's attribute hides the class's method; hooks still run around it.
            make_forward = _packed_forward if layer.is_packed else _plain_forward
            vars(layer.module)[layer.method] = make_forward(weight_OI, bias if layer.adds_bias else None)
            replaced.append((layer.module, layer.method))
            num_bytes += weight_OI.numel() * weight_OI.element_size()
        packing = Packing(num_layers=len(replaced), num_bytes=num_bytes, seconds=time.perf_counter() - start)
        _announce(packing.num_layers, num_bytes, seconds=packing.seconds)
        yield packing
    finally:
        for module, method in replaced:
            del vars(module)[method]


def copied_bytes(model: nn.Module, *, device_type: str) -> int:
    """Bytes of the copies that `packed_linears` would make of a model on such a device; it may lie on another."""
    layers = _layers_to_copy(model, device_type=device_type)
    return sum(layer.weight.numel() * layer.weight.element_size() for layer in layers)


@dataclass(frozen=True)
class _Layer:
    """A layer that computes on a copy."""

    module: nn.Module
    """The layer, around its adapters if it has any."""
    linear: nn.Module
    is_packed: bool
    """In oneDNN's order."""

    @property
    def weight(self) -> Tensor:
        return cast(Tensor, self.linear.weight)

    @property
    def method(self) -> str:
        """What computes on the copy: of a layer that is shared with other ranks, its part alone."""
        return "product" if isinstance(self.module, _SHARED) else "forward"

    @property
    def adds_bias(self) -> bool:
        """Whether the method does; a sum over ranks is followed by it."""
        return not isinstance(self.module, SummedLinear | SummedConv1D)


def _layers_to_copy(model: nn.Module, *, device_type: str) -> Iterator[_Layer]:
    inside: set[nn.Module] = set()
    for module in model.modules():
        if module in inside or "forward" in vars(module):
            continue
        merged = is_adapted(module)
        linear = cast(nn.Module, module.base_layer) if merged else module
        if not _is_linear(linear):
            continue
        weight = cast(Tensor, linear.weight)
        # Narrower types always save, and torch's own product of them sets up the same call.
        large = weight.dtype != torch.float32 or weight.numel() >= FEWEST_WEIGHTS
        is_packed = device_type == "cpu" and large and onednn_multiplies(weight.dtype)
        if merged or is_packed:
            inside.update(module.modules())
            yield _Layer(module, linear, is_packed)


def _packed_forward(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = reorder(weight_OI, num_rows=PACKED_FOR_ROWS)
    bias_O = None if bias_O is None else bias_O.detach()

    def forward(input: Tensor) -> Tensor:  # noqa: A002  the name of nn.Linear's argument
        return product(input, packed, bias_O)

    return forward


def _plain_forward(weight_OI: Tensor, bias_O: Tensor | None) -> Callable[[Tensor], Tensor]:
    def forward(input: Tensor) -> Tensor:  # noqa: A002
        return F.linear(input, weight_OI, bias_O)

    return forward


def _is_linear(module: nn.Module) -> bool:
    """A layer that decodes as nn.Linear or GPT-2's Conv1D does, not a subclass with a forward of its own."""
    known = type(module).forward in (nn.Linear.forward, FlatLinear.forward, Float8Linear.forward, Conv1D.forward)
    return (known or isinstance(module, _SHARED)) and cast(Tensor, module.weight).ndim == 2


_announced: set[tuple[int, int]] = set()


def _announce(num_layers: int, num_bytes: int, *, seconds: float) -> None:
    """Say once for each size what the copies cost."""
    if num_layers and (num_layers, num_bytes) not in _announced:
        _announced.add((num_layers, num_bytes))
        logger.info(
            "rollout: weights of %d linear layers copied in the order of the kernels, %.1f MB, in %.3f s each time",
            num_layers,
            num_bytes / 1e6,
            seconds,
        )
