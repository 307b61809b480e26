"""Jobs: configs that our stages accept, what is read from their folders, and what the peers are started with."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from launch.recipe import read_stage_config
from rlhf.bench import jobs
from rlhf.bench.jobs import Bench
from rlhf.bench.lines import OURS, make_lines
from rlhf.bench.process import Finished
from rlhf.bench.readings import Work, model_flops, read_stage
from rlhf.bench.workload import FULL, QUICK, rows_of
from rlhf.plan import flops
from rlhf.plan.shapes import shape_of

from .conftest import make_sample

FINISHED = Finished(started=1000.0, wall_seconds=30.0, cpu_seconds=20.0, peak_rss_bytes=7_000_000)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(
        work=tmp_path / "work", sizes=QUICK, pythons={"trl": "/opt/trl/python"}, overrides={"sft": ["--run.seed=5"]}
    )


@pytest.mark.parametrize(
    ("work", "stage"),
    [
        (Work(kind="sft", rows=8), "sft"),
        (Work(kind="long", rows=4, dtype="bf16"), "sft"),
        (Work(kind="pairs", rows=8, ranks=2), "reward"),
        (Work(kind="ppo", rows=8, ranks=2, zero3=True, answer=128), "ppo"),
        (Work(kind="ppo", rows=64), "ppo"),
    ],
)
def test_our_stages_accept_their_configs(bench: Bench, work: Work, stage: str, tmp_path: Path) -> None:
    """The JSONs hold the micro-batch; the batch is all ranks' rows; step 3 answers freely or to the full length."""
    job = jobs.ours(bench, work, tmp_path)
    path = tmp_path / f"{stage}.yaml"
    assert job.argv[-2:] == ["--config", str(path)] or job.argv[-1] == "--run.seed=5"
    assert ("deepspeed.launcher.runner" in job.argv) == (work.ranks > 1)
    config: Any = read_stage_config(stage, path, job.argv[job.argv.index(str(path)) + 1 :])
    assert config.run.out_dir == str(tmp_path / "stage") and config.run.seed == (5 if stage == "sft" else 1)
    names = [config.deepspeed] if isinstance(config.deepspeed, str) else list(vars(config.deepspeed).values())
    for name in names:
        ds = json.loads(Path(name).read_text())
        assert ds["train_micro_batch_size_per_gpu"] == min(work.rows, 16)
        assert ds["zero_optimization"]["stage"] == (3 if work.zero3 else 0)
        assert ("bf16" in ds) == (work.dtype == "bf16")
    if stage == "ppo":
        assert config.rollout.prompts_per_step == config.update.minibatch_size == work.rows * work.ranks
        assert config.sampling.min_new_tokens == (config.data.max_response_tokens if work.answer else 0)
        assert Path(config.actor.path).name == ("actor" if work.answer else "actor_stops")
    else:
        assert config.global_batch_size == work.rows * work.ranks
        assert config.max_steps == QUICK.warmup_steps + QUICK.steps
    assert config.data.split.eval == 0 and config.eval.max_rows == 0


