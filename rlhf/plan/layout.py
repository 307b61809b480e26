"""How a model is spread over ranks, and what the software does with it. No torch."""

import math
from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "selective", "full"]
Optimizer = Literal["adamw", "adamw_8bit", "muon"]


def recomputed_layers(layers: int, *, every: int = 1, budget: float = 0.0) -> range:
    """Numbers of the layers that are recomputed.

    Args:
        layers: of the model.
        every: the first of so many is.
        budget: share of the layers, in [0, 1), that are kept whole: so many of the last ones.
    """
    return range(0, layers - math.floor(budget * layers + 1e-9), every)


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a parameter of what training keeps."""

    weights: float = 2
    gradients: float = 2
    optimizer: float = 12
    """Master weights and Adam's two moments."""

    @property
    def total(self) -> float:
        """All of it, unsharded."""
        return self.weights + self.gradients + self.optimizer


MIXED = StateBytes()
"""fp16 or bf16 with gradients in the same type: Rajbhandari et al. 2020 (ZeRO), sec. 3.1, 16 bytes."""
FP32_GRADIENTS = StateBytes(gradients=4)
"""bf16 with fp32 accumulation: Megatron's, 18 bytes."""
FP32 = StateBytes(weights=4, gradients=4, optimizer=8)
HALF_MOMENTS = StateBytes(gradients=4, optimizer=8)
"""Two-byte moments: the 14 bytes (6 weights, 4 gradients, 4 moments) behind "14 TB for a trillion parameters" of
Dash et al. 2023, arXiv:2312.12705."""


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What a training program does with the hardware, as far as its speed or memory depends on it."""

    attention: Literal["eager", "fused", "flash1", "flash"] = "flash"
    """eager: every step of the softmax reads and writes all pairs; fused: one kernel does; flash: pairs stay on chip;
    flash1: the same by its first version, half as fast (Dao 2023, arXiv:2307.08691)."""
    pointwise: Literal["eager", "fused", "compiled"] = "eager"
    """How often norms, activations and residuals read and write memory."""
    states: StateBytes = MIXED
    gradients_kept: bool = False
    """Gradients have a buffer of their own from the start, as Megatron's have; else they appear during the backward
    pass, when activations go."""
    live_layers: float = 4
    """Layers whose gathered weights ZeRO-3 holds at the peak. Lambda's memory of OPT-13B and 66B, which differ in
    nothing else, says four for DeepSpeed."""
    gathers: int = 2
    """Times that ZeRO-3 gathers a layer in a micro-batch: forward and backward, and 3 if the recomputation gathers
    by itself."""
    gather_messages: int = 1
    """Collectives for one gather of a layer: 1 for a flat buffer, or one for each weight matrix."""
    overlap: float = 0.7
    """Share of the shorter of computing and ZeRO-3's communication that is hidden behind the longer."""
    gradient_overlap: bool = True
    """The reduction of gradients runs under the backward pass of the last micro-batch."""
    gather_overlap: bool = False
    """ZeRO-1's gathering of new weights runs under the next forward pass."""
    tensor_overlap: float = 0.0
    """Share of tensor parallelism's collectives that runs under products."""
    exchanged_heads: bool = False
    """A context group exchanges tokens for heads around attention (Ulysses); else keys and values go round it."""
    scattered_pipeline: bool = False
    """Stages exchange 1/TP of the activations on each rank."""
    logit_bytes: float = 8
    """Bytes for each logit of the micro-batch that are alive at the peak of the loss."""
    logit_tokens: int = 0
    """Tokens whose logits are made at once; 0: all of the micro-batch."""
    bucket_elements: float = 5e8
    """Elements of a reduction bucket."""
    dropout: bool = False
    """Masks are kept for the backward pass."""
    host: float = 1.0
    """Host time of a kernel call, in units of a plain PyTorch call."""
    serial_overflow_check: bool = False
    """Without ZeRO, fp16 gradients are looked through for overflow one tensor after the other, the processor waiting
    for each: DeepSpeed's FP16_Optimizer (`CheckOverflow.has_overflow_serial`)."""
    single_card: bool = False
    """Each weight is broadcast by its owner over one network card, as ZeRO-3 did before ZeRO-Infinity (Rajbhandari et
    al. 2021, arXiv:2104.07857, sec. 6.1)."""
    quantised_gather: bool = False
    """ZeRO++: weights gathered as int8 (qwZ), backward gathers inside a machine (hpZ), int4 gradients (qgZ)."""
    context_bytes: float = 0.0
    """What a reading of the whole device counts beside the allocator: CUDA, NCCL, libraries."""

    @property
    def on_chip(self) -> bool:
        """Attention keeps no pairs in memory."""
        return self.attention.startswith("flash")


