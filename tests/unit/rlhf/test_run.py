import json
import logging
import math
import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from rlhf import clock, distributed
from rlhf import run as run_module
from rlhf.config import RunConfig
from rlhf.data.collate import Sequences, collate_sft
from rlhf.data.dataset import SFTRow
from rlhf.health_config import HealthConfig, LossConfig
from rlhf.plan.shapes import Shape
from rlhf.run import Run
from rlhf.run_folder import seed_generators
from rlhf.states import StateError


@dataclass(frozen=True)
class Config:
    run: RunConfig
    deepspeed: str = "cpu"


def start(folder: Path, *, num_steps: int = 4, **run) -> Run:
    config = Config(run=RunConfig(out_dir=str(folder), **run))
    return Run.start(config, stage="step1_sft", ds_configs={"policy": {"zero": 1}}, num_steps=num_steps)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def a_state(folder: Path) -> None:
    """What a folder needs to be resumed from, as far as a run looks."""
    (folder / "state" / "step_00000003").mkdir(parents=True)
    (folder / "state" / "step_00000003" / "state.json").write_text("{}")


def result(folder: Path) -> dict:
    return json.loads((folder / "result.json").read_text())


def test_start_writes_what_a_rerun_needs(tmp_path: Path) -> None:
    start(tmp_path / "a" / "step1_sft", seed=7)
    folder = tmp_path / "a" / "step1_sft"
    assert yaml.safe_load((folder / "config.yaml").read_text())["run"]["seed"] == 7
    assert json.loads((folder / "ds_config_policy.json").read_text()) == {"zero": 1}
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["stage"] == "step1_sft" and environment["seed"] == 7
    assert environment["versions"]["torch"] and environment["hardware"]["cpu_count"] >= 1
    assert "git_commit" in environment and environment["command"]
    assert json.loads((folder / "progress.json").read_text())["phase"] == "start"


def test_generators_are_seeded(tmp_path: Path) -> None:
    drawn = []
    for name in ("a", "b"):
        start(tmp_path / name, seed=3)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert drawn[0] == drawn[1]


def test_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    run = start(tmp_path)
    start(tmp_path)  # an attempt that failed before its first record is no run
    run.log(4)
    with pytest.raises(FileExistsError, match=r"holds an unfinished run \(metrics.jsonl\).*run.resume=true"):
        start(tmp_path)
    run.finish({}, tmp_path / "model")
    with pytest.raises(FileExistsError, match="holds a finished run"):
        start(tmp_path)
    a_state(tmp_path)
    start(tmp_path, resume=True)
    assert not (tmp_path / "result.json").exists()


def test_resume_without_a_state_is_an_error(tmp_path: Path) -> None:
    start(tmp_path).log(4)
    with pytest.raises(FileNotFoundError, match="holds no saved state"):
        start(tmp_path, resume=True)


