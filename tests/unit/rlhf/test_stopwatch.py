"""Seconds between marks."""

import time

import pytest

from rlhf.stopwatch import Stopwatch


def test_marks_are_places_on_one_line() -> None:
    watch = Stopwatch()
    numbers = []
    for pause in (0.02, 0.0, 0.01):
        numbers.append(watch.mark())
        time.sleep(pause)
    numbers.append(watch.mark())
    assert numbers == [0, 1, 2, 3]
    assert watch.seconds(0, 1) >= 0.02 and watch.seconds(2, 3) >= 0.01
    assert watch.seconds(0, 3) == pytest.approx(watch.seconds(0, 1) + watch.seconds(1, 2) + watch.seconds(2, 3))
