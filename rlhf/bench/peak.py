"""Program: what this machine's processor can do on one thread, in matrix products and in copies.

python -m rlhf.bench.peak --out FILE
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

_SIZES = (1024, 2048)
_COPY_BYTES = 1 << 28
_SECONDS = 1.5


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(prog="rlhf.bench.peak", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    peaks = {
        "matmul_fp32_flops": max(matmul_flops(n, torch.float32) for n in _SIZES),
        "matmul_bf16_flops": max(matmul_flops(n, torch.bfloat16) for n in _SIZES),
        "copy_bytes_per_second": copy_bytes_per_second(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    arguments.out.write_text(json.dumps(peaks, indent=2) + "\n", encoding="utf-8")
    return 0


def matmul_flops(n: int, dtype: torch.dtype) -> float:
    """FLOPs per second of a product of two square matrices, the best of the tries."""
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    out = torch.empty(n, n, dtype=dtype)
    return 2 * n**3 / _best_seconds(lambda: torch.mm(a, b, out=out))


def copy_bytes_per_second(device: torch.device | str = "cpu") -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    a = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    b = torch.ones_like(a)

    def copy() -> None:
        b.copy_(a)
        if b.device.type != "cpu":
            torch.accelerator.synchronize()

    return 2 * _COPY_BYTES / _best_seconds(copy)


def _best_seconds(work: Callable[[], object]) -> float:
    """Shortest duration of `work` within the time for it, after one warm-up."""
    work()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


if __name__ == "__main__":
    sys.exit(main())
