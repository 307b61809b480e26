"""The three stages at the smallest size that still has everything: ragged rows, K ranked answers, real engines.

A row serves all stages (step 1 takes its best answer, step 2 all pairs, step 3 the prompt), so that all see the same
files. Answers are a few words; the rank of an answer is its number of "yes".
"""

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf import ds_config
from rlhf.artifacts import write_json
from rlhf.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SourceConfig,
    SplitConfig,
    TokenizerConfig,
)
from rlhf.health_config import HealthConfig, LossConfig
from step1_sft.config import SFTConfig
from step2_reward.config import RewardConfig
from step3_ppo.algorithm import UpdateConfig
from step3_ppo.config import DeepSpeedConfigs, PPOConfig, RolloutConfig

MODEL = {
    "model_type": "opt",
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 64,
    "max_position_embeddings": 96,
    "init_std": 0.08,
}
# Changes of a config that leave evaluation out.
NO_EVAL = {"eval__max_rows": 0, "eval__generate_rows": 0}
# Values that no two attempts have in common.
MEASURED = ("time/", "speed/", "memory/")


def changed(config: Any, /, **changes: Any) -> Any:
    """A config with fields replaced, all at once; `run__seed=2` replaces run.seed."""
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        first, _, rest = name.partition("__")
        if rest:
            fields.setdefault(first, {})[rest] = value
        else:
            fields[first] = value
    nested = {name.partition("__")[0] for name in changes if "__" in name}
    return dataclasses.replace(
        config, **{k: changed(getattr(config, k), **v) if k in nested else v for k, v in fields.items()}
    )


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def yes_rows(num_rows: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of 1 to 6 words, each with 2 to 4 answers of 1 to 5 words; some answers are tied."""
    rng = random.Random(seed)
    rows = []
    for number in range(num_rows):
        prompt = " ".join([f"q{number}", *rng.choices(("is", "it", "so", "red", "big"), k=rng.randint(0, 5))])
        answers = {" ".join(rng.choices(("yes", "no", "ok"), k=rng.randint(1, 5))) for _ in range(3)} | {"yes no", "no"}
        answers = sorted(sorted(answers), key=lambda text: rng.random())[: rng.randint(2, 4)]
        ranks = [answer.split().count("yes") for answer in answers]
        if len(set(ranks)) == 1:
            answers, ranks = [*answers, "yes yes yes yes yes yes"], [*ranks, 6]
        rows.append({"prompt": prompt, "responses": answers, "ranks": ranks, "meta": {"answer": "7"}})
    return rows


def digit_rows(num_rows: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Answered by any digit; rule `final_number` wants 7. The better answer is 7."""
    rng = random.Random(seed)
    return [
        {
            "prompt": " ".join([f"q{number}", *["so"] * rng.randint(0, 4)]),
            "responses": [str(number % 10), "no"],
            "ranks": [1, 0],
            "meta": {"answer": "7"},
        }
        for number in range(num_rows)
    ]


def ds_json(folder: Path, name: str, *, micro_batch_size: int) -> str:
    """A packaged DeepSpeed JSON with another micro-batch size."""
    path = folder / f"{name}_{micro_batch_size}.json"
    write_json(path, {**ds_config.load(name), "train_micro_batch_size_per_gpu": micro_batch_size})  # by every rank
    return str(path)


def data_config(path: Path, *, share: str, **changes: Any) -> DataConfig:
    """Three quarters of the rows for one stage, a quarter held out; the cache beside the file."""
    shares = {"sft": 0.0, "reward": 0.0, "ppo": 0.0, share: 1.0}
    config = DataConfig(
        sources=[SourceConfig(path=str(path))],
        max_prompt_tokens=48,
        max_response_tokens=24,
        split=SplitConfig(**shares, eval=0.25),
        cache_dir=str(path.parent / "cache"),
    )
    return changed(config, **changes)


def sft_config(folder: Path, rows: Path, **changes: Any) -> SFTConfig:
    config = SFTConfig(
        model=ModelConfig(config=MODEL, dropout=0.0),
        tokenizer=TokenizerConfig(train_vocab_size=300),
        data=data_config(rows, share="sft"),
        optim=OptimConfig(lr=3e-3),
        run=RunConfig(out_dir=str(folder)),
        eval=EvalConfig(max_rows=64, generate_rows=4),
        deepspeed="cpu_zero0",
        global_batch_size=8,
        max_steps=4,
        epochs=100.0,
    )
    return changed(config, **changes)


def exploding(folder: Path, rows: Path, *, action: str, **changes: Any) -> Any:
    """Step 1 at a rate that grows until the loss blows up after four quiet steps; a hundredth of it would not.

    Rows of `digit_rows`, which are the same in every process. The limit is close, so that the few steps of a test are
    enough to learn it and to pass it twice in a row.
    """
    values: dict[str, Any] = {
        "max_steps": 24,
        "run__save_every": 3,
        "run__health": HealthConfig(
            loss_explosion=LossConfig(action=action, factor=2.0, window=4, patience=2),  # type: ignore[arg-type]
            rollback_lr_factor=0.01,
        ),
        "optim__lr": 3.0,
        "optim__warmup_frac": 0.99,
        "optim__clip_norm": 0.0,
        "model__dropout": 0.1,
        "eval__max_rows": 0,
        "eval__generate_rows": 0,
    }
    return sft_config(folder, rows, **{**values, **changes})


def reward_config(folder: Path, rows: Path, *, base: Path, **changes: Any) -> RewardConfig:
    config = RewardConfig(
        model=ModelConfig(path=str(base), dropout=0.0),
        data=data_config(rows, share="reward"),
        optim=OptimConfig(lr=3e-3),
        run=RunConfig(out_dir=str(folder)),
        eval=EvalConfig(max_rows=64, generate_rows=0),
        deepspeed="cpu_zero0",
        global_batch_size=8,
        max_steps=4,
        epochs=100.0,
    )
    return changed(config, **changes)


def ppo_config(folder: Path, rows: Path, *, actor: Path, reward: Path, **changes: Any) -> PPOConfig:
    config = PPOConfig(
        actor=ModelConfig(path=str(actor)),
        reward=ModelConfig(path=str(reward)),
        data=data_config(rows, share="ppo", max_response_tokens=10),
        actor_optim=OptimConfig(lr=1e-3, schedule="constant", warmup_frac=0.0),
        critic_optim=OptimConfig(lr=1e-3, schedule="constant", warmup_frac=0.0),
        run=RunConfig(out_dir=str(folder)),
        rollout=RolloutConfig(prompts_per_step=8, batch_size=8),
        update=UpdateConfig(epochs=2, minibatch_size=4),
        eval=EvalConfig(max_rows=64, generate_rows=4),
        deepspeed=DeepSpeedConfigs(actor="cpu_zero0", critic="cpu_zero0", reference="cpu_frozen", reward="cpu_frozen"),
        max_steps=2,
    )
    return changed(config, **changes)


def metric_lines(folder: Path, *, measured: bool = False) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock says."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    if measured:
        return lines
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith(MEASURED)} for line in lines]


