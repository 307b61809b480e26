"""Seconds of one update of one model: computing, collectives, bubble, optimiser. No torch."""

from dataclasses import dataclass, fields, replace

from rlhf.plan import layer as layers
from rlhf.plan import memory
from rlhf.plan.collectives import Group, all_gather, all_reduce, group, send
from rlhf.plan.efficiency import traffic
from rlhf.plan.hardware import Device
from rlhf.plan.layout import OURS, Layout, Stack
from rlhf.plan.shapes import Shape

STEP_HOST = 4e-3
"""Seconds of the processor for an update beside its layers: data, clipping, the optimiser's launch."""

OVERFLOW_CALLS = 3
"""For one tensor: a copy in fp32, its sum, and the copy of that to the host. Its cause is known, its time is not
fitted."""

UNPACKED_BYTES = 3.0
"""Read and written by ZeRO++ for a gathered weight: one byte in, two out."""
PACKED_BYTES = 3.5
"""For a gradient: two bytes in and half of one out before the hop inside a machine, half in and half out behind it."""

OUTSIDE = 0.5
"""Layers that embeddings, last norm and head are worth to ZeRO-3's hooks: about five modules of a layer's ten."""

HOST_LINK = 20e9
"""Bytes a second between device and host memory, either way: PCIe 4 x16 under load."""

EXPOSED = 0.1
"""Of an overlapped reduction, the last bucket's share."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of an update by what they are spent on; the sum is the step."""

    computing: float = 0.0
    """Products, attention and pointwise operations of all micro-batches."""
    recomputing: float = 0.0
    host: float = 0.0
    """What the launching processor adds where it is slower than the device."""
    tensor: float = 0.0
    """Collectives of tensor and context parallelism that nothing hides."""
    gather: float = 0.0
    """ZeRO-3's gathers and reductions that nothing hides."""
    bubble: float = 0.0
    """Stages that wait for the pipeline to fill and drain, and the sends between them."""
    reduce: float = 0.0
    """The reduction of gradients and the gathering of weights behind the last micro-batch."""
    offload: float = 0.0
    """Copies of activations to host memory and back that computing does not hide."""
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Name -> seconds."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def step(shape: Shape, layout: Layout, device: Device, stack: Stack = OURS, *, with_head: bool = True) -> StepTime:
    """An update of `layout.global_batch` sequences; without a head, of a reward model or critic."""
    stack = stack_on(device, stack)
    one = layers.layer(shape, layout, device, stack)
    head = layers.head(shape, layout, device, stack) if with_head else 0.0
    again = _again(shape, one, layout, stack)
    count = slowest(shape, layout, head / (one.forward + one.backward + again))
    useful = count * (one.forward + one.backward) + head * (layout.pipeline == 1)
    again *= count
    tensor = count * _tensor(shape, layout, device, stack)
    busy = useful + again + tensor
    share = layout.recomputed_share(shape.layers)
    passes = share * layers.HOST_PASSES[layout.recompute] + (1 - share) * layers.HOST_PASSES["none"]
    host = one.host * passes
    waiting = count * host
    if layout.zero == 3:
        waiting += (
            (count + OUTSIDE * (device.measured is not None)) * gather_host(device, layout, stack) * stack.gathers
        )
    idle = waiting if device.is_serial else max(0.0, waiting - busy)
    gather = _zero3(shape, layout, device, stack, busy + idle)
    micro = busy + idle + gather
    bubble = _bubble(shape, layout, device, stack, micro)
    reduce = _reduce(shape, layout, device, stack, hidden=(count * one.backward, count * one.forward))
    trained = memory.trained_parameters(shape, layout)
    n = layout.accumulation
    step_host = STEP_HOST * device.host_scale * stack.host
    if device.measured is not None:
        step_host = device.measured.update_step
    elif stack.serial_overflow_check and layout.zero == 0 and layout.dtype == "fp16":
        trained_tensors = shape.layers * (12 if layout.lora else layers.TENSORS)
        step_host += trained_tensors * OVERFLOW_CALLS * layers.HOST_CALL * stack.host * device.host_scale
    return StepTime(
        computing=n * useful, recomputing=n * again, host=n * idle + step_host,
        tensor=n * tensor, gather=n * gather, bubble=bubble, reduce=reduce,
        offload=n * _offloaded(shape, layout, stack, one, again),
        optimizer=layers.optimizer(trained, layout, device, stack),
    )  # fmt: skip


