"""Trainable and frozen models on DeepSpeed: the only user of deepspeed, with checkpoint.py.

What the rest of the code relies on, and what DeepSpeed alone does not give:

- One trajectory. A loss is a local sum over a global count; the number of ranks, of micro-batches and the ZeRO stage do
  not change an update beyond rounding. DeepSpeed averages gradients over ranks; only `accumulate` knows.
- The clip is torch's at every stage: gradients are scaled by min(1, clip / (norm + 1e-6)) with the norm of the averaged
  gradients of all weights. DeepSpeed's own clip is off. Its norm exists at stages 1 to 3 only.
- A non-finite loss or gradient is found before the update, on all ranks in the same step.
- Under ZeRO-3, weights can be gathered some at a time, to be copied for generation (rollout/weights.py); whatever
  happens while they are whole or used layer by layer, they are released afterwards.
- No op is compiled: the optimiser is torch's, and the shared-memory collectives that DeepSpeed builds on CPUs are off.
"""

import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers.integrations import deepspeed as hf_deepspeed
from transformers.utils import logging as hf_logging
from transformers.utils import logging as transformers_logging

from rlhf import distributed, ds_config, heartbeat, host
from rlhf.config import OptimConfig
from rlhf.distributed import Group
from rlhf.engine_memory import num_bytes, optimizer_bytes, weight_bytes
from rlhf.health import UnhealthyError
from rlhf.metrics import Stats
from rlhf.models.compiled import compiled_blocks
from rlhf.models.tensor_parallel import cut_of, is_share
from rlhf.mpu import ModelParallelUnit
from rlhf.optimizers import Muon, make_optimizer, parameter_groups, zero_shards
from rlhf.schedule import lr_multiplier
from rlhf.state_writer import StateWriter

if distributed.device_type() == "cpu":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it, the import prints a line on stdout

import deepspeed  # noqa: E402
from deepspeed.ops.op_builder import AsyncIOBuilder  # noqa: E402
from deepspeed.runtime.zero import parameter_offload as ds_offload  # noqa: E402
from deepspeed.runtime.zero import utils as zero_utils  # noqa: E402
from deepspeed.utils import groups as ds_groups  # noqa: E402

from rlhf import universal  # noqa: E402

Batch = TypeVar("Batch")
Said = TypeVar("Said")
LossOf = Callable[[Callable[..., Any], Batch], tuple[Tensor, Said]]
"""Calls the model on a micro-batch: its loss, summed over tokens (or pairs), and what is to be said of it."""

_folder_numbers = itertools.count()
# The term that torch.nn.utils.clip_grad_norm_ adds to the norm before it divides.
CLIP_EPS = 1e-6


class NonFiniteError(UnhealthyError):
    """A loss, a gradient or a rollout was not finite; raised on all ranks before the update.

    Args:
        step: number of steps that the model has made.
        rank: the first on which it was found.
        role: of the model.
        what: was found.
        accumulated: gradients of an update that is not made are left.
    """

    def __init__(self, *, step: int, rank: int, role: str, what: str, accumulated: bool = True) -> None:
        super().__init__(
            f"{role}: {what} at step {step} on rank {rank}; the update was not made. Look at that step's rows, lower "
            "the learning rate, or use bf16 instead of fp16; earlier states are intact."
        )
        self.step = step
        self.rank = rank
        self.role = role
        self.accumulated = accumulated


@dataclass(frozen=True)
class StepStats:
    """What one optimiser step reports, equal on all ranks."""

    loss: float
    """The loss of the step: the sum over all ranks and micro-batches over the count."""
    grad_norm: float
    """Norm of the averaged gradients of all trained weights, before clipping; inf where fp16 overflowed."""
    lr: float
    """Learning rate of this step."""
    skipped: bool
    """fp16 overflowed: the loss scale was lowered, no weight changed, the schedule stays where it was."""
    stats: Stats = field(default_factory=dict)
    """What else is measured of the step, as this rank's part of metrics."""


