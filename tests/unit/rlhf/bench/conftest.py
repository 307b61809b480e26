"""Samples, steps and a report, small enough to be worked out by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from rlhf.bench.record import Sample, to_json
from rlhf.bench.result import Result


def make_sample(**changes: Any) -> Sample:
    """100 real tokens of 4 rows in 2 steps and 2 seconds."""
    values: dict[str, Any] = {"wall_seconds": 2.0, "cpu_seconds": 1.0, "steps": 2, "tokens": 100.0, "rows": 4.0}
    return Sample(**{**values, **changes})


@pytest.fixture
def report() -> dict[str, Any]:
    """One line, three rounds: ours 2 times, 4 times and 3 times the peer's speed; its packing failed."""
    ours = [make_sample(wall_seconds=w, flops=50e9, padding_frac=0.01, phases={"update": 0.75 * w}) for w in (2, 1, 2)]
    theirs = [make_sample(wall_seconds=w, padding_frac=0.4) for w in (4, 4, 6)]
    contestants = {
        "ours": {"samples": [to_json(s) for s in ours], "error": None},
        "TRL": {"samples": [to_json(s) for s in theirs], "error": None},
        "TRL, packing": {"samples": [], "error": "ChildError: -m x ended with exit code 1.\n  the log"},
    }
    return {
        "command": "rlhf bench peers --rounds 3 --write docs/performance.md",
        "date": "2026-01-02",
        "git_commit": None,
        "settings": {"sizes": "full", "rounds": 3, "overrides": {}},
        "machine": {
            "cpu": "A processor",
            "cores": 2,
            "peaks": {"matmul_fp32_flops": 50e9, "matmul_bf16_flops": 100e9, "copy_bytes_per_second": 20e9},
        },
        "versions": {"torch": "2.13.0", "trl": "1.12.0"},
        "left_out": {"vLLM": "`import vllm` failed"},
        "lines": {"sft_fp32": {"status": "failed", "contestants": contestants}},
    }


@pytest.fixture
def make_result() -> Callable[..., Result]:
    """A step of a recipe on two ranks; keywords change it."""

    def make(**changes: Any) -> Result:
        values: dict[str, Any] = {
            "number": 1, "recipe": "tiny_cpu", "settings": [], "hardware": "CPU", "ranks": 2, "dtype": "fp32",
            "date": "2026-01-02", "git_commit": None, "versions": {"torch": "2.13.0"}, "rows": 32.0,
            "step_seconds": [1.0, 1.0], "tokens": 640.0, "phases": {"update": 0.9},
            "flops_per_second": 1e9, "memory": {"weights": 1e9, "other": 1e9, "peak": 2e9},
        }  # fmt: skip
        return Result(**{**values, **changes})

    return make
