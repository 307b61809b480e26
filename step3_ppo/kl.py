"""The weight of the KL penalty: fixed, or moved towards a target."""

from step3_ppo.algorithm import KLConfig


class KLCoefficient:
    """Coefficient of the KL penalty; `value` is in reward units per nat."""

    def __init__(self, config: KLConfig) -> None:
        self.config = config
        self.value = config.coef

    def update(self, kl: float, *, num_sequences: int) -> None:
        """Move the coefficient after a rollout; nothing happens unless `kl.adaptive`.

        Args:
            kl: mean KL to the reference, nats per response (k1, summed over its tokens).
            num_sequences: responses of the rollout, over all ranks.

        Source: Ziegler et al. 2019, arXiv:1909.08593, sec. 2.2: error clipped to [-0.2, 0.2], proportional step.
        """
        if not self.config.adaptive:
            return
        error = min(max(kl / self.config.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num_sequences / self.config.horizon

    def state_dict(self) -> dict[str, float]:
        """What resume needs."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from `state_dict`."""
        self.value = state["value"]
