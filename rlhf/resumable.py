"""What a run and its parts have to offer so that `rlhf/checkpoint.py` can save them and take them back."""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlhf.artifacts import Contract
from rlhf.config import RunConfig
from rlhf.health import Health, Verdict

Batch = TypeVar("Batch")
Batch_co = TypeVar("Batch_co", covariant=True)


class Stateful(Protocol):
    """Something whose state is a few JSON-able values."""

    def state_dict(self) -> dict[str, Any]:
        """The values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back; a ValueError says why they do not fit."""


class ResumableRun(Protocol):
    """What is needed of a run."""

    folder: Path
    config: RunConfig
    stage: str
    num_steps: int
    health: Health

    @property
    def first_step(self) -> int:
        """Steps that an earlier attempt has made."""

    def steps(self, batches: Iterable[Batch]) -> Generator[tuple[int, Batch], None, None]:
        """Numbered batches."""

    def state_dict(self, step: int) -> dict[str, Any]:
        """Values that are equal on all ranks."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the saved step."""

    def window_state(self) -> dict[str, Any]:
        """This rank's metrics that are not written yet."""

    def load_window(self, windows: Sequence[Mapping[str, Any]]) -> None:
        """Take back what `window_state` gave on one rank or, after a change of their number, on several."""

    def stop(self) -> None:
        """Close the records; a later attempt goes on."""

    def observe_failure(self, step: int, text: str) -> None:
        """Record that a loss or gradient was not finite."""

    def roll_back(self, state: Mapping[str, Any], verdict: Verdict, name: str) -> None:
        """As `load_state_dict`, in the course of the run."""

    def give_up(self, step: int, detector: str, text: str) -> None:
        """Close the records of a run that a detector ends."""


class Batches(Protocol[Batch_co]):
    """A loader that a rollback can take back and move on."""

    def __iter__(self) -> Iterator[Batch_co]: ...
    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""

    def skip_past(self, later: dict[str, Any]) -> None:
        """Leave out the rows up to a later state."""


class Language(Protocol):
    """How text becomes tokens: `rlhf.stage.Language`."""

    @property
    def contract(self) -> Contract:
        """What has to be the same."""

    def save(self, folder: Path) -> None:
        """Write the tokenizer with its template."""
