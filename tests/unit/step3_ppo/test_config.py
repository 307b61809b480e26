"""What a rollout may be asked for, and what of it does not fit how the actor runs. One message each."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rlhf.config import ModelConfig
from step3_ppo.config import PPOConfig
from step3_ppo.roles import model_configs
from tests.stages import ppo_config


def config(**changes: Any) -> PPOConfig:
    made = ppo_config(Path("out"), Path("rows"), actor=Path("a"), reward=Path("r"), **changes)
    assert isinstance(made, PPOConfig)
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__tensor_parallel": 0}, r"rollout.tensor_parallel must be >= 1 or null, got 0"),
        (
            {"rollout__tensor_parallel": 2, "rollout__weights": "layerwise"},
            "tensor_parallel=2 shares .*Set one of",
        ),
        ({"rollout__dtype": "bfloat16", "rollout__weights": "layerwise"}, "dtype=bfloat16 needs a copy .*Leave one"),
        ({"rollout__tensor_parallel": 2, "rollout__engine": "vllm"}, "vllm, which takes whole weights on each rank"),
        ({"rollout__weights": "layerwise", "rollout__engine": "vllm"}, "vllm, which takes whole weights on each rank"),
        ({"rollout__graphs": True}, "graphs is true.*rollout.weights auto.*gathered and null, or rollout.graphs=false"),
        (
            {"rollout__graphs": True, "rollout__weights": "gathered", "rollout__tensor_parallel": 2},
            "graphs is true.*tensor_parallel 2",
        ),
        ({"parallel__pp": 2}, "parallel.pp=2: only step 1 has it"),
        ({"parallel__sp": 2, "data__packing": "off"}, "parallel.sp=2 shares packed rows .*data.packing is `off`"),
        ({"parallel__sp": 2, "critic__compile": True}, "in step 1 alone, but critic.compile is true. Set it to false"),
        *(
            ({"parallel__sp": 2, f"{role}__attention": "eager"}, f"but {role}.attention is eager. Use sdpa")
            for role in ("actor", "reward", "critic", "reference")
        ),
        ({"parallel__tp": 2, "rollout__tensor_parallel": 4}, "tensor_parallel=4, but parallel.tp=2: the actor decodes"),
        ({"parallel__tp": 2, "rollout__weights": "layerwise"}, "rollout.weights=layerwise, but parallel.tp=2"),
        ({"parallel__tp": 2, "rollout__engine": "vllm"}, "rollout.engine=vllm, but parallel.tp=2"),
        (
            {"parallel__tp": 2, "rollout__graphs": True, "rollout__weights": "gathered"},
            "rollout.graphs=True, but parall",
        ),
    ],
)
def test_settings_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__weights": "layerwise"}, "`layerwise`, but the actor runs at ZeRO stage 2.*Set it to auto"),
        ({"rollout__tensor_parallel": 3}, "tensor_parallel=3 does not divide the 4 ranks.*Use a divisor of 4"),
        ({"rollout__dtype": "bfloat16"}, "trained in float32 and rollout.old_logprobs is `decoder`.*=rescore"),
    ],
)
def test_settings_that_do_not_fit_the_actor(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes).check_rollout(trained_in="float32", zero_stage=2, world_size=4)


def test_float8_is_for_what_is_trained_and_rescored() -> None:
    """A frozen model has none, but for the reference, which rounds as the actor whose start it is."""

    def changed(**models: ModelConfig) -> PPOConfig:
        return dataclasses.replace(config(rollout__old_logprobs="rescore"), **models)

    with pytest.raises(ValueError, match="reward.float8=rowwise, but the reward model is not trained.*Leave it out"):
        changed(reward=ModelConfig(path="r", float8="rowwise"))
    with pytest.raises(ValueError, match="reference.float8=rowwise, but there is no reference.path.*as the actor does"):
        changed(reference=ModelConfig(float8="rowwise"))
    changed(reference=ModelConfig(path="a", float8="rowwise"))
    made = changed(actor=ModelConfig(path="a", float8="tensorwise", float8_filter_fqns=["fc1"], float8_min_features=32))
    models = model_configs(made)
    for name in ("float8", "float8_filter_fqns", "float8_min_features", "float8_emulate"):
        assert getattr(models["reference"], name) == getattr(models["actor"], name)
    assert models["critic"].float8 == models["reward"].float8 == "none"
    with pytest.raises(ValueError, match="actor.float8=rowwise, but rollout.old_logprobs is `decoder`.*rescore"):
        dataclasses.replace(config(), actor=ModelConfig(path="a", float8="rowwise"))


def test_settings_that_fit() -> None:
    config(rollout__tensor_parallel=2, rollout__weights="gathered").check_rollout(
        trained_in="bfloat16", zero_stage=0, world_size=4
    )
    config(rollout__weights="gathered", rollout__graphs=True)
    config(rollout__weights="layerwise").check_rollout(trained_in="float32", zero_stage=3, world_size=1)
    config(rollout__dtype="bfloat16").check_rollout(trained_in="bfloat16", zero_stage=3, world_size=1)
    config(rollout__dtype="bfloat16", rollout__old_logprobs="rescore").check_rollout(
        trained_in="float32", zero_stage=3, world_size=1
    )
