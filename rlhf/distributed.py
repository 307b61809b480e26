"""Ranks and collectives: the only user of torch.distributed.

A program calls `init` once. Under a launcher (deepspeed, torchrun) it joins the others; as a plain process it is a
world of one. Every function below then works in both cases, so that no caller asks which case it is in. Calls marked
"collective" must be made by every rank in the same order.
"""

import functools
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf import heartbeat

# torchao, which transformers imports with its models where it is installed, names kernels of other accelerators that it
# does not find, and a use of torch's that torch will drop. A user can do nothing about either; this is loaded first.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)

T = TypeVar("T")

_world_group: dist.ProcessGroup | None = None
_timeout = timedelta(seconds=1800)
_groups: dict[int, "Group"] = {}
"""By size; pipelines by their size below 0."""
_across: dict[int, dist.ProcessGroup] = {}


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
    global _world_group, _timeout
    if dist.is_initialized():
        return
    timeout = _timeout = timedelta(seconds=timeout_seconds)
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


ProcessGroup: TypeAlias = dist.ProcessGroup
Store: TypeAlias = torch._C._distributed_c10d.Store


def open_store(timeout_seconds: float) -> Store:
    """Meeting place of all ranks of a launcher, on rank 0, for process groups made with `joined`. Collective."""
    return torch._C._distributed_c10d.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size(), rank() == 0,
        timeout=timedelta(seconds=timeout_seconds), wait_for_workers=False,
    )  # fmt: skip


def meet(store: Store, name: str, *, seconds: float) -> None:
    """Wait until every rank has come here, or the time is over. Collective, each name once."""
    store.set(f"{name}/{rank()}", "")
    with suppress(RuntimeError):  # a rank that is late or gone is named by its own group
        store.wait([f"{name}/{other}" for other in range(world_size())], timedelta(seconds=seconds))


@contextmanager
def joined(store: Store, name: str, *, rank: int, size: int, timeout_seconds: float) -> Iterator["Group"]:
    """A process group of some ranks of the store, as if there were no others, while the block runs.

    Args:
        store: of `open_store`.
        name: of the group, each once.
        rank: this process's number in the group.
        size: of the group.
        timeout_seconds: a connection or collective that waits longer for a rank raises.

    Raises:
        RuntimeError: a rank did not come, or could not be reached.
    """
    kind = device_type()
    if kind != "cpu":
        torch.accelerator.set_device_index(local_rank())
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a time-out raises, where it would end the process
    # Part of the keys in the store: an attempt that fails raises it on the ranks that made it, on the others not.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        dist.get_default_backend_for_device(torch.device(kind)),
        store=torch._C._distributed_c10d.PrefixStore(name, store),
        rank=rank, world_size=size, timeout=timedelta(seconds=timeout_seconds),
    )  # fmt: skip
    try:
        yield Group(rank, size, None)
    finally:
        dist.destroy_process_group()


def shutdown() -> None:
    """Leave the process group, if there is one. Not for a rank that failed: the others may be waiting."""
    global _world_group
    if dist.is_initialized():
        dist.destroy_process_group()
    _world_group = None
    _groups.clear()
    _across.clear()


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


def accelerator_name() -> str | None:
    """What the device calls itself; None without an accelerator."""
    kind = device_type()
    if kind == "cpu":
        return None
    name = getattr(torch.get_device_module(kind), "get_device_name", None)
    return kind if name is None else str(name(device()))


def device() -> torch.device:
    """The device of this rank."""
    kind = device_type()
    return torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank())


def synchronise() -> None:
    """Wait for what this rank has given its device to do."""
    if device().type != "cpu":
        torch.accelerator.synchronize()


def is_main() -> bool:
    """Whether this is rank 0, which writes files and talks."""
    return rank() == 0


def ranks_here() -> int:
    """Number of ranks on this machine. Collective."""
    name = socket.gethostname()
    return all_gather_objects(name).count(name)


