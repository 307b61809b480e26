"""Decoding forwards replayed from captured graphs: on accelerators a small model waits for its launches.

A graph has fixed shapes and fixed memory. So a captured forward takes all slots up to a rounded number, and reads their
keys up to a rounded length: rows of slots that are empty are computed too, write into a place that no row uses, and are
thrown away. There is one graph for each pair of rounded numbers, and they live as long as the rollout, whose caches
they point into. Forwards with prompts are launched one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from rlhf.models.attention import takes_layout
from rlhf.rollout.cache import SlotCache
from rlhf.rollout.job import StepModel
from rlhf.rollout.layout import SlotLayout

# Lengths are rounded up to a multiple of it. A step more costs another capture, about two forwards; a wider one, reads.
LENGTH_STEP = 256
# Numbers of slots are rounded up to a power of two, and from here on to a multiple of it.
SLOT_STEP = 16

Replay = Callable[[], None]
Record = Callable[[Callable[[], Tensor], Any], tuple[Replay, Tensor, Any]]


def check_graphs(config: PretrainedConfig, device_type: str) -> None:
    """Check that a model's decoding can be captured on a device.

    Raises:
        ValueError: it cannot.
    """
    if device_type == "cpu":
        raise ValueError("rollout.graphs is true, but a CPU has no graphs to capture. Set rollout.graphs=false.")
    if not takes_layout(config):
        raise ValueError(
            f"rollout.graphs is true, but {config.model_type} attends by itself and is decoded in padded batches, "
            "whose shapes change with each token. Set rollout.graphs=false."
        )


def record(forward: Callable[[], Tensor], pool: Any) -> tuple[Replay, Tensor, Any]:
    """Capture a forward on the current accelerator.

    Args:
        forward: reads and writes the same memory in each call.
        pool: of the memory between its operations, shared with graphs that never run at the same time; None: a new one.

    Returns:
        What repeats the forward, its result, which each repetition writes again, and the pool.
    """
    forward()  # libraries make their workspaces at the first call, which a graph cannot hold
    graph = torch.accelerator.Graph(pool=pool)
    stream = torch.Stream(device=torch.accelerator.current_accelerator())
    stream.wait_stream(torch.accelerator.current_stream())
    with stream, graph:
        result = forward()
    torch.accelerator.current_stream().wait_stream(stream)
    return graph.replay, result, graph.pool()


@dataclass(frozen=True)
class _Step:
    """A captured forward of the first N slots, and the memory that it reads and writes."""

    token_N: Tensor
    place_N: Tensor
    length_N: Tensor
    replay: Replay
    logits_NV: Tensor


class StepGraphs:
    """The decoding forwards of one rollout."""

    def __init__(self, model: StepModel, cache: SlotCache, *, device: torch.device, record: Record = record) -> None:
        """Capture nothing yet.

        Args:
            model: whose weights stay where they are during the rollout, and whose forward is no collective.
            cache: of the rollout. Its last place must be one that no row writes to.
            device: of both.
            record: what captures; another one lets a device without graphs go the same way.
        """
        self.model, self.cache, self.device = model, cache, device
        self._record = record
        self._steps: dict[tuple[int, int], _Step] = {}
        self._pool: Any = None

    def forward(self, layout: SlotLayout, token_A: Tensor, place_A: Tensor) -> Tensor:
        """Logits after the newest token of each decoding row.

        Args:
            layout: of the rows, without prompts, which has been in none or one forward for each of their tokens.
            token_A: newest tokens.
            place_A: of each in its slot.

        Returns:
            logits_AV, the caller's own.
        """
        key = (
            min(rounded_slots(layout.top), self.cache.num_slots),
            min(-(-layout.longest // LENGTH_STEP) * LENGTH_STEP, self.cache.capacity),
        )
        unused = self.cache.capacity - 1
        step = self._steps.get(key)
        values = (token_A, place_A, layout.length_N)
        if step is None:
            buffers = tuple(
                torch.full((key[0],), value, dtype=torch.int64, device=self.device) for value in (0, unused, 1)
            )
            _fill(buffers, layout.slot_N, values)
            self._steps[key] = step = self._capture(*buffers, longest=key[1])
        else:
            step.token_N.zero_()
            step.place_N.fill_(unused)
            step.length_N.fill_(1)
            _fill((step.token_N, step.place_N, step.length_N), layout.slot_N, values)
        step.replay()
        return step.logits_NV[layout.slot_N]

    def _capture(self, token_N: Tensor, place_N: Tensor, length_N: Tensor, *, longest: int) -> _Step:
        slot_N = torch.arange(len(token_N), device=self.device)

        def forward() -> Tensor:
            self.cache.aim(slot_N, place_N)
            layout = SlotLayout.of_first_slots(self.cache, slot_N, length_N, longest=longest)
            return self.model.packed(token_N, place_N, self.cache, layout, keep_M=None)

        replay, logits_NV, self._pool = self._record(forward, self._pool)
        return _Step(token_N, place_N, length_N, replay, logits_NV)


def rounded_slots(number: int) -> int:
    """Slots that a captured forward takes for so many."""
    return -(-number // SLOT_STEP) * SLOT_STEP if number > SLOT_STEP else 1 << (number - 1).bit_length()


def _fill(buffers: tuple[Tensor, ...], slot_A: Tensor, values: tuple[Tensor, ...]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer[slot_A] = value