def stack_on(device: Device, stack: Stack) -> Stack:
    """What the program does on a device: on a processor without an accelerator nothing overlaps."""
    if not device.is_serial:
        return stack
    return replace(stack, overlap=0.0, gradient_overlap=False, gather_overlap=False, tensor_overlap=0.0)


def moved_bytes(weights: float, trained: float, width: float, stack: Stack) -> float:
    """Bytes of a micro-batch's gathers and its reduction of gradients under ZeRO-3."""
    return width * weights * stack.gathers + trained * min(stack.states.gradients, width)


def gather_once(members: Group, size: float, messages: float) -> float:
    """Seconds to gather `size` bytes of weights under ZeRO-3: as measured within a machine, or by its collectives."""
    measured = members.device.measured
    if measured is not None and members.nodes == 1:
        return measured.sharded_seconds(size, members.ranks)
    return all_gather(members, size, messages=messages)


def gather_host(device: Device, layout: Layout, stack: Stack) -> float:
    """Seconds of the processor to gather one layer once under ZeRO-3."""
    if device.measured is not None:
        return device.measured.gather_seconds(layout.shards) / stack.gathers
    return stack.gather_messages * layers.HOST_GATHER * device.host_scale


def slowest(shape: Shape, layout: Layout, head: float) -> float:
    """Layers that the slowest stage takes the time of, the head, which is worth `head` layers, included.

    Layers are dealt evenly; where two more would be a multiple of the stages, the ends have one less each, since
    they embed and have the head.
    """
    stages = layout.pipeline
    if stages == 1:
        return float(shape.layers)
    middle = -(-shape.layers // stages)
    ends_have_less = (shape.layers + 2) % stages == 0
    return max(middle, middle - ends_have_less + head)


def _again(shape: Shape, one: layers.LayerTime, layout: Layout, stack: Stack) -> float:
    """Seconds of the second forward of a layer, mean over those that have none."""
    share = layout.recomputed_share(shape.layers)
    if layout.recompute == "full":
        return share * one.forward
    if layout.recompute == "selective":
        # Without pairs in memory every second product is made again (torchtitan's "op"); with them, attention's are.
        again = 0.5 * one.products + one.pointwise if stack.on_chip else one.attention
        return share * again
    return 0.0


def _offloaded(shape: Shape, layout: Layout, stack: Stack, one: layers.LayerTime, again: float) -> float:
    """What copies of a micro-batch's activations, all layers' but the last, add: out under the forward pass, back under
    the backward pass."""
    if not layout.offload_activations:
        return 0.0
    count = shape.layers / layout.pipeline
    size = memory.kept_activations(shape, layout, stack) * (count - 1) / HOST_LINK
    return max(0.0, size - count * one.forward) + max(0.0, size - count * one.backward - again)


def _tensor(shape: Shape, layout: Layout, device: Device, stack: Stack) -> float:
    """Collectives of a layer: two all-reduces of the activations forward, two backward, two when it is recomputed;
    and what a context group exchanges."""
    size = 2.0 * layout.tokens * shape.hidden
    total = 0.0
    again = layout.recomputed_share(shape.layers) * (layout.recompute == "full")
    if layout.tensor > 1:
        times = 4 + 2 * again
        members = group(device, layout.tensor)
        total += times * all_reduce(members, size) * (1 - stack.tensor_overlap)
    if layout.context > 1:
        members = group(device, layout.context, stride=layout.tensor)
        if stack.exchanged_heads:
            return total + (2 + again) * exchange(shape, layout, device)
        keys = 2.0 * 2 * layout.tokens * layout.context * shape.kv_heads * shape.head_size / layout.tensor
        passes = 3 + again
        total += passes * all_gather(members, keys) * 0.5  # half of it under the pairs of the block at hand
    return total


def exchange(shape: Shape, layout: Layout, device: Device) -> float:
    """Seconds of the two all-to-alls of a layer's forward pass: queries, keys and values, then attention's outputs.

    Each rank sends all of its own but its share, as in an all-gather of as many bytes. Nothing runs beside them.
    """
    if layout.context == 1:
        return 0.0
    members = group(device, layout.context, stride=layout.tensor)
    width = 4.0 if layout.dtype == "fp32" else 2.0
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_size
    return all_gather(members, width * layout.tokens * heads / layout.tensor, messages=2)


def data_group(layout: Layout, device: Device) -> Group:
    """Ranks that hold the same part of the model; tensor ranks are neighbours, then data, then stages."""
    return group(device, layout.replicas, stride=layout.tensor)


def _zero3(shape: Shape, layout: Layout, device: Device, stack: Stack, busy: float) -> float:
    """What ZeRO-3's collectives of a micro-batch add to `busy` seconds."""
    members = data_group(layout, device)
    width = 4.0 if layout.dtype == "fp32" else 2.0
    if layout.zero == 3 and device.measured is not None and members.nodes == 1:
        trained = memory.trained_parameters(shape, layout) / layout.tensor
        size = moved_bytes(shape.parameters / layout.tensor, trained, width, stack)
        return _overlapped(busy, device.measured.sharded_seconds(size, layout.shards), stack.overlap)
    if not layout.sharded:
        return 0.0
    if stack.single_card:
        members = replace(members, single_card=True)
    size = width * shape.parameters / layout.tensor
    messages = shape.layers * stack.gather_messages
    if stack.quantised_gather:
        forward = all_gather(members, size / 2, messages=messages)
        inside = group(device, min(layout.shards, device.node))
        backward = all_gather(inside, size, messages=messages) * (stack.gathers - 1)
        reduce = all_gather(members, size / 4, messages=shape.layers)
        weights = shape.parameters / layout.tensor
        packing = traffic(device, weights * (stack.gathers * UNPACKED_BYTES + PACKED_BYTES))
        return packing + _overlapped(busy, forward + backward + reduce, stack.overlap)
    near = group(device, layout.secondary) if layout.secondary else members  # hpZ
    gathers = all_gather(members, size, messages=messages)
    gathers += (stack.gathers - 1) * all_gather(near, size, messages=messages)
    trained = memory.trained_parameters(shape, layout)
    reduced = trained * min(stack.states.gradients, width)
    reduce = all_gather(members, reduced, messages=max(1.0, reduced / width / stack.bucket_elements))
    if layout.offload_weights:
        gathers += stack.gathers * size / layout.shards / HOST_LINK
    return _overlapped(busy, gathers + reduce, stack.overlap)


def _overlapped(busy: float, other: float, overlap: float) -> float:
    """Seconds that `other` adds when `overlap` of the shorter of the two is hidden behind the longer."""
    return other - overlap * min(busy, other)


def _bubble(shape: Shape, layout: Layout, device: Device, stack: Stack, micro: float) -> float:
    """Filling and draining, (p - 1) / v micro-batches, and sends: Narayanan et al. 2021, arXiv:2104.04473, sec. 2.2."""
    if layout.pipeline == 1:
        return 0.0
    size = 2.0 * layout.tokens * shape.hidden / (layout.tensor if stack.scattered_pipeline else 1)
    between = layout.gpus > device.node
    one = send(device, size, between=between, sharing=min(layout.tensor, device.node))
    fill = (layout.pipeline - 1) * (micro + 2 * one) / layout.virtual
    return fill + 2 * one * layout.virtual * layout.accumulation


def _reduce(shape: Shape, layout: Layout, device: Device, stack: Stack, *, hidden: tuple[float, float]) -> float:
    """Gradients summed over replicas, once an update; ZeRO-1 and 2 scatter them and gather the new weights.

    `hidden`: seconds of the last backward and the first forward pass of a micro-batch, which can run over them.
    """
    if layout.replicas == 1 or layout.zero == 3:
        return 0.0
    members = data_group(layout, device)
    trained = memory.trained_parameters(shape, layout)
    width = 4.0 if layout.dtype == "fp32" else stack.states.gradients
    buckets = max(1.0, trained / stack.bucket_elements)
    if layout.zero == 0:
        reduction = all_reduce(members, width * trained, messages=buckets)
        gathering = 0.0
    else:
        reduction = all_gather(members, width * trained, messages=buckets)
        sharing = group(device, layout.shards, stride=layout.tensor)
        gathering = all_gather(sharing, 2.0 * trained, messages=buckets)
    if stack.gradient_overlap:
        reduction = max(reduction - hidden[0], EXPOSED * reduction)
    if stack.gather_overlap:
        gathering = max(gathering - hidden[1], EXPOSED * gathering)
    return reduction + gathering
