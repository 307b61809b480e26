import math

import pytest

from rlhf.rollout.answers import Answer
from step1_sft.evaluate import _ratios, summarise_answers, to_samples
from step1_sft.train import headline


def answer(text: str, length: int, *, stopped: bool) -> Answer:
    return Answer(
        index=0, prompt="p", prompt_ids=[1], text=text, response_ids=[3] * length, stopped=stopped, meta={"a": 1}
    )


def test_answers_hand_worked() -> None:
    answers = [answer("a", 2, stopped=True), answer("a", 1, stopped=True), answer("b", 6, stopped=False)]
    assert summarise_answers(answers) == {
        "eval/stop_frac": pytest.approx(2 / 3),
        "eval/distinct_frac": pytest.approx(2 / 3),
        "eval/repeat_frac": pytest.approx(2 / 3),  # of one answer's three 4-grams, all the same
        "eval/response_length": 3.0,
    }
    assert summarise_answers([]) == {}
    assert to_samples(answers)[2] == {"prompt": "p", "response": "b", "stopped": False, "score": None, "gold": None}


def test_perplexity_is_taken_once_of_the_mean_over_tokens() -> None:
    """C23: losses 1 and 3 of equally many tokens: exp(2) = 7.39, not the mean of exp(1) and exp(3) = 11.4."""
    values = _ratios([1.0 * 5 + 3.0 * 5, 4, 10])
    assert values["eval/perplexity"] == pytest.approx(math.exp(2))
    assert values["eval/token_accuracy"] == 0.4
    assert _ratios([0.0, 0, 0]) == {}


def test_headline_leaves_out_what_was_not_measured() -> None:
    before = {"eval/loss": 3.0, "eval/perplexity": 20.0, "eval/token_accuracy": 0.1}
    after = {"eval/loss": 2.0, "eval/perplexity": 7.4, "eval/token_accuracy": 0.5, "eval/stop_frac": 0.75}
    metrics = headline(before, after)
    assert metrics["eval_loss_before"] == 3.0 and metrics["eval_loss_after"] == 2.0 and metrics["stop_frac"] == 0.75
    assert "distinct_frac" not in metrics
    assert headline({}, {}) == {}
