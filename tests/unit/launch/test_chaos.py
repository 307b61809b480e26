"""The study's plan, comparison and table; the study itself: tests/pipeline/test_kill_study.py."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch import chaos
from launch.chaos import ChaosOptions, Kill, compare, draw_kills, main, table
from launch.victims import MARK


@pytest.fixture
def options(tmp_path: Path) -> ChaosOptions:
    return ChaosOptions(
        recipe="tiny_cpu", kills=20, stages=("sft", "reward", "ppo"), zero=(0, 2, 3), seed=1, work=tmp_path / "work",
        save_every=2,
    )  # fmt: skip


def test_kills_are_drawn_from_the_seed_and_spread(options: ChaosOptions) -> None:
    kills = draw_kills(options)
    assert kills == draw_kills(options) != draw_kills(dataclasses.replace(options, seed=2))
    assert len(kills) == 20
    cells = [(kill.zero, kill.stage) for kill in kills]
    assert {cells.count(cell) for cell in cells} == {2, 3} and len(set(cells)) == 9
    many = draw_kills(dataclasses.replace(options, kills=200))
    assert {kill.target for kill in many} == set(chaos.TARGETS)
    assert {kill.moment for kill in many} == {"start-up", "step", "save"}
    # Within a stage in the order in which a run that is resumed comes to them.
    first = [kill for kill in many if (kill.zero, kill.stage) == (0, "sft")]
    early = [kill.moment == "start-up" for kill in first]
    assert early == sorted(early, reverse=True)
    late = [kill.fraction for kill in first if kill.moment != "start-up"]
    assert late == sorted(late) and len(late) > 5


def write_stage(folder: Path, *, loss: float = 1.0, seconds: float = 2.0, weights: bytes = b"w") -> Path:
    (folder / "model").mkdir(parents=True)
    line = {"step": 1, "split": "train", "time": seconds, "train/loss": loss, "time/step_seconds": seconds}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (folder / "model" / "model.safetensors").write_bytes(weights)
    return folder


def test_comparison_sees_values_and_weights_but_no_clock(tmp_path: Path) -> None:
    whole = write_stage(tmp_path / "whole")
    assert compare(whole, write_stage(tmp_path / "same", seconds=3.0)) == []
    assert compare(whole, write_stage(tmp_path / "loss", loss=1.0000001)) == [
        "line 1 of metrics.jsonl differs in train/loss"
    ]
    assert compare(whole, write_stage(tmp_path / "weights", weights=b"v")) == ["model/model.safetensors differs"]
    (tmp_path / "same" / "metrics.jsonl").write_text("")
    assert compare(whole, tmp_path / "same") == ["metrics.jsonl has 0 lines, not 1"]
    assert compare(whole, tmp_path / "nothing")[-1] == "model/model.safetensors differs"


@pytest.mark.parametrize(
    ("phase", "ended", "happened"), [("train", False, "after step 3, 0.05 s in"), ("done", True, "after its end")]
)
def test_a_kill_comes_in_steps_of_the_run_and_at_the_stage_s_end_at_the_latest(
    tmp_path: Path, phase: str, *, ended: bool, happened: str
) -> None:
    """Half a step of 0.1 s after a step; a stage that was done before is not waited for."""
    whole, out = tmp_path / "whole" / "step1_sft", tmp_path / "killed" / "step1_sft"
    write_stage(whole, seconds=0.1)
    out.mkdir(parents=True)
    started = time.time()
    (whole / "progress.json").write_text(json.dumps({"num_steps": 4}))
    (out / "progress.json").write_text(json.dumps({"phase": phase, "step": 3}))
    if ended:
        (out / "result.json").write_text(json.dumps({"status": "done"}))
    mark = f"test.{os.getpid()}.{phase}"
    program = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(program, env={**os.environ, MARK: mark, "RANK": "1"}) as process:
        attempt: Any = SimpleNamespace(out=out.parent, mark=mark, started=started, process=process)
        stage: Any = SimpleNamespace(name="sft", folder="step1_sft", out_dir=out)
        kill = Kill(zero=0, stage="sft", target="rank", moment="step", fraction=1.0, delay=0.5)
        chaos._strike(kill, stage, attempt)
        assert process.wait(timeout=10) == -signal.SIGKILL
    assert (kill.happened, kill.killed) == (happened, "rank 1")


def test_table() -> None:
    kill = Kill(0, "sft", "rank", "step", 0.5, 0.1, "after step 3, 0.10 s in", "rank 1", "step 2", "equal")
    assert table([kill]).splitlines() == [
        "| # | ZeRO | Stage | Moment | Killed | Resumed from | Metrics and weights |",
        "|---|---|---|---|---|---|---|",
        "| 1 | 0 | step1_sft | after step 3, 0.10 s in | rank 1 | step 2 | equal |",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kills": 0}, "--kills and --save-every must be >= 1, got 0, 2."),
        ({"zero": (4,)}, "--zero takes stages 0 to 3, got 4."),
        ({"recipe": "opt_13b_350m_single_node"}, "recipes for CPUs"),
        ({"work": Path(__file__).parent}, "exists. Remove it"),
        ({"overrides": ("--sft.nothing=1",)}, "nothing"),
    ],
)
def test_bad_options(options: ChaosOptions, capsys: pytest.CaptureFixture[str], changes: dict, words: str) -> None:
    """Said before anything runs, with exit code 2."""
    assert main(dataclasses.replace(options, num_gpus=None, **changes)) == 2
    captured = capsys.readouterr()
    assert words in captured.err and "Traceback" not in captured.err and not (options.work / "zero0").exists()
