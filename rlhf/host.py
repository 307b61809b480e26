"""The machine that this process runs on: its processor, its ports, its C library's memory. No torch."""

import ctypes
import os
import platform
import resource
import socket
import sys
from pathlib import Path

# Numbers of mallopt(3), malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3

KEPT_BLOCK_BYTES = 40 << 20
"""Larger blocks go back to the kernel all the same: where they lay, smaller ones would break the room up."""


def keep_freed_memory() -> bool:
    """Let glibc keep freed blocks of up to `KEPT_BLOCK_BYTES` instead of giving them back to the kernel.

    By default what lies free at the end of the heap goes back, and its pages are zeroed when they are touched again: in
    training on a CPU one step frees and takes the same blocks again and again. The price is what lies free between
    blocks in use: call it once the models are loaded, whose passing copies would otherwise stay.

    Returns:
        Whether the C library took it; others than glibc have no such setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(_MMAP_THRESHOLD, KEPT_BLOCK_BYTES) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


def trim_memory() -> None:
    """Give what is freed back to the kernel after all, where the C library can."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if malloc_trim is not None:
        malloc_trim(0)


def memory_bytes() -> int:
    """Memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory_bytes() -> int:
    """Memory that processes can still take: of the machine, or of the container that they are in."""
    available = _fields("/proc/meminfo").get("MemAvailable")
    if available is None:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))


def resident_bytes() -> int:
    """Memory of this process at this moment; its largest so far where the system does not tell."""
    return _fields("/proc/self/status").get("VmRSS") or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Most memory of this process so far, or since `reset_peak_resident`."""
    high_water = _fields("/proc/self/status").get("VmHWM")
    if high_water is not None:
        return high_water
    # getrusage counts what the process was before exec too: of a program started by a large one, that one's memory.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux


def reset_peak_resident() -> None:
    """Count `peak_resident_bytes` from here on, where the system can (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _fields(path: str) -> dict[str, int]:
    """Entries in kilobytes of a file of /proc, in bytes; none where there is no such file."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    entries = (line.split() for line in lines)
    return {entry[0].rstrip(":"): int(entry[1]) * 1024 for entry in entries if entry[-1:] == ["kB"]}


def cpu_name() -> str:
    """Name of the processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def free_port() -> int:
    """A TCP port that nothing on this machine listens on now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