def series(folder: Path, name: str, *, split: str = "train") -> list[float]:
    """Values of one metric in order of steps."""
    return [line[name] for line in metric_lines(folder) if line["split"] == split and name in line]


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def weights(folder: Path) -> dict[str, Tensor]:
    """Weights of a model folder."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def same_weights(one: Path, two: Path) -> bool:
    """Whether two model folders hold the same weights, to the bit."""
    first, second = weights(one), weights(two)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


class Models:
    """Folders of step 1 and step 2 on the same rows, not evaluated."""

    def __init__(self, folder: Path, rows: Path, *, reward: Mapping[str, Any] | None = None, **sft: Any) -> None:
        from step1_sft.train import train as train_sft
        from step2_reward.train import train as train_reward

        self.rows = rows
        train_sft(sft_config(folder / "sft", rows, **NO_EVAL, **sft))
        self.actor = folder / "sft/model"
        train_reward(reward_config(folder / "rm", rows, base=self.actor, **NO_EVAL, **(reward or {})))
        self.reward = folder / "rm/model"

    def config(self, folder: Path, **changes: Any) -> PPOConfig:
        """Of step 3 from the two."""
        return ppo_config(folder, self.rows, actor=self.actor, reward=self.reward, **changes)


def events(folder: Path) -> list[dict[str, Any]]:
    """health.jsonl without the clock's part."""
    lines = [json.loads(line) for line in (folder / "health.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "time"} for line in lines]


class Killed(BaseException):
    """Stands for a signal: nothing in the stages may catch it."""


def kill_at(monkeypatch: Any, run_class: Any, *, step: int) -> None:
    """End a stage when it is about to log a step."""
    log = run_class.log

    def log_or_die(self: Any, number: int) -> None:
        if number == step:
            raise Killed
        log(self, number)

    monkeypatch.setattr(run_class, "log", log_or_die)
