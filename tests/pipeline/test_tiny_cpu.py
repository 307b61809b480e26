"""The embedded default as a user runs it: real launcher, two processes, three stages, report."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


SECRETS = {"HF_TOKEN": "hf_verysecret0", "WANDB_API_KEY": "verysecret1", "AWS_SECRET_ACCESS_KEY": "verysecret2"}


def rlhf(*arguments: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlhf.cli", *arguments], capture_output=True, text=True, timeout=timeout, check=False,
        env={**os.environ, **SECRETS},
    )  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "tiny_cpu"
    done = rlhf("run", "--recipe", "tiny_cpu", "--out", str(folder), "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def metrics(run_dir: Path) -> dict[str, dict[str, Any]]:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["schema"] == 1
    assert all(stage["status"] == "done" for stage in summary["stages"].values())
    assert all(stage["seconds"] > 0 and stage["tokens_per_second"] > 0 for stage in summary["stages"].values())
    assert all((run_dir / stage["model_dir"] / "manifest.json").is_file() for stage in summary["stages"].values())
    return {name: stage["metrics"] for name, stage in summary["stages"].items()}


def test_no_detector_fires(run_dir: Path) -> None:
    """All stages are watched with the default limits."""
    for stage in ("step1_sft", "step2_reward", "step3_ppo"):
        assert (run_dir / stage / "progress.json").is_file() and not (run_dir / stage / "health.jsonl").exists()


def test_sft_learns_and_stops(run_dir: Path) -> None:
    sft = metrics(run_dir)["step1_sft"]
    assert sft["eval_loss_after"] < 0.3 * sft["eval_loss_before"]
    assert sft["token_accuracy_after"] > sft["token_accuracy_before"] + 0.5
    assert sft["stop_frac"] >= 0.9


def test_the_reward_model_ranks_held_out_answers(run_dir: Path) -> None:
    reward = metrics(run_dir)["step2_reward"]
    assert reward["pair_accuracy"] >= 0.9
    assert 0 <= reward["tie_frac"] < 0.5
    assert 0 <= reward["calibration_error"] < 0.2
    assert -1 <= reward["length_correlation"] <= 1


def test_ppo_is_better_than_sft_by_the_gold_rule(run_dir: Path) -> None:
    ppo = metrics(run_dir)["step3_ppo"]
    assert ppo["gold_ppo"] >= ppo["gold_sft"] + 0.15 * (ppo["gold_max"] - ppo["gold_sft"])
    assert ppo["score_ppo"] > ppo["score_sft"]
    assert 0 <= ppo["kl"] < 100
    assert ppo["distinct_frac"] > 0.5 and ppo["entropy"] > 0 and ppo["response_length"] > 3


def test_the_report_shows_the_same_prompts_before_and_after(run_dir: Path) -> None:
    page = (run_dir / "report.html").read_text()
    samples = [json.loads(line) for line in (run_dir / "step3_ppo/samples.jsonl").read_text().splitlines()]
    before = [sample["prompt"] for sample in samples if sample["when"] == "before"]
    after = [sample["prompt"] for sample in samples if sample["when"] == "after"]
    assert before == after and before
    assert before[0] in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script src" not in page
    assert (run_dir / "report.md").is_file()


def test_a_second_run_finds_everything_done(run_dir: Path) -> None:
    """F11: nothing is run again, and no log is overwritten."""
    logs = sorted(path.name for path in (run_dir / "logs").iterdir())
    again = rlhf("run", "--recipe", "tiny_cpu", "--out", str(run_dir), "--seed", "1", timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == logs


def test_secrets_of_the_environment_are_written_nowhere(run_dir: Path) -> None:
    """Neither into logs, reports and manifests nor into any other file."""
    files = [path for path in run_dir.rglob("*") if path.is_file()]
    assert len(files) > 50
    found = [(path, name) for path in files for name, value in SECRETS.items() if value.encode() in path.read_bytes()]
    assert not found