def test_refusal_reaches_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is not the first learns of the error from it, and does not look at the disk."""
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "broadcast_object", lambda value: (FileExistsError, "run.out_dir=x holds a run"))
    with pytest.raises(FileExistsError, match="holds a run"):
        start(tmp_path / "x")


def test_train_line_holds_means_times_and_speed(tmp_path: Path) -> None:
    run = start(tmp_path, num_steps=2)
    with run.timer("eval"):
        time.sleep(0.05)
    for step in (1, 2):
        with run.timer("rollout"):
            time.sleep(0.02)
        with run.timer("update"):
            time.sleep(0.03)
        run.metrics.add({"train/loss": (torch.tensor(6.0), 3)})
        run.metrics.set({"train/lr": 0.1})
        run.count_tokens(50)
        run.log(step)
    first, second = lines(tmp_path)
    assert (first["step"], first["split"], first["train/loss"], first["train/lr"]) == (1, "train", 2.0, 0.1)
    assert first["time/eval_seconds"] >= 0.05 and "time/eval_seconds" not in second
    assert 0.02 <= first["time/rollout_seconds"] < 0.03 <= first["time/update_seconds"]
    for line in (first, second):
        phases = line["time/rollout_seconds"] + line["time/update_seconds"] + line["time/other_seconds"]
        assert line["time/step_seconds"] == pytest.approx(phases, abs=1e-3)
        assert line["speed/tokens_per_second"] == pytest.approx(50 / line["time/step_seconds"])
        assert line["memory/peak_bytes"] > 1e6
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress["loss"] == 2.0 and progress["eta_seconds"] == 0 and progress["phase"] == "train"


def test_F32_one_speed_for_lines_progress_and_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted tokens over counted seconds; micro-batches, evaluation, start-up and export change nothing."""
    now = [100.0]
    monkeypatch.setattr(run_module.time, "perf_counter", lambda: now[0])

    def work(run: Run, phase: str, seconds: float) -> None:
        with run.timer(phase):
            now[0] += seconds

    run = start(tmp_path, num_steps=4, log_every=2)
    now[0] += 1000  # start-up
    work(run, "eval", 500)
    for step in (1, 2, 3, 4):
        for _ in range(2):  # two micro-batches
            work(run, "update", 1)
            run.count_tokens(100)
        now[0] += 2  # outside of all phases
        run.log(step)
        if step == 2:
            work(run, "eval", 300)
    work(run, "eval", 400)
    now[0] += 50  # export
    run.finish({"eval_loss_after": 1.0}, tmp_path / "model")
    assert [line["speed/tokens_per_second"] for line in lines(tmp_path)] == [50.0, 50.0]  # 400 tokens in 8 s
    assert [line["time/step_seconds"] for line in lines(tmp_path)] == [4.0, 4.0]
    done = result(tmp_path)
    assert done["tokens_per_second"] == 50.0 and done["num_tokens"] == 800 and done["train_seconds"] == 16.0
    assert done["phase_seconds"] == {
        "startup": 1000, "input": 0, "rollout": 0, "score": 0, "update": 8, "eval": 1200, "compile": 0,
        "other": 58,
    }  # fmt: skip
    assert done["seconds"] == sum(done["phase_seconds"].values())
    assert json.loads((tmp_path / "progress.json").read_text())["tokens_per_second"] == 50.0


def test_compiling_is_a_phase_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taken from whatever phase it cut into, from the step and from the speed; also what an evaluation compiles."""
    now, compiling = [100.0], [0.0]
    monkeypatch.setattr(run_module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(clock, "compile_seconds", lambda: compiling[0])

    def work(run: Run, phase: str, seconds: float, compiled: float = 0.0) -> None:
        with run.timer(phase):
            now[0] += seconds + compiled
            compiling[0] += compiled

    run = start(tmp_path, num_steps=2)
    work(run, "eval", 5, compiled=7)
    for step, compiled in ((1, 20.0), (2, 0.0)):
        work(run, "rollout", 1)
        work(run, "update", 3, compiled=compiled)
        run.count_tokens(100)
        run.log(step)
    run.finish({}, tmp_path / "model")
    first, second = lines(tmp_path)
    assert first["time/compile_seconds"] == 27 and "time/compile_seconds" not in second
    for line in (first, second):
        assert (line["time/rollout_seconds"], line["time/update_seconds"], line["time/step_seconds"]) == (1, 3, 4)
        assert line["speed/tokens_per_second"] == 25
    assert first["time/eval_seconds"] == 5
    done = result(tmp_path)
    assert done["phase_seconds"]["compile"] == 27 and done["phase_seconds"]["other"] == 0
    assert done["tokens_per_second"] == 25 and done["train_seconds"] == 8
    assert done["seconds"] == sum(done["phase_seconds"].values())
    assert "compiling 27.0 s" in (tmp_path / "log.txt").read_text()


def test_two_ranks_in_one_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank, as its share of the collective's vector: 30 tokens and 60 GFLOPs more, and slower."""
    run = start(tmp_path, num_steps=1)
    with run.timer("update"):
        pass
    run.count_tokens(10)
    run.count_flops(20e9)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    offset = 2 * len(run.metrics._names)

    def all_sum(x: torch.Tensor) -> torch.Tensor:
        assert x.numel() == offset + 3 + 2 * 10
        other = torch.zeros_like(x)
        other[offset : offset + 3] = torch.tensor([30, 60e9, 7.0], dtype=x.dtype)  # tokens, FLOPs, processor seconds
        other[offset + 3 + 10 :] = 5.0  # every maximum of rank 1
        return x + other

    monkeypatch.setattr(distributed, "all_sum", all_sum)
    run.log(1)
    (line,) = lines(tmp_path)
    assert line["speed/tokens_per_second"] == 40 / 5.0 and line["time/update_seconds"] == 5.0
    assert line["speed/model_flops_per_second"] == 80e9 / 2 / 5.0
    assert 7.0 <= line["time/cpu_seconds"] < 7.5


