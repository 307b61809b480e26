"""Bytes on one rank while a model is trained or read: weights, gradients, optimiser, activations, buffers. No torch.

Sources: states, Rajbhandari et al. 2020 (ZeRO), arXiv:1910.02054, sec. 3 and 5; activations, Korthikanti et al. 2022,
arXiv:2205.05198, sec. 4 and 5.
"""

from dataclasses import dataclass, fields, replace

from rlhf.plan.layout import OURS, Layout, Stack, StateBytes
from rlhf.plan.shapes import Shape

RESERVE = 0.10
"""Share of the rest that the allocator holds beside what is in use: fragments, rounding."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank, by what they are for."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    """Kept from forward to backward, of all micro-batches in flight."""
    working: float = 0.0
    """Of the layer that is being computed, beside what is kept."""
    logits: float = 0.0
    gathered: float = 0.0
    """Weights of other ranks, held for a while."""
    cache: float = 0.0
    """Keys and values."""
    buckets: float = 0.0
    reserve: float = 0.0
    context: float = 0.0

    @property
    def states(self) -> float:
        """What stays between steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """Name -> bytes."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def __add__(self, other: "Memory") -> "Memory":
        mine, theirs = self.parts(), other.parts()
        return Memory(**{name: mine[name] + theirs[name] for name in mine})


def states(parameters: float, zero: int, shards: int, kept: StateBytes) -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimiser on one of `shards` ranks.

    Stage 1 shards the optimiser, 2 the gradients too, 3 the weights too.
    """
    divisors = [shards if zero >= stage else 1 for stage in (3, 2, 1)]
    sizes = (kept.weights, kept.gradients, kept.optimizer)
    weights, gradients, optimizer = (parameters * size / n for size, n in zip(sizes, divisors, strict=True))
    return weights, gradients, optimizer


def stage_parameters(shape: Shape, layout: Layout, *, last: bool = False) -> float:
    """Weights of one rank's share of the model before ZeRO: of the first stage, which embeds, or of the last."""
    layers = -(-shape.layers // layout.pipeline) * shape.layer_parameters
    if layout.pipeline == 1:
        outside = shape.parameters - shape.layers * shape.layer_parameters
    elif last:  # a tied head is a second copy there
        outside = shape.embedding * shape.vocabulary + shape.final_parameters
    else:
        outside = shape.embedding_parameters
    return (layers + outside) / layout.tensor


def trained_parameters(shape: Shape, layout: Layout, *, last: bool = False) -> float:
    """Of `stage_parameters`, and of adapters, what is trained."""
    if not layout.lora:
        return stage_parameters(shape, layout, last=last)
    adapters = shape.lora_parameters(layout.lora) / (layout.pipeline * layout.tensor)
    rest = stage_parameters(shape, layout, last=last) - shape.layers * shape.layer_parameters / (
        layout.tensor * layout.pipeline
    )
    return adapters + rest * layout.embeddings_trained


def layer_activations(shape: Shape, layout: Layout, stack: Stack) -> float:
    """Bytes a token that the backward pass of one recomputed layer needs, by what is recomputed, on one rank."""
    width = 4.0 if layout.dtype == "fp32" else 2.0
    tensor = layout.tensor
    serial = tensor if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return width * shape.hidden / serial
    hidden, heads = shape.hidden, shape.heads * shape.head_size
    qkv = heads + 2 * shape.kv_heads * shape.head_size
    mask = 1.0 if stack.dropout else 0.0
    outside = 4 * width * hidden + 2 * mask * hidden  # inputs of both norms and of both blocks, two masks
    inner = shape.intermediate * shape.mlp_matrices  # before and after the activation, and the gate
    inside = width * (qkv + heads + inner)
    if layout.recompute == "selective" and stack.on_chip:
        # Every second product is kept (torchtitan's "op"): half of what is inside, the inputs of the rest.
        inside, outside = inside / 2, outside / 2
    # Of each pair: the softmax and, after dropout, its mask and product; eager, the softmax in fp32 and a copy.
    pair_bytes = {"flash": 0.0, "flash1": 0.0, "fused": 2 * width + mask, "eager": 3 * width}[stack.attention]
    pairs = pair_bytes * shape.heads * layout.length * (layout.recompute == "none")
    return outside / serial + (inside + pairs) / tensor


def kept_activations(shape: Shape, layout: Layout, stack: Stack = OURS) -> float:
    """Bytes of a micro-batch that a layer keeps for the backward pass, mean over those that are recomputed or not."""
    share = layout.recomputed_share(shape.layers)
    whole = layer_activations(shape, replace(layout, recompute="none"), stack)
    return (share * layer_activations(shape, layout, stack) + (1 - share) * whole) * layout.tokens


def activations(shape: Shape, layout: Layout, stack: Stack = OURS) -> tuple[float, float]:
    """(bytes kept for the backward pass, bytes of the layer at work) of a rank of the first stage."""
    whole = layer_activations(shape, replace(layout, recompute="none"), stack) * layout.tokens
    per_layer = kept_activations(shape, layout, stack)
    layers = shape.layers / layout.pipeline
    in_flight = float(min(layout.accumulation, layout.pipeline))
    if layout.virtual > 1:  # Korthikanti et al., sec. 4.2.3
        in_flight *= 1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual)
    kept = per_layer * layers * in_flight
    if layout.offload_activations:  # of a layer that leaves or comes back and of its neighbour, or of the last
        kept = min(kept, 2 * per_layer)
    # A layer is recomputed before its backward pass, whose gradients are as large as its widest tensors. Where the last
    # layers are kept whole, theirs is over by then and has freed more than that.
    working = whole if layout.recompute != "none" and not layout.recompute_budget else whole / 2
    return kept, working


