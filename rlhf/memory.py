"""Memory of this rank: what is free, the most that was taken, and what one piece of work takes."""

from collections.abc import Callable
from typing import Any

import torch

from rlhf import distributed, host

_earlier_peak_bytes = 0


def free_bytes() -> int:
    """Bytes that this rank can still take: the device's, or its part of the machine's without one. Collective."""
    num_ranks = distributed.ranks_here()
    if _on_cpu():
        return host.available_memory_bytes() // num_ranks
    module = _device_module()
    free, _ = module.mem_get_info()
    # What the allocator keeps for later counts as free.
    return int(free) + int(module.memory_reserved()) - int(module.memory_allocated())


def peak_bytes() -> int:
    """Most accelerator memory allocated so far by this process, or its largest resident set without an accelerator."""
    return max(_earlier_peak_bytes, _peak_since_reset())


def measure_growth() -> Callable[[], int]:
    """Start to measure; the result tells how far memory has risen since, at its highest, in bytes.

    Without an accelerator it is the resident set's rise, in which everything counts that the process does meanwhile.
    """
    global _earlier_peak_bytes
    _earlier_peak_bytes = peak_bytes()
    if _on_cpu():
        host.trim_memory()  # memory that is kept would be taken again without a rise
        host.reset_peak_resident()
        before = host.resident_bytes()
    else:
        _device_module().reset_peak_memory_stats()
        before = int(_device_module().memory_allocated())
    return lambda: max(0, _peak_since_reset() - before)


def _peak_since_reset() -> int:
    return host.peak_resident_bytes() if _on_cpu() else int(_device_module().max_memory_allocated())


def _on_cpu() -> bool:
    return distributed.device_type() == "cpu"


def _device_module() -> Any:
    return torch.get_device_module(distributed.device())
