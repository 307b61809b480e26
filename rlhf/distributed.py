"""Ranks and collectives: the only user of torch.distributed.

A program calls `init` once. Under a launcher (deepspeed, torchrun) it joins the others; as a plain process it is a
world of one. Every function below then works in both cases, so that no caller asks which case it is in. Calls marked
"collective" must be made by every rank in the same order.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf import heartbeat

T = TypeVar("T")

_world_group: dist.ProcessGroup | None = None


def device_type() -> str:
    """Type of the device this program runs on: DS_ACCELERATOR if set (DeepSpeed follows it too), else what is found."""
    forced = os.environ.get("DS_ACCELERATOR")
    if forced:
        return forced
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator.type if accelerator is not None else "cpu"


def init(timeout_seconds: float = 1800) -> None:
    """Join the process group, or become a world of one; a second call does nothing.

    Args:
        timeout_seconds: a collective that waits longer for a rank raises. It holds for `world_group` too, which
            DeepSpeed uses for its collectives in place of a clone with torch's own limit of 30 minutes.

    Raises:
        ValueError: WORLD_SIZE is set but another of the launcher's variables is not.
    """
    global _world_group
    if dist.is_initialized():
        return
    timeout = timedelta(seconds=timeout_seconds)
    kind = device_type()
    if kind != "cpu":
        torch.accelerator.set_device_index(local_rank())
    backend = dist.get_default_backend_for_device(torch.device(kind))
    if "WORLD_SIZE" in os.environ:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ValueError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set but {', '.join(missing)} is not: half of a launcher's "
                "environment. Start with the deepspeed launcher, or unset WORLD_SIZE to run one process."
            )
        dist.init_process_group(backend, timeout=timeout)
    else:
        # An in-memory store needs no port, so that single processes on one machine cannot collide.
        dist.init_process_group(
            backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1, timeout=timeout
        )
    _world_group = dist.new_group(ranks=list(range(dist.get_world_size())), timeout=timeout)


def shutdown() -> None:
    """Leave the process group, if there is one. Not for a rank that failed: the others may be waiting."""
    global _world_group
    if dist.is_initialized():
        dist.destroy_process_group()
    _world_group = None


def world_group() -> dist.ProcessGroup:
    """A group of all ranks with the timeout given to `init`."""
    assert _world_group is not None, "distributed.init() has not been called"
    return _world_group


def rank() -> int:
    """This process's number among all ranks."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def local_rank() -> int:
    """This process's number among the ranks of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device() -> torch.device:
    """The device of this rank."""
    kind = device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank())


def free_memory() -> int:
    """Bytes that this rank can still take on its accelerator: free ones, and those that torch's allocator has ready."""
    memory = torch.accelerator.memory
    free, _ = memory.get_memory_info(device())
    return free + memory.memory_reserved(device()) - memory.memory_allocated(device())


def is_main() -> bool:
    """Whether this is rank 0, which writes files and talks."""
    return rank() == 0


def barrier() -> None:
    """Wait for every rank. Collective."""
    if world_size() > 1:
        device_ids = None if device_type() == "cpu" else [local_rank()]
        dist.barrier(device_ids=device_ids)


def all_sum(x: Tensor) -> Tensor:
    """Sum over ranks, on the device of x, no gradient. Collective."""
    return _all_reduce(x, dist.ReduceOp.SUM)


def all_max(x: Tensor) -> Tensor:
    """Elementwise maximum over ranks, on the device of x, no gradient. Collective."""
    return _all_reduce(x, dist.ReduceOp.MAX)


def _all_reduce(x: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
    total = x.detach().to(device(), torch.int64 if x.dtype == torch.bool else x.dtype, copy=True)
    if world_size() > 1:
        dist.all_reduce(total, op=op)
        heartbeat.tick()
    return total.to(x.device)


def all_gather(x: Tensor) -> Tensor:
    """Equal-shaped tensors of all ranks, stacked along a new first dimension in rank order. Collective."""
    if world_size() == 1:
        return x.detach().unsqueeze(0)
    local = x.detach().to(device()).contiguous()
    parts = [torch.empty_like(local) for _ in range(world_size())]
    dist.all_gather(parts, local)
    heartbeat.tick()
    return torch.stack(parts).to(x.device)


def all_gather_objects(value: T) -> list[T]:
    """Picklable values of all ranks, in rank order. Collective."""
    if world_size() == 1:
        return [value]
    values: list[T] = [value] * world_size()
    dist.all_gather_object(values, value)
    heartbeat.tick()
    return values


def broadcast_object(value: T) -> T:
    """Rank 0's picklable value, on every rank. Collective."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=device())
    return box[0]


def same_on_all(ok: bool, message: str, *, error: type[Exception] = RuntimeError) -> None:  # noqa: FBT001  reads as assert
    """Raise the same error on every rank if a check failed on any; nothing if all passed. Collective.

    Args:
        ok: whether this rank passed.
        message: what a failing rank has to say; the lowest failing rank's is raised everywhere.
        error: class of the exception.
    """
    failures = all_gather_objects(None if ok else message)
    for number, failure in enumerate(failures):
        if failure is not None:
            where = f" [rank {number} of {len(failures)}]" if len(failures) > 1 else ""
            raise error(failure + where)


@contextmanager
def together(what: str) -> Iterator[None]:
    """Run a block that may fail on some ranks only (a full disk on rank 0); then it fails on all. Collective.

    The failing rank raises its own exception, the others a RuntimeError that quotes it. The block itself must not hold
    collectives after the point where one rank may fail.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failures = all_gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for number, failure in enumerate(failures):
        if failure is not None:
            raise RuntimeError(f"{what} failed on rank {number}: {failure}")
