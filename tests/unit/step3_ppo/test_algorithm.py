"""Which algorithm is made of what, and which settings contradict each other."""

from pathlib import Path
from typing import Any

import pytest

from step3_ppo.algorithm import ALGORITHMS, Objective
from step3_ppo.config import PPOConfig
from tests.stages import ppo_config

GROUPED = {"rollout__samples_per_prompt": 2}


def config(**changes: Any) -> PPOConfig:
    made = ppo_config(Path("out"), Path("rows"), actor=Path("a"), reward=Path("r"), **changes)
    assert isinstance(made, PPOConfig)
    return made


@pytest.mark.parametrize(
    ("name", "critic", "compares", "expected"),
    [
        # advantage, where the KL is, its estimator, ratio, mean of the loss
        ("ppo", True, False, ("gae", "reward", "k1", "token", "token")),
        ("rloo", False, True, ("leave_one_out", "reward", "k1", "token", "token")),
        ("reinforce_pp", False, False, ("return", "reward", "k1", "token", "token")),
        ("grpo", False, True, ("group_scaled", "loss", "k3", "token", "sequence")),
        ("dr_grpo", False, True, ("group", "loss", "k3", "token", "constant")),
        ("gspo", False, True, ("group_scaled", "loss", "k3", "sequence", "sequence")),
    ],
)
def test_what_an_algorithm_is_made_of(name: Any, critic: object, compares: object, expected: tuple[str, ...]) -> None:
    """As the papers have it; a config may choose otherwise."""
    made = config(algorithm=name, **GROUPED)
    method = made.method
    assert expected == (method.advantage, method.kl_place, method.kl_estimator, method.ratio, method.loss_mean)
    assert (made.has_critic, ALGORITHMS[name].compares_samples) == (critic, compares)
    assert (method.group_size, method.max_response_tokens) == (2, 10)
    assert method.whitens == (name in ("ppo", "reinforce_pp"))


def test_what_a_config_chooses_otherwise() -> None:
    made = config(
        algorithm="grpo", **GROUPED, update__loss_mean="token", update__ratio="sequence", kl__place="reward",
        update__clip_high=0.28,
    )  # fmt: skip
    method = made.method
    assert (method.loss_mean, method.ratio, method.kl_place, method.kl_estimator) == (
        "token",
        "sequence",
        "reward",
        "k1",
    )
    assert made.update.upper_clip == 0.28 and config().update.upper_clip == 0.2
    in_loss, in_reward = (
        Objective(update=made.update, method=config(kl__place=place).method, kl_coef=0.3)
        for place in ("loss", "reward")
    )
    assert (in_loss.kl_loss_coef, in_reward.kl_loss_coef) == (0.3, 0.0)


def test_without_a_critic_none_is_asked_for() -> None:
    made = config(algorithm="rloo", **GROUPED, critic_optim=None, deepspeed__critic=None)
    assert made.critic_optim is None and made.num_updates == 2 * 2 * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": "rloo"}, r"samples_per_prompt=1, but algorithm=rloo compares .*at least 2"),
        ({"algorithm": "grpo"}, r"samples_per_prompt=1, but algorithm=grpo compares"),
        ({"algorithm": "dr_grpo"}, r"samples_per_prompt=1, but algorithm=dr_grpo compares"),
        ({"algorithm": "gspo"}, r"samples_per_prompt=1, but algorithm=gspo compares"),
        ({"algorithm": "grpo", **GROUPED, "kl__estimator": "k1"}, "k1 and the KL is in the loss .*to k3"),
        ({"kl__place": "loss", "kl__estimator": "k1"}, "k1 and the KL is in the loss .algorithm=ppo"),
        ({"update__ratio": "sequence"}, "algorithm=ppo gives each token .*Set update.ratio=token"),
        ({"algorithm": "reinforce_pp", "update__ratio": "sequence"}, "algorithm=reinforce_pp gives each token"),
        ({"algorithm": "reinforce_pp", "critic__path": "c"}, "critic.path=c, but algorithm=reinforce_pp has no critic"),
        ({"algorithm": "reinforce_pp", "update__critic_warmup_steps": 1}, "warmup_steps=1, but .* has no critic"),
        ({"algorithm": "reinforce_pp", "gae__gamma": 0.9}, "gae.gamma=0.9 .* no critic and discounts nothing"),
        ({"algorithm": "rloo", **GROUPED, "gae__lam": 1.0}, "gae.lam=1.0, but algorithm=rloo has no critic"),
        ({"critic_optim": None}, "critic_optim is missing, but algorithm=ppo trains a critic. Set it"),
        ({"deepspeed__critic": None}, "deepspeed.critic is missing, but algorithm=ppo trains a critic. Set it"),
        ({"rollout__flat_groups": "drop"}, "`drop`, but algorithm=ppo does not compare .*Set it to keep"),
        ({"algorithm": "reinforce_pp", "rollout__flat_groups": "refill"}, "but algorithm=reinforce_pp does not"),
        ({"rollout__most_draws": 0}, "rollout.most_draws must be >= 1, got 0"),
        ({"update__clip_high": 0.0}, "update.clip_high must be > 0 or null, got 0.0"),
        ({"update__dual_clip": 1.0}, "update.dual_clip must be 0 or above 1, got 1.0"),
        ({"shaping__overlong_tokens": 11}, "overlong_tokens=11 is above data.max_response_tokens=10. Lower it"),
        ({"shaping__overlong_tokens": -1}, "shaping.overlong_tokens must be >= 0, got -1"),
        ({"shaping__overlong_penalty": -0.5}, "shaping.overlong_penalty must be >= 0, got -0.5"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_k1_in_the_loss_of_weight_0_is_no_error() -> None:
    assert config(algorithm="grpo", **GROUPED, kl__estimator="k1", kl__coef=0.0).method.kl_estimator == "k1"