def setup(timeout_seconds: float = 1800) -> None:
    """Join the process group and prepare DeepSpeed; call it once, before any model is built.

    Args:
        timeout_seconds: a collective that waits longer for a rank raises.
    """
    distributed.init(timeout_seconds)
    # DeepSpeed reads it where no launcher has set it.
    os.environ.setdefault("LOCAL_RANK", str(distributed.local_rank()))
    # DeepSpeed would compile this op at every start on CPUs; it serves tensor-parallel inference only, and without a
    # compiler or ninja the attempt raises.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # DeepSpeed's use of two renamed collectives: one warning per rank that a user can do nothing about.
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        warnings.filterwarnings("ignore", message=rf".*{name}.*", category=FutureWarning)
    # Bars of all ranks would run through one another in the log.
    hf_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # ZeRO's collectives run on a clone of the world group, which DeepSpeed would make with torch's default timeout.
    ds_groups._WORLD_GROUP = distributed.world_group()
    ds_groups._create_zero_param_parallel_group = _set_hpz_group


def _set_hpz_group(size: int) -> None:
    """DeepSpeed's would fail at the second model of a process, and have torch's default timeout."""
    ds_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = distributed.group_of(min(size, distributed.world_size())).handle


@contextmanager
def _own_hpz_group() -> Iterator[None]:
    """DeepSpeed keeps hpZ's group in a global, by which the next model would have hpZ too, whatever its JSON says."""
    ds_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    try:
        yield
    finally:
        ds_groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


@contextmanager
def _asking(mpu: ModelParallelUnit | None) -> Iterator[None]:
    """DeepSpeed keeps the last engine's `mpu` in a global, by which it finds the ranks to average over for all."""
    outer, ds_groups.mpu = ds_groups.mpu, mpu
    try:
        yield
    finally:
        ds_groups.mpu = outer


@contextmanager
def zero3_init(ds: Mapping[str, Any], *, shares: bool = False) -> Iterator[None]:
    """Build or load one model: under stage 3 its weights are sharded as they are made, else nothing special happens.

    transformers asks a global, a weak reference to the config created last, whether to shard. It is set for this block
    alone and restored after, so that a model for stage 2 is never built sharded because one for stage 3 came before it.

    Args:
        ds: content of the model's DeepSpeed JSON.
        shares: the model is cut into shares of ranks after it is built: it has to be whole on each until then.
    """
    outer = hf_deepspeed._hf_deepspeed_config_weak_ref
    hf_deepspeed._hf_deepspeed_config_weak_ref = None
    config = None
    try:
        if ds_config.zero_stage(ds) == 3 and not shares:
            config = hf_deepspeed.HfDeepSpeedConfig(for_deepspeed(ds))  # type: ignore[no-untyped-call]
        with _own_hpz_group():
            yield
    finally:
        hf_deepspeed._hf_deepspeed_config_weak_ref = outer
        del config


