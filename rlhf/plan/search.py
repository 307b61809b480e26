"""The fastest layout that fits: ZeRO stage x tensor x pipeline x micro-batch x recomputation. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from rlhf.plan import memory
from rlhf.plan.hardware import Device
from rlhf.plan.layout import Layout
from rlhf.plan.setting import stack_of
from rlhf.plan.shapes import Shape
from rlhf.plan.step import StepTime, step
from rlhf.plan.steps import context_of

MICRO_BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout with its time and memory."""

    layout: Layout
    time: StepTime
    memory: float
    """Bytes of the fullest rank."""

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens a second of one device."""
        return self.layout.global_batch * self.layout.length / self.layout.gpus / self.time.total


@dataclass(frozen=True, kw_only=True)
class Found:
    """Outcome of a search."""

    ranked: list[Candidate]
    """Those that fit, the fastest first."""
    tried: int
    too_large: int
    """Layouts that do not fit."""
    nearest: Candidate | None
    """Of those, the smallest."""


def search(shape: Shape, device: Device, gpus: int, *, length: int, global_batch: int, dtype: str = "bf16") -> Found:
    """Rank every layout of one model's training; `global_batch` sequences an update, at most a tenth more."""
    ranked: list[Candidate] = []
    nearest: Candidate | None = None
    tried = 0
    for layout in layouts(shape, device, gpus, length=length, global_batch=global_batch, dtype=dtype):
        tried += 1
        stack = stack_of(layout)
        need = memory.training(shape, layout, replace(stack, context_bytes=context_of(device))).total
        if need > device.memory:
            if nearest is None or need < nearest.memory:
                nearest = Candidate(layout=layout, time=StepTime(), memory=need)
            continue
        ranked.append(Candidate(layout=layout, time=step(shape, layout, device, stack), memory=need))
    ranked.sort(key=lambda candidate: -candidate.tokens_per_gpu)
    return Found(ranked=ranked, tried=tried, too_large=tried - len(ranked), nearest=nearest)


def layouts(shape: Shape, device: Device, gpus: int, *, length: int, global_batch: int, dtype: str) -> Iterator[Layout]:
    """Layouts that split the model, the devices and the batch evenly."""
    tensors = [n for n in _divisors(shape.kv_heads) if n <= device.node and device.node % n == 0]
    for tensor, pipeline in product(tensors, _divisors(shape.layers)):
        if gpus % (tensor * pipeline):
            continue
        data = gpus // (tensor * pipeline)
        for micro, recompute in product(MICRO_BATCHES, ("none", "selective", "full")):
            accumulation = round(global_batch / (data * micro))
            if accumulation < 1 or abs(accumulation * data * micro / global_batch - 1) > 0.1:
                continue
            for zero, virtual in _schedules(shape, pipeline, accumulation):
                if zero and data == 1:
                    continue
                yield Layout(
                    gpus=gpus, length=length, micro_batch=micro, accumulation=accumulation, zero=zero, tensor=tensor,
                    pipeline=pipeline, virtual=virtual, recompute=recompute, dtype=dtype,  # type: ignore[arg-type]
                    sequence_parallel=tensor > 1,
                )  # fmt: skip


def _schedules(shape: Shape, pipeline: int, accumulation: int) -> Iterator[tuple[int, int]]:
    """(ZeRO stage, pieces a stage)."""
    if pipeline == 1:
        yield from ((zero, 1) for zero in (0, 1, 2, 3))
        return
    pieces = [n for n in (1, 2, 4, 8) if shape.layers % (pipeline * n) == 0]
    for zero, virtual in product((0, 1), pieces):
        if virtual == 1 or accumulation % pipeline == 0:  # what interleaving needs
            yield zero, virtual


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def reason(best: Candidate, other: Candidate) -> str:
    """Why a runner-up is slower: the part of the step that grew most for each token."""
    scale = best.layout.global_batch / other.layout.global_batch
    mine, theirs = best.time.parts(), other.time.parts()
    grown = {name: theirs[name] * scale - mine[name] for name in mine}
    name = max(grown, key=lambda part: grown[part])
    return f"{name} +{grown[name] / best.time.total:.0%} of a step" if grown[name] > 0 else "as fast"


def decide(parameters: float, device: Device, gpus: int) -> str:
    """A first choice in words, by size and network."""
    states = 16 * parameters
    fits_sharded = states / gpus < 0.6 * device.memory
    network = device.node_bandwidth / device.node / 1e9
    if parameters < 10e9 and fits_sharded:
        return "below 10B parameters: ZeRO alone, stage 3 where states do not fit, stage 1 or 2 where they do"
    if parameters < 100e9 and fits_sharded:
        if network >= 20:
            return "10 to 100B: ZeRO-3, or tensor parallelism inside a machine where the batch is small"
        return "10 to 100B on a slow network: tensor parallelism inside a machine, pipeline between machines"
    return "above 100B: tensor parallelism inside a machine, pipeline between machines, ZeRO-1 over the replicas"
