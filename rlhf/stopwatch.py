"""Seconds between marks on a device's own time line, read at the end, so that the host never waits for them."""

import time

import torch

from rlhf import distributed


class Stopwatch:
    """Marks in a row; on an accelerator each is an event in the stream of work."""

    def __init__(self) -> None:
        self._is_host = distributed.device_type() == "cpu"
        self._marks: list[float | torch.Event] = []

    def mark(self) -> int:
        """The work given to the device so far ends here; the mark's number."""
        if self._is_host:
            self._marks.append(time.perf_counter())
        else:
            event = torch.Event(distributed.device_type(), enable_timing=True)
            event.record()
            self._marks.append(event)
        return len(self._marks) - 1

    def seconds(self, first: int, last: int) -> float:
        """Between two marks that the device has passed."""
        begin, end = self._marks[first], self._marks[last]
        if isinstance(begin, float) and isinstance(end, float):
            return end - begin
        assert isinstance(begin, torch.Event) and isinstance(end, torch.Event)
        return begin.elapsed_time(end) / 1e3