def test_what_is_read_from_a_stage(tmp_path: Path) -> None:
    """The first step is warm-up; evaluation lines do not count; start-up ends where the first step begins."""
    lines = [
        {"step": 0, "split": "eval", "time": 1005.0},
        {"step": 1, "split": "train", "time": 1020.0, "time/step_seconds": 8.0, "time/cpu_seconds": 9.0,
         "speed/tokens_per_second": 1.0},
        {"step": 2, "split": "train", "time": 1022.0, "time/step_seconds": 2.0, "time/cpu_seconds": 1.5,
         "speed/tokens_per_second": 50.0, "time/update_seconds": 1.0, "data/padding_frac": 0.02},
        {"step": 3, "split": "train", "time": 1026.0, "time/step_seconds": 4.0, "time/cpu_seconds": 3.5,
         "speed/tokens_per_second": 30.0, "time/update_seconds": 3.0, "data/padding_frac": 0.04},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = read_stage(tmp_path, rows=8, warmup=1, finished=FINISHED)
    assert (sample.wall_seconds, sample.cpu_seconds, sample.steps, sample.rows) == (6.0, 5.0, 2, 16)
    assert sample.tokens == 50 * 2 + 30 * 4
    assert sample.padding_frac == pytest.approx(0.03) and sample.phases == {"update": 4.0}
    assert sample.startup_seconds == 12.0 and sample.peak_rss_bytes == 7_000_000
    assert sample.compile_seconds == 0
    with pytest.raises(ValueError, match="3 train lines, but more than 3"):
        read_stage(tmp_path, rows=8, warmup=3, finished=FINISHED)


def test_what_is_compiled_after_the_warm_up_counts(tmp_path: Path) -> None:
    """A stage's step leaves compiling out; a measured step does not, and start-up ends before the first graph."""
    step = {"split": "train", "time/step_seconds": 2.0, "time/cpu_seconds": 2.0, "speed/tokens_per_second": 10.0}
    lines = [
        {**step, "step": 1, "time": 1040.0, "time/compile_seconds": 20.0},
        {**step, "step": 2, "time": 1045.0, "time/compile_seconds": 3.0},
        {**step, "step": 3, "time": 1047.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    sample = read_stage(tmp_path, rows=8, warmup=1, finished=FINISHED)
    assert sample.wall_seconds == 2 + 3 + 2 and sample.tokens == 40 and sample.phases == {"compile": 3.0}
    assert sample.compile_seconds == 23 and sample.startup_seconds == 1040 - 22 - FINISHED.started


def test_peers_are_started_as_their_users_start_them(bench: Bench, tmp_path: Path) -> None:
    """Two ranks under DDP by torchrun, ZeRO-3 by DeepSpeed's launcher with our settings of it."""
    alone = jobs.trl(bench, Work(kind="sft", rows=8, dtype="bf16"), tmp_path, packing=True).argv
    assert alone[:3] == ["/opt/trl/python", "-m", "rlhf.bench.peers.trl_sft"]
    assert alone[alone.index("--packing") + 1] == str(QUICK.positions) and alone[alone.index("--dtype") + 1] == "bf16"
    both = jobs.trl(bench, Work(kind="pairs", rows=8, ranks=2), tmp_path).argv
    assert "torch.distributed.run" in both and "--deepspeed" not in both
    sharded = jobs.trl(bench, Work(kind="ppo", rows=8, ranks=2, zero3=True), tmp_path).argv
    assert "deepspeed.launcher.runner" in sharded and "--stop" in sharded
    ds = json.loads(Path(sharded[sharded.index("--deepspeed") + 1]).read_text())
    assert ds["zero_optimization"]["stage"] == 3 and ds["train_micro_batch_size_per_gpu"] == 8


def test_record_of_a_peer(bench: Bench, tmp_path: Path) -> None:
    work = Work(kind="ppo", rows=8, ranks=2, answer=128)
    step = {"wall": 2.0, "cpu": 1.0, "tokens": 200, "rows": 8, "filled": 0, "positions": 0, "phases": {}}
    read = jobs.trl(bench, work, tmp_path).read
    for rank in range(2):
        with pytest.raises(ValueError, match=f"record of {rank} ranks, but 2"):
            read(FINISHED)
        record = {"first_step_time": 1003.0 + rank, "steps": [step] * 2}
        (tmp_path / f"steps_rank{rank}.json").write_text(json.dumps(record))
    sample = read(FINISHED)
    assert (sample.wall_seconds, sample.tokens, sample.rows, sample.startup_seconds) == (2.0, 400, 16, 4.0)
    assert sample.flops is not None and sample.flops > 0


def test_flops_of_what_was_measured() -> None:
    """A whole pass over the file's rows counts the FLOPs of each of them."""
    actor, reward = shape_of(FULL.actor()), shape_of(FULL.reward())
    rows = rows_of(FULL)["sft"]
    sample = make_sample(tokens=sum(row.prompt + row.answers[0] for row in rows), rows=len(rows))
    each = sum(flops.sft_row(actor, row.prompt, row.answers[0]) for row in rows)
    assert model_flops(FULL, Work(kind="sft", rows=8), sample) == pytest.approx(each)
    prompt = sum(row.prompt for row in rows_of(FULL)["prompts"]) / FULL.num_rows
    sample = make_sample(tokens=16 * (prompt + 128), rows=16)
    expected = 16 * flops.ppo_row(actor, reward, prompt, 128)
    assert model_flops(FULL, Work(kind="ppo", rows=16, answer=128), sample) == pytest.approx(expected)
    sample = make_sample(tokens=32 * 128, rows=32)
    expected = 32 * flops.rollout_row(actor, prompt, 128)
    assert model_flops(FULL, Work(kind="rollout", rows=32, answer=128), sample) == pytest.approx(expected)


def test_children_have_one_thread_and_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    values = jobs.environment({"EXTRA": "1"}, work=tmp_path)
    assert values["OMP_NUM_THREADS"] == "1" and values["OMP_WAIT_POLICY"] == "passive" and values["EXTRA"] == "1"
    assert values["HF_HUB_OFFLINE"] == "1" and values["DS_ACCELERATOR"] == "cpu"
    assert values["PYTHONPATH"].split(os.pathsep) == [str(jobs.SOURCE_ROOT), "/somewhere"]


@pytest.mark.parametrize("name", make_lines())
def test_every_contestant_has_a_job(bench: Bench, name: str, tmp_path: Path) -> None:
    line = make_lines()[name]
    for number, contestant in enumerate(line.contestants):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert contestant.job(bench, folder).argv
    names = {contestant.name for contestant in line.contestants}
    assert names >= {goal.contestant for goal in line.goals} | {goal.against for goal in line.goals} - {""}
    assert len(names) == len(line.contestants) and (OURS in names or name in ("startup", "growth"))
