"""The folder of states without any engine: complete, intact, kept, compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf import artifacts, states
from rlhf.states import StateError


def a_state(folder: Path, step: int, **run: Any) -> Path:
    part, target = states.part_of(folder, step), states.path_of(folder, step)
    (part / "policy").mkdir(parents=True)
    (part / "policy" / "weights.pt").write_bytes(b"weights of step %d" % step)
    entry = vars(artifacts.entry_of(part / "policy" / "weights.pt"))
    record = {"step": step, "world_size": 1, "engines": {}, "parts": {}, "fits": {}, "run": run}
    states.publish(part, target, {**record, "files": {"policy/weights.pt": entry}})
    return target


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_what_was_written_to_the_end_counts(tmp_path: Path) -> None:
    a_state(tmp_path, 3)
    a_state(tmp_path, 12)
    states.part_of(tmp_path, 20).mkdir()  # killed inside a save
    (tmp_path / "step_00000030").mkdir()  # killed inside a deletion
    states.set_aside(a_state(tmp_path, 40), "damaged")
    assert [path.name for path in states.complete(tmp_path)] == ["step_00000003", "step_00000012"]
    assert states.complete(tmp_path / "nothing") == []
    states.discard_parts(tmp_path)
    assert ".step_00000020.part" not in names(tmp_path) and "step_00000040.damaged" in names(tmp_path)


def test_a_state_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    a_state(tmp_path, 3, metrics={"eval/loss": 1.0})
    a_state(tmp_path, 3, metrics={"eval/loss": 2.0})
    assert states.read_record(states.path_of(tmp_path, 3))["run"]["metrics"] == {"eval/loss": 2.0}
    assert names(tmp_path) == ["step_00000003"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "is truncated: 16 bytes, 17 were written"),
        (lambda path: path.write_bytes(b"W" + path.read_bytes()[1:]), "sha256 is not that of what was written"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "is changed: 18 bytes, 17 were written"),
        (lambda path: path.unlink(), "is missing"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, change: Any, words: str) -> None:
    state = a_state(tmp_path, 3)
    files = states.files_of(states.read_record(state))
    assert states.fault_of(state, "policy/weights.pt", files["policy/weights.pt"]) is None
    change(state / "policy" / "weights.pt")
    fault = states.fault_of(state, "policy/weights.pt", files["policy/weights.pt"])
    assert fault is not None and words in fault and "weights.pt" in fault


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 2, "step": 3}', "\x00"])
def test_records_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    state = a_state(tmp_path, 3)
    (state / "state.json").write_text(text)
    with pytest.raises(StateError, match=r"state\.json"):
        states.read_record(state)


def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)):
        a_state(tmp_path, step, metrics={} if loss is None else {"eval/loss": loss})
    assert states.best_of(tmp_path, "eval/loss", "up") == states.path_of(tmp_path, 1)
    assert states.best_of(tmp_path, "eval/accuracy", "up") is None
    dropped = states.rotate(tmp_path, keep=2, best=("eval/loss", "down"))
    assert [path.name for path in dropped] == ["step_00000001", "step_00000003"]
    assert names(tmp_path) == ["step_00000002", "step_00000004", "step_00000005"]
    states.rotate(tmp_path, keep=1)
    assert names(tmp_path) == ["step_00000005"]


def test_rotation_keeps_good_states_too(tmp_path: Path) -> None:
    """States 1 to 3 are good, one of before there were detectors among them; 4 to 6 were saved over a limit."""
    for step in range(1, 7):
        a_state(tmp_path, step, **({} if step == 2 else {"health": {"good": step <= 3}}))
    assert [states.is_good(path) for path in states.complete(tmp_path)] == [True] * 3 + [False] * 3
    states.rotate(tmp_path, keep=2, keep_good=2)
    assert [states.step_of(path) for path in states.complete(tmp_path)] == [2, 3, 5, 6]
    (states.path_of(tmp_path, 3) / "state.json").write_text("{")
    assert not states.is_good(states.path_of(tmp_path, 3))
    states.set_aside(states.path_of(tmp_path, 6), "unhealthy")
    assert "step_00000006.unhealthy" in names(tmp_path)
    assert [states.step_of(path) for path in states.complete(tmp_path)] == [2, 3, 5]


def test_every_file_is_read_by_one_rank() -> None:
    files = [f"f{i}" for i in range(7)]
    shares = [states.share_of(files, rank=rank, world_size=3) for rank in range(3)]
    assert sorted(name for share in shares for name in share) == files
    assert max(map(len, shares)) - min(map(len, shares)) == 1


def test_differences_are_told_in_words() -> None:
    saved = {"seed": 1, "policy.optimiser": {"lr": 0.1, "eps": 1e-8}, "rows": "abc", "same": [1]}
    own = {"seed": 2, "policy.optimiser": {"lr": 0.2, "eps": 1e-8}, "same": [1], "new": True}
    assert states.differences(saved, own) == [
        "new is absent in the state, true in this run",
        "policy.optimiser: lr is 0.1 in the state, 0.2 in this run",
        'rows is "abc" in the state, absent in this run',
        "seed is 1 in the state, 2 in this run",
    ]
    many = states.differences({"w": dict.fromkeys("abcdefg", 1)}, {"w": dict.fromkeys("abcdefg", 2)})
    assert len(many) == 5 and many[-1] == "w: and 3 more"
    assert json.dumps(many)
