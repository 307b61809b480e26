"""Optimisers that DeepSpeed is handed as objects: Muon, and AdamW with 8-bit moments.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) steps along the momentum of a matrix with all its singular
values brought near 1. Under ZeRO an optimiser sees flat shards. Momentum is taken there, element by element; only its
result is put together, one bucket of matrices at a time, and each matrix is orthogonalised on one rank. DeepSpeed's own
Muon does that in the backward pass at stages 1 and 2, where norm and clip would be those of the update and not of the
gradient.
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rlhf import distributed
from rlhf.config import OptimConfig
from rlhf.models.backbone import base_of
from rlhf.models.lora import linear_layers
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import ScalarModel
from rlhf.models.tensor_parallel import is_share

# Quintic Newton-Schulz: the slope at 0 is as large as convergence to [0.7, 1.2] allows (Jordan et al. 2024).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
# Root mean square of an AdamW step in units of its rate (Liu et al. 2025, arXiv:2502.16982, sec. 2.2).
ADAMW_RMS = 0.2
# Elements of matrices that are put together at once.
BUCKET_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Shard:
    """What a rank's flat vector holds of one matrix: elements `start` to `stop` of it, from `offset` of the vector."""

    shape: tuple[int, int]
    start: int
    stop: int
    offset: int
    divided: bool
    """Whether several ranks hold parts of the matrix; the same on all ranks."""

    @property
    def numel(self) -> int:
        """Elements of the whole matrix."""
        return self.shape[0] * self.shape[1]

    def of(self, flat: Tensor) -> Tensor:
        """This part of a rank's vector, as a view."""
        return flat[self.offset : self.offset + self.stop - self.start]


class Muon(torch.optim.Optimizer):
    """Muon for the groups with `matrices` true, AdamW for the others; weight decay is decoupled in both.

    m = momentum m + (1 - momentum) g; the step is lr 0.2 sqrt(max(rows, columns)) orthogonal((1 - momentum) g +
    momentum m), which has the root mean square of an AdamW step, so that one rate serves both.
    """

    def __init__(self, groups: list[dict[str, Any]], optim: OptimConfig) -> None:
        """Take parameter groups.

        Args:
            groups: each with `params`, `weight_decay` and `matrices`.
            optim: rate, betas, eps and momentum.
        """
        defaults = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "momentum": optim.momentum}
        super().__init__(groups, defaults)
        self.shards: Mapping[Tensor, list[Shard]] = {}
        """Under ZeRO: of each flat parameter its matrices, in an order that is the same on all ranks."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update from `.grad`. Collective under ZeRO."""
        assert closure is None, "no closure"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if group["matrices"]:
                    self._muon_step(weight, group)
                else:
                    _adamw_step(weight, self.state[weight], group)

    def _muon_step(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        grad = cast(Tensor, weight.grad)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        direction = grad.lerp(momentum, group["momentum"])
        if weight.ndim == 2:
            direction = _matched(direction)
        else:
            _orthogonalise_shards(direction, self.shards[weight])
        weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])


def orthogonalise(matrix: Tensor) -> Tensor:
    """Singular vectors as they are, singular values near 1 (0.7 to 1.2): five steps of Newton-Schulz.

    Computed in bfloat16 on accelerators, as published, and in float32 on CPUs; returned in the type of `matrix`.
    """
    a, b, c = COEFFICIENTS
    x: Tensor = matrix.float()
    x = x / (x.norm() + 1e-7)
    if matrix.device.type != "cpu":
        x = x.bfloat16()
    if matrix.shape[0] > matrix.shape[1]:
        x = x.mT
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    if matrix.shape[0] > matrix.shape[1]:
        x = x.mT
    return x.to(matrix.dtype)


def _matched(matrix: Tensor) -> Tensor:
    scale: float = ADAMW_RMS * max(matrix.shape) ** 0.5
    return orthogonalise(matrix) * scale


def _orthogonalise_shards(direction: Tensor, shards: list[Shard]) -> None:
    """In place, for a rank's vector of all its parts of matrices. Collective where a matrix is divided."""
    for shard in shards:
        if not shard.divided and shard.stop > shard.start:
            part = shard.of(direction)
            whole = part.view(shard.shape).to(distributed.device())
            part.copy_(_matched(whole).flatten())
    number = 0
    for bucket in _buckets([shard for shard in shards if shard.divided]):
        sizes = [shard.numel for shard in bucket]
        whole = torch.zeros(sum(sizes), dtype=direction.dtype, device=distributed.device())
        for shard, piece in zip(bucket, torch.split(whole, sizes), strict=True):
            piece[shard.start : shard.stop] = shard.of(direction)
        whole = distributed.all_sum(whole)
        for shard, piece in zip(bucket, torch.split(whole, sizes), strict=True):
            # In turn, so that the products are shared out; the sum below brings each result to all ranks.
            if number % distributed.world_size() == distributed.rank():
                piece.copy_(_matched(piece.view(shard.shape)).flatten())
            else:
                piece.zero_()
            number += 1
        whole = distributed.all_sum(whole)
        for shard, piece in zip(bucket, torch.split(whole, sizes), strict=True):
            shard.of(direction).copy_(piece[shard.start : shard.stop])