def logits(shape: Shape, layout: Layout, stack: Stack = OURS) -> float:
    """Bytes of logits and their gradient on a rank of the last stage."""
    tokens = min(layout.tokens, stack.logit_tokens) if stack.logit_tokens else layout.tokens
    return stack.logit_bytes * tokens * shape.vocabulary / layout.tensor


def training(shape: Shape, layout: Layout, stack: Stack = OURS) -> Memory:
    """Peak of one rank in an update: the larger of the first and the last pipeline stage."""
    ends = [_stage(shape, layout, stack, last=False)]
    if layout.pipeline > 1:
        ends.append(_stage(shape, layout, stack, last=True))
    return max(ends, key=lambda memory: memory.total)


def _stage(shape: Shape, layout: Layout, stack: Stack, *, last: bool) -> Memory:
    kept = _state_bytes(shape, layout, stack)
    trained = trained_parameters(shape, layout, last=last)
    adapters = shape.lora_parameters(layout.lora) / (layout.pipeline * layout.tensor)
    frozen = stage_parameters(shape, layout, last=last) - (trained - adapters) if layout.lora else 0.0
    weights, gradients, optimizer = states(trained, layout.zero, layout.shards, kept)
    weights += frozen * kept.weights / (layout.shards if layout.zero == 3 else 1)
    if layout.secondary:
        weights += (trained + frozen) * 2 / layout.secondary
    stashed, working = activations(shape, layout, stack)
    if last:  # one micro-batch in flight there
        stashed /= min(layout.accumulation, layout.pipeline)
    stays = Memory(
        weights=0.0 if layout.offload_weights else weights,
        gradients=0.0 if layout.offload_optimizer and layout.zero > 1 else gradients,
        optimizer=0.0 if layout.offload_optimizer else optimizer,
        gathered=gathered(shape, layout, stack),
        context=stack.context_bytes,
    )
    buckets = min(stack.bucket_elements, trained) * kept.gradients * (layout.replicas > 1)
    # Three moments: the loss, the first layer of the backward pass, its end.
    with_head = last or layout.pipeline == 1
    at_loss = replace(stays, activations=stashed, logits=logits(shape, layout, stack) if with_head else 0.0)
    backward = replace(stays, activations=stashed, working=working, buckets=buckets if layout.zero > 1 else 0.0)
    if layout.accumulation == 1 and layout.zero < 2 and not stack.gradients_kept:
        at_loss, backward = replace(at_loss, gradients=0.0), replace(backward, gradients=0.0)
    end = replace(stays, buckets=buckets)
    peak = max((at_loss, backward, end), key=lambda memory: memory.total)
    return replace(peak, reserve=RESERVE * (peak.total - peak.context))


def _state_bytes(shape: Shape, layout: Layout, stack: Stack) -> StateBytes:
    kept = StateBytes(weights=4, gradients=4, optimizer=8) if layout.dtype == "fp32" else stack.states
    if layout.optimizer == "adamw_8bit":  # two bytes for eight, and a scale of four for each 256
        return replace(kept, optimizer=kept.optimizer - 8 + 2 + 8 / 256)
    if layout.optimizer == "muon":  # the matrices of layers have one moment
        share = 1.0 if layout.lora else shape.layers * shape.layer_parameters / shape.parameters
        return replace(kept, optimizer=kept.optimizer - 4 * share)
    return kept


def gathered(shape: Shape, layout: Layout, stack: Stack = OURS) -> float:
    """Bytes of weights that ZeRO-3 holds beside its own: a few layers, or the embedding."""
    if not layout.sharded:
        return 0.0
    width = 4.0 if layout.dtype == "fp32" else 2.0
    return width * max(stack.live_layers * shape.layer_parameters, shape.vocabulary * shape.embedding) / layout.tensor


def reading(shape: Shape, parameters: float, layout: Layout, *, rows: int, length: int) -> Memory:
    """A frozen model of `parameters` weights that scores `rows` sequences: no state but weights, one layer at work.

    The sequences are those of a context group, where ranks share them.
    """
    width = 4.0 if layout.dtype == "fp32" else 2.0
    shards = layout.shards if layout.zero == 3 else 1
    tokens = rows * length / layout.context
    working = 0.5 * tokens * layer_activations(shape, replace(layout, recompute="none"), OURS)
    weights = 0.0 if layout.offload_weights else width * parameters / (shards * layout.tensor)
    return Memory(weights=weights, working=working, gathered=gathered(shape, layout))


def cache(shape: Shape, layout: Layout, *, rows: int, length: int, width: float = 2.0) -> float:
    """Bytes of keys and values of `rows` sequences."""
    return width * rows * length * shape.cache_elements / layout.tensor
