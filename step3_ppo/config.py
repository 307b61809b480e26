"""Config of step 3. No torch."""

from dataclasses import dataclass, field
from typing import Literal

from rlhf.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    VLLMConfig,
)
from step3_ppo.algorithm import (
    ALGORITHMS,
    AlgorithmName,
    GAEConfig,
    KLConfig,
    Method,
    UpdateConfig,
    check_without_critic,
    choose_method,
)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfigs:
    """The DeepSpeed JSON of each role: a path, or a name in ds_configs."""

    actor: str
    """Actor (trainable)."""
    critic: str | None = None
    """Critic (trainable); needed by an algorithm that has one."""
    reference: str = "frozen"
    """Reference (frozen)."""
    reward: str = "frozen"
    """Reward model (frozen)."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How much is sampled in one PPO step."""

    prompts_per_step: int
    """Prompts of one PPO step, over all ranks."""
    samples_per_prompt: int = 1
    """Responses drawn for each prompt."""
    flat_groups: Literal["keep", "drop", "refill"] = "keep"
    """What becomes of prompts whose responses all got the same score, of which an algorithm that compares them learns
    nothing: trained on, left out, or left out and made up for by other prompts (DAPO's dynamic sampling, Yu et al.
    2025, arXiv:2503.14476, sec. 3.2)."""
    most_draws: int = 4
    """Rollouts of one step at most, with `flat_groups: refill`; a step that is not full after them is trained on as it
    is."""
    engine: Literal["builtin", "vllm"] = "builtin"
    """Who decodes: rlhf/rollout, or vLLM in the rank's process (docs/vllm.md)."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    """What vLLM may take of the machine."""
    batch_size: int = 64
    """Sequences decoded side by side on one rank."""
    weights: Literal["auto", "gathered", "layerwise"] = "auto"
    """How the actor's weights come to the decoder: whole on a rank or a group of ranks, or (ZeRO-3) gathered layer by
    layer in each forward; `auto`: whole if they fit a rank, else over as few ranks as they fit, else layer by layer."""
    tensor_parallel: int | None = None
    """Ranks that share one copy of the weights and decode their prompts together; null: 1, or what `weights: auto`
    finds."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights that decode; null: the one that the actor is trained in."""
    graphs: bool = False
    """Replay the forwards that decode from captured graphs: for accelerators on which a small actor waits for its
    launches. Needs `weights: gathered`."""
    old_logprobs: Literal["decoder", "rescore"] = "decoder"
    """Log-probs of the sampling policy: as the decoder computed them, or by one more forward of the actor."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "samples_per_prompt", "batch_size", "most_draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name} must be >= 1, got {getattr(self, name)}.")
        if self.tensor_parallel is not None and self.tensor_parallel < 1:
            raise ValueError(f"rollout.tensor_parallel must be >= 1 or null, got {self.tensor_parallel}.")
        shared = self.tensor_parallel is not None and self.tensor_parallel > 1
        if self.weights == "layerwise" and shared:
            raise ValueError(
                f"rollout.tensor_parallel={self.tensor_parallel} shares a copy of the weights, but rollout.weights is "
                "`layerwise`, which makes none. Set one of them."
            )
        if self.weights == "layerwise" and self.dtype is not None:
            raise ValueError(
                f"rollout.dtype={self.dtype} needs a copy of the weights, but rollout.weights is `layerwise`, which "
                "makes none. Leave one of them out."
            )
        if self.engine == "vllm" and (shared or self.weights == "layerwise"):
            raise ValueError(
                "rollout.engine is vllm, which takes whole weights on each rank. Leave rollout.tensor_parallel and "
                "rollout.weights=layerwise out, or set rollout.engine=builtin."
            )
        if self.graphs and (self.engine == "vllm" or shared or self.weights != "gathered"):
            raise ValueError(
                "rollout.graphs is true, which needs our decoder on whole weights on each rank, but rollout.engine is "
                f"{self.engine}, rollout.weights {self.weights}, rollout.tensor_parallel {self.tensor_parallel}. Set "
                "them to builtin, gathered and null, or rollout.graphs=false."
            )

    @property
    def num_sequences(self) -> int:
        """Sequences of one PPO step, over all ranks."""
        return self.prompts_per_step * self.samples_per_prompt


@dataclass(frozen=True, kw_only=True)
class ShapingConfig:
    """From the reward model's score to the reward of a response."""

    rule: str | None = None
    """Name of a rule (rlhf/rules.py) scored beside the reward model; null: none."""
    rule_weight: float = 1.0
    """Weight of the rule's score."""
    model_weight: float = 1.0
    """Weight of the reward model's score."""
    clip: float = 10.0
    """The score is clipped to [-clip, clip]; 0: not clipped."""
    scale: Literal["none", "running"] = "none"
    """`running` divides by the running standard deviation of all scores so far."""
    missing_stop_penalty: float = 0.0
    """Subtracted from the score of a response that did not stop."""
    length_penalty: float = 0.0
    """Subtracted from the score for each token of the response."""
    overlong_tokens: int = 0
    """Last tokens before data.max_response_tokens over which a penalty rises from 0 to overlong_penalty (DAPO's soft
    overlong punishment, Yu et al. 2025, arXiv:2503.14476, eq. 13); 0: none."""
    overlong_penalty: float = 1.0
    """Subtracted from the score of a response of data.max_response_tokens."""

    def __post_init__(self) -> None:
        for name in ("clip", "missing_stop_penalty", "length_penalty", "overlong_tokens", "overlong_penalty"):
            if getattr(self, name) < 0:
                raise ValueError(f"shaping.{name} must be >= 0, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Step 3: PPO, or another algorithm, of the SFT policy against the reward model."""

    algorithm: AlgorithmName = "ppo"
    """How the policy is improved (step3_ppo/README.md)."""
    actor: ModelConfig
    """The policy: step 1's model folder."""
    reward: ModelConfig
    """The reward model: step 2's model folder."""
    critic: ModelConfig = field(default_factory=ModelConfig)
    """The value model; by default it starts from the reward model."""
    reference: ModelConfig = field(default_factory=ModelConfig)
    """The policy that KL is measured to; by default the actor's start (with actor.lora: the actor, adapters off)."""
    data: DataConfig
    """The prompts."""
    actor_optim: OptimConfig
    """Actor's optimiser and schedule."""
    critic_optim: OptimConfig | None = None
    """Critic's optimiser and schedule; needed by an algorithm that has one."""
    run: RunConfig
    """Folder, seed, cadence."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Ranks that share the weights of actor and critic, or rows when these are scored and trained on."""
    rollout: RolloutConfig
    """Sampling volume."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How responses are drawn and scored."""
    update: UpdateConfig
    """Training on a rollout."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL penalty."""
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    """Reward of a response."""
    gae: GAEConfig = field(default_factory=GAEConfig)
    """Advantages."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    gold_rule: str | None = None
    """Rule that measures held-out answers without being trained on; null: none."""
    deepspeed: DeepSpeedConfigs
    """The DeepSpeed JSON of each role."""
    max_steps: int
    """PPO steps."""

    def __post_init__(self) -> None:
        if self.max_steps < 1:
            raise ValueError(f"max_steps must be >= 1, got {self.max_steps}.")
        self._check_models()
        self._check_parallel()
        self._check_algorithm()
        if self.rollout.num_sequences % self.update.minibatch_size:
            raise ValueError(
                f"rollout.prompts_per_step x rollout.samples_per_prompt = {self.rollout.num_sequences} is not a "
                f"multiple of update.minibatch_size = {self.update.minibatch_size}. Change one of them."
            )
        if self.update.critic_warmup_steps >= self.max_steps:
            raise ValueError(
                f"update.critic_warmup_steps={self.update.critic_warmup_steps} leaves no step for the actor: "
                f"max_steps is {self.max_steps}. Lower it."
            )
        if self.update.importance_cap and self.rollout.old_logprobs != "rescore":
            raise ValueError(
                f"update.importance_cap={self.update.importance_cap} compares the decoder's log-probs with the actor's "
                "own, but rollout.old_logprobs is `decoder`. Set it to `rescore`."
            )
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature is 0, but PPO needs samples. Use a temperature above 0, usually 1.")
        if self.sampling.min_new_tokens > self.data.max_response_tokens:
            raise ValueError(
                f"sampling.min_new_tokens={self.sampling.min_new_tokens} is above data.max_response_tokens="
                f"{self.data.max_response_tokens}. Lower it."
            )

    def check_rollout(self, *, trained_in: str, zero_stage: int, world_size: int) -> None:
        """Check the rollout against how the actor runs, which its DeepSpeed JSON says.

        Args:
            trained_in: type that the actor computes in.
            zero_stage: of the actor.
            world_size: number of ranks.

        Raises:
            ValueError: they do not fit.
        """
        rollout = self.rollout
        if rollout.weights == "layerwise" and zero_stage != 3:
            raise ValueError(
                f"rollout.weights is `layerwise`, but the actor runs at ZeRO stage {zero_stage}, where every rank has "
                "whole weights. Set it to auto, or take a DeepSpeed JSON of stage 3."
            )
        if rollout.tensor_parallel and world_size % rollout.tensor_parallel:
            raise ValueError(
                f"rollout.tensor_parallel={rollout.tensor_parallel} does not divide the {world_size} ranks into "
                f"groups. Use a divisor of {world_size}."
            )
        if rollout.dtype not in (None, trained_in) and rollout.old_logprobs != "rescore":
            raise ValueError(
                f"rollout.dtype={rollout.dtype}, but the actor is trained in {trained_in} and rollout.old_logprobs is "
                "`decoder`: every policy ratio would compare two types. Set rollout.old_logprobs=rescore, and "
                "update.importance_cap=2 to weigh what they round differently."
            )

    def _check_parallel(self) -> None:
        self.parallel.check_has("sp", "tp")
        if (tp := self.parallel.tp) == 1:
            return
        rollout = self.rollout
        if rollout.tensor_parallel not in (None, tp):
            raise ValueError(
                f"rollout.tensor_parallel={rollout.tensor_parallel}, but parallel.tp={tp}: the actor decodes in the "
                "shares that it is trained in. Leave rollout.tensor_parallel out."
            )
        for name, usual in (("engine", "builtin"), ("weights", "auto"), ("graphs", False)):
            if (value := getattr(rollout, name)) not in (usual, "gathered"):
                raise ValueError(
                    f"rollout.{name}={value}, but parallel.tp={tp}: shares of weights are lent to our decoder as they "
                    "are, or in one copy under ZeRO-3. Leave it out, or set parallel.tp=1."
                )

    def _check_algorithm(self) -> None:
        method, rollout = self.method, self.rollout
        if not self.has_critic:
            check_without_critic(
                self.algorithm, critic_path=self.critic.path, warmup_steps=self.update.critic_warmup_steps, gae=self.gae
            )
        for key, value in (("deepspeed.critic", self.deepspeed.critic), ("critic_optim", self.critic_optim)):
            if self.has_critic and not value:
                raise ValueError(f"{key} is missing, but algorithm={self.algorithm} trains a critic. Set it.")
        if rollout.flat_groups != "keep" and not ALGORITHMS[self.algorithm].compares_samples:
            raise ValueError(
                f"rollout.flat_groups is `{rollout.flat_groups}`, but algorithm={self.algorithm} does not compare the "
                "responses to a prompt and learns of equal ones too. Set it to keep, or take rloo, grpo, dr_grpo or "
                "gspo."
            )
        if self.parallel.sp > 1 and method.ratio == "sequence":
            raise ValueError(
                f"parallel.sp={self.parallel.sp} divides responses between ranks, but algorithm={self.algorithm} with "
                "update.ratio=sequence takes a mean over each of them. Set parallel.sp=1, or ratio=token."
            )
        if self.shaping.overlong_tokens > method.max_response_tokens:
            raise ValueError(
                f"shaping.overlong_tokens={self.shaping.overlong_tokens} is above data.max_response_tokens="
                f"{method.max_response_tokens}. Lower it."
            )

    @property
    def method(self) -> Method:
        """How responses become advantages and a loss."""
        return choose_method(
            self.algorithm,
            self.update,
            self.kl,
            group_size=self.rollout.samples_per_prompt,
            max_response_tokens=self.data.max_response_tokens,
        )

    @property
    def has_critic(self) -> bool:
        """Whether a critic is built and trained."""
        return ALGORITHMS[self.algorithm].has_critic

    def _check_models(self) -> None:
        for role in ("actor", "reward"):
            if not getattr(self, role).path:
                step = 2 if role == "reward" else 1
                raise ValueError(f"{role}.path is empty. Name the model folder that step {step} wrote.")
        for role in ("actor", "reward", "critic", "reference"):
            if getattr(self, role).config is not None:
                raise ValueError(f"{role}.config is set, but step 3 starts from trained models. Use {role}.path.")
            self.parallel.check_model(getattr(self, role), self.data, name=role)
        self._check_float8()

    def _check_float8(self) -> None:
        if self.reward.float8 != "none":
            raise ValueError(
                f"reward.float8={self.reward.float8}, but the reward model is not trained: it scores in its own type. "
                "Leave it out; actor.float8 and critic.float8 are there."
            )
        if self.reference.float8 != "none" and not self.reference.path:
            raise ValueError(
                f"reference.float8={self.reference.float8}, but there is no reference.path, and the default reference "
                "computes as the actor does. Leave it out, or name a path."
            )
        if self.actor.float8 != "none" and self.rollout.old_logprobs != "rescore":
            raise ValueError(
                f"actor.float8={self.actor.float8}, but rollout.old_logprobs is `decoder`, which does not compute in "
                "float8: every policy ratio would compare two types. Set rollout.old_logprobs=rescore, and "
                "update.importance_cap=2 to weigh what they round differently."
            )

    @property
    def num_updates(self) -> int:
        """Optimiser steps over the whole run: of the critic, or the actor where there is none."""
        return self.max_steps * self.update.epochs * (self.rollout.num_sequences // self.update.minibatch_size)
