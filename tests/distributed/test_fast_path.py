"""Packed rows under a token budget equal one padded micro-batch on one rank, through the stages' own steps.

Ranks 1 and 2, ZeRO-0, 2 and 3, micro-batches of few and of many tokens, packed and padded. Adam's eps is 1, which blows
up no rounding: weights move in proportion to their gradients, and a wrong gradient moves them far beyond the limits.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlhf import distributed, engine
from rlhf.rollout.decode import Response
from step1_sft.train import train as train_sft
from step2_reward.train import train as train_reward
from step3_ppo import rollout as ppo_rollout
from step3_ppo.train import train as train_ppo
from tests.distributed.harness import Ranks
from tests.stages import NO_EVAL, ds_json, ppo_config, reward_config, series, sft_config, weights, write_rows, yes_rows

# Of each setting: fields of the data section, and the rows of a padded micro-batch.
BATCHINGS: dict[str, tuple[dict[str, Any], int]] = {
    "few_tokens": ({"packing": "on", "micro_batch_tokens": 80}, 1),
    "many_tokens": ({"packing": "on", "micro_batch_tokens": 4096}, 1),
    "padded": ({"packing": "off"}, 3),
}
REFERENCE = "zero0_all_padded_1"
LEARNS = {"lr": 0.1, "eps": 1.0, "schedule": "constant", "warmup_frac": 0.0}
ANSWER_TOKENS = 10


def settings() -> list[tuple[str, str, dict[str, Any], int]]:
    """Name, DeepSpeed JSON, changes to the data section, rows of a padded micro-batch."""
    return [
        (f"{zero}_{name}_{distributed.world_size()}", f"cpu_{zero}", {f"data__{k}": v for k, v in data.items()}, rows)
        for zero, (name, (data, rows)) in itertools.product(("zero0", "zero2", "zero3"), BATCHINGS.items())
    ]


def optimiser(section: str) -> dict[str, Any]:
    return {f"{section}__{name}": value for name, value in LEARNS.items()}


def fixed_responses(*arguments: Any, sample_ids: Sequence[int], **named: Any) -> list[Response]:
    """Instead of a rollout: answers of 1 to 10 tokens that depend on the prompt and the sample's number alone."""
    voice, prompts = arguments[1], arguments[2]
    responses = []
    for row, sample_id in zip(prompts, sample_ids, strict=True):
        rng = random.Random(f"{row.uid} {sample_id}")
        token_ids = [rng.randrange(5, 250) for _ in range(rng.randrange(ANSWER_TOKENS))]
        responses.append(
            Response(
                token_ids=[*token_ids, voice.template.stop_token_id],
                logprobs=[-1.0] * (len(token_ids) + 1),
                stopped=True,
            )
        )
    return responses


def train_all(folder: Path, name: str, ds_name: str, data: dict[str, Any], rows: int) -> None:
    """All three stages under one setting, each from what the reference run of the stage before has left."""
    ds = ds_json(folder, ds_name, micro_batch_size=rows)
    source = folder / "rows.jsonl"
    changes = {"deepspeed": ds, "max_steps": 2, **NO_EVAL, **optimiser("optim"), **data}
    train_sft(sft_config(folder / "sft" / name, source, **changes))
    base = folder / "sft" / REFERENCE / "model"
    train_reward(reward_config(folder / "rm" / name, source, base=base, **changes))
    cfg = ppo_config(
        folder / "ppo" / name,
        source,
        actor=base,
        reward=folder / "rm" / REFERENCE / "model",
        max_steps=2,
        data__max_response_tokens=ANSWER_TOKENS,
        rollout__prompts_per_step=3,
        rollout__samples_per_prompt=4,
        rollout__old_logprobs="rescore",  # the answers are not the decoder's
        update__minibatch_size=6,
        update__epochs=1,
        update__entropy_coef=0.01,
        deepspeed__actor=ds,
        deepspeed__critic=ds,
        **NO_EVAL,
        **optimiser("actor_optim"),
        **optimiser("critic_optim"),
        **data,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_rollout, "draw_responses", fixed_responses)
        train_ppo(cfg)


def one_rank_job(folder: Path) -> None:
    engine.setup(timeout_seconds=60)
    train_all(folder, REFERENCE, "cpu_zero0", {"data__packing": "off"}, 64)
    two_rank_job(folder)


def two_rank_job(folder: Path) -> None:
    engine.setup(timeout_seconds=60)
    for setting in settings():
        train_all(folder, *setting)


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fast_path")
    write_rows(folder / "rows.jsonl", yes_rows(40))
    ranks(one_rank_job, world_size=1, timeout=300, folder=folder)
    ranks(two_rank_job, world_size=2, timeout=300, folder=folder)
    return folder


def assert_equal(stage: Path, *, losses: Sequence[str], norms: Sequence[str], models: Sequence[str]) -> None:
    """All runs of a stage: losses within 1e-6 and gradient norms within 1e-5 of their size, weights within 1e-6."""
    names = sorted(folder.name for folder in stage.iterdir())
    assert len(names) == 19 and REFERENCE in names
    reference = stage / REFERENCE
    for name, metric in itertools.product(names, [*losses, *norms]):
        expected = series(reference, metric)
        assert len(expected) >= 2 and max(map(abs, expected)) > 1e-3, metric
        limit = {"rel": 1e-6 if metric in losses else 1e-5, "abs": 1e-6}
        assert series(stage / name, metric) == pytest.approx(expected, **limit), (name, metric)
    for model in models:
        expected_weights = weights(reference / model)
        for name in names:
            found = weights(stage / name / model)
            assert found.keys() == expected_weights.keys()
            gap = max(float((found[key] - weight).abs().max()) for key, weight in expected_weights.items())
            assert gap < 1e-6, (name, model, gap)


CHECKS: dict[str, Callable[[Path], None]] = {
    "sft": lambda runs: assert_equal(
        runs / "sft", losses=["train/loss"], norms=["train/grad_norm", "train/token_accuracy"], models=["model"]
    ),
    "rm": lambda runs: assert_equal(
        runs / "rm", losses=["train/loss"], norms=["train/grad_norm", "train/margin"], models=["model"]
    ),
    "ppo": lambda runs: assert_equal(
        runs / "ppo",
        losses=["policy/loss", "value/loss", "ppo/score", "ppo/kl_ref", "ppo/entropy"],
        norms=["train/grad_norm", "critic/grad_norm"],
        models=["model", "critic"],
    ),
}


@pytest.mark.parametrize("stage", CHECKS)
def test_any_ranks_any_zero_stage_and_any_micro_batches_are_one_trajectory(runs: Path, stage: str) -> None:
    CHECKS[stage](runs)