def test_processor_seconds_leave_start_up_and_evaluation_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(run_module.time, "process_time", lambda: now[0])
    run = start(tmp_path, num_steps=2)
    now[0] += 100.0  # start-up
    for step, seconds in ((1, 3.0), (2, 5.0)):
        with run.timer("eval"):
            now[0] += 40.0
        with run.timer("update"):
            now[0] += seconds
        now[0] += 1.0  # outside of all phases
        run.log(step)
    assert [line["time/cpu_seconds"] for line in lines(tmp_path)] == [4.0, 6.0]


def test_lines_are_due_by_cadence_and_at_the_end(tmp_path: Path) -> None:
    run = start(tmp_path, num_steps=11, log_every=4)
    for step in range(1, 12):
        run.metrics.add({"train/loss": (float(step), 1)})
        run.log(step)
    assert [line["step"] for line in lines(tmp_path)] == [4, 8, 11]
    assert [line["train/loss"] for line in lines(tmp_path)] == [2.5, 6.5, 10.0]
    assert [step for step in range(12) if run.every(5, step)] == [5, 10]
    assert not any(run.every(0, step) for step in range(5))


def test_timers_nest_into_the_outer_one_and_know_their_names(tmp_path: Path) -> None:
    run = start(tmp_path)
    with run.timer("eval"), run.timer("rollout"):
        time.sleep(0.01)
    with pytest.raises(ValueError, match="'roll' is not one of input, rollout, score, update, eval"), run.timer("roll"):
        pass
    run.log(4)
    assert lines(tmp_path)[0]["time/eval_seconds"] >= 0.01 and "time/rollout_seconds" not in lines(tmp_path)[0]


def test_batches_count_real_tokens_and_padding(tmp_path: Path) -> None:
    """Rows of 3, 1 and 2 tokens in [3, 3]: 6 real tokens, a third padding."""
    run = start(tmp_path, num_steps=1)
    with run.timer("update"):
        rows = [SFTRow(np.arange(n, dtype=np.int32), np.ones(n, np.bool_), 0, 0) for n in (3, 1, 2)]
        run.count_batch(collate_sft(rows, pad_id=0, device="cpu", packed=False).sequences)
    run.log(1)
    assert lines(tmp_path)[0]["data/padding_frac"] == pytest.approx(1 / 3)
    run.finish({}, tmp_path / "model")
    assert result(tmp_path)["num_tokens"] == 6


def test_steps_are_numbered_by_what_has_been_done(tmp_path: Path) -> None:
    run = start(tmp_path, num_steps=3)
    assert run.first_step == 0 and list(run.steps("abcdef")) == [(1, "a"), (2, "b"), (3, "c")]
    run.load_state_dict(run.state_dict(2))
    assert run.first_step == 2 and list(run.steps("c")) == [(3, "c")]


def test_data_report(tmp_path: Path) -> None:
    start(tmp_path).write_data_report({"kept": 3})
    assert json.loads((tmp_path / "data.json").read_text()) == {"kept": 3}


def test_seed_for_is_a_function_of_seed_name_and_step(tmp_path: Path) -> None:
    run = start(tmp_path / "a", seed=1)
    assert run.seed_for("rollout", 3) == 2514889546396444710  # printf 1/rollout/3 | sha256sum, 63 bits
    seeds = {run.seed_for(name, step) for name in ("rollout", "shuffle", "rollout/1") for step in range(50)}
    seeds |= {start(tmp_path / "b", seed=2).seed_for("rollout", step) for step in range(50)}
    assert len(seeds) == 200 and all(0 <= seed < 2**63 for seed in seeds)


