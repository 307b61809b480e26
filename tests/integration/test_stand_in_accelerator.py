"""The three stages on an accelerator that is neither CUDA nor the CPU: all that is placed goes through the API.

tests/stand_in_accelerator.py says what stands in and what it cannot show. The numbers are those of the CPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "launch" / "recipes" / "tiny_cpu"
DEVICE = 3
"""Its number on the machine: one that is not the first shows that nothing goes to a default."""
MEASURED = ("time", "memory/", "speed/")
"""Starts of the names of metrics that say how the machine was."""


def run_stage(module: str, folder: Path, flags: list[str], *, stand_in: bool) -> Path:
    """A stage as a program, on the stand-in or on the CPU; its folder."""
    out = folder / f"{module}_{'npu' if stand_in else 'cpu'}"
    start = ["tests.stand_in_accelerator", f"{out}.asked", module] if stand_in else [module]
    environment = {**os.environ, "LOCAL_RANK": str(DEVICE), "OMP_NUM_THREADS": "1"}
    environment.pop("DS_ACCELERATOR", None)
    done = subprocess.run(
        [sys.executable, "-m", *start, *flags, "--run.out_dir", str(out)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def metrics(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in lines]


def check_asked(folder: Path) -> None:
    """Everything was placed on the rank's own device, and the API was asked for what only it knows."""
    asked = json.loads(Path(f"{folder}.asked").read_text())
    assert {name for name in asked if name.startswith("npu") and "." not in name} == {f"npu:{DEVICE}"}
    assert asked[f"npu:{DEVICE}"] > 50  # weights, batches, counts
    assert asked["set_device_index"] == 1
    assert all(asked[name] > 0 for name in ("synchronize", "get_memory_info", "deepspeed.device_name"))


SFT = ["--config", f"{RECIPE}/sft.yaml", "--deepspeed", "cpu_zero2", "--max_steps", "2", "--eval.max_rows", "16",
       "--eval.generate_rows", "4"]  # fmt: skip


def test_step_1_goes_through_the_api(tmp_path: Path) -> None:
    """Training, answers, export; the same numbers as on the CPU."""
    on_npu = run_stage("step1_sft.train", tmp_path, SFT, stand_in=True)
    check_asked(on_npu)
    on_cpu = run_stage("step1_sft.train", tmp_path, SFT, stand_in=False)
    assert metrics(on_npu) == metrics(on_cpu) and len(metrics(on_cpu)) == 3
    assert json.loads((on_npu / "environment.json").read_text())["hardware"]["accelerator"] == "npu"


@pytest.mark.slow
def test_steps_2_and_3_go_through_the_api(tmp_path: Path) -> None:
    """The reward model's normalisation, rollouts, four roles and saved states as well."""
    policy = run_stage("step1_sft.train", tmp_path, SFT, stand_in=False) / "model"
    small = ["--eval.max_rows", "16", "--max_steps", "2", "--run.save_every", "1"]
    reward = ["--config", f"{RECIPE}/reward.yaml", "--model.path", f"{policy}", "--normalise.policy", f"{policy}",
              "--normalise.rows", "8", *small]  # fmt: skip
    on_cpu = run_stage("step2_reward.train", tmp_path, reward, stand_in=False)
    on_npu = run_stage("step2_reward.train", tmp_path, reward, stand_in=True)
    check_asked(on_npu)
    assert metrics(on_npu) == metrics(on_cpu)
    ppo = ["--config", f"{RECIPE}/ppo.yaml", "--actor.path", f"{policy}", "--reward.path", f"{on_cpu}/model",
           "--deepspeed.actor", "cpu_zero2", "--deepspeed.reference", "cpu_frozen", "--rollout.prompts_per_step", "8",
           "--update.minibatch_size", "4", "--eval.generate_rows", "8", *small]  # fmt: skip
    on_cpu = run_stage("step3_ppo.train", tmp_path, ppo, stand_in=False)
    on_npu = run_stage("step3_ppo.train", tmp_path, ppo, stand_in=True)
    check_asked(on_npu)
    assert metrics(on_npu) == metrics(on_cpu)


def test_cuda_by_name_ends_the_program(tmp_path: Path) -> None:
    """The stand-in tells: a module that sends something to CUDA does not get through."""
    sends = ("torch.zeros(1).to('cuda')", "torch.zeros(1, device='cuda:0')", "torch.ones(1).cuda()")
    for number, code in enumerate(sends):
        (tmp_path / f"sends{number}.py").write_text(f"import torch\n{code}\n")
        done = subprocess.run(
            [sys.executable, "-m", "tests.stand_in_accelerator", str(tmp_path / "asked"), f"sends{number}"],
            cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and "AssertionError" in done.stderr, done.stderr[-500:]
