"""Memory of this rank: what is free, the most that was taken, and what one piece of work takes."""

from collections.abc import Callable

import torch

from rlhf import distributed, host

_accelerator = torch.accelerator.memory
_earlier_peak_bytes = 0


def free_bytes() -> int:
    """Bytes that this rank can still take: the device's, or its part of the machine's without one. Collective."""
    num_ranks = distributed.ranks_here()
    if _on_cpu():
        return host.available_memory_bytes() // num_ranks
    device = distributed.device()
    free, _ = _accelerator.get_memory_info(device)
    # What the allocator keeps for later counts as free.
    return free + _accelerator.memory_reserved(device) - _accelerator.memory_allocated(device)


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
        _accelerator.reset_peak_memory_stats(distributed.device())
        before = _accelerator.memory_allocated(distributed.device())
    return lambda: max(0, _peak_since_reset() - before)


def _peak_since_reset() -> int:
    return host.peak_resident_bytes() if _on_cpu() else _accelerator.max_memory_allocated(distributed.device())


def _on_cpu() -> bool:
    return distributed.device_type() == "cpu"
