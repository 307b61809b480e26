import math

import numpy as np
import pytest

from step2_reward.evaluate import Judgements, calibration, histograms, pearson, summarise


def test_summary_hand_worked():
    """C4, C5: margins 2, -1, 1 and one tie apart: accuracy 2/3 over pairs, tie share 1/4; over both ranks' parts."""
    one = Judgements(margin=[2.0], margin_source=[0], score=[2.0, 0.0], length=[5, 1], score_source=[0, 0], num_ties=1)
    two = Judgements(
        margin=[-1.0, 1.0], margin_source=[1, 1], score=[0.0, 1.0, 3.0, 2.0], length=[2, 3, 7, 4], score_source=[1] * 4
    )
    one.extend(two)
    values = summarise(one, ["a", "b"])
    assert values["eval/pair_accuracy"] == pytest.approx(2 / 3)
    assert values["eval/pair_accuracy/a"] == 1.0
    assert values["eval/pair_accuracy/b"] == 0.5
    assert values["eval/tie_frac"] == 0.25
    assert values["eval/margin"] == pytest.approx(2 / 3)
    assert (values["eval/score_low"], values["eval/score_high"]) == (0, 3)
    expected_loss = sum(math.log1p(math.exp(-m)) for m in (2.0, -1.0, 1.0)) / 3
    assert values["eval/loss"] == pytest.approx(expected_loss)
    assert values["eval/length_correlation"] == pytest.approx(np.corrcoef([2, 0, 0, 1, 3, 2], [5, 1, 2, 3, 7, 4])[0, 1])


def test_no_pairs_give_no_numbers():
    assert summarise(Judgements(num_ties=3), ["a"]) == {}
    assert histograms(Judgements()) == {}


def test_calibration_hand_worked():
    """C14: two pairs at confidence .9, one right, one wrong: gap .4. Two at .6, both right: gap .4; error .4."""
    sure, unsure = math.log(0.9 / 0.1), math.log(0.6 / 0.4)
    curve = calibration(np.array([sure, -sure, unsure, unsure]))
    assert curve.error == pytest.approx(0.4)
    assert curve.counts == [2, 2]
    assert curve.predicted == pytest.approx([0.6, 0.9])
    assert curve.observed == pytest.approx([1.0, 0.5])


def test_a_model_whose_pairs_come_out_as_it_says_is_calibrated():
    """Margins drawn, outcomes drawn with probability sigmoid(margin): the error goes to 0 with the number of pairs."""
    rng = np.random.default_rng(0)
    strength = rng.normal(0, 2, 40_000)
    right = rng.random(40_000) < 1 / (1 + np.exp(-np.abs(strength)))
    assert calibration(np.where(right, 1, -1) * np.abs(strength)).error < 0.02
    # Scores three times as far apart claim too much.
    assert calibration(3 * np.where(right, 1, -1) * np.abs(strength)).error > 0.05


def test_correlation_of_what_does_not_vary_is_left_out():
    assert pearson([1.0, 1.0], [1, 2]) is None
    assert pearson([1.0, 2.0, 3.0], [3, 2, 1]) == pytest.approx(-1.0)
    values = summarise(
        Judgements(margin=[1.0], margin_source=[0], score=[1.0, 0.0], length=[4, 4], score_source=[0, 0]), ["a"]
    )
    assert "eval/length_correlation" not in values