OURS = Stack(logit_tokens=4096, bucket_elements=1e8, logit_bytes=10, exchanged_heads=True)
"""This code on a GPU through transformers: PyTorch's scaled dot product attention, chunked logits."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks and batch of one trained model."""

    gpus: int
    length: int
    """Tokens of a sequence."""
    micro_batch: int = 1
    """Sequences of a rank that go through together."""
    accumulation: int = 1
    """Micro-batches of an update."""
    zero: int = 0
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    """Pieces of the model on a stage: above 1, interleaved 1F1B."""
    context: int = 1
    """Ranks that share each row's tokens (`parallel.sp`)."""
    sequence_parallel: bool = False
    """Norms and residuals split over the tensor group."""
    recompute: Recompute = "none"
    recompute_every: int = 1
    """Layers are recomputed in the first of every so many."""
    recompute_budget: float = 0.0
    """Share of the layers that are kept whole all the same."""
    dtype: str = "bf16"
    """fp8: bf16 with `model.float8`."""
    optimizer: Optimizer = "adamw"
    lora: int = 0
    """Rank of adapters on all matrices of the layers, which then are the only trained weights; 0: all are trained."""
    embeddings_trained: bool = False
    """With adapters, embeddings and norms are trained beside them, as DeepSpeed-Chat does."""
    zero_group: int = 0
    """Ranks over which stage 1 shards, where that is fewer than all replicas; 0: all."""
    secondary: int = 0
    """hpZ: ranks that hold a second, two-byte shard of the weights for the backward gathers; 0: none."""
    offload_optimizer: bool = False
    offload_weights: bool = False
    offload_activations: bool = False

    def __post_init__(self) -> None:
        for name in (
            "gpus",
            "length",
            "micro_batch",
            "accumulation",
            "tensor",
            "pipeline",
            "virtual",
            "context",
            "recompute_every",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}.")
        if self.gpus % self.model_ranks:
            raise ValueError(
                f"{self.gpus} ranks do not split into tensor {self.tensor} x pipeline {self.pipeline} x context "
                f"{self.context} = {self.model_ranks}. Use a multiple."
            )
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero must be 0, 1, 2 or 3, got {self.zero}.")
        if self.pipeline > 1 and self.zero > 1:
            raise ValueError(f"pipeline {self.pipeline} needs ZeRO 0 or 1, got {self.zero}.")
        if self.virtual > 1 and self.pipeline == 1:
            raise ValueError(f"virtual {self.virtual} needs pipeline > 1.")

    @property
    def model_ranks(self) -> int:
        """Ranks that one replica is spread over by tensor, pipeline and context parallelism."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """Replicas, each with its own sequences."""
        return self.gpus // self.model_ranks

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards: replicas, and the context group, whose weights are the same."""
        return self.zero_group or self.data * self.context

    @property
    def replicas(self) -> int:
        """Ranks over which gradients are summed."""
        return self.data * self.context

    @property
    def sharded(self) -> bool:
        """ZeRO-3: weights are spread over ranks and gathered where they are used."""
        return self.zero == 3 and self.shards > 1

    @property
    def stored(self) -> str:
        """Type of weights and of whatever is no product of a layer in training."""
        return "bf16" if self.dtype in ("fp8", "fp4") else self.dtype

    def recomputed_share(self, layers: int) -> float:
        """Share of a model's layers that are recomputed in some way."""
        if self.recompute == "none":
            return 0.0
        return len(recomputed_layers(layers, every=self.recompute_every, budget=self.recompute_budget)) / layers

    @property
    def global_batch(self) -> int:
        """Sequences of an update."""
        return self.data * self.micro_batch * self.accumulation

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.length / self.context
