"""Seconds of drawing responses and of scoring them. No torch.

A drawn token reads every weight and the keys and values of its row once, whatever is computed with them, so small
batches are bound by the memory's bandwidth; and it launches every kernel of the model, which is bound by the host.
"""

from dataclasses import dataclass, replace

from rlhf.plan import layer as layers
from rlhf.plan.collectives import all_gather, all_reduce, group
from rlhf.plan.efficiency import matmul, traffic
from rlhf.plan.hardware import Device
from rlhf.plan.layout import OURS, Layout, Stack
from rlhf.plan.shapes import Shape
from rlhf.plan.step import data_group, exchange, gather_host, gather_once, stack_on

DECODE_HOST = 570e-6
"""Seconds of the processor for one layer of a decoding step (fitted: Lambda's OPT-13B on H100)."""
GATHER_HOST = 1.2e-3
"""Seconds of the processor to gather one weight tensor for generation (fitted: the same)."""


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Seconds of one rollout on every rank."""

    gather: float
    prefill: float
    decode: float

    @property
    def total(self) -> float:
        """Seconds of the rollout."""
        return self.gather + self.prefill + self.decode


@dataclass(frozen=True, kw_only=True)
class Work:
    """Rows of a rollout on one rank."""

    rows: int
    batch: int
    """Rows that are decoded side by side."""
    prompt: int
    response: int
    gathered: bool = True
    """Under ZeRO-3, weights are gathered once for the rollout; else layer by layer for every token."""


def gather(shape: Shape, layout: Layout, device: Device) -> float:
    """Seconds to gather a ZeRO-3 actor's weights for a rollout; tensor-parallel ranks keep a part each."""
    if not layout.sharded:
        return 0.0
    tensors = shape.layers * layers.TENSORS
    size = (4.0 if layout.dtype == "fp32" else 2.0) * shape.parameters / layout.tensor
    if device.measured is not None:
        host = shape.layers * gather_host(device, layout, OURS)
        return gather_once(data_group(layout, device), size, shape.layers) + host
    moved = all_gather(data_group(layout, device), size, messages=tensors)
    return moved + tensors * GATHER_HOST * device.host_scale


def gather_layers(shape: Shape, layout: Layout, device: Device) -> float:
    """Seconds to gather every layer once, one after the other, as ZeRO-3 does in each forward pass."""
    if not layout.sharded:
        return 0.0
    size = (4.0 if layout.dtype == "fp32" else 2.0) * shape.parameters / layout.tensor
    moved = gather_once(data_group(layout, device), size, shape.layers)
    return moved + shape.layers * gather_host(device, layout, OURS)


def rollout(shape: Shape, layout: Layout, device: Device, work: Work, *, host: float = DECODE_HOST) -> Rollout:
    """Draw `work.rows` responses on each rank, in batches, all of full length."""
    batches = -(-work.rows // work.batch)
    batch = min(work.rows, work.batch)
    layout = replace(layout, dtype=layout.stored)
    prompt = replace(layout, length=work.prompt, micro_batch=batch, recompute="none", lora=0, context=1)
    prefill = shape.layers * layers.layer(shape, prompt, device, OURS).forward
    middle = work.prompt + work.response / 2
    token = decode_step(shape, layout, device, batch, middle, host=host)
    if not work.gathered:
        once = gather_layers(shape, layout, device)
        return Rollout(
            gather=batches * work.response * once, prefill=batches * prefill, decode=batches * work.response * token
        )
    return Rollout(
        gather=gather(shape, layout, device),
        prefill=batches * prefill,
        decode=batches * work.response * token,
    )


def decode_step(
    shape: Shape, layout: Layout, device: Device, batch: int, length: float, *, host: float = DECODE_HOST
) -> float:
    """Seconds of one token of `batch` rows that are `length` long; tensor-parallel ranks share the model."""
    dtype, tensor = layout.dtype, layout.tensor
    products = sum(matmul(device, dtype, batch, n, k) for n, k in layers.products(shape, tensor))
    width = 4.0 if dtype == "fp32" else 2.0
    keys = traffic(device, width * batch * length * shape.cache_elements / shape.layers / tensor)
    sums = 2 * all_reduce(group(device, tensor), 2.0 * batch * shape.hidden)
    head = matmul(device, dtype, batch, -(-shape.vocabulary // 64) * 64 / tensor, shape.embedding)
    if device.measured is not None:
        host, computing = device.measured.decode_layer, products + keys + sums
        each = computing + host if device.is_serial else max(computing, host)
        drawn = batch * shape.vocabulary * device.measured.draw_logit
        return shape.layers * each + head + device.measured.decode_token + drawn
    return shape.layers * max(products + keys + sums, host * device.host_scale) + head


def score(shape: Shape, layout: Layout, device: Device, rows: int, *, stack: Stack = OURS, head: bool = True) -> float:
    """Seconds of one forward pass over `rows` sequences on each replica, in micro-batches of the layout."""
    batches = -(-rows // layout.micro_batch)
    one = layers.layer(shape, replace(layout, recompute="none", lora=0), device, stack)
    stack = stack_on(device, stack)
    host = one.host if device.measured is None else device.measured.score_layer
    host += (layout.zero == 3) * gather_host(device, layout, stack)
    computing = shape.layers * (one.forward + host if device.is_serial else max(one.forward, host))
    computing += 0.0 if device.measured is None else device.measured.score_pass
    if head:
        computing += layers.head(shape, layout, device, stack) / 3
    computing += shape.layers * exchange(shape, layout, device)
    if layout.tensor > 1:
        size = 2.0 * layout.tokens * shape.hidden
        computing += shape.layers * 2 * all_reduce(group(device, layout.tensor), size)
    if layout.sharded or (layout.zero == 3 and device.measured is not None):
        members = data_group(layout, device)
        width = 4.0 if layout.dtype == "fp32" else 2.0
        moved = gather_once(members, width * shape.parameters, shape.layers * stack.gather_messages)
        computing += moved - stack.overlap * min(moved, computing)
    return batches * computing
