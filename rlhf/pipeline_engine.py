"""A trained model whose layers are dealt to the ranks of a pipeline, by DeepSpeed's PipelineEngine.

What DeepSpeed gives: the 1F1B schedule (Narayanan et al. 2019, PipeDream), sends of activations and gradients between
stages, and ZeRO-1 over the ranks that hold the same layers. What is done here, beside what `TrainEngine` does for all:

- All ranks of a pipeline read the same rows. So each knows a micro-batch's layout and positions, and the shape of what
  comes in; hidden states are all that is sent, and micro-batches may differ in length and number from step to step.
- The norm is over the weights of all stages. DeepSpeed's own clip at stage 0 leaves out all stages but the first.
- A tied embedding has one owner, the first stage. The last stage's copy is in no optimiser: its gradient is sent to the
  owner and added there before gradients are averaged, and it gets the new weight after the step. So the norm counts it
  once, its moments exist once, and the copies cannot drift apart.
- Loss, tokens and FLOPs are the last stage's alone, and so counted once.
"""

import contextlib
import io
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from deepspeed.utils import groups as ds_groups
from torch import Tensor, nn

from rlhf import distributed, ds_config, heartbeat, memory
from rlhf.config import OptimConfig
from rlhf.distributed import Group
from rlhf.engine import Batch, LossOf, Said, TrainEngine, for_deepspeed
from rlhf.metrics import Stats
from rlhf.models.backbone import hidden_states
from rlhf.models.pipeline_part import keep_part
from rlhf.models.pipeline_weights import gather_weights, whole_model
from rlhf.models.policy import Policy, PolicyOutput
from rlhf.optimizers import parameter_groups
from rlhf.sharing import Sharing
from rlhf.stopwatch import Stopwatch

logger = logging.getLogger(__name__)

# Share of the free memory that the whole model may fill while answers are drawn: keys, values and logits take the rest.
USABLE_FRAC = 0.9


def train_engine(
    model: Policy, *, sharing: Sharing, ds: Mapping[str, Any], optim: OptimConfig, role: str, num_steps: int
) -> TrainEngine:
    """The engine of a model that each rank has whole or in shares, or of which it is to have some layers."""
    if sharing.pipeline.size > 1:
        return PipelineTrainEngine(model, group=sharing.pipeline, ds=ds, optim=optim, role=role, num_steps=num_steps)
    return TrainEngine(model, ds=ds, optim=optim, role=role, num_steps=num_steps, tensor=sharing.tensor)


class _Stage(nn.Module):
    """The one layer of DeepSpeed's pipeline that this rank has: its part of a policy, and what to do with it next."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.calls: deque[Callable[[Tensor], Tensor]] = deque()
        """One for each micro-batch, in their order."""

    def forward(self, x: Tensor) -> Tensor:
        return self.calls.popleft()(x)


class _Micro1F1B(schedule.TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's 1F1B without what follows the last backward pass: that is `TrainEngine.step`'s."""

    def steps(self) -> Iterator[list[Any]]:
        after = (schedule.ReduceTiedGrads, schedule.ReduceGrads, schedule.OptimizerStep)
        for instructions in super().steps():
            yield [instruction for instruction in instructions if not isinstance(instruction, after)]


