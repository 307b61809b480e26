"""The models of step 3: actor and, for PPO, critic (trainable), reference and reward model (frozen)."""

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, cast

import torch

from rlhf import artifacts, ds_config, engine
from rlhf.combinations import Role
from rlhf.config import ModelConfig
from rlhf.engine import FrozenEngine, TrainEngine
from rlhf.models.build import build_causal_lm, build_reward_model, check_length_fits
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import ScalarModel
from rlhf.sharing import Sharing
from rlhf.stage import Language
from step3_ppo.config import PPOConfig

logger = logging.getLogger(__name__)


class AdapterOff:
    """The actor with its adapters off, as the reference: below them lie the very weights that training started from.

    No second copy of the base is held, and none can drift from it.
    """

    def __init__(self, actor: TrainEngine) -> None:
        self.actor = actor

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The base's forward, in the actor's mode."""
        with cast(Any, self.actor.module).model.disable_adapter():
            return self.actor(*args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The engines of one run. All read the same tokens, which the contract between the folders makes sure."""

    actor: TrainEngine
    critic: TrainEngine | None
    """None with an algorithm that has no critic."""
    reference: FrozenEngine | AdapterOff
    reward: FrozenEngine
    sharing: Sharing
    """Ranks that work on the same rows when the roles score and when actor and critic are trained."""

    @property
    def engines(self) -> list[TrainEngine | FrozenEngine]:
        """Those that hold weights of their own."""
        own = [self.reference] if isinstance(self.reference, FrozenEngine) else []
        return [*self.trained.values(), *own, self.reward]

    @property
    def trained(self) -> dict[str, TrainEngine]:
        """Those that are updated, by role."""
        return {"actor": self.actor, **({} if self.critic is None else {"critic": self.critic})}


def load_ds_configs(cfg: PPOConfig) -> dict[str, dict[str, Any]]:
    """The content of the DeepSpeed JSON of each role that there is."""
    return {role: ds_config.load(getattr(cfg.deepspeed, role)) for role in model_configs(cfg)}


def model_configs(cfg: PPOConfig) -> dict[str, ModelConfig]:
    """The config of each model that there is: paths filled in from the role they default to, and no dropout anywhere.

    With dropout the same weights are two policies, one when sampling and scoring and another in the update, and the
    first ratio is not 1. A reference that is the actor's start rounds as the actor does, so that the first KL is 0.
    """
    reference = cfg.reference if cfg.reference.path else ModelConfig(
        path=cfg.actor.path, dtype=cfg.actor.dtype, attention=cfg.actor.attention, compile=cfg.actor.compile,
        float8=cfg.actor.float8, float8_filter_fqns=cfg.actor.float8_filter_fqns,
        float8_min_features=cfg.actor.float8_min_features, float8_emulate=cfg.actor.float8_emulate,
    )  # fmt: skip
    critic = cfg.critic if cfg.critic.path else dataclasses.replace(cfg.critic, path=cfg.reward.path)
    models = {"actor": cfg.actor, "critic": critic, "reference": reference, "reward": cfg.reward}
    if not cfg.has_critic:
        del models["critic"]
    return {role: dataclasses.replace(model, dropout=0.0) for role, model in models.items()}


def trained_roles(cfg: PPOConfig, ds: dict[str, dict[str, Any]]) -> dict[str, Role]:
    """Actor and critic as they are set up."""
    models, optims = model_configs(cfg), {"actor": cfg.actor_optim, "critic": cfg.critic_optim}
    return {
        role: Role(model=models[role], ds=ds[role], optim=optim, parallel=cfg.parallel)
        for role, optim in optims.items()
        if optim is not None and role in models
    }


def check_artifacts(cfg: PPOConfig) -> None:
    """Check that the model folders are whole and fit one another, before anything is loaded.

    Raises:
        ArtifactError: a file is missing or changed, a model is of the wrong kind, or the tokens differ.
    """
    assert cfg.actor.path and cfg.reward.path
    actor = artifacts.verify(cfg.actor.path)
    artifacts.check_contract(actor, artifacts.verify(cfg.reward.path))
    others: tuple[tuple[str, str | None, tuple[artifacts.Kind, ...]], ...] = (
        ("critic", cfg.critic.path, ("critic", "reward")),
        ("reference", cfg.reference.path, ("policy",)),
    )
    for role, path, allowed in others:
        if path:
            manifest = artifacts.verify(path)
            artifacts.check_kind(manifest, role, allowed=allowed)
            artifacts.check_same_text(actor, manifest)


