"""The last steps of a stage under torch's profiler: a trace, and the share of time that went into communication."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.profiler import ProfilerActivity, profile, supported_activities

from rlhf import artifacts, distributed

FOLDER = "profile"
SUMMARY = "profile.json"
_COLLECTIVE = ("nccl", "gloo:", "rccl", "xccl", "hccl")
"""Starts of the names of what a backend records: NCCL's kernels, gloo's operations."""
Interval = tuple[float, float]


@contextmanager
def profiled(folder: Path) -> Iterator[None]:
    """Profile the block; rank 0 writes its trace and every rank's shares into `folder`. Collective.

    A block that fails writes nothing.
    """
    on_cpu = distributed.device_type() == "cpu"
    activities = {ProfilerActivity.CPU} if on_cpu else cast(Any, supported_activities)()
    with profile(activities=activities) as profiler:
        started = time.perf_counter()
        yield
        distributed.synchronise()
        seconds = time.perf_counter() - started
    shares = distributed.all_gather_objects(communication(profiler.events() or (), seconds=seconds))
    if distributed.is_main():
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / "rank0.json.gz"))
        artifacts.write_json(folder / SUMMARY, {"seconds": seconds, "ranks": shares})


def communication(events: Iterable[Any], *, seconds: float) -> dict[str, float]:
    """Of one rank: share of the time in which a collective ran, and in which nothing else did beside it.

    On an accelerator collectives are kernels, and what runs beside them are the other kernels. On a CPU the operations
    that wait for them count, and nothing runs beside.

    Args:
        events: of torch's profiler.
        seconds: of the block.
    """
    collectives: list[Interval] = []
    kernels: list[Interval] = []
    on_device = [event for event in events if event.device_type.name != "CPU"]
    for event in on_device or events:
        is_collective = event.name.lower().startswith(_COLLECTIVE)
        if is_collective or on_device:
            span = (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
            (collectives if is_collective else kernels).append(span)
    communicating = union(collectives)
    hidden = covered(communicating) + covered(union(kernels)) - covered(union([*collectives, *kernels]))
    total = covered(communicating)
    return {"communication_frac": total / seconds, "exposed_frac": (total - hidden) / seconds}


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def covered(disjoint: Iterable[Interval]) -> float:
    """Their length."""
    return sum(end - start for start, end in disjoint)