def _buckets(shards: list[Shard]) -> Iterator[list[Shard]]:
    bucket: list[Shard] = []
    for shard in shards:
        if bucket and sum(s.numel for s in bucket) + shard.numel > BUCKET_ELEMENTS:
            yield bucket
            bucket = []
        bucket.append(shard)
    if bucket:
        yield bucket


def _adamw_step(weight: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
    beta1, beta2 = group["betas"]
    adamw(
        [weight], [cast(Tensor, weight.grad)], [state["exp_avg"]], [state["exp_avg_sq"]], [], [state["step"]],
        fused=True, amsgrad=False, beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"],
        eps=group["eps"], maximize=False,
    )  # fmt: skip


def make_optimizer(groups: list[dict[str, Any]], optim: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser of `optim.name` (`ds_config.OBJECTS`) for the groups of `parameter_groups`.

    AdamW's 8-bit moments are bitsandbytes', with a scale for each 256 (Dettmers et al. 2022, arXiv:2110.02861).
    """
    if optim.name == "muon":
        return Muon(groups, optim)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it misses a kernel that is not for optimisers
    bitsandbytes = importlib.import_module("bitsandbytes")
    made = bitsandbytes.optim.AdamW8bit(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)
    return cast(torch.optim.Optimizer, made)


def parameter_groups(model: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Trained weights in groups: matrices are decayed; biases, norms and other vectors are not.

    Shares of weights (`models.tensor_parallel`) are apart from weights that each rank has whole.

    For Muon there is a group of its own, `matrices` true: the weights of the linear layers but the heads. Embeddings
    and heads go by AdamW, as is usual.

    Raises:
        ValueError: no weight is trained, or Muon has no matrix.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError("no weight of the model requires a gradient. A frozen model belongs in a FrozenEngine.")
    hidden = _hidden_matrices(model) if optim.name == "muon" else set()
    if optim.name == "muon" and not any(id(p) in hidden for p in trained):
        raise ValueError("optim.name=muon, but no matrix of a linear layer is trained. Use optim.name=adamw.")
    groups: dict[tuple[bool, float, bool], list[nn.Parameter]] = {}
    for matrices, decay in ((True, optim.weight_decay), (False, optim.weight_decay), (False, 0.0)):
        groups[matrices, decay, False] = []
        groups[matrices, decay, True] = []
    for p in trained:
        # A weight sharded by ZeRO-3 has an empty shape of its own and keeps the real one in ds_shape.
        decayed = len(getattr(p, "ds_shape", p.shape)) > 1
        groups[id(p) in hidden, optim.weight_decay if decayed else 0.0, is_share(p)].append(p)
    flag = optim.name == "muon"
    return [
        {"params": params, "weight_decay": decay, **({"matrices": matrices} if flag else {})}
        for (matrices, decay, _), params in groups.items()
        if params
    ]


def _hidden_matrices(model: nn.Module) -> set[int]:
    """Ids of the weights of all linear layers but the heads."""
    inner = base_of(model.model if isinstance(model, Policy | ScalarModel) else model)
    return {id(cast(Any, inner.get_submodule(name)).weight) for name in linear_layers(cast(Any, inner))}


def zero_shards(optimizer: Any, zero_stage: int) -> dict[Tensor, list[Shard]]:
    """How the flat vectors that DeepSpeed's ZeRO optimiser steps are made of matrices, for the groups of matrices.

    Args:
        optimizer: of stage 1, 2 or 3, around a `Muon`.
        zero_stage: which.
    """
    rank = distributed.rank()
    is_matrix = [group["matrices"] for group in optimizer.optimizer.param_groups]
    found: dict[Tensor, list[Shard]] = {}
    if zero_stage == 3:
        for number, (flat, weights) in enumerate(
            zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
        ):
            if not is_matrix[optimizer.sub_group_to_group_id[number]]:
                continue
            offset, found[flat] = 0, []
            for weight in weights:
                size = weight.partition_numel()
                start, stop = (min(n * size, weight.ds_numel) for n in (rank, rank + 1))
                found[flat].append(Shard(tuple(weight.ds_shape), start, stop, offset, divided=True))
                offset += size
        return found
    for number, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        if not is_matrix[number]:
            continue
        size, whole = optimizer.partition_size[number], optimizer.bit16_groups_flat[number]
        first, found[flat] = rank * size, []
        for weight in optimizer.bit16_groups[number]:
            # Order and padding are DeepSpeed's; where a weight lies in the vector of all says it.
            begin = (weight.data_ptr() - whole.data_ptr()) // weight.element_size()
            end = begin + weight.numel()
            low, high = (min(max(n, begin), end) for n in (first, first + size))
            divided = begin // size != (end - 1) // size
            found[flat].append(Shard(tuple(weight.shape), low - begin, high - begin, low - first, divided=divided))
    return found
