from collections.abc import Callable

import pytest
import torch

from rlhf.rules import Rule
from step3_ppo.algorithm import GAEConfig, Method
from step3_ppo.config import ShapingConfig
from step3_ppo.drawing import Drawn, shaped_scores
from step3_ppo.experience import ScoredSequence, penalty_kl, to_experience
from step3_ppo.rewards import RunningScale
from step3_ppo.rollout import Judges
from step3_ppo.summary import explained_variance, headline, summarise

Make = Callable[..., ScoredSequence]
Choose = Callable[..., Method]


def test_the_running_scale_takes_this_steps_scores_in_first(sequence: Make) -> None:
    """D19: scores 1 and 3, deviation 1, then -1 and 1 more: of all four, deviation sqrt 2; then clip and penalties."""
    scale, config = RunningScale(), ShapingConfig(scale="running", clip=2.5, missing_stop_penalty=0.5)
    rows = [sequence((0, 0), 1, score=1.0), sequence((1, 0), 2, score=3.0, stopped=False)]
    torch.testing.assert_close(shaped_scores(rows, scale, config, max_response_tokens=8), torch.tensor([1.0, 2.0]))
    rows = [sequence((0, 0), 1, score=-1.0), sequence((1, 0), 2, score=1.0)]
    torch.testing.assert_close(
        shaped_scores(rows, scale, config, max_response_tokens=8), torch.tensor([-1.0, 1.0]) / 2**0.5
    )
    plain = ShapingConfig(clip=0.0, length_penalty=0.25)
    torch.testing.assert_close(shaped_scores(rows, scale, plain, max_response_tokens=8), torch.tensor([-1.25, 0.5]))
    assert scale.count == 4, "a scale that is not used is not fed"
    overlong = ShapingConfig(clip=0.0, overlong_tokens=2, overlong_penalty=3.0)
    torch.testing.assert_close(shaped_scores(rows, scale, overlong, max_response_tokens=2), torch.tensor([-2.5, -2.0]))


def test_penalty_of_ragged_rows(sequence: Make) -> None:
    rows = [
        sequence((0, 0), 1, old_logprob_R=torch.tensor([-1.0]), ref_logprob_R=torch.tensor([-2.0])),
        sequence((1, 0), 2, old_logprob_R=torch.tensor([-1.0, -3.0]), ref_logprob_R=torch.tensor([-1.0, -2.5])),
    ]
    torch.testing.assert_close(penalty_kl(rows, "k1"), torch.tensor([[1.0, 0.0], [0.0, -0.5]]))
    expected = torch.tensor([[torch.e**-1 - 1 + 1, 0.0], [0.0, torch.e**0.5 - 1 - 0.5]])
    torch.testing.assert_close(penalty_kl(rows, "k3"), expected)


def test_explained_variance_hand_worked(sequence: Make, method: Choose) -> None:
    """Returns 1 and -1 (gamma = lambda = 1). Values equal to them explain all, 0 nothing, their opposites minus 3."""
    zero = torch.zeros(1)
    for factor, expected in ((1.0, 1.0), (0.0, 0.0), (-1.0, -3.0)):
        rows = [
            sequence((i, 0), 1, old_logprob_R=zero, ref_logprob_R=zero, old_value_R=torch.tensor([factor * score]))
            for i, score in enumerate((1.0, -1.0))
        ]
        found = to_experience(
            rows, torch.tensor([1.0, -1.0]), kl_coef=0.0, method=method(), gae_config=GAEConfig(lam=1.0)
        )
        assert explained_variance(found) == pytest.approx(expected)
    rows = [sequence((i, 0), 1, old_logprob_R=zero, ref_logprob_R=zero) for i in range(2)]
    constant = to_experience(rows, torch.ones(2), kl_coef=0.0, method=method(), gae_config=GAEConfig(lam=1.0))
    assert explained_variance(constant) == 0.0
    drawn = Drawn(sequences=rows, score_B=torch.ones(2), kept=[0, 1], decoded=[], metrics={"ppo/draws": 2.0})
    values = summarise(drawn, constant, kl_coef=0.3, has_critic=True)
    assert values["ppo/reward"] == 1.0 and values["ppo/kl_coef"] == 0.3 and values["ppo/kl_ref"] == 0.0
    assert values["value/explained_variance"] == 0.0 and values["ppo/draws"] == 2.0
    assert "value/explained_variance" not in summarise(drawn, constant, kl_coef=0.3, has_critic=False)
    assert "ppo/reward" not in summarise(drawn, None, kl_coef=0.3, has_critic=True)


def test_headline_has_the_summarys_names() -> None:
    rule = Rule("r", lambda *_: 0.0, 2.0)
    judges = Judges(rule=None, rule_weight=1.0, model_weight=1.0, gold=rule)
    before = {"gold": 0.2, "score": -1.0, "kl_ref": 0.0}
    after = {"gold": 0.9, "score": 1.5, "kl_ref": 3.0, "entropy": 1.0, "distinct_frac": 0.5, "response_length": 9.0}
    assert headline(before, after, judges) == {
        "gold_sft": 0.2, "gold_ppo": 0.9, "gold_max": 2.0, "score_sft": -1.0, "score_ppo": 1.5, "kl": 3.0,
        "entropy": 1.0, "distinct_frac": 0.5, "response_length": 9.0,
    }  # fmt: skip
    assert headline({}, {}, Judges(rule=None, rule_weight=1.0, model_weight=1.0, gold=None)) == {}
