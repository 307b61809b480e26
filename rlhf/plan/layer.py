"""Seconds of a transformer layer, the language head and the optimiser on one rank. No torch."""

from dataclasses import dataclass

from rlhf.plan import efficiency
from rlhf.plan.efficiency import matmul, traffic
from rlhf.plan.hardware import Device
from rlhf.plan.layout import Layout, Stack
from rlhf.plan.shapes import Shape

POINTWISE = {"eager": 2.2, "fused": 2.0, "compiled": 1.3}
"""Bytes that norms, residuals and activations move, in units of the least that separate kernels need (fitted)."""
BACKWARD_BYTES = 1.6
"""Bytes of a pointwise operation's backward pass, in units of its forward pass."""
HOST_CALL = 9e-6
"""Seconds of the processor to launch one kernel from PyTorch."""
CALLS = {"eager": 26, "fused": 16, "compiled": 12}
"""Kernels of a layer's forward pass."""
HOST_GATHER = 0.235e-3
"""Seconds of the processor to gather one tensor under ZeRO-3: hooks, allocation, launch (fitted: Lambda's step 1)."""
HOST_PASSES = {"none": 2.5, "selective": 2.7, "full": 3.5}
"""Time of the host for a layer's passes by what is recomputed, in units of a forward pass."""
TENSORS = 16
"""Weight tensors of a layer, OPT's."""
LORA_BYTES = 10
"""Bytes for each output of an adapted matrix: the adapter's is scaled, read and written, and added."""
LORA_CALLS = 4
"""More of them for each adapted matrix."""


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Seconds of one layer and micro-batch."""

    products: float
    """Forward; the backward pass is `backward_products`."""
    backward_products: float
    attention: float
    backward_attention: float
    pointwise: float
    host: float
    """Forward, of the processor that launches it."""

    @property
    def forward(self) -> float:
        """Seconds of the device."""
        return self.products + self.attention + self.pointwise

    @property
    def backward(self) -> float:
        """Seconds of the device."""
        return self.backward_products + self.backward_attention + BACKWARD_BYTES * self.pointwise


def products(shape: Shape, tensor: int) -> list[tuple[float, float]]:
    """(columns, depth) of a layer's matrices on one rank of the tensor group."""
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_size
    heads = shape.heads * shape.head_size
    up = shape.intermediate * (shape.mlp_matrices - 1)
    return [
        (qkv / tensor, shape.hidden), (shape.hidden, heads / tensor),
        (up / tensor, shape.hidden), (shape.hidden, shape.intermediate / tensor),
    ]  # fmt: skip


def layer(shape: Shape, layout: Layout, device: Device, stack: Stack) -> LayerTime:
    """Seconds of one layer for one micro-batch of a rank."""
    tokens, dtype = layout.tokens, layout.dtype
    forward = backward = 0.0
    for n, k in products(shape, layout.tensor):
        forward += matmul(device, dtype, tokens, n, k)
        backward += backward_product(device, dtype, tokens, n, k, own=not layout.lora)
        if layout.lora:
            adapter = matmul(device, layout.stored, tokens, layout.lora, k) + matmul(
                device, layout.stored, tokens, n, layout.lora
            )
            forward += adapter
            backward += 2 * adapter
    attention, backward_attention = _attention(shape, layout, device, stack)
    calls = CALLS[stack.pointwise] + LORA_CALLS * 6 * bool(layout.lora)
    moved = pointwise_bytes(shape, layout, stack)
    pointwise = traffic(device, moved) + calls * efficiency.KERNEL
    host = calls * HOST_CALL * stack.host * device.host_scale
    if device.measured is not None:
        pointwise = device.measured.pointwise_seconds(moved, shape.hidden)
        host = device.measured.update_layer / HOST_PASSES["none"]
    return LayerTime(
        products=forward,
        backward_products=backward,
        attention=attention,
        backward_attention=backward_attention,
        pointwise=pointwise,
        host=host,
    )


def backward_product(device: Device, dtype: str, tokens: float, n: float, k: float, *, own: bool) -> float:
    """Seconds of the products of a matrix's backward pass: for its input's gradient and, if it is trained, its own."""
    if device.measured is not None:
        return device.measured.product(dtype, tokens, n, k, backward=True) * (1.0 if own else 0.5)
    return matmul(device, dtype, tokens, k, n) + (matmul(device, dtype, n, k, tokens) if own else 0.0)


