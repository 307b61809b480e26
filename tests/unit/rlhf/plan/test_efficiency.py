"""The efficiency table: waves, alignment, roofline."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.plan import efficiency
from rlhf.plan.hardware import load_devices

A100 = load_devices()["a100-80"]


def test_waves_worked_by_hand() -> None:
    """108 cores. 108 x 128 rows of 256 columns are one wave of whole tiles; one row more costs a second wave."""
    assert efficiency.waves(A100, 108 * 256, 128) == 1.0
    # 109 tiles in two waves of 108.
    assert efficiency.waves(A100, 109 * 256, 128) == pytest.approx(
        max(109 / 216, *(speed * share for speed, share in _others(109 * 256, 128)))
    )


def _others(m: int, n: int) -> list[tuple[float, float]]:
    """Tiles of 128 x 128, 64 x 128 and 64 x 64, by counting them one by one."""
    found = []
    for rows, columns, speed in ((128, 128, 0.94), (64, 128, 0.8), (64, 64, 0.62)):
        tiles = len(range(0, m, rows)) * len(range(0, n, columns))
        waves = 0
        while waves * 108 < tiles:
            waves += 1
        found.append((speed, m * n / (waves * 108 * rows * columns)))
    return found


def test_alignment() -> None:
    assert efficiency.alignment(4096, 128) == 1.0
    assert efficiency.alignment(1800, 64) == efficiency.UNALIGNED  # hidden 14400 over 8 ranks
    assert efficiency.alignment(108) == efficiency.NO_TENSOR_CORE


def test_small_products_are_bound_by_memory() -> None:
    """One row against 8192 x 8192 weights reads 134 MB."""
    seconds = efficiency.matmul(A100, "bf16", 1, 8192, 8192)
    assert seconds == pytest.approx(2 * 8192 * 8194 / (2039e9 * efficiency.BANDWIDTH) + efficiency.KERNEL)


@given(m=st.integers(1, 20000), n=st.integers(8, 20000), k=st.integers(8, 20000))
def test_never_faster_than_the_ceiling(m: int, n: int, k: int) -> None:
    seconds = efficiency.matmul(A100, "bf16", m, n, k)
    assert 2 * m * n * k / seconds <= A100.peak("bf16") * efficiency.CEILING["ampere"]["bf16"]


def test_twice_the_rows_take_longer_but_less_than_thrice() -> None:
    for m in (64, 512, 4096):
        one, two = (efficiency.matmul(A100, "bf16", rows, 4096, 4096) for rows in (m, 2 * m))
        assert one < two < 3 * one


def test_unknown_architecture_is_named(make_device: Any) -> None:
    with pytest.raises(ValueError, match="architecture='tpu' with bf16 is not in the efficiency table"):
        efficiency.matmul(make_device(architecture="tpu"), "bf16", 8, 8, 8)


def test_a_cpu_keeps_its_measured_peak(make_device: Any) -> None:
    cpu = make_device(architecture="cpu", peak_tflops={"fp32": 1.0})
    assert efficiency.matmul_efficiency(cpu, "fp32", 3, 5, 7) == efficiency.CEILING["cpu"]["fp32"]
