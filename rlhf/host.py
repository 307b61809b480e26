"""The machine that this process runs on: its processor, its ports, its C library's memory. No torch."""

import ctypes
import platform
import socket
import sys
from pathlib import Path

# Numbers of mallopt(3), malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed instead of giving each large block back to the kernel.

    By default every tensor over 32 MiB is mapped anew and its pages are zeroed at first touch: in training on a CPU one
    step frees and takes the same blocks again and again. The price is what lies free between blocks in use: call it
    once the models are loaded, whose passing copies would otherwise stay.

    Returns:
        Whether the C library took it; others than glibc have no such setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 1 << 30) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))


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