def test_eval_lines(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.log_eval(0, {"eval/loss": 2.0, "eval/perplexity/hh": math.inf})
    assert lines(tmp_path)[0]["eval/perplexity/hh"] is None and lines(tmp_path)[0]["split"] == "eval"
    with pytest.raises(ValueError, match="not registered"):
        run.log_eval(0, {"eval/lss": 2.0})


def test_samples_replace_those_of_the_same_moment(tmp_path: Path) -> None:
    run = start(tmp_path)

    def sample(text: str, score: float | None = None) -> dict:
        return {"prompt": "p", "response": text, "stopped": True, "score": score, "gold": None}

    run.write_samples("before", [sample("\u00e4\n", float("nan"))])
    run.write_samples("after", [sample("old")])
    run.write_samples("after", [sample("new", 0.5)])
    written = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert written == [{"when": "before", **sample("\u00e4\n")}, {"when": "after", **sample("new", 0.5)}]
    with pytest.raises(ValueError, match="but needs"):
        run.write_samples("after", [{"prompt": "p"}])


def test_histograms_are_merged(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.write_histograms({"margin": {"edges": [0, 1], "counts": [3]}})
    run.write_histograms({"calibration": {"predicted": [0.5], "observed": [0.4], "counts": [9]}})
    assert set(json.loads((tmp_path / "histograms.json").read_text())) == {"margin", "calibration"}


def test_result_marks_the_stage_as_done(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.finish({"stop_frac": 0.9, "kl": float("nan")}, tmp_path / "model")
    done = result(tmp_path)
    assert (done["status"], done["model_dir"]) == ("done", "model")
    assert done["metrics"] == {"stop_frac": 0.9, "kl": None} and done["notes"] == {"kl": "nan"}
    assert json.loads((tmp_path / "progress.json").read_text())["phase"] == "done"


def numbers(folder: Path) -> list:
    timing = ("time", "speed", "memory")
    return [{k: v for k, v in line.items() if not k.startswith(timing)} for line in lines(folder)]


@pytest.mark.parametrize("saved", [3, 4])
def test_F12_resumed_records_are_those_of_an_uninterrupted_run(tmp_path: Path, saved: int) -> None:
    """Saved at a line and between two lines, then on, then dead in the middle of a line."""

    def train(run: Run, steps: range) -> None:
        for step in steps:
            with run.timer("update"):
                run.metrics.add({"train/loss": (torch.tensor(0.1 * step**2), 3)})
                run.metrics.set({"train/lr": 0.1 / step})
                run.count_tokens(step)
                run.count_flops(step * 1e9)
            run.log(step)
            if step % 2 == 0:
                run.log_eval(step, {"eval/loss": step * 1.0})

    whole = start(tmp_path / "whole", num_steps=6, log_every=3)
    train(whole, range(1, 7))
    whole.finish({}, tmp_path / "model")

    folder = tmp_path / "parts"
    first = start(folder, num_steps=6, log_every=3)
    train(first, range(1, saved + 1))
    state = json.loads(json.dumps([first.state_dict(saved), first.window_state()]))
    train(first, range(saved + 1, 6))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "spl')
    a_state(folder)
    second = start(folder, num_steps=6, log_every=3, resume=True)
    second.load_window([state[1]])
    second.load_state_dict(state[0])
    train(second, range(saved + 1, 7))
    second.finish({}, folder / "model")
    assert numbers(folder) == numbers(tmp_path / "whole") and len(numbers(folder)) == 5
    assert result(folder)["num_tokens"] == result(tmp_path / "whole")["num_tokens"] == 21
    assert result(folder)["model_flops"] == result(tmp_path / "whole")["model_flops"] == 21e9
    last = lines(folder)[-2]  # of 3 steps and 15 tokens, wherever the attempts met
    assert last["step"] == 6
    assert last["speed/tokens_per_second"] == pytest.approx(15 / (3 * last["time/step_seconds"]))


def test_a_run_is_turned_back(tmp_path: Path) -> None:
    """Lines after the state go, what the detectors said stays; the time that has passed stays counted."""
    health = HealthConfig(loss_explosion=LossConfig(action="rollback", window=1, patience=1))

    def train(run: Run, losses: list[float]) -> None:
        for step, loss in enumerate(losses, start=run.first_step + 1):
            with run.timer("update"):
                run.metrics.add({"train/loss": (loss, 1)})
                run.count_tokens(10)
            run.observe(step, {"loss": loss})
            run.log(step)

    run = start(tmp_path, num_steps=4, save_every=1, health=health)
    train(run, [2.0])
    state = json.loads(json.dumps(run.state_dict(1)))
    assert state["records"]["health.jsonl"] == 0 and state["health"]["good"]
    train_wall = run.state_dict(1)["totals"]["wall_seconds"]
    run._first_step = 1
    train(run, [2.5, 99.0])
    verdict = run.health.take_verdict()
    assert verdict is not None and (verdict.step, verdict.since) == (3, 3)
    run.state_dict(3)  # what a save adds to the wall seconds
    run.roll_back(state, verdict, "step_00000001")
    assert run.first_step == 1 and [line["step"] for line in lines(tmp_path)] == [1]
    assert run.state_dict(3)["metrics"] == {}, "the line of step 3 that was given up is nobody's best"
    said = [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]
    assert [(line["step"], line["event"]) for line in said] == [(3, "fires"), (3, "rollback")]
    assert (said[1]["state"], said[1]["rollbacks"], said[1]["lr_scale"]) == ("step_00000001", 1, 0.5)
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert (progress["rollbacks"], progress["firing"], progress["step"]) == (1, [], 1)
    train(run, [2.0, 2.0, 2.0])
    run.finish({}, tmp_path / "model")
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert result(tmp_path)["rollbacks"] == 1 and result(tmp_path)["num_tokens"] == 40
    assert result(tmp_path)["seconds"] > train_wall


def test_the_last_evaluation_is_not_there_twice_after_a_resume(tmp_path: Path) -> None:
    """A state of the last step was saved before the closing evaluation of the same step."""
    first = start(tmp_path, num_steps=1)
    first.log(1)
    state = first.state_dict(1)
    first.log_eval(1, {"eval/loss": 1.0})
    a_state(tmp_path)
    second = start(tmp_path, num_steps=1, resume=True)
    second.load_state_dict(state)
    second.log_eval(1, {"eval/loss": 1.0})
    assert [line["split"] for line in lines(tmp_path)] == ["train", "eval"]


def test_lost_lines_are_noticed(tmp_path: Path) -> None:
    first = start(tmp_path, num_steps=2)
    first.log(1)
    state = first.state_dict(1)
    (tmp_path / "metrics.jsonl").write_text("")
    a_state(tmp_path)
    with pytest.raises(StateError, match="metrics.jsonl has 0 bytes, but had .* lines are lost"):
        start(tmp_path, num_steps=2, resume=True).load_state_dict(state)


def test_open_windows_of_two_ranks_become_one(tmp_path: Path) -> None:
    """1 of 2 and 5 of 8 tokens on two ranks are 6 of 10 on one; the slower rank's seconds, both processors'."""
    windows = []
    for name, (value, count) in {"a": (1.0, 2), "b": (5.0, 8)}.items():
        run = start(tmp_path / name)
        run.metrics.add({"train/loss": (torch.tensor(value), count)})
        run.metrics.set({"train/lr": 0.5})
        run.count_tokens(count)
        windows.append(json.loads(json.dumps(run.window_state())))
        windows[-1]["clock"] |= {"update": value, "wall": value, "cpu": value}
    one = start(tmp_path / "one", num_steps=1)
    one.load_window(windows)
    one.log(1)
    line = lines(tmp_path / "one")[0]
    assert line["train/loss"] == pytest.approx(0.6) and line["train/lr"] == 0.5
    assert line["time/update_seconds"] == 5.0 and line["time/step_seconds"] == 5.0 and line["time/cpu_seconds"] == 6.0
    assert line["speed/tokens_per_second"] == 2.0


def test_log_goes_on_in_the_same_file_and_carries_the_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F11: a second attempt does not erase the log of the first."""
    start(tmp_path)
    start(tmp_path)
    logging.getLogger("some.library").info("chatter")
    logging.getLogger("rlhf.x").info("once")
    text = (tmp_path / "log.txt").read_text()
    assert text.count("4 steps on 1 ranks") == 2
    assert text.count("once") == 1 and "chatter" not in text and "[rank 0] INFO rlhf.x: once" in text
    assert capsys.readouterr().out.count("once") == 1


def test_other_ranks_write_warnings_only(tmp_path: Path) -> None:
    code = f"""
import logging
from rlhf.config import RunConfig
from rlhf import distributed
distributed.rank = lambda: 1
distributed.is_main = lambda: False
distributed.broadcast_object = lambda value: value
import types

from rlhf.run import Run
cfg = types.SimpleNamespace(run=RunConfig(out_dir={str(tmp_path)!r}))
run = Run.start(cfg, stage="step1_sft", ds_configs={{}}, num_steps=1)
run.write_samples("after", [])
logging.getLogger("rlhf.x").info("quiet")
logging.getLogger("rlhf.x").warning("loud")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[rank 1] WARNING rlhf.x: loud" in done.stdout and "quiet" not in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["log.txt"]


def test_tensorboard_gets_the_same_lines(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = start(tmp_path, tensorboard=True)
    run.log_eval(0, {"eval/loss": 2.0})
    run.finish({}, tmp_path / "model")
    assert list((tmp_path / "tensorboard").iterdir())


def test_wandb_takes_the_same_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = start(tmp_path, wandb_project="test")
    run.log(4)
    run.log_eval(4, {"eval/loss": 2.0})
    run.finish({}, tmp_path / "model")
    assert len(lines(tmp_path)) == 2


def sequences_of(*lengths: int) -> Sequences:
    ids = [np.arange(length) for length in lengths]
    rows = [SFTRow(token_ids=i, loss_mask=np.ones(len(i), np.bool_), source=0, index=0) for i in ids]
    return collate_sft(rows, pad_id=0, device="cpu", packed=False).sequences


def test_a_batch_counts_its_flops_and_its_targets(tmp_path: Path) -> None:
    """One layer of width 2, its MLP of 2, a vocabulary of 8: 2 x (16 + 8) a token, 8 a pair, 32 a target; three times.

    Sequences of 3 and 2 tokens have 6 + 3 pairs.
    """
    shape = Shape(layers=1, hidden=2, heads=1, kv_heads=1, head_size=2, intermediate=2, mlp_matrices=2, embedding=2,
                  vocabulary=8)  # fmt: skip
    run = start(tmp_path, num_steps=1)
    run.watch([], shape=shape)
    with run.timer("update"):
        run.count_batch(sequences_of(3, 2), num_targets=3)
    run.log(1)
    (line,) = lines(tmp_path)
    assert line["speed/target_frac"] == pytest.approx(3 / 5)
    flops = line["speed/model_flops_per_second"] * line["time/step_seconds"]
    assert flops == pytest.approx(3 * (5 * 48 + 9 * 8 + 3 * 32))


def test_bytes_of_states_are_those_of_all_engines(tmp_path: Path) -> None:
    class Engine:
        def __init__(self, **sizes: int) -> None:
            self.sizes = sizes

        def state_bytes(self) -> dict[str, int]:
            return self.sizes

    run = start(tmp_path, num_steps=1)
    run.watch([Engine(weights=10, gradients=5, optimizer=40), Engine(weights=7)])
    with run.timer("update"):
        pass
    run.log(1)
    (line,) = lines(tmp_path)
    assert (line["memory/weights_bytes"], line["memory/gradients_bytes"], line["memory/optimizer_bytes"]) == (17, 5, 40)


def test_the_last_steps_are_profiled(tmp_path: Path) -> None:
    run = start(tmp_path, num_steps=3, profile_steps=1)
    seen = []
    for step, _ in run.steps(iter(range(3))):
        seen.append((step, (tmp_path / "profile").exists()))
        run.log(step)
    assert seen == [(1, False), (2, False), (3, False)] and (tmp_path / "profile" / "profile.json").is_file()


def test_more_steps_to_profile_than_there_are_means_all(tmp_path: Path) -> None:
    run = start(tmp_path, num_steps=2, profile_steps=5)
    for step, _ in run.steps(iter(range(2))):
        run.log(step)
    assert (tmp_path / "profile" / "profile.json").is_file()


def test_ranks_that_share_rows_draw_from_generators_of_their_own() -> None:
    """Torch's, of which dropout is made; the first one's is that of a rank with rows of its own."""
    drawn = []
    for share in (None, 0, 1, 2):
        seed_generators(7, **({} if share is None else {"share": share}))
        drawn.append((torch.rand(4).tolist(), np.random.rand()))
    assert drawn[0] == drawn[1] and len({tuple(found) for found, _ in drawn}) == 3
    assert len({number for _, number in drawn}) == 1
