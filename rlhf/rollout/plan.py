"""What a rollout takes of a rank's memory, known from shapes before anything is gathered."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhf.models import attention
from rlhf.rollout.cache import cache_dtype
from rlhf.rollout.copy import GenerationCopy, whole_shape
from rlhf.rollout.packed import copied_bytes


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What is decoded side by side on one rank."""

    num_rows: int
    """Rows that are decoded together, of this rank's prompts."""
    num_tokens: int
    """Of the longest row, prompt and response."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes that a rollout takes on one rank, beside what is there before it."""

    weights: int
    """Of the copy; 0 where the weights themselves are lent."""
    gathered: int
    """Most trained weights that are whole at a time for it."""
    cache: int
    """Keys and values."""
    packed: int
    """Copies of weights in the order of the CPU's kernels, and of merged layers."""
    layerwise: bool = False
    """Weights are gathered by the forwards, and not before them."""

    @property
    def peak(self) -> int:
        """The most at one time; activations and logits, which are small beside it, are left out."""
        decoding = self.cache + self.packed
        return self.weights + (self.gathered + decoding if self.layerwise else max(self.gathered, decoding))

    def __str__(self) -> str:
        parts = [("weights", self.weights), ("keys and values", self.cache), ("packed copies", self.packed)]
        parts.append(("gathered at a time", self.gathered))
        return ", ".join(f"{name} {megabytes(size)}" for name, size in parts if size)


def plan_copy(copy: GenerationCopy, demand: Demand, *, num_ranks: int, device_type: str) -> MemoryPlan:
    """Of a copy that `num_ranks` ranks share, before it is filled; a group decodes the rows of all its ranks."""
    return MemoryPlan(
        weights=sum(p.numel() * p.element_size() for p in copy.model.parameters()),
        gathered=copy.gathered_bytes,
        cache=cache_bytes(copy.model, demand, num_ranks=num_ranks, device_type=device_type),
        packed=copied_bytes(copy.model, device_type=device_type),
    )


def plan_in_place(model: nn.Module, demand: Demand, *, num_ranks: int = 1, device_type: str) -> MemoryPlan:
    """Of the trained model itself, whose weights are whole on each rank or in shares of `num_ranks`."""
    return MemoryPlan(
        weights=0,
        gathered=0,
        cache=cache_bytes(model, demand, num_ranks=num_ranks, device_type=device_type),
        packed=copied_bytes(model, device_type=device_type),
    )


def plan_layerwise(model: nn.Module, demand: Demand, *, max_live_weights: int, device_type: str) -> MemoryPlan:
    """Of sharded weights that each forward gathers.

    Args:
        model: sharded.
        demand: of the rollout.
        max_live_weights: that DeepSpeed lets be whole at a time, unless one alone has more.
        device_type: of the rank.
    """
    sizes = [(whole_shape(p).numel(), p.element_size()) for p in model.parameters()]
    live = max(max_live_weights, max(number for number, _ in sizes)) * max(size for _, size in sizes)
    return MemoryPlan(
        weights=0,
        gathered=min(live, sum(number * size for number, size in sizes)),
        cache=cache_bytes(model, demand, num_ranks=1, device_type=device_type),
        packed=0,
        layerwise=True,
    )


def cache_bytes(model: nn.Module, demand: Demand, *, num_ranks: int, device_type: str) -> int:
    """Keys and values of a rank: of all rows of its group, and its share of the heads."""
    config: Any = model.config
    text = config.get_text_config()
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    computed_in = next(model.parameters()).dtype
    in_slots = attention.is_installed(model)
    dtype: torch.dtype = cache_dtype(computed_in, device_type) if in_slots else computed_in
    per_token: int = 2 * text.num_hidden_layers * (num_heads // num_ranks) * head_size * dtype.itemsize
    return per_token * demand.num_rows * num_ranks * demand.num_tokens


def megabytes(size: int) -> str:
    """A size as a person reads it."""
    return f"{size / 1e9:.2f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"