@dataclass(frozen=True)
class Group:
    """Ranks that share work among themselves. Its methods are collectives in it."""

    rank: int
    """This process's number in the group."""
    size: int
    handle: dist.ProcessGroup | None
    """For a library that asks for it; None at size 1, and where all ranks are in the group."""
    by_layers: bool = False
    """The ranks lie `count` apart and have a part of the layers each, in their order (`pipeline_of`); else they are
    consecutive, and share the tokens of each row or the weights (`group_of`)."""

    @property
    def number(self) -> int:
        """Which of the groups of this size it is."""
        return rank() % self.count if self.by_layers else rank() // self.size

    @property
    def count(self) -> int:
        """Number of groups of this size."""
        return world_size() // self.size

    def sum_(self, x: Tensor) -> Tensor:
        """Replace x by its sum over the group, no gradient; gives it back."""
        if self.size > 1:
            dist.all_reduce(x, group=self.handle)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        """Equal-shaped tensors of all members, in their order, the same bytes on each."""
        if self.size == 1:
            return [x.clone()]
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.handle)
        return parts

    def gather_objects(self, value: T) -> list[T]:
        """Picklable values of all members, in their order."""
        values: list[T] = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.handle)
        return values

    def max_(self, x: Tensor) -> Tensor:
        """Replace x by its elementwise maximum over the group, no gradient; gives it back."""
        if self.size > 1:
            dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.handle)
        return x

    def sum(self, x: Tensor) -> Tensor:
        """Sum over the group of what each member has computed for all; with gradient. Without one, x is overwritten.

        All members go on alike from the result, so its gradient, equal on all, is that of each member's x.
        """
        if self.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
            return self.sum_(x)
        return cast(Tensor, cast(Any, _Sum).apply(x, self))

    def total(self, x: Tensor) -> Tensor:
        """Sum over the group of what each member has found, with which each goes on by itself; with gradient.

        The gradient of each member's x is the sum of what all of them ask of the result.
        """
        return x if self.size == 1 else cast(Tensor, cast(Any, _Total).apply(x, self))

    def fan_out(self, x: Tensor) -> Tensor:
        """The same x, equal on all members, from which each computes a part: its gradient is the sum of theirs."""
        if self.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
            return x
        return cast(Tensor, cast(Any, _FanOut).apply(x, self))

    def join(self, x: Tensor) -> Tensor:
        """The parts of all members side by side in the last dimension, the same bytes on each; with gradient.

        All members go on alike from the result, so that each part's gradient is its slice of the whole's.
        """
        return x if self.size == 1 else cast(Tensor, cast(Any, _Join).apply(x, self))

    def broadcast_(self, x: Tensor, source: int) -> Tensor:
        """Replace x by what a member has, no gradient; gives it back."""
        if self.size > 1:
            dist.broadcast(x, group=self.handle, group_src=source)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Send x to a member, which calls `receive_`; of these two alone."""
        dist.send(x.contiguous(), group=self.handle, group_dst=to)

    def receive_(self, x: Tensor, source: int) -> Tensor:
        """Replace x by what a member sends; gives it back."""
        dist.recv(x, group=self.handle, group_src=source)
        heartbeat.tick()
        return x

    def exchange(self, x: Tensor) -> Tensor:
        """Part i of x goes to member i, and part j of the result is what member j had for this one; with gradient.

        Args:
            x: its first dimension is the parts, one for each member; shape and type equal on all.
        """
        return x if self.size == 1 else cast(Tensor, cast(Any, _Exchange).apply(x, self.handle))


class _Exchange(torch.autograd.Function):
    """All-to-all, which is its own transpose: gradients go back the way their tensors came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: dist.ProcessGroup | None) -> Tensor:
        ctx.handle = handle
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        dist.all_to_all_single(out, x.contiguous(), group=handle)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.forward(ctx, grads[0], ctx.handle), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return group.sum_(x.clone(memory_format=torch.contiguous_format))  # x itself may be kept for the backward pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.sum_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.sum_(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.sum_(grads[0].clone(memory_format=torch.contiguous_format)), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.width = group, x.shape[-1]
        return torch.cat(group.gather(x), dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].narrow(-1, ctx.group.rank * ctx.width, ctx.width), None


def group_of(size: int) -> Group:
    """This rank's group among groups of `size` consecutive ranks, made once. Collective over all ranks.

    Raises:
        ValueError: the number of ranks is not a multiple of it.
    """
    if world_size() % size:
        raise ValueError(f"{world_size()} ranks do not divide into groups of {size}.")
    if size == 1:
        return Group(0, 1, None)  # a process group for each rank would take long to make, and none is asked anything
    if size not in _groups:
        for first in range(0, world_size(), size):
            handle = dist.new_group(ranks=list(range(first, first + size)), timeout=_timeout)
            if first <= rank() < first + size:
                _groups[size] = Group(rank() - first, size, handle)
    return _groups[size]


def group_across(size: int) -> dist.ProcessGroup:
    """The ranks that have this one's place in their groups of `size`, one of each group. Collective over all ranks.

    Raises:
        ValueError: the number of ranks is not a multiple of it.
    """
    group_of(size)
    if size not in _across:
        for place in range(size):
            handle = dist.new_group(ranks=list(range(place, world_size(), size)), timeout=_timeout)
            if rank() % size == place:
                _across[size] = handle
    return _across[size]


def pipeline_of(size: int) -> Group:
    """This rank's pipeline among pipelines of `size` stages, made once. Collective over all ranks.

    Ranks that hold the same layers are neighbours, since they exchange most.

    Raises:
        ValueError: the number of ranks is not a multiple of it.
    """
    if size == 1:
        return group_of(1)
    if world_size() % size:
        raise ValueError(f"{world_size()} ranks do not divide into pipelines of {size} stages.")
    count = world_size() // size
    if -size not in _groups:
        for first in range(count):
            handle = dist.new_group(ranks=list(range(first, world_size(), count)), timeout=_timeout)
            if rank() % count == first:
                _groups[-size] = Group(rank() // count, size, handle, by_layers=True)
    return _groups[-size]


@contextmanager
def own_timeout() -> Iterator[None]:
    """Process groups that a library makes inside wait as long as `init` was told, not as long as torch would."""
    made = dist.new_group
    dist.new_group = functools.partial(made, timeout=_timeout)
    try:
        yield
    finally:
        dist.new_group = made


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
