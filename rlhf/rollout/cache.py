"""The KV cache of a batch that loses rows while it is decoded."""

import functools
from typing import Any, cast

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