def pointwise_bytes(shape: Shape, layout: Layout, stack: Stack) -> float:
    """Bytes that a layer's norms, residuals, activation and rotation move forward on one rank."""
    width = 4.0 if layout.dtype == "fp32" else 2.0
    serial = layout.tensor if layout.sequence_parallel else 1
    outside = (2 * 2 + 2 * 3) * width * shape.hidden  # a norm reads and writes, a residual reads two and writes one
    outside += 2 * 2 * width * shape.hidden * stack.dropout
    inside = shape.intermediate * shape.mlp_matrices * width
    rotation = 2 * (shape.heads + shape.kv_heads) * shape.head_size * width * (shape.positions == 0)
    adapted = LORA_BYTES * sum(n for n, _ in products(shape, 1)) * bool(layout.lora)
    adapted *= POINTWISE[stack.pointwise] / POINTWISE["eager"]
    quantise = 3 * (shape.hidden * 2 + shape.intermediate) * (layout.dtype in ("fp8", "fp4"))
    return layout.tokens * (POINTWISE[stack.pointwise] * (outside / serial + (inside + rotation) / layout.tensor)
                            + adapted / layout.tensor
                            + quantise / layout.tensor)  # fmt: skip


def _attention(shape: Shape, layout: Layout, device: Device, stack: Stack) -> tuple[float, float]:
    dtype = layout.stored
    heads = shape.heads / layout.tensor
    pairs = layout.micro_batch * layout.length * layout.length / layout.context * heads
    operations = 4 * pairs * shape.head_size
    if device.measured is not None and stack.on_chip:
        half, measured = operations / 2, device.measured
        return (measured.attention_seconds(dtype, half, layout.length),
                measured.attention_seconds(dtype, half, layout.length, backward=True))  # fmt: skip
    speed = 1.0 if shape.head_size % 8 == 0 else efficiency.NO_TENSOR_CORE
    if stack.on_chip:
        speed *= efficiency.FLASH_1 if stack.attention == "flash1" else 1.0
        rate = device.peak(dtype) * efficiency.FLASH[device.architecture] * device.power_limit * speed
        half = operations / 2 / rate  # the lower triangle
        return half, 2.5 * half  # backward: five products for two
    # Two batched products; what they read and write is the pairs, and their short side costs no start of its own.
    ceiling = efficiency.CEILING[device.architecture][dtype] * device.power_limit
    rate = device.peak(dtype) * ceiling * efficiency.alignment(shape.head_size)
    computing = max(operations / rate, traffic(device, 4 * pairs))
    moved = pairs * {"fused": 4 + 5 * stack.dropout, "eager": 20}[stack.attention]
    forward = computing + traffic(device, moved)
    return forward, 2 * computing + traffic(device, 1.5 * moved)


def head(shape: Shape, layout: Layout, device: Device, stack: Stack) -> float:
    """Seconds of the language head and its loss, forward and backward, for one micro-batch."""
    dtype = layout.stored
    n = shape.vocabulary / layout.tensor
    padded = -(-n // 64) * 64
    trained = not layout.lora or layout.embeddings_trained
    forward = matmul(device, dtype, layout.tokens, padded, shape.embedding)
    backward = backward_product(device, dtype, layout.tokens, padded, shape.embedding, own=trained)
    loss = traffic(device, layout.tokens * n * (20 if stack.pointwise == "eager" else 12))
    return forward + backward + loss


def optimizer(parameters: float, layout: Layout, device: Device, stack: Stack) -> float:
    """Seconds of clipping and Adam on a rank's share of what is trained."""
    share = parameters / (layout.shards if layout.zero else 1)
    moved = optimizer_bytes(share, stack)
    if device.measured is not None and not layout.offload_optimizer:
        return moved / (device.measured.optimizer_rate(layout.zero, layout.shards) * 1e9)
    if layout.offload_optimizer:  # Adam on the host, whose memory 8 ranks share
        return moved / (150e9 / device.node) + share * 4 / 12e9
    return traffic(device, moved)


def optimizer_bytes(parameters: float, stack: Stack) -> float:
    """Bytes that clipping and Adam read and write for so many weights."""
    return parameters * (2 * stack.states.optimizer + 2 * stack.states.gradients + stack.states.weights)
