"""Faults of training that are watched for, from where on, and what is done about each. No torch."""

from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Literal

Action = Literal["off", "warn", "stop", "rollback"]

SUPERVISED = ("non_finite", "loss_explosion")
"""Detectors that have something to look at in steps 1 and 2; step 3 has all."""


@dataclass(frozen=True, kw_only=True)
class DetectorConfig:
    """What every detector but `non_finite` has."""

    action: Action = "warn"
    """What follows when it fires: nothing, a warning, the end of the stage, or a return to the last good state."""
    patience: int = 3
    """It fires when it was over its limit in so many steps in a row."""


@dataclass(frozen=True, kw_only=True)
class NonFiniteConfig:
    """A loss or a gradient that is not a finite number; the update was not made."""

    action: Literal["stop", "rollback"] = "stop"
    """There is nothing to go on with, so it cannot be ignored."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(DetectorConfig):
    """The loss (of the critic in step 3) against what it was lately."""

    factor: float = 4.0
    """Over so many times the running median it is an explosion."""
    window: int = 32
    """Steps that the median is taken over; those over the limit are not among them."""
    floor: float = 1.0
    """Below it nothing is an explosion, however small the median."""

    def __post_init__(self) -> None:
        if not (self.factor > 1 and self.window >= 1 and self.floor >= 0):
            raise ValueError(
                "run.health.loss_explosion.factor must be > 1, window >= 1 and floor >= 0, got "
                f"{self.factor}, {self.window}, {self.floor}."
            )


@dataclass(frozen=True, kw_only=True)
class KLConfig(DetectorConfig):
    """KL of the policy to the reference (k1), of either sign: in expectation it cannot be negative."""

    limit: float = 1.0
    """Nats per response token."""

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"run.health.kl_explosion.limit must be > 0, got {self.limit}.")


@dataclass(frozen=True, kw_only=True)
class EntropyConfig(DetectorConfig):
    """Entropy of the sampling distribution against that of the first step."""

    frac: float = 0.1
    """Below so much of it the policy has collapsed."""

    def __post_init__(self) -> None:
        if not 0 < self.frac < 1:
            raise ValueError(f"run.health.entropy_collapse.frac must be in (0, 1), got {self.frac}.")


@dataclass(frozen=True, kw_only=True)
class RepeatConfig(DetectorConfig):
    """Text that a response says again: ppo/repeat_frac."""

    limit: float = 0.5
    """Share of repeated n-grams."""

    def __post_init__(self) -> None:
        if not 0 < self.limit < 1:
            raise ValueError(f"run.health.repeated_text.limit must be in (0, 1), got {self.limit}.")


@dataclass(frozen=True, kw_only=True)
class LengthConfig(DetectorConfig):
    """Length of the responses and their stop rate against those of the first step."""

    factor: float = 4.0
    """So many times as long, or as short, is drift."""
    stop_frac: float = 0.25
    """Below so much of the first stop rate it has collapsed."""
    patience: int = 5
    """As of the others; the stop rate of a few responses jumps."""

    def __post_init__(self) -> None:
        if not (self.factor > 1 and 0 < self.stop_frac < 1):
            raise ValueError(
                "run.health.length_drift.factor must be > 1 and stop_frac in (0, 1), got "
                f"{self.factor}, {self.stop_frac}."
            )


@dataclass(frozen=True, kw_only=True)
class RewardConfig(DetectorConfig):
    """Mean score of the reward model against the range of its scores on the preferences of step 2."""

    margin: float = 0.5
    """How far above its end is far, in widths of the range."""

    def __post_init__(self) -> None:
        if not self.margin >= 0:
            raise ValueError(f"run.health.reward_above_training.margin must be >= 0, got {self.margin}.")


@dataclass(frozen=True, kw_only=True)
class HealthConfig:
    """Detectors of training that goes wrong, and what is done."""

    non_finite: NonFiniteConfig = field(default_factory=NonFiniteConfig)
    """A loss or gradient that is no number."""
    loss_explosion: LossConfig = field(default_factory=LossConfig)
    """The loss far above its running median."""
    kl_explosion: KLConfig = field(default_factory=KLConfig)
    """Step 3: the policy far from the reference."""
    entropy_collapse: EntropyConfig = field(default_factory=EntropyConfig)
    """Step 3: one answer to everything."""
    repeated_text: RepeatConfig = field(default_factory=RepeatConfig)
    """Step 3: responses that repeat themselves."""
    length_drift: LengthConfig = field(default_factory=LengthConfig)
    """Step 3: responses much longer or shorter than at first, or that no longer stop."""
    reward_above_training: RewardConfig = field(default_factory=RewardConfig)
    """Step 3: scores that the reward model never gave in step 2."""
    most_rollbacks: int = 2
    """Rollbacks of one run; the next one stops it."""
    rollback_lr_factor: float = 0.5
    """Learning rates are multiplied by it at each rollback; 1 leaves them."""

    def __post_init__(self) -> None:
        for name in self.detectors:
            section = getattr(self, name)
            if isinstance(section, DetectorConfig) and section.patience < 1:
                raise ValueError(f"run.health.{name}.patience must be >= 1, got {section.patience}.")
        if self.most_rollbacks < 1:
            raise ValueError(
                f"run.health.most_rollbacks must be >= 1, got {self.most_rollbacks}. Use action=stop for none."
            )
        if not 0 < self.rollback_lr_factor <= 1:
            raise ValueError(f"run.health.rollback_lr_factor must be in (0, 1], got {self.rollback_lr_factor}.")

    @property
    def detectors(self) -> list[str]:
        """Their names."""
        return [f.name for f in fields(self) if hasattr(getattr(self, f.name), "action")]

    def with_action(self, *actions: Action) -> list[str]:
        """Detectors that do one of these."""
        return [name for name in self.detectors if getattr(self, name).action in actions]

    def check_measured(self, measured: Collection[str]) -> None:
        """Check that what is to end or turn a stage back is something that the stage measures.

        Raises:
            ValueError: it is not.
        """
        for name in self.with_action("stop", "rollback"):
            if name not in measured:
                raise ValueError(
                    f"run.health.{name}.action is {getattr(self, name).action}, but this stage has no responses that "
                    "it could look at. Set it in step 3."
                )
