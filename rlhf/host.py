"""How this process uses the host's memory."""

import ctypes
import sys

# Numbers of mallopt(3), malloc.h.
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed instead of giving each large block back to the kernel.

    By default every tensor over 32 MiB is mapped anew and its pages are zeroed at first touch: in training on a CPU one
    step frees and takes the same blocks again and again. The largest resident set stays what it was.

    Returns:
        Whether the C library took it; others than glibc have no such setting.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return bool(mallopt(_MMAP_THRESHOLD, 1 << 30) and mallopt(_TRIM_THRESHOLD, (1 << 31) - 1))