def for_deepspeed(ds: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON as DeepSpeed is given it.

    Without `hybrid_engine`: DeepSpeed's own fails on CPUs and does nothing useful on GPUs; the section is honoured here
    instead. With a new folder for weights on a disk: DeepSpeed empties it for each model, also of another role.

    Raises:
        ValueError: this machine cannot build DeepSpeed's asynchronous I/O.
    """
    content = {key: value for key, value in ds.items() if key != "hybrid_engine"}
    zero = content.get("zero_optimization", {})
    section = zero.get("offload_param") or {}
    if section.get("device") != "nvme":
        return content
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise ValueError(
            "`zero_optimization.offload_param.device` is nvme, but DeepSpeed's async_io cannot be built: libaio's "
            "headers are missing. Install libaio-dev (libaio-devel), or use cpu."
        )
    folder = Path(section["nvme_path"]) / f"model{next(_folder_numbers)}"
    return {**content, "zero_optimization": {**zero, "offload_param": {**section, "nvme_path": str(folder)}}}


class TrainEngine:
    """A model that is trained: forward, accumulate, step.

    A step is any number of micro-batches, the same on every rank; a rank without rows passes empty ones (loss 0 times a
    sum of the outputs), because under ZeRO every rank has to make the same calls.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ds: Mapping[str, Any],
        optim: OptimConfig,
        role: str,
        num_steps: int,
        tensor: Group | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: the weights with requires_grad are trained; built inside `zero3_init(ds)` for stage 3, or of shares
                (`models.tensor_parallel`), which ZeRO-3 divides here.
            ds: content of the DeepSpeed JSON, as loaded or resolved.
            optim: optimiser and schedule.
            role: name in errors: policy, reward, actor, critic.
            num_steps: length of the learning-rate schedule in optimiser steps.
            tensor: ranks that have a share of each weight; None: each has all.
        """
        self.role = role
        self.optim = optim
        self.num_steps = num_steps
        self.tensor = tensor or distributed.group_of(1)
        self.zero_stage = ds_config.zero_stage(ds)
        self.micro_batch_size = ds_config.micro_batch_size(ds)
        self.hybrid_engine = ds_config.hybrid_engine(ds)
        self.step_count = 0
        self.lr_scale = 1.0
        """What the schedule's rates are multiplied by (`rlhf/health.py`)."""
        self._trains_all = all(p.requires_grad for p in model.parameters())
        self.ds = ds_config.resolve(
            ds, optim=optim, world_size=self.num_replicas, trainable=True, lora=not self._trains_all
        )
        self._mpu = ModelParallelUnit.of(self.tensor.size) if self.tensor.size > 1 else None
        self._engine = self._wrap(model)
        if self.zero_stage == 0 and self.tensor.count == 1:
            # DeepSpeed would copy all gradients into a bucket and back, to reduce them over one rank.
            self._engine.enable_backward_allreduce = False
        if self.device.type == "cpu":
            host.keep_freed_memory()  # from here on: what loading freed is given back
        self.train()  # transformers loads models in eval mode: no dropout, no gradient checkpointing
        self._scales_16bit_at_stage0 = self.zero_stage == 0 and ds_config.dtype_name(ds) != "float32"
        if self._scales_16bit_at_stage0:
            # Here gradients become fp32 inside DeepSpeed's step only; its clip there has torch's formula.
            self._engine.optimizer.clip_grad = optim.clip_norm
            _undo_first_step(self._engine.optimizer)
        self._loss_is_finite = torch.ones((), dtype=torch.bool, device=self.device)
        self._loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self._at_boundary = False
        self._gradient_bytes = 0

    def _wrap(self, model: nn.Module) -> Any:
        """DeepSpeed's engine."""
        return _initialize(model, self.ds, optim=self.optim, mpu=self._mpu)

    @property
    def num_replicas(self) -> int:
        """Ranks over which DeepSpeed averages gradients, each with micro-batches of its own."""
        return self.tensor.count

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds the whole weights (ZeRO-3)."""
        return self.zero_stage == 3

    @property
    def module(self) -> nn.Module:
        """The model that was given to the constructor."""
        return self._engine.module  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Device of inputs and outputs."""
        return distributed.device()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        heartbeat.call(self.role)
        return self._engine(*args, **kwargs)

    def train(self) -> None:
        """Dropout on."""
        self._engine.train()

    def eval(self) -> None:
        """Dropout off."""
        self._engine.eval()

    def accumulate_all(
        self, batches: Sequence[Batch], loss_of: LossOf[Batch, Said], *, count: float | Tensor
    ) -> Iterator[tuple[Batch, Said]]:
        """Add the gradients of all micro-batches of a step. Collective.

        Args:
            batches: this rank's, as many as every other rank's.
            loss_of: is given the model to call and a micro-batch.
            count: as in `accumulate`.

        Yields:
            Each micro-batch with what `loss_of` says of it. To be iterated to the end.
        """
        for i, batch in enumerate(batches):
            loss_sum, said = loss_of(self, batch)
            self.accumulate(loss_sum, count=count, last=i == len(batches) - 1)
            yield batch, said

    def accumulate(self, loss_sum: Tensor, *, count: float | Tensor, last: bool) -> None:
        """Add one micro-batch's gradients. Collective.

        Args:
            loss_sum: 0-d, fp32, the loss summed over this rank's tokens (or pairs) of the micro-batch.
            count: number of tokens (or pairs) of the whole step, summed over all ranks and micro-batches. Those that
                ranks with shares of the weights compute together are in the loss and in the count of each of them.
            last: whether this is the step's last micro-batch, on every rank.

        Raises:
            ValueError: count is not positive, or the loss does not depend on the weights.
        """
        count = self._note_loss(loss_sum, count)
        heartbeat.call(self.role)
        self._engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks, so the world size here makes it a sum over ranks, over the count. With shares
        # of weights it averages over fewer ranks, and the count has each token as often as there are shares.
        scale = distributed.world_size() / count
        if self.zero_stage == 0:
            # DeepSpeed 0.19.8 forgets the loss scale in backward here, but not in step, which divides by it.
            scale *= self._loss_scale()
        with _asking(self._mpu):
            self._engine.backward(loss_sum * scale)
        self._at_boundary = last

    def _checked_count(self, count: float | Tensor) -> float:
        count = float(count)
        if not count > 0:
            raise ValueError(f"{self.role}: count must be > 0, got {count}. A step without a single token has no loss.")
        return count

    def _note_loss(self, loss_sum: Tensor, count: float | Tensor) -> float:
        """Check a micro-batch's loss, remember it for the step, and give the count as a number."""
        count = self._checked_count(count)
        if loss_sum.ndim != 0 or not loss_sum.requires_grad:
            raise ValueError(
                f"{self.role}: the loss must be one number that depends on the weights, got shape "
                f"{tuple(loss_sum.shape)}, requires_grad {loss_sum.requires_grad}. For an empty micro-batch pass "
                "0 times the sum of the model's outputs."
            )
        self._loss_is_finite &= torch.isfinite(loss_sum.detach())
        self._loss += loss_sum.detach() / count
        return count

    @torch.no_grad()
    def step(self) -> StepStats:
        """Clip and update the weights from what has been accumulated. Collective.

        Raises:
            NonFiniteError: on every rank, before any weight changed.
        """
        assert self._at_boundary, "step() follows accumulate(..., last=True)"
        heartbeat.call(self.role)
        self._at_boundary = False
        gradients = _averaged_gradients(self._engine, self.zero_stage)
        self._gradient_bytes = num_bytes(gradient for _, gradient in gradients)
        loss, norm = self._checked_norm(gradients)
        lr = self.optim.lr * self._lr_multiplier() * self.lr_scale
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self.optim.clip_norm > 0 and math.isfinite(norm) and not self._scales_16bit_at_stage0:
            coefficient = self.optim.clip_norm / (norm + CLIP_EPS)
            if coefficient < 1:
                torch._foreach_mul_([gradient for _, gradient in gradients], coefficient)
        self._update()
        skipped = not self._engine.was_step_applied()
        self.step_count += not skipped
        return StepStats(loss=loss, grad_norm=norm, lr=lr, skipped=skipped, stats=self._step_metrics())

    def _update(self) -> None:
        """Let DeepSpeed make the step with the gradients that it has."""
        with _asking(self._mpu):
            self._engine.step()

    def _step_metrics(self) -> Stats:
        return {}

    @torch.no_grad()
    def discard_gradients(self) -> None:
        """After a NonFiniteError: leave what was accumulated behind, so that a state can be loaded. Collective.

        Only a step clears all that DeepSpeed keeps of an accumulation. It is made with gradients of 0, and what it does
        to weights and moments is overwritten by the state.
        """
        for _, gradient in _averaged_gradients(self._engine, self.zero_stage):
            gradient.zero_()
        self._update()

    def _lr_multiplier(self) -> float:
        return lr_multiplier(
            self.step_count,
            num_steps=self.num_steps,
            schedule=self.optim.schedule,
            warmup_frac=self.optim.warmup_frac,
            min_lr_frac=self.optim.min_lr_frac,
        )

    def _checked_norm(self, gradients: list[tuple[nn.Parameter, Tensor]]) -> tuple[float, float]:
        """Loss and gradient norm over all ranks, equal on each; raises on all if one of them is not finite."""
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        if gradients:
            norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for _, g in gradients]
            squares = torch.stack(norms).to(self.device, torch.float64).square()
            if self.tensor.size > 1:
                # A weight that all ranks of a group have whole has the same gradient on each.
                whole = torch.tensor([not is_share(weight) for weight, _ in gradients], device=self.device)
                squares = torch.where(whole, squares / self.tensor.size, squares)
            square = squares.sum()
        bad_loss = (~self._loss_is_finite).to(torch.float64)
        self._loss_is_finite.fill_(True)  # noqa: FBT003  the tensor's value
        # One small collective a step: every rank then knows every rank's part.
        parts = distributed.all_gather(torch.stack([square, bad_loss, self._loss])).tolist()
        self._loss.zero_()
        for rank, (_, bad, _) in enumerate(parts):
            if bad:
                raise NonFiniteError(step=self.step_count, rank=rank, role=self.role, what="the loss is not finite")
        total = sum(parts[rank][0] for rank in self._ranks_of_all_gradients())
        if not math.isfinite(total) and ds_config.dtype_name(self.ds) != "float16":
            self._raise_bad_gradient([rank for rank, (part, _, _) in enumerate(parts) if not math.isfinite(part)])
        norm = math.sqrt(total) / self._loss_scale() if math.isfinite(total) else math.inf
        return sum(loss for _, _, loss in parts), norm

    def _ranks_of_all_gradients(self) -> Sequence[int]:
        """Ranks that hold the averaged gradient of each weight once together."""
        # At stage 0 every rank holds all gradients (of its shares), else its own shard of them.
        return range(self.tensor.size if self.zero_stage == 0 else distributed.world_size())

    def _raise_bad_gradient(self, ranks: list[int]) -> None:
        found = distributed.all_gather_objects(_non_finite_names(self._engine, self.zero_stage))
        names = sorted({name for part in found for name in part})
        where = f" of {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}" if names else ""
        what = f"the averaged gradient{where} is not finite"
        raise NonFiniteError(step=self.step_count, rank=ranks[0], role=self.role, what=what)

    def _loss_scale(self) -> float:
        if ds_config.dtype_name(self.ds) != "float16":
            return 1.0
        return float(self._engine.optimizer.loss_scale)

    @contextmanager
    def gathered(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """Inside, these weights are whole on this rank, and not to be changed; after, as before. Collective."""
        with _gathered(self._engine, self.zero_stage, weights):
            yield

    @contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """The model itself to generate with, in eval mode.

        Under ZeRO-3 its weights stay sharded and each forward gathers layer by layer, so every rank has to make the
        same number of forwards; Hugging Face's generate finds that out by itself in this block (synced_gpus).
        """
        heartbeat.call(self.role)
        with self._evaluating(), _sharded_weights(self._engine, self.ds):
            yield self.module

    def release_cache(self) -> None:
        """Return the accelerator's cached memory after a rollout, if the JSON says so."""
        if self.hybrid_engine.enabled and self.hybrid_engine.release_inference_cache and self.device.type != "cpu":
            torch.accelerator.memory.empty_cache()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        training = self.module.training
        self.eval()
        try:
            yield
        finally:
            if training:
                self.train()

    def full_state_dict(self, module: nn.Module | None = None) -> dict[str, Tensor] | None:
        """All weights on rank 0's CPU, None on the other ranks, which never hold more than one weight. Collective.

        Args:
            module: the part to export (the Hugging Face model inside a wrapper); all of `self.module` if None.

        Raises:
            RuntimeError: on every rank, if a tensor came out empty.
        """
        model = self.module if module is None else module
        return full_state_dict(self._engine, self.zero_stage, model, share_group=self.tensor)

    def save_state(self, folder: str | Path, tag: str, writer: StateWriter) -> None:
        """Hand weights, optimiser and step, for this number of ranks, to a writer of folder/tag. Collective.

        Args:
            folder: of the state.
            tag: name of the engine's folder in it.
            writer: of this state on this rank; its `wait` tells of errors.
        """
        engine = self._engine
        former, engine.checkpoint_engine = engine.checkpoint_engine, writer
        # A copy of DeepSpeed's script for reading its files, which fails on one rank alone where the disk is full.
        engine._copy_recovery_script = lambda path: None
        try:
            with _asking(self._mpu):
                engine.save_checkpoint(
                    str(folder),
                    tag=tag,
                    client_state={"step_count": self.step_count},
                    save_latest=False,
                    exclude_frozen_parameters=not self._trains_all,
                )
        finally:
            engine.checkpoint_engine = former

    def load_state(self, folder: str | Path, tag: str) -> None:
        """Restore what `save_state` wrote, on the same number of ranks. Collective.

        Raises:
            FileNotFoundError: there is no such state.
        """
        with _asking(self._mpu):
            path, client = self._engine.load_checkpoint(
                str(folder), tag=tag, load_module_strict=self._trains_all, load_lr_scheduler_states=False
            )
        if path is None:
            raise FileNotFoundError(f"{self.role}: no state in {Path(folder) / tag}.")
        self.step_count = int(client["step_count"])

    def load_universal(self, folder: Path, *, step_count: int) -> None:
        """Restore weights and moments from the form that `rlhf.universal` writes. Collective.

        AdamW's moments in 8 bits begin anew: their scales are of blocks of a rank's vector, which is cut otherwise.

        Args:
            folder: holds `zero/`.
            step_count: optimiser steps made, for the schedule.
        """
        moments = self.optim.name != "adamw_8bit"
        universal.load(self._engine, self.zero_stage, folder, self._group_names(), moments=moments)
        self.step_count = step_count

    def state_bytes(self) -> dict[str, int]:
        """Bytes on this rank: weights, gradients (at the last step), optimizer."""
        return {
            "weights": weight_bytes(self.module),
            "gradients": self._gradient_bytes,
            "optimizer": optimizer_bytes(self._engine, self.module),
        }

    def layout(self) -> dict[str, Any]:
        """How the engine's saved files are to be read: JSON-able, equal on all ranks."""
        return {
            "zero_stage": self.zero_stage,
            "optimizer": self.optim.name,
            "step_count": self.step_count,
            "tensor_parallel": self.tensor.size,
            "shapes": {n: list(getattr(p, "ds_shape", p.shape)) for n, p in self.module.named_parameters()},
            "groups": self._group_names(),
        }

    def describe(self) -> dict[str, Any]:
        """What makes its trajectory, beside weights and data."""
        return {
            "optimiser": vars(self.optim),
            "schedule steps": self.num_steps,
            "dtype": ds_config.dtype_name(self.ds),
        }

    def _group_names(self) -> list[list[str]]:
        """Names of the trained weights in the order of the optimiser's groups."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        groups = parameter_groups(self.module, self.optim)
        return [[names[id(parameter)] for parameter in group["params"]] for group in groups]


class FrozenEngine:
    """A model that is only asked: reference, reward. Eval mode, no gradients; plain, or sharded under ZeRO-3."""

    def __init__(self, model: nn.Module, *, ds: Mapping[str, Any], role: str) -> None:
        """Wrap a model.

        Args:
            model: built inside `zero3_init(ds)` for stage 3.
            ds: content of the DeepSpeed JSON; stage 0 or 3.
            role: name in errors.
        """
        self.role = role
        self.zero_stage = ds_config.zero_stage(ds)
        self.ds = ds_config.resolve(ds, optim=None, world_size=distributed.world_size(), trainable=False)
        model.requires_grad_(requires_grad=False)
        self._engine: Any = None
        self.module = model
        if self.zero_stage == 3:
            self._engine = _initialize(model, self.ds)
        else:
            dtype = getattr(torch, ds_config.dtype_name(ds))
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
            # Buffers keep their type, as DeepSpeed keeps the trained model's: rotary frequencies in bfloat16 are other
            # positions, and a reference would not say what the actor says.
            model.to(self.device)
        model.eval()

    @property
    def device(self) -> torch.device:
        """Device of inputs and outputs."""
        return distributed.device()

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        heartbeat.call(self.role)
        return (self.module if self._engine is None else self._engine)(*args, **kwargs)

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds the whole weights (ZeRO-3)."""
        return self.zero_stage == 3

    @contextmanager
    def gathered(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        """As `TrainEngine.gathered`."""
        with _gathered(self._engine, self.zero_stage, weights):
            yield

    @contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """As `TrainEngine.generation_module`."""
        with _sharded_weights(self._engine, self.ds):
            yield self.module

    def state_bytes(self) -> dict[str, int]:
        """As `TrainEngine.state_bytes`."""
        return {"weights": weight_bytes(self.module)}

    def release_cache(self) -> None:
        """As `TrainEngine.release_cache`: a frozen model's JSON asks for nothing."""

    def full_state_dict(self, module: nn.Module | None = None) -> dict[str, Tensor] | None:
        """As `TrainEngine.full_state_dict`."""
        return full_state_dict(self._engine, self.zero_stage, self.module if module is None else module)


def _initialize(
    model: nn.Module, ds: dict[str, Any], *, optim: OptimConfig | None = None, mpu: ModelParallelUnit | None = None
) -> Any:
    if distributed.device_type() == "cpu":
        ds_config.check_on_cpu(ds, has_fp16=deepspeed.get_accelerator().is_fp16_supported())
    if ds_config.zero_stage(ds) == 3:
        for block in compiled_blocks(model):
            # Hooks inside would cut the graph at every weight. Without them the block's are gathered together.
            deepspeed.utils.set_z3_leaf_module(block, True)  # noqa: FBT003  DeepSpeed's signature
    groups = None if optim is None else parameter_groups(model, optim)
    made = make_optimizer(groups, optim) if groups and optim and optim.name in ds_config.OBJECTS else None
    if made is not None and type(made) not in zero_utils.ZERO_SUPPORTED_OPTIMIZERS:
        zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(type(made))  # else a warning for each engine
    with _own_hpz_group(), _asking(mpu):
        engine, *_ = deepspeed.initialize(
            model=model,
            model_parameters=groups,
            optimizer=made,
            config=for_deepspeed(ds),
            mpu=mpu,
            dist_init_required=False,
        )
    if isinstance(made, Muon) and ds_config.zero_stage(ds) > 0:
        made.shards = zero_shards(engine.optimizer, ds_config.zero_stage(ds))
    return engine


def _undo_first_step(optimizer: Any) -> None:
    """Take back the step with gradients of 0 that DeepSpeed's 16-bit optimiser of stage 0 makes to allocate moments.

    It decays the master weights, and counts in AdamW's bias correction: the first updates would be too small.
    """
    optimizer.optimizer.state.clear()
    for weights, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            master.data.copy_(weight.data)


def _averaged_gradients(engine: Any, zero_stage: int) -> list[tuple[nn.Parameter, Tensor]]:
    """The tensors that DeepSpeed's next step will read: all gradients at stage 0, else this rank's shard.

    They are scaled in place, so they have to be the ones DeepSpeed uses and no copies. Before each stands its weight,
    or one of the weights of its group, which are all shares of a group of ranks or all whole (`parameter_groups`).
    """
    optimizer = engine.optimizer
    if zero_stage == 0:
        return [(p, p.grad) for p in engine.module.parameters() if p.requires_grad and p.grad is not None]
    weights = optimizer.fp16_groups if zero_stage == 3 else optimizer.bit16_groups
    if zero_stage == 3 and not optimizer.offload_optimizer:
        gradients = [optimizer.averaged_gradients[group] for group in range(len(weights))]
    elif zero_stage == 3:
        gradients = [[flat.grad] for flat in optimizer.fp32_partitioned_groups_flat]
    elif optimizer.cpu_offload:
        optimizer._wait_for_offload_copies()
        gradients = [[flat.grad] for flat in optimizer.single_partition_of_fp32_groups]
    else:
        averaged = [optimizer.averaged_gradients[group] for group in range(len(weights))]
        # With fp32 accumulation the list is made of views of one flat buffer.
        gradients = [[part.flat_partition] if hasattr(part, "flat_partition") else part for part in averaged]
    return [(group[0], gradient) for group, parts in zip(weights, gradients, strict=True) for gradient in parts]


def _non_finite_names(engine: Any, zero_stage: int) -> list[str]:
    """This rank's weights whose averaged gradient is not finite, where DeepSpeed keeps gradients apart by weight."""
    optimizer = engine.optimizer
    pairs: list[tuple[Tensor, Tensor]] = []
    if zero_stage == 0:
        pairs = [(p, p.grad) for p in engine.module.parameters() if p.grad is not None]
    elif zero_stage == 3 and not optimizer.offload_optimizer:
        for group, weights in enumerate(optimizer.fp16_groups):
            pairs += zip(weights, optimizer.averaged_gradients[group], strict=True)
    elif zero_stage in (1, 2) and not optimizer.cpu_offload:
        for group, weights in enumerate(optimizer.params_in_partition):
            parts = [g for g in optimizer.averaged_gradients[group] if not getattr(g, "_zero_padding", False)]
            pairs += zip(weights, parts, strict=False)
    return [engine.param_names[weight] for weight, grad in pairs if not torch.isfinite(grad).all()]


def full_state_dict(
    engine: Any, zero_stage: int, module: nn.Module, *, share_group: Group | None = None
) -> dict[str, Tensor] | None:
    """See `TrainEngine.full_state_dict`; `engine` may be None for a plain model."""
    if zero_stage == 3:
        _release(engine)
    exported: dict[str, Tensor] = {}
    seen: dict[int, Tensor] = {}
    with distributed.together("exporting weights"):
        for name, tensor in module.state_dict(keep_vars=True).items():
            sharded = [tensor] if hasattr(tensor, "ds_id") else []
            # A tied weight has two names and one entry in `seen`, and stays one tensor in the result.
            if id(tensor) not in seen:
                with deepspeed.zero.GatheredParameters(sharded, enabled=bool(sharded)):
                    whole = tensor.detach()
                    if share_group is not None and (cut := cut_of(tensor)) is not None:
                        whole = cut.join(share_group.gather(whole))
                    seen[id(tensor)] = whole.to("cpu", copy=True) if distributed.is_main() else torch.empty(0)
            exported[name] = seen[id(tensor)]
    empty = [name for name, tensor in exported.items() if tensor.numel() == 0] if distributed.is_main() else []
    distributed.same_on_all(not empty, f"exported weights are empty: {', '.join(empty[:5])}.")
    return exported if distributed.is_main() else None


def _parameter_offload(engine: Any) -> Any:
    """DeepSpeed's object that holds the ZeRO-3 hooks: the optimiser's, or the "optimiser" of a frozen engine."""
    return getattr(engine.optimizer, "parameter_offload", engine.optimizer)


def _release(engine: Any) -> None:
    """Put ZeRO-3 in the state between steps: nothing in flight, no submodule active, every weight sharded.

    Under DeepSpeed's default thresholds weights stay gathered after a forward, and a mode switch or an exception in the
    middle of a forward would leave them marked as in use; the next gather or prefetch then fails or leaks memory.
    """
    for module in engine.module.modules():
        if hasattr(module._parameters, "_in_forward"):
            module._parameters._in_forward = False
    _parameter_offload(engine).partition_all_parameters()


@contextmanager
def _gathered(engine: Any, zero_stage: int, weights: Sequence[nn.Parameter]) -> Iterator[None]:
    if zero_stage != 3:
        yield
        return
    _release(engine)
    with deepspeed.zero.GatheredParameters(list(weights)):
        yield


@contextmanager
def _sharded_weights(engine: Any, ds: Mapping[str, Any]) -> Iterator[None]:
    """Inside: weights stay sharded, and transformers knows that forwards are collective. After: all released."""
    if ds_config.zero_stage(ds) != 3:
        yield
        return
    stack_depth = len(ds_offload.FWD_MODULE_STACK)
    with zero3_init(ds):
        _release(engine)
        try:
            yield
        finally:
            del ds_offload.FWD_MODULE_STACK[stack_depth:]
            _release(engine)
