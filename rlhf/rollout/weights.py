"""How an engine lends its weights to a rollout, and which way fits the memory there is."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import nn

from rlhf import ds_config
from rlhf.distributed import Group, all_max, device, group_of, world_size
from rlhf.engine import FrozenEngine, TrainEngine
from rlhf.memory import free_bytes
from rlhf.models.backbone import base_of
from rlhf.models.split import check_rollout_split
from rlhf.rollout.copy import GenerationCopy
from rlhf.rollout.plan import Demand, MemoryPlan, megabytes, plan_copy, plan_in_place, plan_layerwise

logger = logging.getLogger(__name__)

Engine = TrainEngine | FrozenEngine
AllRanksRunning = Callable[[bool], bool]

# Share of the free memory that a plan may fill: activations, logits and what the allocator cuts up take the rest.
USABLE_FRAC = 0.9


@dataclass(frozen=True, kw_only=True)
class Lending:
    """How weights are lent, the same on all ranks."""

    layerwise: bool = False
    """Leave sharded weights sharded: each forward gathers them layer by layer, and all ranks make the same number."""
    dtype: torch.dtype | None = None
    """Type of the weights to generate with; None: the one they are trained in."""
    group: Group | None = None
    """Ranks that share one copy; None: each has its own."""

    def computes_in(self, trained_in: str) -> str:
        """Name of the type that decodes, given that of training."""
        return trained_in if self.dtype is None else str(self.dtype).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Lent:
    """What a rollout gets."""

    model: nn.Module
    """Hugging Face causal LM."""
    all_ranks_running: AllRanksRunning | None = None
    """For weights that forwards gather: tells whether any rank still has rows to decode."""
    group: Group | None = None
    """Ranks whose forwards are one: each has to be given the prompts of all of them."""


@contextmanager
def lend_weights(engine: Engine, lending: Lending) -> Iterator[Lent]:
    """Lend the Hugging Face model of a policy for decoding; a collective under ZeRO-3 and for a group.

    Whole weights are lent as they are where a rank has them in the right type. Else a copy is made for the block: the
    ranks (or groups) then decode independently of one another, and the weights that are trained are never touched.

    Args:
        engine: of a `Policy`.
        lending: the way.
    """
    if lending.layerwise and engine.is_sharded:
        with engine.generation_module() as policy:
            yield Lent(model=cast(nn.Module, policy.model), all_ranks_running=any_rank_running)
    elif _lends_itself(engine, lending):
        with engine.generation_module() as policy:
            yield Lent(model=cast(nn.Module, policy.model), group=trained_by(engine))
    else:
        group = trained_by(engine) or lending.group
        copy = GenerationCopy(_model(engine), dtype=lending.dtype, group=group)
        try:
            yield Lent(model=copy.fill(engine), group=group)
        finally:
            copy.clear()
            engine.release_cache()


def _model(engine: Engine) -> nn.Module:
    return cast(nn.Module, engine.module.model)


def trained_by(engine: Engine) -> Group | None:
    """The ranks that have a share of the weights each in training, and so in a rollout; None: each has all."""
    return engine.tensor if isinstance(engine, TrainEngine) and engine.tensor.size > 1 else None


def _trained_in(engine: Engine) -> torch.dtype:
    return next(base_of(_model(engine)).parameters()).dtype


def _lends_itself(engine: Engine, lending: Lending) -> bool:
    return not engine.is_sharded and lending.group is None and lending.dtype in (None, _trained_in(engine))


def any_rank_running(running: bool) -> bool:  # noqa: FBT001  the signature that decode calls
    """Whether `running` holds on any rank. Collective."""
    return bool(all_max(torch.tensor(int(running), device=device())).item())


def choose_lending(
    engine: Engine,
    demand: Demand,
    *,
    weights: Literal["auto", "gathered", "layerwise"],
    tensor_parallel: int | None,
    dtype: torch.dtype | None,
) -> tuple[Lending, MemoryPlan]:
    """The way of lending that was asked for, or the quickest that fits; said in one line of the log. Collective.

    Args:
        engine: of a `Policy`.
        demand: of the rollouts to come.
        weights: `gathered` is whole, `layerwise` sharded (ZeRO-3); `auto` takes whole weights if they fit, else groups
            of ranks that share them, else sharded ones.
        tensor_parallel: ranks of a group; None: 1, or what `auto` finds.
        dtype: of the weights to generate with; None: as they are trained.

    Raises:
        ValueError: nothing that was allowed fits, or the model cannot be split as asked.
    """
    if dtype == _trained_in(engine):
        dtype = None
    free = -int(all_max(torch.tensor(-free_bytes(), device=device())).item())
    tried: list[tuple[Lending, int, MemoryPlan]] = []
    for num_ranks in _group_sizes(engine, weights, tensor_parallel):
        tried.append((Lending(dtype=dtype), num_ranks, _plan(engine, demand, dtype, num_ranks)))
        if tried[-1][2].peak <= USABLE_FRAC * free:
            break
    else:
        is_free = tensor_parallel in (None, 1) and trained_by(engine) is None
        if weights != "gathered" and is_free and engine.is_sharded and dtype is None:
            tried.append((Lending(layerwise=True), 1, _plan_layerwise(engine, demand)))
    lending, num_ranks, plan = tried[-1]
    if plan.peak > USABLE_FRAC * free:
        raise ValueError(_does_not_fit(min(tried, key=lambda entry: entry[2].peak)[2], free))
    how = "gathered layer by layer in each forward" if lending.layerwise else "whole on each rank"
    if trained_by(engine) is not None:
        how = f"in the shares of {num_ranks} ranks that they are trained in"
    elif num_ranks > 1:
        lending, how = replace(lending, group=group_of(num_ranks)), f"shared by {num_ranks} ranks"
    logger.info(
        "rollout: weights %s%s; planned for each rank: %s (%s; %d rows of up to %d tokens), free: %s",
        how,
        f" in {lending.computes_in(ds_config.dtype_name(engine.ds))}",
        megabytes(plan.peak),
        plan,
        demand.num_rows,
        demand.num_tokens,
        megabytes(free),
    )
    return lending, plan


def _group_sizes(engine: Engine, weights: str, tensor_parallel: int | None) -> list[int]:
    """Numbers of ranks that may share a copy, in the order of trial."""
    shape = cast(Any, base_of(_model(engine))).config.to_dict()
    if (group := trained_by(engine)) is not None:
        return [group.size]
    if weights == "layerwise":
        return []
    if tensor_parallel is not None or weights == "gathered":
        if tensor_parallel is not None and tensor_parallel > 1:
            check_rollout_split(shape, tensor_parallel)
        return [tensor_parallel or 1]
    return [1, *(n for n in range(2, world_size() + 1) if world_size() % n == 0 and _can_split(shape, n))]


def _can_split(shape: dict[str, Any], num_ranks: int) -> bool:
    try:
        check_rollout_split(shape, num_ranks)
    except ValueError:
        return False
    return True


def _plan(engine: Engine, demand: Demand, dtype: torch.dtype | None, num_ranks: int) -> MemoryPlan:
    model, device_type = _model(engine), device().type
    if (num_ranks == 1 or trained_by(engine)) and _lends_itself(engine, Lending(dtype=dtype)):
        return plan_in_place(model, demand, num_ranks=num_ranks, device_type=device_type)
    copy = GenerationCopy(model, dtype=dtype, num_ranks=num_ranks)
    return plan_copy(copy, demand, num_ranks=num_ranks, device_type=device_type)


def _plan_layerwise(engine: Engine, demand: Demand) -> MemoryPlan:
    # DeepSpeed's default where the JSON is silent.
    live = int(engine.ds["zero_optimization"].get("stage3_max_live_parameters", 1e9))
    return plan_layerwise(_model(engine), demand, max_live_weights=live, device_type=device().type)


def _does_not_fit(plan: MemoryPlan, free: int) -> str:
    return (
        f"the rollout needs {megabytes(plan.peak)} on a rank ({plan}), but of {megabytes(free)} that are free it may "
        f"take {USABLE_FRAC:.0%}. Lower rollout.batch_size, set rollout.dtype=bfloat16, let more ranks share the "
        "weights (rollout.tensor_parallel), or leave them sharded (ZeRO-3, rollout.weights=layerwise)."
    )
