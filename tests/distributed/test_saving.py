"""When states are written and what happens when that fails, on two ranks: signals, time, disks, damaged files."""

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf import distributed, engine
from rlhf.states import StateError
from tests.distributed.harness import Ranks
from tests.distributed.tiny import engine_of, steps_of_rows, tiny_opt, train_step
from tests.saving import Counter, TinyRun, checkpoints, resume, save


def saved(folder: Path | str) -> list[str]:
    return sorted(path.name for path in (Path(folder) / "state").iterdir() if path.name != "tokenizer")


def cadence_job(folder: str) -> dict[str, Any]:
    """Three steps under different cadences; a signal to one rank, a file, and rank 0's clock."""
    engine.setup(timeout_seconds=60)
    trained = engine_of(tiny_opt(), "cpu_zero2")
    seen: dict[str, Any] = {}

    def train(name: str, *, at_step_2: Any = None, **config: Any) -> None:
        run, code, made = TinyRun(f"{folder}/{name}", num_steps=3, **config), 0, []
        if distributed.is_main():
            run.folder.mkdir(parents=True, exist_ok=True)
        distributed.barrier()
        states = checkpoints(run, {"policy": trained}, part=Counter(5))
        try:
            for step, rows in states.steps(steps_of_rows(3)):
                train_step(trained, rows)
                made.append(step)
                run.values = {"eval/loss": abs(2.0 - step)}
                if step == 2 and at_step_2 is not None:
                    at_step_2(run)
        except SystemExit as stop:
            code = int(stop.code or 0)
        seen[name] = (made, code, run.stopped, saved(run.folder) if (run.folder / "state").exists() else [])

    train("none")
    train("steps", save_every=2, keep_states=9)
    train("async", save_every=1, keep_states=2, save_async=True)
    train("best", save_every=1, keep_states=1, keep_best="eval/loss", eval_every=1)
    train("minutes", save_minutes=1e-9 if distributed.is_main() else 1e9, keep_states=9)
    train("file", at_step_2=lambda run: (run.folder / "stop_request").touch() if distributed.is_main() else None)
    for signum in (signal.SIGUSR1, signal.SIGTERM):

        def send(run: TinyRun, signum: int = signum) -> None:
            if distributed.rank() == 1:
                os.kill(os.getpid(), signum)

        train(signal.Signals(signum).name, at_step_2=send)
    seen["request"] = (Path(folder) / "file" / "stop_request").exists()
    return seen


def test_when_states_are_written(ranks: Ranks, tmp_path: Path) -> None:
    """By count, by rank 0's clock, on request in agreement; the newest and the best are kept."""
    first, second = ranks(cadence_job, folder=str(tmp_path), timeout=120)
    assert first == second
    step = "step_0000000{}".format
    assert first["none"] == ([1, 2, 3], 0, False, [])
    assert first["steps"] == ([1, 2, 3], 0, False, [step(0), step(2)])
    assert first["async"] == ([1, 2, 3], 0, False, [step(2), step(3)])
    assert first["best"] == ([1, 2, 3], 0, False, [step(2), step(3)])
    assert first["minutes"] == ([1, 2, 3], 0, False, [step(0), step(1), step(2), step(3)])
    for name in ("file", "SIGUSR1", "SIGTERM"):
        assert first[name] == ([1, 2], 75, True, [step(2)]), name
    assert not first["request"], "an answered request is taken away"


