import pytest

from rlhf.rollout import job
from rlhf.rollout.job import Meter, check_finite


def test_stats_by_hand(monkeypatch):
    """Two slots: forwards of 2, 2, 1 and 0.5 slots' worth; seconds divided by tokens."""
    clock = iter([0.0, 10.0, 14.0])
    monkeypatch.setattr(job.time, "perf_counter", lambda: next(clock))
    meter = Meter(num_slots=4, progress=None, every=10)
    meter.forward(busy=4, prompt_tokens=30)
    meter.lap(prompt_tokens=30, decode_tokens=10)
    for busy in (4, 2, 1):
        meter.forward(busy=busy, prompt_tokens=0)
    meter.add(tokens=11, finished=4)
    meter.lap(prompt_tokens=0, decode_tokens=7)
    stats = meter.stats()
    assert (stats.tokens, stats.forwards, stats.prefill_tokens) == (11, 4, 30)
    assert stats.occupancy == pytest.approx(11 / 16) and stats.tail_frac == pytest.approx(1 / 4)
    assert (stats.prefill_seconds, stats.decode_seconds) == (7.5, 2.5 + 4)


def test_a_lap_without_tokens_is_decoding(monkeypatch):
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(job.time, "perf_counter", lambda: next(clock))
    meter = Meter(num_slots=1, progress=None, every=1)
    meter.lap(prompt_tokens=0, decode_tokens=0)
    assert (meter.stats().prefill_seconds, meter.stats().decode_seconds) == (0.0, 1.0)


def test_progress_every_so_many_tokens():
    seen = []
    meter = Meter(num_slots=1, progress=lambda *numbers: seen.append(numbers), every=5)
    for finished in (0, 1, 0, 1):
        meter.add(tokens=3, finished=finished)
    assert seen == [(6, 1), (12, 2)]


def test_check_finite():
    check_finite(True, 3)
    with pytest.raises(FloatingPointError, match="response token 3 of a row.*use bfloat16 or float32"):
        check_finite(False, 3)
