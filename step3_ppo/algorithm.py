"""What the algorithms of step 3 are made of, and the settings of advantages, KL and losses. No torch.

An algorithm is a row of ALGORITHMS: one way to advantages, and where the KL goes, which ratio the loss clips and what
it is a mean over. The last three a config may set otherwise; `Method` is what then holds.
"""

from dataclasses import dataclass
from typing import Literal

AlgorithmName = Literal["ppo", "rloo", "reinforce_pp", "grpo", "dr_grpo", "gspo"]
Advantage = Literal["gae", "return", "leave_one_out", "group", "group_scaled"]
Ratio = Literal["token", "sequence"]
LossMean = Literal["token", "sequence", "constant"]
KLPlace = Literal["reward", "loss"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One row of the table; the meaning of its words is that of `Method`."""

    advantage: Advantage
    kl_place: KLPlace
    ratio: Ratio = "token"
    loss_mean: LossMean = "token"
    source: str

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained."""
        return self.advantage == "gae"

    @property
    def compares_samples(self) -> bool:
        """Whether a response is judged by the other responses to its prompt."""
        return self.advantage in ("leave_one_out", "group", "group_scaled")


ALGORITHMS: dict[AlgorithmName, Algorithm] = {
    "ppo": Algorithm(
        advantage="gae", kl_place="reward",
        source="Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155",
    ),
    "rloo": Algorithm(
        advantage="leave_one_out", kl_place="reward", source="Ahmadian et al. 2024, arXiv:2402.14740",
    ),
    "reinforce_pp": Algorithm(
        advantage="return", kl_place="reward", source="Hu 2025, arXiv:2501.03262",
    ),
    "grpo": Algorithm(
        advantage="group_scaled", kl_place="loss", loss_mean="sequence",
        source="Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4",
    ),
    "dr_grpo": Algorithm(
        advantage="group", kl_place="loss", loss_mean="constant", source="Liu et al. 2025, arXiv:2503.20783",
    ),
    "gspo": Algorithm(
        advantage="group_scaled", kl_place="loss", ratio="sequence", loss_mean="sequence",
        source="Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Method:
    """How responses become advantages and a loss: an algorithm, with what the config puts in place of its own."""

    advantage: Advantage
    """`gae`: of a critic's values; `return`: reward still to come; the others compare a response's reward with those of
    its group: `leave_one_out` with the mean of the others, `group` with the mean of all, `group_scaled` in units of
    their standard deviation."""
    kl_place: KLPlace
    """Whether the KL to the reference is taken from the rewards or added to the loss."""
    kl_estimator: KLEstimator
    ratio: Ratio
    """Policy ratio of each token, or of the whole response."""
    loss_mean: LossMean
    """Over the tokens of a minibatch; over its responses, each the mean over its tokens; or over its responses, each
    the sum over its tokens divided by `max_response_tokens`."""
    group_size: int
    """Responses to one prompt that are compared."""
    max_response_tokens: int

    @property
    def whitens(self) -> bool:
        """Whether advantages get mean 0 and variance 1 over the tokens of a step."""
        return self.advantage in ("gae", "return")


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How one rollout is trained on."""

    epochs: int = 1
    """Passes over the rollout."""
    minibatch_size: int
    """Sequences of one optimiser step, over all ranks and micro-batches."""
    clip_ratio: float = 0.2
    """Half-width of the policy-ratio interval (Schulman et al. 2017, sec. 3); its lower half with clip_high."""
    clip_high: float | None = None
    """Upper half-width of the interval (DAPO's clip-higher, Yu et al. 2025, arXiv:2503.14476, sec. 3.1: 0.28); null:
    clip_ratio."""
    dual_clip: float = 0.0
    """Where the advantage is negative, the ratio counts as at most this (Ye et al. 2020, arXiv:1912.09729: 3); 0:
    no limit."""
    ratio: Ratio | None = None
    """Ratio of each token, or one of the response, exp of the mean log ratio (GSPO); null: the algorithm's own."""
    loss_mean: LossMean | None = None
    """Mean of the policy loss: over tokens (DAPO); over responses, each a mean over its tokens (GRPO); or over
    responses, each a sum divided by data.max_response_tokens (Dr. GRPO); null: the algorithm's own."""
    clip_value: float = 0.2
    """Half-width of the interval around the old value estimate; 0: no clipping."""
    importance_cap: float = 0.0
    """Largest importance weight of a token, for what decoder and update round differently; 0: no weights."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    target_kl: float = 0.0
    """Skip the rest of the update when a minibatch's KL to the rollout policy (k3) exceeds it; 0: never."""
    critic_warmup_steps: int = 0
    """First PPO steps in which only the critic is updated."""

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.minibatch_size < 1:
            raise ValueError(
                f"update.epochs and update.minibatch_size must be >= 1, got {self.epochs}, {self.minibatch_size}."
            )
        if self.importance_cap and not self.importance_cap >= 1:
            raise ValueError(f"update.importance_cap must be 0 or at least 1, got {self.importance_cap}. Usual is 2.")
        if not 0 < self.clip_ratio < 1:
            raise ValueError(f"update.clip_ratio must be in (0, 1), got {self.clip_ratio}.")
        if self.clip_high is not None and not self.clip_high > 0:
            raise ValueError(f"update.clip_high must be > 0 or null, got {self.clip_high}. Usual is 0.28.")
        if self.dual_clip and not self.dual_clip > 1:
            raise ValueError(f"update.dual_clip must be 0 or above 1, got {self.dual_clip}. Usual is 3.")
        if min(self.clip_value, self.entropy_coef, self.target_kl, self.critic_warmup_steps) < 0:
            raise ValueError(
                "update.clip_value, update.entropy_coef, update.target_kl and update.critic_warmup_steps must be >= 0, "
                f"got {self.clip_value}, {self.entropy_coef}, {self.target_kl}, {self.critic_warmup_steps}."
            )

    @property
    def upper_clip(self) -> float:
        """Upper half-width of the policy-ratio interval."""
        return self.clip_ratio if self.clip_high is None else self.clip_high


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The penalty that keeps the policy near the reference."""

    coef: float = 0.05
    """Weight of the per-token penalty, at start; nats."""
    place: KLPlace | None = None
    """Taken from the rewards, or added to the loss with a gradient of its own; null: the algorithm's own."""
    estimator: KLEstimator | None = None
    """Per-token estimator (Schulman 2020, joschu.net/blog/kl-approx.html); null: k1 in the rewards, k3 in the loss."""
    adaptive: bool = False
    """Move coef towards `target` (Ziegler et al. 2019, sec. 2.2) instead of keeping it."""
    target: float = 6.0
    """Wanted KL to the reference, nats per response."""
    horizon: float = 10_000.0
    """Sequences over which the adaptive controller moves."""

    def __post_init__(self) -> None:
        if self.coef < 0 or self.target <= 0 or self.horizon <= 0:
            raise ValueError(
                f"kl.coef must be >= 0, kl.target and kl.horizon > 0, got {self.coef}, {self.target}, {self.horizon}."
            )


@dataclass(frozen=True, kw_only=True)
class GAEConfig:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438)."""

    gamma: float = 1.0
    """Discount per token."""
    lam: float = 0.95
    """0 trusts the critic, 1 the sampled return."""

    def __post_init__(self) -> None:
        if not (0 <= self.gamma <= 1 and 0 <= self.lam <= 1):
            raise ValueError(f"gae.gamma and gae.lam must be in [0, 1], got {self.gamma}, {self.lam}.")


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What the updates of one step minimise."""

    update: UpdateConfig
    method: Method
    kl_coef: float
    """Of that step."""

    @property
    def kl_loss_coef(self) -> float:
        """Weight of the KL to the reference in the loss."""
        return self.kl_coef if self.method.kl_place == "loss" else 0.0


def choose_method(
    name: AlgorithmName, update: UpdateConfig, kl: KLConfig, *, group_size: int, max_response_tokens: int
) -> Method:
    """The method of an algorithm under a config.

    Raises:
        ValueError: the settings contradict each other or the algorithm.
    """
    algorithm = ALGORITHMS[name]
    place = kl.place or algorithm.kl_place
    method = Method(
        advantage=algorithm.advantage,
        kl_place=place,
        kl_estimator=kl.estimator or ("k1" if place == "reward" else "k3"),
        ratio=update.ratio or algorithm.ratio,
        loss_mean=update.loss_mean or algorithm.loss_mean,
        group_size=group_size,
        max_response_tokens=max_response_tokens,
    )
    if algorithm.compares_samples and group_size < 2:
        raise ValueError(
            f"rollout.samples_per_prompt={group_size}, but algorithm={name} compares the responses to one prompt. Draw "
            "at least 2, usually 4 to 16."
        )
    if place == "loss" and method.kl_estimator == "k1" and kl.coef:
        raise ValueError(
            f"kl.estimator is k1 and the KL is in the loss (algorithm={name}): the expected gradient of k1 is 0, so it "
            "would hold nothing. Set kl.estimator to k3 or k2, or kl.place to reward."
        )
    if method.ratio == "sequence" and not algorithm.compares_samples:
        raise ValueError(
            f"update.ratio is `sequence`, one ratio for a response, but algorithm={name} gives each token an advantage "
            "of its own. Set update.ratio=token, or take rloo, grpo, dr_grpo or gspo."
        )
    return method


def check_without_critic(name: AlgorithmName, *, critic_path: str | None, warmup_steps: int, gae: GAEConfig) -> None:
    """Check that nothing is asked of a critic or its advantages that an algorithm does not have.

    Raises:
        ValueError: something is.
    """
    said = f"but algorithm={name} has no critic"
    if critic_path:
        raise ValueError(f"critic.path={critic_path}, {said}. Leave it out, or set algorithm=ppo.")
    if warmup_steps:
        raise ValueError(f"update.critic_warmup_steps={warmup_steps}, {said}. Set it to 0, or algorithm=ppo.")
    if gae != GAEConfig():
        raise ValueError(
            f"gae.gamma={gae.gamma} and gae.lam={gae.lam}, {said} and discounts nothing. Leave the section out, or set "
            "algorithm=ppo."
        )