@contextlib.contextmanager
def no_room(num_bytes: int) -> Iterator[None]:
    """No file of this process gets larger, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def full_disk_job(folder: str, name: str, full: int, *, beside: bool) -> tuple[str, list[str], int]:
    """A good state, one for which a rank has no room, and a run that goes on from what is left."""
    engine.setup(timeout_seconds=60)
    trained = engine_of(tiny_opt(), name)
    train_step(trained, steps_of_rows(1)[0])
    save(folder, {"policy": trained}, step=1)
    said = ""
    with no_room(20_000) if distributed.rank() == full else contextlib.nullcontext():
        try:
            save(folder, {"policy": trained}, step=2, save_async=beside)
        except StateError as error:
            said = str(error)
    distributed.barrier()  # rank 0 tidies up
    found = saved(folder)
    resumed = resume(folder, {"policy": engine_of(tiny_opt(seed=5), name)})
    save(folder, {"policy": trained}, step=3)
    return said, found, resumed.first_step


@pytest.mark.parametrize(("name", "full", "beside"), [("cpu_zero3", 1, False), ("cpu_zero0", 0, True)])
def test_a_full_disk(ranks: Ranks, tmp_path: Path, name: str, full: int, *, beside: bool) -> None:
    """Noticed on one rank, said by all; nothing half-written is left and the last good state is used."""
    for said, found, step in ranks(full_disk_job, folder=str(tmp_path), name=name, full=full, beside=beside):
        assert "the state of step 2 could not be written" in said and "File too large" in said, said
        assert "MB are free there" in said and "step_00000001 is intact" in said and f"[rank {full} of 2]" in said
        assert found == ["step_00000001"] and step == 1


def unwritable_job(folder: str) -> str:
    engine.setup(timeout_seconds=60)
    try:
        save(folder, {"policy": engine_of(tiny_opt(), "cpu_zero2")}, step=2)
    except StateError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not Path("/sys/kernel").is_dir(), reason="needs a file system that cannot be written")
def test_a_folder_that_cannot_be_written(ranks: Ranks, tmp_path: Path) -> None:
    """sysfs takes no folder from anyone, root included."""
    (tmp_path / "state").symlink_to("/sys/kernel")
    first, second = ranks(unwritable_job, folder=str(tmp_path))
    assert first == second
    assert "the state of step 2 could not be written" in first and "there is no earlier state" in first
    assert "not permitted" in first or "denied" in first or "Read-only" in first, first


def damage_job(folder: str) -> tuple[int, list[str], list[float], str]:
    """Three states: the newest cut short, the next with one flipped bit; then the last one too."""
    engine.setup(timeout_seconds=60)
    trained = engine_of(tiny_opt(), "cpu_zero2")
    expected: list[float] = []
    for step, rows in enumerate(steps_of_rows(3), start=1):
        loss = train_step(trained, rows)[0]
        expected.append(loss)
        save(folder, {"policy": trained}, step=step, keep_states=3)
    state = Path(folder) / "state"
    if distributed.is_main():
        cut_short(next((state / "step_00000003" / "policy").glob("*model_states.pt")))
        flip(next((state / "step_00000002" / "policy").glob("*optim_states.pt")))
    distributed.barrier()
    again = engine_of(tiny_opt(seed=3), "cpu_zero2")
    step = resume(folder, {"policy": again}).first_step
    names = saved(folder)
    losses = [train_step(again, rows)[0] for rows in steps_of_rows(3)[1:]]
    distributed.barrier()
    if distributed.is_main():
        flip(state / "step_00000001" / "ranks" / "1.json")
    distributed.barrier()
    try:
        resume(folder, {"policy": again})
    except StateError as error:
        return step, names, [a - b for a, b in zip(losses, expected[1:], strict=True)], str(error)
    raise AssertionError("resumed from a damaged state")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_damaged_files(ranks: Ranks, tmp_path: Path) -> None:
    """A byte missing or flipped anywhere: the newest state that is whole is taken; none is an error that names all."""
    for step, names, gaps, said in ranks(damage_job, folder=str(tmp_path)):
        assert step == 1 and names == ["step_00000001", "step_00000002.damaged", "step_00000003.damaged"]
        assert gaps == [0.0, 0.0], "the run goes on as it had"
        assert said.startswith("nothing to resume") and "ranks/1.json is changed" in said


def test_a_write_that_the_disk_lost_is_found(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(lossy_disk_job, folder=str(tmp_path))
    assert said[0] == said[1] and "is not what was written. Check the disk." in said[0]
    assert saved(tmp_path) == []


def lossy_disk_job(folder: str) -> str:
    """On rank 1 a bit of what was written changes before it is read back."""
    from rlhf.state_writer import StateWriter

    engine.setup(timeout_seconds=60)
    trained = engine_of(tiny_opt(), "cpu_zero3")
    wait = StateWriter.wait

    def lossy(self: StateWriter) -> None:
        wait(self)
        if distributed.rank() == 1:
            flip(self.root / next(iter(self.entries)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateWriter, "wait", lossy)
        try:
            save(folder, {"policy": trained}, step=1)
        except StateError as error:
            return str(error)
    return ""
