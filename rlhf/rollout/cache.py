"""KV caches: of a left-padded batch that loses rows while it is decoded, and of slots whose rows come and go."""

import functools
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class BufferLayer(DynamicLayer):
    """Keys and values of one layer, written into buffers of the full length.

    DynamicLayer concatenates, which copies the whole cache for each token. Layers with a sliding window get full
    buffers too: the mask restricts them.
    """

    def __init__(self, *, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity
        self.length = 0
        self.buffers: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values, [B, heads, new tokens, head size]; views of all so far."""
        states = (key_states, value_states)
        if not self.buffers:  # values beyond `length` are never read
            self.buffers = tuple(x.new_empty((*x.shape[:2], self.capacity, x.shape[-1])) for x in states)
            self.is_initialized = True
        start, self.length = self.length, self.length + key_states.shape[-2]
        for buffer, new in zip(self.buffers, states, strict=True):
            buffer[:, :, start : self.length] = new
        self.keys, self.values = (buffer[:, :, : self.length] for buffer in self.buffers)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def close(self, to_M: Tensor, source_M: Tensor, *, num_left: int) -> None:
        """Copy rows source_M over rows to_M, then keep the first num_left rows."""
        for buffer in self.buffers if len(to_M) else ():
            buffer[to_M, :, : self.length] = buffer[source_M, :, : self.length]
        self.buffers = tuple(buffer[:num_left] for buffer in self.buffers)


class BufferCache(Cache):
    """Buffers for as many layers as the model turns out to have."""

    def __init__(self, *, capacity: int) -> None:
        """Hold up to `capacity` tokens of each row, padding included."""
        super().__init__(layer_class_to_replicate=cast(Any, functools.partial(BufferLayer, capacity=capacity)))

    def close(self, to_M: Tensor, source_M: Tensor, *, num_left: int) -> None:
        """Copy rows source_M over rows to_M in every layer, then keep the first num_left rows."""
        for layer in self.layers:
            cast(BufferLayer, layer).close(to_M, source_M, num_left=num_left)


def cache_dtype(computed_in: torch.dtype, device_type: str) -> torch.dtype:
    """Type that a `SlotCache` keeps keys and values in."""
    return torch.float32 if device_type == "cpu" else computed_in


class SlotCache(Cache):
    """Keys and values of rows that come and go, in buffers made once.

    Each row has a slot, and its tokens stand in it from the first place on. A forward takes tokens of any slots as one
    row, `[1, N]`: `aim` says where each belongs, `update` writes it there, and the layout (`SlotLayout`) reads.

    On a CPU the buffers are float32 whatever the model computes in: its kernels are several times faster on it for one
    query, which outweighs the bytes, and every number of a narrower type is one of float32.
    """

    def __init__(self, *, num_slots: int, capacity: int) -> None:
        """Hold up to `capacity` tokens in each slot, of as many layers as the model turns out to have."""
        super().__init__(layers=[])
        self.num_slots = num_slots
        self.capacity = capacity
        self.buffers: list[tuple[Tensor, Tensor]] = []
        """Keys and values of each layer, [S, K, capacity, d]."""
        self.layer = 0
        """The layer that was written last, whose attention comes next."""
        self._slot_N = self._place_N = torch.empty(0, dtype=torch.int64)
        self._row_W: Tensor | None = None

    @property
    def bytes_per_token(self) -> int:
        """Of one token's keys and values in one layer; 0 before the first forward."""
        return sum(x.shape[1] * x.shape[3] * x.element_size() for x in self.buffers[0]) if self.buffers else 0

    def aim(self, slot_N: Tensor, place_N: Tensor) -> None:
        """Say where the next forward's tokens belong: slot and place in it, both int64."""
        self._slot_N, self._place_N, self._row_W = slot_N, place_N, None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the row's tokens, [1, K, N, d], into their slots; given back as they are."""
        if layer_idx == len(self.buffers):
            self.buffers.append((self._buffer(key_states), self._buffer(value_states)))
        if self._row_W is None:  # one row of numbers for each token and key head, the same in all layers
            heads = torch.arange(key_states.shape[1], device=self._slot_N.device)
            row_NK = (self._slot_N[:, None] * len(heads) + heads) * self.capacity + self._place_N[:, None]
            self._row_W = row_NK.flatten()
        for buffer, states in zip(self.buffers[layer_idx], (key_states, value_states), strict=True):
            rows_Wd = states[0].transpose(0, 1).reshape(-1, buffer.shape[-1])
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, self._row_W, rows_Wd.to(buffer.dtype))
        self.layer = layer_idx
        return key_states, value_states

    def _buffer(self, states: Tensor) -> Tensor:
        _, num_heads, _, head_size = states.shape
        dtype = cache_dtype(states.dtype, states.device.type)
        # Zeros and not whatever memory held: a masked call gives it weight 0, and 0 times NaN is NaN.
        shape = (self.num_slots, num_heads, self.capacity, head_size)
        return torch.zeros(shape, dtype=dtype, device=states.device)

    def copy(self, source: int, to: list[int], *, length: int) -> None:
        """Copy the first `length` tokens of a slot into others."""
        for buffer in (x for pair in self.buffers for x in pair):
            buffer[to, :, :length] = buffer[source, :, :length]

    def reorder(self, source_S: list[int], *, length: int) -> None:
        """Put the first `length` tokens of slot source_S[s] into slot s."""
        for buffer in (x for pair in self.buffers for x in pair):
            buffer[: len(source_S), :, :length] = buffer[source_S, :, :length]
