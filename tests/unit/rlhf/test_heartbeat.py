"""What a rank notes about itself, its record, and which rank of several holds a run up."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf import heartbeat
from rlhf.heartbeat import Beat, Stuck, beat_path, find_stuck, read_beat, read_stuck, write_beat, write_stuck


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(heartbeat, "_activity", heartbeat._Activity())
    yield


def now(**limits: float) -> Beat:
    return heartbeat.current_beat(rank=1, world_size=2, host="h", number=3, limits=limits)


def test_phases_steps_and_roles() -> None:
    assert (now().phase, now().step) == ("start", 0)
    with heartbeat.during("eval"):
        assert now(eval=7.0).limit_seconds == 7.0
    assert now().phase == "start"  # what is before the first step is still the start
    heartbeat.at_step(1, 5)
    assert (now().phase, now().step, now().num_steps) == ("other", 1, 5)
    with heartbeat.during("rollout"):
        heartbeat.call("actor")
        heartbeat.call()
        with heartbeat.during("score"):  # a timer inside another one counts for the outer one
            assert (now().phase, now().role, now().calls) == ("rollout", "actor", 2)
    assert (now().phase, now().calls) == ("other", 0)


def test_an_exception_leaves_its_phase_in_the_record() -> None:
    heartbeat.at_step(1, 5)
    with pytest.raises(RuntimeError), heartbeat.during("update"):
        raise RuntimeError
    assert now().phase == "update"
    with heartbeat.during("save"):
        assert now().phase == "save"
    assert now().phase == "other"


def test_progress_resets_the_clock() -> None:
    heartbeat._activity.since -= 100
    assert 100 <= now().idle_seconds < 110
    heartbeat.tick()
    assert now().idle_seconds < 10


def test_where_the_main_thread_is_while_it_makes_no_progress() -> None:
    """Told by another thread, as the watchdog does it; a collective is one of torch.distributed's functions."""
    found: list[Beat] = []

    def look() -> None:
        heartbeat._activity.since -= 5
        found.append(now())

    thread = threading.Thread(target=look)
    code = compile(
        "def all_reduce(thread):\n    thread.start()\n    thread.join()\n", "/x/torch/distributed/c.py", "exec"
    )
    space: dict = {}
    exec(code, space)
    space["all_reduce"](thread)
    assert found[0].waits_for == "all_reduce"
    assert found[0].at == ""  # tests are not this code's packages
    with heartbeat.waiting_for("a lock"):
        assert now().waits_for == "a lock"
    assert now().waits_for == ""


def test_a_record_is_read_back_and_written_in_place(tmp_path: Path) -> None:
    beat = replace(now(), error="x" * 5000, at='a "quoted" name')
    write_beat(tmp_path, beat)
    size = beat_path(tmp_path, 1).stat().st_size
    write_beat(tmp_path, replace(beat, error="", number=4))
    assert beat_path(tmp_path, 1).stat().st_size == size == 2048
    assert read_beat(tmp_path, 1) == replace(beat, error="", number=4)
    assert read_beat(tmp_path, 0) is None
    beat_path(tmp_path, 1).write_text(json.dumps({"rank": 1})[:-3])
    assert read_beat(tmp_path, 1) is None


def test_the_first_to_find_out_is_the_one_that_is_heard(tmp_path: Path) -> None:
    assert read_stuck(tmp_path) is None
    assert write_stuck(tmp_path, Stuck(rank=1, text="a")).rank == 1
    assert write_stuck(tmp_path, Stuck(rank=2, text="b")).rank == 1
    assert read_stuck(tmp_path) == Stuck(rank=1, text="a")


def beat(rank: int, **values: object) -> Beat:
    defaults = {"phase": "update", "phases": 9, "limit_seconds": 60.0, "idle_seconds": 100.0, "step": 4, "calls": 2}
    return Beat(rank=rank, world_size=3, host=f"h{rank}", pid=100 + rank, **{**defaults, **values})


WAITING = {"waits_for": "all_reduce"}
BUSY = {"idle_seconds": 0.5}


@pytest.mark.parametrize(
    ("beats", "culprit"),
    [
        ([beat(0, **WAITING), beat(1), beat(2, **WAITING)], 1),  # sleeps while the others wait for it
        ([beat(0, **WAITING), beat(1, **BUSY), beat(2, **WAITING)], None),  # a slow rank: the others may wait
        ([beat(0, **BUSY), beat(1), beat(2, **BUSY)], 1),  # without a collective the others go on
        ([beat(0, **WAITING), beat(1, **WAITING), beat(2, phases=8, **WAITING)], 2),  # two different collectives
        ([beat(0, calls=3, **WAITING), beat(1, calls=1, **WAITING), beat(2, calls=3, **WAITING)], 1),
        ([beat(0), beat(1, phases=8), beat(2, phases=8, calls=1)], 2),  # the one with the least progress
        ([beat(0, limit_seconds=0.0), beat(1, limit_seconds=0.0), beat(2, limit_seconds=0.0)], None),  # 0: never
        ([beat(0, **WAITING), beat(1, state="failed"), beat(2, **BUSY)], None),  # who has ended is not stuck
        ([beat(0, **WAITING), beat(1, state="ended"), beat(2, **WAITING)], 0),
        ([beat(0, idle_seconds=59.0), beat(1, idle_seconds=60.0), beat(2, **BUSY)], None),
    ],
)
def test_who_is_stuck(beats: list[Beat], culprit: int | None) -> None:
    found = find_stuck({b.rank: b for b in beats}, {}, silent_limit=30, start_limit=300)
    assert (found and found.rank) == culprit


def test_silence_is_worse_than_idling() -> None:
    beats = {0: beat(0, **WAITING), 1: beat(1, **BUSY), 2: None}

    def culprit(silent: dict[int, float]) -> int | None:
        found = find_stuck(beats, silent, silent_limit=30, start_limit=300)
        return found.rank if found else None

    assert culprit({0: 1.0, 1: 29.0, 2: 299.0}) is None
    assert culprit({0: 1.0, 1: 31.0, 2: 299.0}) == 1
    assert culprit({0: 1.0, 1: 31.0, 2: 301.0}) == 2
    assert find_stuck(beats, {1: 1e6, 2: 1e6}, silent_limit=0, start_limit=0) is None


def test_what_is_said() -> None:
    others = {0: beat(0, **WAITING), 2: beat(2, waits_for="barrier")}
    found = find_stuck({1: beat(1, role="critic", at="step3_ppo/update.py:90 in update"), **others}, {}, silent_limit=0,
                       start_limit=0)  # fmt: skip
    assert found is not None and found.text == (
        "rank 1 on h1 (process 101), step 4 of 0, phase update, role critic, model call 2 has made no progress for "
        "100 s (limit 60 s, run.watchdog.update_seconds). It is at step3_ppo/update.py:90 in update. The other ranks "
        "are in all_reduce, barrier."
    )


def test_reading_the_clock_is_all_that_a_call_costs() -> None:
    started = time.perf_counter()
    for _ in range(10_000):
        heartbeat.call("actor")
    assert time.perf_counter() - started < 0.5
