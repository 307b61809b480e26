"""model.compile changes no stage: the trajectories of uncompiled ones, with the seconds of compiling apart."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from rlhf.run import Run
from step1_sft.train import train as train_sft
from step2_reward.train import train as train_reward
from step3_ppo.train import train as train_ppo
from tests.stages import (
    Killed,
    kill_at,
    metric_lines,
    ppo_config,
    reward_config,
    series,
    sft_config,
    weights,
    write_rows,
    yes_rows,
)

pytestmark = pytest.mark.usefixtures("one_rank")

# Adam's eps is 1: it blows up no rounding.
SUPERVISED: dict[str, Any] = {"optim__eps": 1.0, "optim__lr": 0.1, "eval__max_rows": 0, "eval__generate_rows": 0}
PPO: dict[str, Any] = {
    "actor_optim__eps": 1.0, "critic_optim__eps": 1.0, "actor_optim__lr": 0.1, "critic_optim__lr": 0.1,
    "eval__max_rows": 0, "eval__generate_rows": 0,
}  # fmt: skip
ROLES = {f"{role}__compile": True for role in ("actor", "critic", "reward")}


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are traced and guarded, but run without machine code, which takes minutes."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))


def same(plain: Path, compiled: Path, names: tuple[str, ...]) -> None:
    for name in names:
        first, second = series(plain, name), series(compiled, name)
        assert len(first) >= 2 and first == pytest.approx(second, rel=1e-5, abs=1e-7), name
    one, two = weights(plain / "model"), weights(compiled / "model")
    assert one.keys() == two.keys()
    for key, weight in one.items():
        assert float((weight - two[key]).abs().max()) < 1e-6, key


def train_lines(folder: Path) -> list[dict[str, Any]]:
    return [line for line in metric_lines(folder, measured=True) if line["split"] == "train"]


def compile_seconds(folder: Path) -> list[float]:
    return [line.get("time/compile_seconds", 0.0) for line in train_lines(folder)]


def test_compiled_stages_train_alike_and_report_compiling_apart(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", yes_rows(40))
    sft, reward, ppo = ({on: tmp_path / on / stage for on in ("plain", "compiled")} for stage in ("sft", "rm", "ppo"))
    train_sft(sft_config(sft["plain"], rows, **SUPERVISED))
    assert not counters["stats"]
    train_sft(sft_config(sft["compiled"], rows, model__compile=True, **SUPERVISED))
    assert counters["stats"]["unique_graphs"] > 0
    same(sft["plain"], sft["compiled"], ("train/loss", "train/grad_norm"))
    base = sft["plain"] / "model"
    train_reward(reward_config(reward["plain"], rows, base=base, **SUPERVISED))
    torch._dynamo.reset()  # a stage of its own process has no graphs of another's
    train_reward(reward_config(reward["compiled"], rows, base=base, model__compile=True, **SUPERVISED))
    same(reward["plain"], reward["compiled"], ("train/loss", "train/margin"))
    models = {"actor": base, "reward": reward["plain"] / "model"}
    train_ppo(ppo_config(ppo["plain"], rows, **models, **PPO))
    torch._dynamo.reset()
    train_ppo(ppo_config(ppo["compiled"], rows, **models, **PPO, **ROLES))
    same(ppo["plain"], ppo["compiled"], ("ppo/score", "policy/loss", "value/loss", "ppo/kl_ref", "train/grad_norm"))
    for folders in (sft, reward, ppo):
        assert not any(compile_seconds(folders["plain"]))
        seconds = compile_seconds(folders["compiled"])
        assert seconds[0] > 0 and seconds[-1] == 0, "all is compiled in the first steps"
        first = train_lines(folders["compiled"])[0]
        parts = ("input", "rollout", "score", "update", "other")
        steady = sum(first.get(f"time/{part}_seconds", 0.0) for part in parts)
        assert first["time/step_seconds"] == pytest.approx(steady, rel=1e-3), "compiling is in no other phase"


def test_a_compiled_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", yes_rows(40))
    settings = {**SUPERVISED, "model__compile": True, "run__save_every": 2}
    train_sft(sft_config(tmp_path / "whole", rows, **settings))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, Run, step=3)
        train_sft(sft_config(tmp_path / "cut", rows, **settings))
    train_sft(sft_config(tmp_path / "cut", rows, run__resume=True, **settings))
    whole, cut = weights(tmp_path / "whole/model"), weights(tmp_path / "cut/model")
    assert all(torch.equal(whole[key], cut[key]) for key in whole)
    assert metric_lines(tmp_path / "whole") == metric_lines(tmp_path / "cut")
