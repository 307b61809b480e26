"""Activations that wait for the backward pass in host memory, a decoder layer (block) at a time.

What autograd saves of a block goes to pinned host memory while the next blocks compute, and comes back while the block
behind it is differentiated (Rajbhandari et al. 2021, arXiv:2104.07857, sec. 5.1.2; the streams are torchtune's). Where
a block is recomputed in full, that is its input alone. Weights, and what all blocks share (masks, rotary tables), stay;
so does the last block, whose backward pass comes first. The copies are exact.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from rlhf.models.backbone import known_blocks

# Smaller tensors are not worth a copy each.
FEWEST_BYTES = 1024


def offload_activations(model: nn.Module) -> None:
    """Let the blocks of a model keep in host memory what they save; only while it trains.

    Args:
        model: with adapters, and with blocks that `recompute_blocks` has set already.

    Raises:
        ValueError: the model has no blocks that are known as such.
    """
    blocks = known_blocks(model, setting="offload_activations is true", off="offload_activations: false")
    trail = _Trail(_Streams())
    for number, block in enumerate(blocks):
        layer = cast(Any, block)
        # transformers calls a training block through this function, also for recomputation (`models.recompute`).
        run = layer._gradient_checkpointing_func if layer.gradient_checkpointing else _call
        place = {"first": number == 0, "last": number == len(blocks) - 1}
        layer._gradient_checkpointing_func = functools.partial(
            _run_offloaded, run, trail, list(block.parameters()), **place
        )
        layer.gradient_checkpointing = True


def _call(forward: Callable[..., Any], *args: Any) -> Any:
    return forward(*args)


def _run_offloaded(
    run: Callable[..., Any], trail: "_Trail", weights: Sequence[Tensor], forward: Any, *args: Any,
    first: bool, last: bool,
) -> Any:  # fmt: skip
    """A block's forward pass, recomputed later or not; `forward` holds what all blocks share as its keywords."""
    if not torch.is_grad_enabled():
        return run(forward, *args)
    before = None if first else trail.newest()
    if last:
        output = run(forward, *args)
    else:
        stay = _Stay(weights, shared=_storages(forward.keywords), streams=trail.streams, before=before)
        trail.newest = weakref.ref(stay)
        with saved_tensors_hooks(stay.pack, _unpack):
            output = run(forward, *args)
        stay.leave()
    if before is not None:
        before.give_back()
    return output


class _Streams:
    """Copies beside the computing on an accelerator, one stream for each direction; on a CPU they are in line."""

    def __init__(self) -> None:
        self._made: list[torch.Stream] = []

    def to_host(self, device: torch.device) -> Any:
        """A context whose copies come after all that has been computed so far."""
        if device.type == "cpu":
            return nullcontext()
        self._make(device)
        self._made[0].wait_stream(torch.accelerator.current_stream(device))
        return self._made[0]

    def to_device(self, device: torch.device) -> Any:
        """A context whose copies come after those to the host."""
        if device.type == "cpu":
            return nullcontext()
        self._make(device)
        self._made[1].wait_stream(self._made[0])
        return self._made[1]

    def _make(self, device: torch.device) -> None:
        if not self._made:
            self._made = [torch.Stream(device=device), torch.Stream(device=device)]

    def mark(self, device: torch.device, *, back: bool) -> torch.Event | None:
        """The end of the copies so far, to the host or back; None on a CPU, where they are done."""
        return None if device.type == "cpu" else self._made[back].record_event()


class _Trail:
    """What the blocks of a model share: streams, and the newest stay. The graph alone keeps that alive."""

    def __init__(self, streams: _Streams) -> None:
        self.streams = streams
        self.newest: Callable[[], _Stay | None] = lambda: None


class _Entry:
    """One tensor away from its device, which may be saved by several operations of its block."""

    def __init__(self, stay: "_Stay", source: Tensor) -> None:
        self.stay = stay
        self.device = source.device
        self.source: Tensor | None = source
        """Until its copy is done: else its memory could be given to another tensor."""
        self.host = torch.empty_like(source, device="cpu", pin_memory=source.device.type != "cpu")
        self.here: Tensor | None = None
        """The copy back, from the first time it is asked for to the last."""
        self.times_saved = 0
        self.times_asked = 0


class _Stay:
    """What one forward pass of a block saves, away and back."""

    def __init__(
        self, weights: Sequence[Tensor], *, shared: set[int], streams: _Streams, before: "_Stay | None"
    ) -> None:
        self._weights = weights
        self._shared = shared
        self._streams = streams
        self._before = before
        self._leaving: dict[tuple[Any, ...], _Entry] = {}
        self._entries: list[weakref.ref[_Entry]] = []
        self._gone: torch.Event | None = None
        self._back: torch.Event | None = None
        self._fetched = False

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps of a tensor: an entry, or the tensor."""
        if isinstance(tensor, nn.Parameter):
            return tensor  # as it is: ZeRO-3 releases and fills it
        tensor = tensor.detach()  # an operation that keeps its own result with its history is never freed
        if type(tensor) is not Tensor or tensor.numel() * tensor.element_size() < FEWEST_BYTES:
            return tensor
        if tensor.untyped_storage().data_ptr() in self._shared | _storages(self._weights):
            return tensor
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        if key not in self._leaving:
            entry = _Entry(self, tensor)
            with self._streams.to_host(tensor.device):
                entry.host.copy_(tensor, non_blocking=True)
            self._leaving[key] = entry
            self._entries.append(weakref.ref(entry))
        self._leaving[key].times_saved += 1
        return self._leaving[key]

    def leave(self) -> None:
        """The block has computed all."""
        for entry in self._leaving.values():
            self._gone = self._streams.mark(entry.device, back=False)
            break

    def give_back(self) -> None:
        """Give the device's memory back once the copies are done: what is computed from here on waits for them."""
        if self._gone is not None:
            torch.accelerator.current_stream().wait_event(self._gone)
        for entry in self._leaving.values():
            entry.source = None
        self._leaving = {}

    def fetch(self) -> None:
        """Start to copy all back, once."""
        if not self._fetched:
            self._fetched = True
            self._bring([entry for reference in self._entries if (entry := reference()) is not None])

    def _bring(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            with self._streams.to_device(entry.device):
                entry.here = entry.host.to(entry.device, non_blocking=True, copy=True)
        if entries:
            self._back = self._streams.mark(entries[0].device, back=True)

    def arrive(self, entry: _Entry) -> Tensor:
        """A tensor on its device again; what the block before saved is then on its way."""
        self.fetch()
        if self._before is not None:
            self._before.fetch()
        if entry.here is None:  # asked for again: by a second backward pass
            self._bring([entry])
        here = cast(Tensor, entry.here)
        if self._back is not None:
            stream = torch.accelerator.current_stream()
            stream.wait_event(self._back)
            here.record_stream(stream)
        entry.times_asked += 1
        if entry.times_asked % entry.times_saved == 0:
            entry.here = None
        return here


def _unpack(kept: Any) -> Tensor:
    return kept.stay.arrive(kept) if isinstance(kept, _Entry) else kept


def _storages(value: Any) -> set[int]:
    """Addresses of the memory of all tensors in nested sequences and mappings."""
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr()}
    if isinstance(value, dict):
        value = list(value.values())
    return set().union(*map(_storages, value)) if isinstance(value, list | tuple) else set()
