"""Batches of the next step, made while the present one is trained on."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

Raw_co = TypeVar("Raw_co", covariant=True)
Raw = TypeVar("Raw")
Batch = TypeVar("Batch")


class Source(Protocol[Raw_co]):
    """A loader."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Raw_co]: ...
    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""

    def skip_past(self, later: dict[str, Any]) -> None:
        """Leave out the rows up to a later state."""


class Prefetch(Generic[Raw, Batch]):
    """A loader one step ahead, on a thread of its own. Its state is that of the step handed out last."""

    def __init__(self, source: Source[Raw], prepare: Callable[[Raw], Batch]) -> None:
        """Wrap a loader.

        Args:
            source: iterated by one iteration at a time.
            prepare: from what the loader yields to what the step takes; called on the thread.
        """
        self.source = source
        self.prepare = prepare
        self._state: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Batch]:
        rows = iter(self.source)

        def make() -> tuple[Batch, dict[str, Any]] | None:
            for raw in rows:
                return self.prepare(raw), self.source.state_dict()
            return None

        self._state = self.source.state_dict()
        with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as thread:
            coming = thread.submit(make)
            while (made := coming.result()) is not None:
                coming = thread.submit(make)
                batch, self._state = made
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """The loader's state after the step handed out last, whatever has been made ahead."""
        return self.source.state_dict() if self._state is None else self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken; while no iteration is open."""
        self.source.load_state_dict(state)
        self._state = None

    def skip_past(self, later: dict[str, Any]) -> None:
        """As the loader's; while no iteration is open."""
        self.source.skip_past(later)
