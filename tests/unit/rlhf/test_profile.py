"""Shares of communication, from events written by hand, and from a real block."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.profile import SUMMARY, communication, covered, profiled, union


def event(name: str, start: float, end: float, device: str = "CPU") -> Any:
    """Times in microseconds, as the profiler gives them."""
    return SimpleNamespace(
        name=name, device_type=SimpleNamespace(name=device), time_range=SimpleNamespace(start=start, end=end)
    )


def test_intervals_are_joined_where_they_touch_or_overlap() -> None:
    assert union([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert covered(union([(0, 2), (1, 3), (10, 11)])) == 4


def test_on_a_cpu_the_operations_that_wait_count_once() -> None:
    """Two overlapping operations of gloo, 3 ms together, in 10 ms; what else the processor does is no matter."""
    events = [event("gloo:all_reduce", 0, 2000), event("gloo:all_gather", 1000, 3000), event("aten::mm", 0, 9000)]
    shares = communication(events, seconds=10e-3)
    assert shares == pytest.approx({"communication_frac": 0.3, "exposed_frac": 0.3})


def test_on_an_accelerator_what_runs_beside_a_collective_hides_it() -> None:
    """A kernel of 4 ms from 1 to 5; a collective from 0 to 3: 1 ms of it is exposed. Host events do not count."""
    events = [
        event("ncclDevKernel_AllReduce_Sum", 0, 3000, "CUDA"), event("gemm", 1000, 5000, "CUDA"),
        event("nccl:all_reduce", 0, 50, "CPU"),
    ]  # fmt: skip
    shares = communication(events, seconds=5e-3)
    assert shares == pytest.approx({"communication_frac": 0.6, "exposed_frac": 0.2})


def test_a_block_leaves_a_trace_and_its_shares(tmp_path: Path) -> None:
    with profiled(tmp_path / "profile"):
        torch.randn(64, 64) @ torch.randn(64, 64)
    summary = json.loads((tmp_path / "profile" / SUMMARY).read_text())
    assert summary["seconds"] > 0 and summary["ranks"] == [{"communication_frac": 0, "exposed_frac": 0}]
    assert (tmp_path / "profile" / "rank0.json.gz").stat().st_size > 0


def test_a_block_that_fails_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="broken"), profiled(tmp_path / "profile"):
        raise RuntimeError("broken")
    assert not (tmp_path / "profile").exists()