class PipelineTrainEngine(TrainEngine):
    """A `Policy` of which each rank of a pipeline has some layers.

    Called without gradients, it is a pipeline too: a rank goes on to the next call when its layers are done. Then, as
    in training, the last stage alone has an output; on the others it is 0, as their masks of targets are empty.
    """

    def __init__(
        self, model: Policy, *, group: Group, ds: Mapping[str, Any], optim: OptimConfig, role: str, num_steps: int
    ) -> None:
        """Keep this rank's layers of a model, and wrap them.

        Args:
            model: whole, the same on all ranks; what other stages have is taken from it.
            group: of `distributed.pipeline_of`, two stages at least.
            ds: as for `TrainEngine`; ZeRO 0 or 1.
            optim: as for `TrainEngine`.
            role: as for `TrainEngine`.
            num_steps: as for `TrainEngine`.
        """
        assert group.by_layers and group.size > 1, "a model on one stage is a TrainEngine's"
        self.group = group
        self._policy = model
        self._watch = Stopwatch()
        self._span = (0, 0)
        self._busy: list[tuple[int, int]] = []
        self._coming: deque[Tensor] = deque()
        self._part = keep_part(model.model, number=group.rank, num_stages=group.size)
        self._tied_weight = self._end_of_tied_weight()
        self._hidden_size = int(model.config.get_text_config().hidden_size)
        super().__init__(model, ds=ds, optim=optim, role=role, num_steps=num_steps)
        self._dtype = getattr(torch, ds_config.dtype_name(self.ds))
        if self._tied_weight is not None:
            self._tied_weight.requires_grad = True
        # Else all stages would draw the same dropout masks, each for its own layers.
        torch.manual_seed(torch.initial_seed() + group.rank)
        own = {name: list(weight.shape) for name, weight in model.named_parameters() if weight is not self._copy}
        self._shapes = {name: shape for part in group.gather_objects(own) for name, shape in part.items()}
        dealt = ", ".join(
            f"{layers.start}-{layers.stop - 1} ({size / 1e6:.1f} M weights)"
            for layers, size in group.gather_objects((self._part.layers, sum(p.numel() for p in model.parameters())))
        )
        logger.info("%s: %d pipelines of %d stages, layers %s", role, group.count, group.size, dealt)

    @property
    def layers(self) -> range:
        """That this rank has."""
        return self._part.layers

    @property
    def is_first(self) -> bool:
        """Whether this rank embeds."""
        return self.group.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the head, and with it the outputs."""
        return self.group.rank == self.group.size - 1

    @property
    def num_replicas(self) -> int:
        """Pipelines, each with micro-batches of its own."""
        return self.group.count

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model that was given to the constructor."""
        return self._policy

    @property
    def _copy(self) -> nn.Parameter | None:
        """The last stage's copy of a tied embedding."""
        return self._tied_weight if self.is_last else None

    def _end_of_tied_weight(self) -> nn.Parameter | None:
        """A tied embedding, on the two stages that have it."""
        for head, embedding in self._part.tied.items():
            if self.is_first or self.is_last:
                return self._policy.model.get_parameter(embedding if self.is_first else head)
        return None

    def _wrap(self, model: nn.Module) -> Any:
        if distributed.device_type() == "cpu":
            ds_config.check_on_cpu(self.ds)
        if self._copy is not None:
            self._copy.requires_grad = False  # so that it is in no group of DeepSpeed's optimiser
        self._stage = _Stage(cast(Policy, model))
        layers = [self._stage if number == self.group.rank else nn.Identity() for number in range(self.group.size)]
        # DeepSpeed prints what it builds, and keeps the groups of the last pipeline in a global, by which the next
        # model of the process would be one of it.
        with contextlib.redirect_stdout(io.StringIO()), distributed.own_timeout():
            try:
                net = PipelineModule(
                    layers,
                    topology=PipeDataParallelTopology(num_pp=self.group.size, num_dp=self.group.count),
                    partition_method="uniform",
                )
                engine, *_ = deepspeed.initialize(
                    model=net,
                    model_parameters=parameter_groups(model, self.optim),
                    config=for_deepspeed(self.ds),
                    dist_init_required=False,
                )
            finally:
                ds_groups.mpu = None
        engine._compute_loss = True
        engine.first_output_send = False  # shapes are known to both ends, and are not sent ahead
        engine._INSTRUCTION_MAP = {
            **engine._INSTRUCTION_MAP,
            schedule.LoadMicroBatch: lambda engine, buffer_id: self._load(buffer_id),
            schedule.RecvActivation: lambda engine, buffer_id: self._receive_hidden(buffer_id),
            schedule.RecvGrad: lambda engine, buffer_id: self._receive_gradient(buffer_id),
            schedule.ForwardPass: self._timed(engine._INSTRUCTION_MAP[schedule.ForwardPass]),
            schedule.BackwardPass: self._timed(engine._INSTRUCTION_MAP[schedule.BackwardPass]),
        }
        return engine

    # One micro-batch without gradients.

    def __call__(self, *args: Any, **kwargs: Any) -> PolicyOutput:
        """The policy's forward on a micro-batch, without gradients. Collective in the pipeline.

        Raises:
            ValueError: gradients are on; training is `accumulate_all`.
        """
        if torch.is_grad_enabled():
            raise ValueError(f"{self.role}: a pipeline is called under torch.no_grad(); it trains by accumulate_all.")
        heartbeat.call(self.role)
        token_ids_BT = kwargs["token_ids_BT"]
        inputs_BTD = None
        if not self.is_first:
            inputs_BTD = self._empty(token_ids_BT)
            p2p.recv(inputs_BTD, self.group.rank - 1)
        if self.is_last:
            return cast(PolicyOutput, self._policy(*args, **kwargs, inputs_BTD=inputs_BTD))
        p2p.send(self._hidden(kwargs, inputs_BTD).contiguous(), self.group.rank + 1)
        zero_BT = torch.zeros(token_ids_BT.shape, dtype=torch.float32, device=token_ids_BT.device)
        return PolicyOutput(zero_BT, zero_BT, zero_BT.bool())

    def _hidden(self, inputs: Mapping[str, Any], inputs_BTD: Tensor | None) -> Tensor:
        names = ("token_ids_BT", "attention_mask_BT", "position_ids_BT", "layout")
        return hidden_states(self._policy.model, **{name: inputs[name] for name in names}, inputs_BTD=inputs_BTD)

    def _empty(self, token_ids_BT: Tensor) -> Tensor:
        return torch.empty(*token_ids_BT.shape, self._hidden_size, dtype=self._dtype, device=token_ids_BT.device)

    # The micro-batches of a step.

    def accumulate_all(
        self, batches: Sequence[Batch], loss_of: LossOf[Batch, Said], *, count: float | Tensor
    ) -> Iterator[tuple[Batch, Said]]:
        """As `TrainEngine.accumulate_all`; yields nothing on stages that have no output."""
        count = self._checked_count(count)  # here, where all stages would raise together
        said: list[tuple[Batch, Said]] = []
        self._engine.total_loss = None
        self._stage.calls.extend(self._call_of(batch, loss_of, count=count, said=said) for batch in batches)
        self._coming = deque(cast(Any, batch).sequences.token_ids_BT for batch in batches)
        self._watch, self._busy = Stopwatch(), []
        begin = self._watch.mark()
        self._engine._exec_schedule(
            _Micro1F1B(micro_batches=len(batches), stages=self.group.size, stage_id=self.group.rank)
        )
        self._span = (begin, self._watch.mark())
        assert not self._stage.calls and not self._coming, "every micro-batch went through"
        self._reduce_gradients()
        self._at_boundary = True
        yield from said

    def _call_of(
        self, batch: Batch, loss_of: LossOf[Batch, Said], *, count: float, said: list[tuple[Batch, Said]]
    ) -> Callable[[Tensor], Tensor]:
        """What this stage does in the forward pass of a micro-batch."""

        def call(x: Tensor) -> Tensor:
            heartbeat.call(self.role)
            inputs_BTD = None if self.is_first else x
            if not self.is_last:
                return self._hidden(cast(Any, batch).sequences.inputs, inputs_BTD)
            loss_sum, told = loss_of(lambda **kwargs: self._policy(**kwargs, inputs_BTD=inputs_BTD), batch)
            said.append((batch, told))
            # DeepSpeed averages over replicas, so their number here makes it a sum over them, over the count.
            return loss_sum * (self.num_replicas / self._note_loss(loss_sum, count))

        return call

    def _load(self, buffer_id: int) -> None:
        """The stage has its rows already; DeepSpeed wants some input."""
        if self.is_first:
            self._coming.popleft()
            self._engine.pipe_buffers["inputs"][buffer_id] = torch.zeros((), device=self.device)

    def _receive_hidden(self, buffer_id: int) -> None:
        hidden_BTD = self._empty(self._coming.popleft())
        p2p.recv(hidden_BTD, self.group.rank - 1)
        self._engine.pipe_buffers["inputs"][buffer_id] = hidden_BTD.requires_grad_()

    def _receive_gradient(self, buffer_id: int) -> None:
        self._engine.grad_layer = torch.empty_like(self._engine.pipe_buffers["outputs"][buffer_id])
        p2p.recv(self._engine.grad_layer, self.group.rank + 1)

    def _timed(self, instruction: Callable[..., None]) -> Callable[..., None]:
        """An instruction that computes, with its place in the step's time."""

        def timed(engine: Any, buffer_id: int) -> None:
            begin = self._watch.mark()
            instruction(engine, buffer_id)
            self._busy.append((begin, self._watch.mark()))

        return timed

    @torch.no_grad()
    def _reduce_gradients(self) -> None:
        """Bring the parts of a tied embedding's gradient together at its owner, then average over replicas."""
        if self._tied_weight is not None:
            gradient = self._tied_weight.grad
            assert gradient is not None, "the embedding and the head are part of every loss"
            if self.is_last:
                p2p.send(gradient, 0)
                self._tied_weight.grad = None
            else:
                other = torch.empty_like(gradient)
                p2p.recv(other, self.group.size - 1)
                gradient += other
        self._engine._exec_reduce_grads()

    def _update(self) -> None:
        self._engine._exec_optimizer_step()
        if self._tied_weight is not None:
            if self.is_last:
                p2p.recv(self._tied_weight.data, 0)
            else:
                p2p.send(self._tied_weight.data, self.group.size - 1)

    def _ranks_of_all_gradients(self) -> Sequence[int]:
        if self.zero_stage == 0:  # the first replica's
            return range(0, distributed.world_size(), self.group.count)
        return range(distributed.world_size())

    def _step_metrics(self) -> Stats:
        # A step's micro-batches begin and end on the first stage, so its time is that of all stages.
        seconds = self.group.size * self._watch.seconds(*self._span) if self.is_first else 0.0
        busy = sum(self._watch.seconds(*lap) for lap in self._busy)
        return {"speed/bubble_frac": (seconds - busy, seconds)}

    # The whole model.

    def full_state_dict(self, module: nn.Module | None = None) -> dict[str, Tensor] | None:
        """As `TrainEngine.full_state_dict`, of all stages: each sends rank 0 its weights one by one. Collective."""
        assert module is None or module is self._policy.model, "the policy or its model"
        with distributed.together("exporting weights"), torch.no_grad():
            exported = gather_weights(self._policy.model, self._part, self.group) if self.group.number == 0 else {}
        prefix = "model." if module is None else ""
        return {f"{prefix}{name}": value for name, value in exported.items()} if distributed.is_main() else None

    def check_lendable(self) -> None:
        """Check that there is room for what `generation_module` copies. Collective.

        Raises:
            ValueError: on all ranks, there is not.
        """
        trained = sum(p.numel() for p in self._policy.parameters()) / (self.group.count if self.zero_stage else 1)
        free = min(distributed.all_gather_objects(memory.free_bytes() - int(8 * trained)))  # Adam's moments are to come
        whole = sum(math.prod(shape) for shape in self._shapes.values()) * self._dtype.itemsize
        if whole > USABLE_FRAC * free:
            raise ValueError(
                f"{self.role}: answers of the evaluation are drawn with the whole model on each rank, "
                f"{whole / 1e9:.1f} GB, but of {free / 1e9:.1f} GB that will be free it may take {USABLE_FRAC:.0%}. "
                "Set eval.generate_rows=0, and draw them afterwards from the model folder."
            )

    @contextmanager
    def generation_module(self) -> Iterator[nn.Module]:
        """The whole model to generate with, in eval mode: a copy on each rank while the block runs. Collective."""
        heartbeat.call(self.role)
        whole = whole_model(self._policy.model, self._part, self.group)
        try:
            yield Policy(whole, chunk_tokens=self._policy.chunk_tokens)
        finally:
            for parameter in whole.parameters():
                parameter.data = torch.empty(0)

    # Its states.

    def layout(self) -> dict[str, Any]:
        """As `TrainEngine.layout`; `pipeline` says that the files are of stages."""
        return {
            "zero_stage": self.zero_stage,
            "step_count": self.step_count,
            "shapes": self._shapes,
            "groups": [],
            "pipeline": self.group.size,
        }

    def describe(self) -> dict[str, Any]:
        """As `TrainEngine.describe`, with the stages, whose files a state holds."""
        return {**super().describe(), "pipeline stages": self.group.size}
