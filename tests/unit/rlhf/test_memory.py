"""Memory of this process: what is free, and how far a piece of work raises it."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from rlhf import distributed, host, memory

PROGRAM = """
import torch
from rlhf import distributed, host, memory
distributed.init()
host.keep_freed_memory()
def work(num_mib):
    torch.ones(num_mib << 18).sum()
work(400)  # freed, but kept: taking it again must still count
peak = memory.peak_bytes()
risen = memory.measure_growth()
work(100)
first = risen()
risen = memory.measure_growth()
second = risen()
print(peak >> 20, first >> 20, second >> 20, memory.peak_bytes() >> 20, memory.free_bytes() >> 20)
"""


def test_the_rise_is_of_the_work_alone() -> None:
    """100 MiB after 400 that are free again, then nothing; the process's own peak stays what it was."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        cwd=Path(__file__).resolve().parents[3],
    )
    assert done.returncode == 0, done.stderr
    peak, first, second, later_peak, free = map(int, done.stdout.split())
    assert 95 <= first <= 130 and second < 10, done.stdout
    assert later_peak >= peak > 400 and free > 0


def test_a_container_s_limit_counts(monkeypatch) -> None:
    """Of the machine's memory no more is available than its group may still take."""
    files = {
        "/proc/meminfo": "MemTotal:  100 kB\nMemAvailable:  50 kB\n",
        "/sys/fs/cgroup/memory.max": "40960\n",
        "/sys/fs/cgroup/memory.current": "30720\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda self, **_: files[str(self)])
    assert host.available_memory_bytes() == 10 * 1024
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert host.available_memory_bytes() == 50 * 1024


def test_what_the_allocator_has_ready_is_free(monkeypatch) -> None:
    """Of 100 on the device 30 are free; the allocator has 50, of which 20 are in use."""
    accelerator = torch.accelerator.memory
    monkeypatch.setattr(distributed, "device_type", lambda: "cuda")
    monkeypatch.setattr(distributed, "ranks_here", lambda: 1)
    monkeypatch.setattr(accelerator, "get_memory_info", lambda device: (30, 100))
    monkeypatch.setattr(accelerator, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(accelerator, "memory_allocated", lambda device: 20)
    assert memory.free_bytes() == 60