def score_range(cfg: PPOConfig) -> dict[str, float]:
    """`score_low` and `score_high`: what the reward model gave to the preferences of step 2; empty if nobody noted it.

    Raises:
        ArtifactError: it is not there, and a detector is to act on it.
    """
    assert cfg.reward.path
    manifest = artifacts.read_manifest(cfg.reward.path)
    found = {name: manifest.metrics.get(name) for name in ("score_low", "score_high")}
    values = {name: value for name, value in found.items() if value is not None}
    if len(values) == len(found):
        return values
    action = cfg.run.health.reward_above_training.action
    if action in ("stop", "rollback"):
        raise artifacts.ArtifactError(
            f"run.health.reward_above_training.action is {action}, but the manifest of {cfg.reward.path} has no "
            "score_low and score_high. Run step 2 again with this version, or set the action to off."
        )
    return {}


def check_language(cfg: PPOConfig, language: Language) -> None:
    """Check that prompts are written as the actor knows them: data.template may name another template than its own.

    Raises:
        ArtifactError: they are not.
    """
    assert cfg.actor.path
    artifacts.check_reads(artifacts.read_manifest(cfg.actor.path), language.contract)


def build_roles(
    cfg: PPOConfig, language: Language, ds: dict[str, dict[str, Any]], sharing: Sharing, *, num_updates: int
) -> Roles:
    """Load the models, each sharded or whole as its JSON says. Collective.

    Args:
        cfg: of the stage.
        language: tokenizer and template that all share.
        ds: content of each role's DeepSpeed JSON.
        sharing: ranks that share rows, or the weights of actor and critic.
        num_updates: optimiser steps of the whole run, for the critic; the actor makes fewer with a critic warm-up.
    """
    models = model_configs(cfg)
    if not cfg.has_critic:
        logger.info(
            "algorithm %s has no critic: critic, critic_optim, deepspeed.critic and update.clip_value play no part",
            cfg.algorithm,
        )
    shares_base = cfg.actor.lora.rank > 0 and not cfg.reference.path
    if shares_base:
        del models["reference"]
        logger.info("the reference is the actor with its adapters off; deepspeed.reference plays no part")
    num_tokens = cfg.data.max_prompt_tokens + cfg.data.max_response_tokens
    wrapped: dict[str, Policy | ScalarModel] = {}
    for role, model_config in models.items():
        is_policy, is_trained = role in ("actor", "reference"), role in ("actor", "critic")
        with engine.zero3_init(ds[role], shares=is_trained and cfg.parallel.tp > 1):
            build = build_causal_lm if is_policy else build_reward_model
            model = build(model_config, language.tokenizer, seed=cfg.run.seed)
        model = sharing.share(model) if is_trained else model
        wrapped[role] = Policy(model) if is_policy else ScalarModel(model)
        check_length_fits(wrapped[role].config, num_tokens)
    actor_updates = num_updates * (cfg.max_steps - cfg.update.critic_warmup_steps) // cfg.max_steps
    actor = TrainEngine(wrapped["actor"], ds=ds["actor"], optim=cfg.actor_optim, role="actor", num_steps=actor_updates,
                        tensor=sharing.tensor)  # fmt: skip
    critic = None
    if cfg.has_critic:
        assert cfg.critic_optim
        critic = TrainEngine(wrapped["critic"], ds=ds["critic"], optim=cfg.critic_optim, role="critic",
                             num_steps=num_updates, tensor=sharing.tensor)  # fmt: skip
    return Roles(
        actor=actor,
        critic=critic,
        reference=(
            AdapterOff(actor)
            if shares_base
            else FrozenEngine(wrapped["reference"], ds=ds["reference"], role="reference")
        ),
        reward=FrozenEngine(wrapped["reward"], ds=ds["reward"], role="reward"),
        sharing=sharing,
    )
