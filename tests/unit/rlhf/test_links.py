"""Timing of collectives: what is compared, and that a wrong result is an error. On real ranks: tests/distributed."""

from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from rlhf import links

T = TypeVar("T")


class Group:
    """The second of two ranks; `wrong` is added to what it gets from the first."""

    rank, size = 1, 2

    def __init__(self, *, reduce_wrong: float = 0.0, gather_wrong: float = 0.0) -> None:
        self.reduce_wrong, self.gather_wrong = reduce_wrong, gather_wrong

    def sum_(self, x: Tensor) -> Tensor:
        x += 1.0
        x[-1] += self.reduce_wrong
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        return [torch.full_like(x, 1.0 + self.gather_wrong), x]

    def gather_objects(self, value: T) -> list[T]:
        return [value] * 2


def test_seconds_of_both() -> None:
    group: Any = Group()
    assert set(links.time_collectives(group, 4096)) == {"all_reduce_seconds", "all_gather_seconds"}


def test_a_wrong_result_is_an_error() -> None:
    group: Any = Group(reduce_wrong=1e-3)
    with pytest.raises(RuntimeError, match=r"all-reduce gave values in \[3.0, 3.00\d+\] where all must be 3.0"):
        links.time_collectives(group, 4096)
    group = Group(gather_wrong=1.0)
    with pytest.raises(RuntimeError, match="all-gather gave values"):
        links.time_collectives(group, 4096)
