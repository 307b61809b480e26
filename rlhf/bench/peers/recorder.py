"""Times the steps of a peer. Standard library alone, so that it runs in any environment."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Recorder:
    """Wall and processor seconds from one step's end to the next, so that nothing between steps is missed."""

    def __init__(self, folder: Path) -> None:
        """Record into `folder`, in a file of this rank."""
        self.path = folder / f"steps_rank{os.environ.get('RANK', '0')}.json"
        self.steps: list[dict[str, Any]] = []
        self.first_step_time = 0.0
        self._wall = self._cpu = 0.0
        self._counts = {"tokens": 0, "rows": 0, "filled": 0, "positions": 0}
        self._phases: dict[str, float] = {}
        self._open: tuple[str, float] | None = None

    def start(self) -> None:
        """Begin the first step."""
        self.first_step_time = time.time()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def count(self, **counts: int) -> None:
        """Add to the running step: tokens (real), rows, and of the batches' positions all and those that are filled."""
        for name, number in counts.items():
            self._counts[name] += number

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's seconds to a phase of the running step."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.perf_counter() - start

    def begin_phase(self, name: str) -> None:
        """Give a phase the rest of the running step, if it has not begun."""
        if self._open is None:
            self._open = (name, time.perf_counter())

    def end_step(self) -> None:
        """End the running step and begin the next one."""
        wall, cpu = time.perf_counter(), time.process_time()
        if self._open is not None:
            name, start = self._open
            self._phases[name] = self._phases.get(name, 0.0) + wall - start
            self._open = None
        phases = dict(self._phases)
        if phases:
            phases["other"] = max(0.0, wall - self._wall - sum(phases.values()))
        self.steps.append({"wall": wall - self._wall, "cpu": cpu - self._cpu, "phases": phases, **self._counts})
        self._wall, self._cpu = wall, cpu
        self._counts = dict.fromkeys(self._counts, 0)
        self._phases = {}

    def write(self) -> None:
        """Write what was recorded."""
        record = {"first_step_time": self.first_step_time, "steps": self.steps}
        self.path.write_text(json.dumps(record), encoding="utf-8")


def response_length(token_ids: Sequence[int], stop_id: int | None) -> int:
    """Real tokens of a response, the stop token included; what follows it is padding. None: nothing stops it."""
    ids = list(token_ids)
    return ids.index(stop_id) + 1 if stop_id in ids else len(ids)
