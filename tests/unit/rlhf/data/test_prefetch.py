"""One step ahead: the same batches, a state that does not run ahead, and errors that arrive."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rlhf.data.prefetch import Prefetch


class Numbers:
    """A loader that counts."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.position = 0

    def __len__(self) -> int:
        return self.stop

    def __iter__(self) -> Iterator[int]:
        while self.position < self.stop:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]

    def skip_past(self, later: dict[str, Any]) -> None:
        self.position = later["position"]


def test_batches_come_in_order_and_the_state_is_that_of_the_last_one_handed_out() -> None:
    source = Numbers(4)
    ahead = Prefetch(source, lambda n: n * 10)
    assert len(ahead) == 4 and ahead.state_dict() == {"position": 0}
    seen = []
    for batch in ahead:
        seen.append(batch)
        assert ahead.state_dict() == {"position": len(seen)}
    assert seen == [10, 20, 30, 40] and ahead.state_dict() == {"position": 4}


def test_a_run_goes_on_at_the_next_batch() -> None:
    """F12: what was made ahead and not handed out is made again."""
    first = Prefetch(Numbers(5), lambda n: n)
    batches = iter(first)
    assert [next(batches), next(batches)] == [1, 2]
    second = Prefetch(Numbers(5), lambda n: n)
    second.load_state_dict(first.state_dict())
    assert list(second) == [3, 4, 5]


def test_an_iteration_is_closed_and_another_begun() -> None:
    """A rollback: what the thread has made ahead in the first one is gone."""
    ahead = Prefetch(Numbers(6), lambda n: n)
    batches = iter(ahead)
    assert [next(batches), next(batches), next(batches)] == [1, 2, 3]
    seen = ahead.state_dict()
    batches.close()  # type: ignore[attr-defined]
    ahead.load_state_dict({"position": 1})
    assert ahead.state_dict() == {"position": 1}
    ahead.skip_past(seen)
    assert ahead.state_dict() == {"position": 3} and list(ahead) == [4, 5, 6]


def test_the_next_batch_is_made_while_this_one_is_in_use() -> None:
    made = threading.Event()

    def prepare(number: int) -> int:
        if number == 2:
            made.set()
        return number

    for batch in Prefetch(Numbers(2), prepare):
        if batch == 1:
            assert made.wait(5), "batch 2 is made without being asked for"


def test_an_error_arrives_where_its_batch_is_asked_for() -> None:
    def prepare(number: int) -> int:
        if number == 2:
            raise ValueError("row 2 is bad")
        return number

    batches = iter(Prefetch(Numbers(3), prepare))
    assert next(batches) == 1
    with pytest.raises(ValueError, match="row 2 is bad"):
        next(batches)
