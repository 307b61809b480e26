"""The four models of PPO: actor and critic (trainable), reference and reward model (frozen)."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf import ds_config
from rlhf.artifacts import check_contract, read_manifest
from rlhf.config import ModelConfig
from rlhf.data.template import ChatTemplate, load_template
from rlhf.distributed import world_size
from rlhf.engine import FrozenEngine, TrainEngine, zero3_init
from rlhf.models.build import build_causal_lm, build_reward_model, load_tokenizer
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import ScalarModel
from step3_ppo.config import PPOConfig


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The engines of one PPO run, and what all four share: one tokenizer, one chat template."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    actor: TrainEngine
    critic: TrainEngine
    reference: FrozenEngine
    reward: FrozenEngine


def resolve_ds_configs(cfg: PPOConfig) -> dict[str, dict[str, Any]]:
    """The four resolved DeepSpeed configs, by role."""
    optimizers = {"actor": cfg.actor_optim, "critic": cfg.critic_optim, "reference": None, "reward": None}
    return {
        role: ds_config.resolve(
            ds_config.load(getattr(cfg.deepspeed, role)),
            optim=optim,
            world_size=world_size(),
            trainable=optim is not None,
        )
        for role, optim in optimizers.items()
    }


def model_configs(cfg: PPOConfig) -> dict[str, ModelConfig]:
    """The four model configs, with the paths that default to another role's and without dropout.

    Dropout makes the same weights give two policies, one when sampling and scoring and another in the update, so that
    the first ratio is not 1; it is off in every role whatever a model's config says.
    """
    start = {
        "actor": cfg.actor,
        "reference": cfg.reference if cfg.reference.path else dataclasses.replace(cfg.actor, path=cfg.actor.path),
        "reward": cfg.reward,
        "critic": cfg.critic if cfg.critic.path else dataclasses.replace(cfg.critic, path=cfg.reward.path),
    }
    return {role: dataclasses.replace(model, dropout=0.0) for role, model in start.items()}
