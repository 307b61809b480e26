"""The clock of the peers' programs: nothing between two steps is missed, and counts belong to the step they are in."""

import json
from pathlib import Path

import pytest

from rlhf.bench.peers import recorder as module
from rlhf.bench.peers.arguments import parse, read_rows
from rlhf.bench.peers.recorder import Recorder, response_length


def test_steps_phases_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall, cpu = [10.0], [5.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(module.time, "process_time", lambda: cpu[0])
    monkeypatch.setenv("RANK", "1")

    def work(seconds: float) -> None:
        wall[0] += seconds
        cpu[0] += seconds / 2

    recorder = Recorder(tmp_path)
    work(100)  # before the first step
    recorder.start()
    with recorder.phase("rollout"):
        work(2)
    recorder.count(tokens=7, rows=1)
    with recorder.phase("rollout"):
        work(1)
    work(3)
    recorder.begin_phase("update")
    work(4)
    recorder.begin_phase("update")  # has begun
    work(1)
    recorder.count(tokens=5, filled=3, positions=4)
    recorder.end_step()
    work(6)  # loading the next batch
    recorder.end_step()
    recorder.write()
    first, second = json.loads((tmp_path / "steps_rank1.json").read_text())["steps"]
    assert first == {
        "wall": 11.0, "cpu": 5.5, "phases": {"rollout": 3.0, "update": 5.0, "other": 3.0},
        "tokens": 12, "rows": 1, "filled": 3, "positions": 4,
    }  # fmt: skip
    assert second == {"wall": 6.0, "cpu": 3.0, "phases": {}, "tokens": 0, "rows": 0, "filled": 0, "positions": 0}


def test_arguments_and_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    words = ["--data", str(rows), "--out", "o", "--rows", "2", "--steps", "3", "--dtype", "bf16", "--new-tokens", "4"]
    arguments = parse("x", words)
    assert arguments.new_tokens == 4 and not arguments.stop and arguments.deepspeed is None
    assert read_rows(arguments.data) == [{"prompt": "a"}, {"prompt": "b"}]


def test_response_length_where_pad_and_stop_share_an_id() -> None:
    assert response_length([5, 6, 2, 2, 2], 2) == 3
    assert response_length([2], 2) == 1
    assert response_length([5, 6, 7], 2) == 3
    assert response_length([5, 2, 7], None) == 3
