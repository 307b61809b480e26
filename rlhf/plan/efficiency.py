"""The one efficiency table: what share of its peak a device reaches, by type and shape of the product. No torch.

Constants marked (fitted) were set on the groups of published figures that validate.py marks so, and are judged on the
others. No entry belongs to a row of those tables.
"""

import math

from rlhf.plan.hardware import Device

CEILING: dict[str, dict[str, float]] = {
    "volta": {"fp16": 0.60, "bf16": 0.60, "fp32": 0.85},
    "ampere": {"fp16": 0.81, "bf16": 0.81, "fp32": 0.85},
    "hopper": {"fp16": 0.67, "bf16": 0.67, "fp8": 0.60, "fp32": 0.75},
    "blackwell": {"fp16": 0.66, "bf16": 0.66, "fp8": 0.65, "fp4": 0.50, "fp32": 0.75},
    "cdna2": {"fp16": 0.53, "bf16": 0.53, "fp32": 0.7},
    "cdna3": {"fp16": 0.43, "bf16": 0.43, "fp8": 0.38, "fp32": 0.6},
    "cpu": {"fp32": 0.9, "bf16": 0.9, "fp16": 0.9},
}
"""Large, aligned products under load (fitted: ampere, hopper, cdna2, volta). The best that a search over shapes
found is 0.87 of peak on A100, 0.80 on H100, 0.71 in fp8, 0.78 on B200, 0.51 on MI300X (stas00/ml-engineering, MAMF); a
step that runs for hours at full power stays below it: blackwell, cdna3 and fp8 are that best times 0.85, hopper's
ratio. fp4 is a guess. A CPU's peak is measured, so the rest is close to it."""

FLASH: dict[str, float] = {
    "volta": 0.30, "ampere": 0.56, "hopper": 0.31, "blackwell": 0.32, "cdna2": 0.30, "cdna3": 0.27, "cpu": 0.5
}  # fmt: skip
"""Attention whose pairs stay on chip, of the 16-bit peak, forward and backward together (fitted: ampere, hopper). Dao
2023, arXiv:2307.08691, measures 0.5 to 0.73 on A100 and 0.35 on H100."""

FLASH_1 = 0.55
"""Speed of its first version beside the second (Dao 2023: "around 2x")."""

BANDWIDTH = 0.75
"""Of the memory's peak, for kernels that only read and write."""

TILES = ((256, 128), (128, 256), (128, 128), (64, 128), (64, 64))
"""Output tiles of a product's kernels, with their relative speed in `_TILE_SPEED`."""
_TILE_SPEED = (1.0, 1.0, 0.94, 0.8, 0.62)

DEPTH = 200.0
"""Depth of a product whose start and end take as long as its middle (fitted)."""

UNALIGNED = 0.50
"""Speed of a product whose rows do not start on a 128-byte line (fitted: BLOOM's hidden 14400 over 8 ranks)."""
NO_TENSOR_CORE = 0.25
"""Of one whose rows do not start on 16 bytes."""

KERNEL = 3.0e-6
"""Seconds of a kernel's start and end on the device."""


def alignment(*sizes: float) -> float:
    """Speed by the least aligned of the sizes that run along memory, in 16-bit elements; one below 64 is one tile."""
    if any(size % 8 for size in sizes):
        return NO_TENSOR_CORE
    return UNALIGNED if any(size > 64 and size % 64 for size in sizes) else 1.0


def waves(device: Device, m: float, n: float) -> float:
    """Share of the tiles' work that is wanted, for the best tile: tiles are cut whole and dealt in whole waves."""
    best = 0.0
    for (rows, columns), speed in zip(TILES, _TILE_SPEED, strict=True):
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        dealt = math.ceil(tiles / device.cores) * device.cores
        best = max(best, speed * m * n / (dealt * rows * columns))
    return best


def matmul_efficiency(device: Device, dtype: str, m: float, n: float, k: float) -> float:
    """Share of peak of an (m, k) x (k, n) product, memory aside.

    Raises:
        ValueError: the table has no such architecture or type.
    """
    rows = CEILING.get(device.architecture)
    if rows is None or dtype not in rows:
        raise ValueError(
            f"hardware {device.name}: architecture={device.architecture!r} with {dtype} is not in the efficiency "
            f"table. It has {', '.join(CEILING)}."
        )
    if device.architecture == "cpu":
        return rows[dtype]
    return rows[dtype] * device.power_limit * alignment(n, k) * waves(device, m, n) * k / (k + DEPTH)


def matmul(device: Device, dtype: str, m: float, n: float, k: float) -> float:
    """Seconds of an (m, k) x (k, n) product: computing or memory, whichever is longer."""
    if device.measured is not None:
        return device.measured.product(dtype, m, n, k)
    efficiency = matmul_efficiency(device, dtype, m, n, k)
    width = {"fp32": 4, "fp8": 1, "fp4": 0.5}.get(dtype, 2)
    computing = 2 * m * n * k / (device.peak(dtype) * efficiency)
    traffic = (width * (m * k + k * n) + max(width, 2) * m * n) / (device.bandwidth * BANDWIDTH)
    return max(computing, traffic) + KERNEL


def traffic(device: Device, size: float) -> float:
    """Seconds of reading and writing `size` bytes."""
    return size / (device.bandwidth * BANDWIDTH)
