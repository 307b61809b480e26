"""Detectors on sequences worked out by hand: each fires in its step, and not one before."""

import dataclasses
import json
import math
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlhf.config import RunConfig
from rlhf.health import Health, repeat_frac
from rlhf.health_config import HealthConfig

HEALTHY = {
    "loss": 2.0, "ppo/kl_ref": 1.0, "ppo/response_length": 20.0, "ppo/entropy": 1.0, "ppo/repeat_frac": 0.02,
    "ppo/stop_frac": 0.9, "ppo/model_score": 0.5, "score_low": -2.0, "score_high": 3.0,
}  # fmt: skip
NAMES = [name for name in HealthConfig().detectors if name != "non_finite"]


def health(name: str = "", **changes: Any) -> Health:
    """One detector with other settings; the others warn."""
    config = HealthConfig()
    if name:
        config = dataclasses.replace(config, **{name: dataclasses.replace(getattr(config, name), **changes)})
    return Health(config)


def first_fire(judge: Health, name: str, steps: list[Mapping[str, float]]) -> int | None:
    """Step in which the detector begins to fire."""
    for step, values in enumerate(steps, start=1):
        for change in judge.observe(step, {**HEALTHY, **values}):
            assert change.detector == name and change.fires
            return step
    return None


def test_a_loss_is_compared_with_the_median_of_healthy_steps() -> None:
    """Median of 1 to 8 is 4.5; 3 x that is 13.5. 13.5 is allowed and makes the median 5, 15 is the next limit.

    15.1 is over it and no part of the median. 15.0 is, which makes that 5.5 and the limit 16.5.
    """
    losses = [*map(float, range(1, 9)), 13.5, 15.1, 15.0, 16.6, 16.6]
    judge = health("loss_explosion", factor=3.0, patience=2)
    assert first_fire(judge, "loss_explosion", [{"loss": loss} for loss in losses]) == 13
    assert health("loss_explosion", factor=3.0).observe(1, {"loss": 15.2}) == []


def test_the_window_of_a_loss_moves_and_leaves_explosions_out() -> None:
    judge = health("loss_explosion", factor=2.0, window=3, floor=0.0, patience=1)
    said = [bool(judge.observe(step, {"loss": loss})) for step, loss in enumerate([8, 8, 8, 4, 4, 8.1], start=1)]
    # Of 4, 4, 8 (the last three) the median is 4, and 8.1 is more than twice that.
    assert said == [False, False, False, False, False, True]
    assert judge.firing == ["loss_explosion"]
    assert [change.fires for change in judge.observe(7, {"loss": 8.0})] == [False], "within the limit again"
    assert judge.firing == []


def test_small_losses_never_explode() -> None:
    steps = [{"loss": 0.01}] * 20 + [{"loss": 0.9}] * 10
    assert first_fire(health("loss_explosion", patience=1), "loss_explosion", steps) is None
    assert first_fire(health("loss_explosion", patience=1), "loss_explosion", [*steps, {"loss": 1.1}]) == 31


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_kl_is_measured_per_token_and_in_both_directions(sign: float) -> None:
    steps = [{"ppo/kl_ref": sign * kl} for kl in (5.0, 20.0, 20.1, 20.1, 19.9, 20.1, 20.1, 20.1)]
    assert first_fire(health(), "kl_explosion", steps) == 8


def test_entropy_is_compared_with_the_first_step() -> None:
    steps = [{"ppo/entropy": x} for x in (2.0, 0.2, 0.19, 0.19, 0.21, 0.19, 0.19, 0.19)]
    assert first_fire(health(), "entropy_collapse", steps) == 8
    warmup = [{key: value for key, value in HEALTHY.items() if key != "ppo/entropy"}] * 5
    judge = health("entropy_collapse", patience=1)
    for step, values in enumerate(warmup, start=1):  # critic warm-up: nobody measures it
        assert judge.observe(step, values) == []
    assert judge.observe(6, {**HEALTHY, "ppo/entropy": 0.1}) == [], "the first one that was measured"


def test_repeated_text() -> None:
    steps = [{"ppo/repeat_frac": x} for x in (0.5, 0.51, 0.51, 0.5, 0.51, 0.51, 0.51)]
    assert first_fire(health(), "repeated_text", steps) == 7


def test_length_may_move_by_a_factor_either_way() -> None:
    for lengths in ((20.0, 80.0, 80.1, 80.1, 80.1), (20.0, 5.0, 4.9, 4.9, 4.9)):
        # KL of the healthy step is 1.0, at most 0.2 a token here.
        steps = [{"ppo/response_length": x} for x in lengths]
        assert first_fire(health("length_drift", patience=3), "length_drift", steps) == 5


def test_a_stop_rate_collapses() -> None:
    steps = [{"ppo/stop_frac": x} for x in (0.8, 0.4, 0.39, 0.39, 0.39)]
    assert first_fire(health("length_drift", stop_frac=0.5, patience=3), "length_drift", steps) == 5
    assert first_fire(health(), "length_drift", [{"ppo/stop_frac": 0.0}] * 9) is None, "it never stopped"


def test_reward_above_what_step_2_has_seen() -> None:
    """The range is -2 to 3, 5 wide; half of that above its end is 5.5."""
    steps = [{"ppo/model_score": x} for x in (5.5, 5.51, 5.51, -9.0, 5.51, 5.51, 5.51)]
    assert first_fire(health(), "reward_above_training", steps) == 7
    unknown = {name: value for name, value in HEALTHY.items() if not name.startswith("score_")}
    judge = health("reward_above_training", patience=1)
    assert judge.observe(1, {**unknown, "ppo/model_score": 1e9}) == []


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("loss_explosion", "loss"), ("kl_explosion", "ppo/kl_ref"), ("entropy_collapse", "ppo/entropy"),
        ("repeated_text", "ppo/repeat_frac"), ("length_drift", "ppo/response_length"),
        ("length_drift", "ppo/stop_frac"), ("reward_above_training", "ppo/model_score"),
    ],
)  # fmt: skip
def test_what_is_no_number_is_over_every_limit(name: str, key: str) -> None:
    """D20: also before a median is known, and in the first step, where it is nothing to compare with later."""
    judge = health(name, patience=1)
    changes = judge.observe(1, {**HEALTHY, key: math.nan})
    assert name in [change.detector for change in changes]
    json.dumps(judge.state_dict(), allow_nan=False)
    assert name in [change.detector for change in judge.observe(2, HEALTHY) if not change.fires]
    judge = health(name, patience=1)
    assert judge.observe(1, HEALTHY) == []
    changes = judge.observe(2, {**HEALTHY, key: math.nan})
    assert name in [change.detector for change in changes]


@pytest.mark.parametrize("name", NAMES)
def test_off_warn_stop_and_rollback(name: str) -> None:
    """D4: what follows; only what acts makes a state one not to go back to."""
    bad = {
        "loss": 1e6, "ppo/kl_ref": 1e6, "ppo/entropy": 0.0, "ppo/repeat_frac": 1.0, "ppo/response_length": 1.0,
        "ppo/model_score": 1e6,
    }  # fmt: skip
    seen = {}
    for action in ("off", "warn", "stop", "rollback"):
        judge = health(name, action=action, patience=2)
        others = dataclasses.replace(
            judge.config,
            **{n: dataclasses.replace(getattr(judge.config, n), action="off") for n in NAMES if n != name},
        )
        judge = Health(others)
        for step in range(1, 11):
            assert judge.observe(step, HEALTHY) == [] and judge.is_good
        one = judge.observe(11, {**HEALTHY, **bad})
        assert one == [] and judge.take_verdict() is None
        good = judge.is_good
        two = [(change.detector, change.fires) for change in judge.observe(12, {**HEALTHY, **bad})]
        verdict = judge.take_verdict()
        assert judge.take_verdict() is None
        seen[action] = (good, two, verdict and (verdict.detector, verdict.action, verdict.since, verdict.step))
        assert verdict is None or verdict.text.endswith(" (2 steps in a row)")
    assert seen == {
        "off": (True, [], None),
        "warn": (True, [(name, True)], None),
        "stop": (False, [(name, True)], (name, "stop", 11, 12)),
        "rollback": (False, [(name, True)], (name, "rollback", 11, 12)),
    }


def test_a_stop_comes_before_a_rollback() -> None:
    config = HealthConfig()
    config = dataclasses.replace(
        config,
        kl_explosion=dataclasses.replace(config.kl_explosion, action="rollback", patience=1),
        repeated_text=dataclasses.replace(config.repeated_text, action="stop", patience=1),
    )
    judge = Health(config)
    judge.observe(1, {**HEALTHY, "ppo/kl_ref": 99.0, "ppo/repeat_frac": 0.9})
    verdict = judge.take_verdict()
    assert verdict is not None and verdict.detector == "repeated_text"


finite = st.floats(min_value=0.0, max_value=100.0)


@given(st.lists(finite, min_size=1, max_size=40), st.integers(0, 39), st.integers(1, 4))
def test_a_resumed_run_judges_as_the_uninterrupted_one(losses: list[float], cut: int, patience: int) -> None:
    """Through JSON, at any step."""
    whole, parts = (health("loss_explosion", factor=1.5, floor=0.0, patience=patience) for _ in range(2))
    for step, loss in enumerate(losses):
        values = {"loss": loss, "ppo/entropy": loss}
        if step == cut:
            state = json.loads(json.dumps(parts.state_dict()))
            parts = health("loss_explosion", factor=1.5, floor=0.0, patience=patience)
            parts.load_state_dict(state)
        assert whole.observe(step, values) == parts.observe(step, values)
        assert whole.firing == parts.firing
    assert whole.state_dict() == parts.state_dict()


@given(st.lists(finite, max_size=60), st.integers(1, 5))
def test_the_loss_detector_is_its_definition(losses: list[float], patience: int) -> None:
    """A naive loop over the whole past."""
    judge = health("loss_explosion", factor=2.0, window=10, floor=1.0, patience=patience)
    calm: list[float] = []
    over = 0
    for step, loss in enumerate(losses):
        judge.observe(step, {"loss": loss})
        limit = max(2.0 * statistics.median(calm[-10:]), 1.0) if len(calm) >= 8 else math.inf
        over = over + 1 if loss > limit else 0
        if loss <= limit:
            calm.append(loss)
        assert (judge.firing == ["loss_explosion"]) == (over >= patience)


def test_a_rollback_is_counted_and_lowers_the_rate() -> None:
    judge = Health(dataclasses.replace(HealthConfig(), rollback_lr_factor=0.25))
    judge.observe(1, HEALTHY)
    state = json.loads(json.dumps(judge.state_dict()))
    for number in (1, 2):  # twice to the same state, which knows of none
        judge.observe(2, {**HEALTHY, "ppo/entropy": 0.0})
        judge.roll_back(state)
        assert judge.rollbacks == number and judge.lr_scale == 0.25**number
        assert {**judge.state_dict(), "rollbacks": 0} == state
    judge.load_state_dict({})
    assert judge.rollbacks == 0, "a state of before there were detectors"


def test_repeats_are_4_grams_of_one_response() -> None:
    """1 2 3 4 1 2 3 4 has five 4-grams, of which the last is the first again."""
    assert repeat_frac([[1, 2, 3, 4, 1, 2, 3, 4]]) == 1 / 5
    assert repeat_frac([[1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 3, 4, 5], [9, 9]]) == 1 / 7
    assert repeat_frac([[7] * 10]) == 6 / 7
    assert repeat_frac([[1, 2, 3], []]) == 0.0
    assert repeat_frac([]) == 0.0


@given(st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=5))
def test_repeats_by_a_naive_search(responses: list[list[int]]) -> None:
    found = total = 0
    for ids in responses:
        for i in range(len(ids) - 3):
            total += 1
            found += any(ids[j : j + 4] == ids[i : i + 4] for j in range(i))
    assert repeat_frac(responses) == pytest.approx(found / total if total else 0.0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("loss_explosion", {"factor": 1.0}, "run.health.loss_explosion.factor must be > 1"),
        ("loss_explosion", {"factor": math.nan}, "run.health.loss_explosion.factor must be > 1"),
        ("loss_explosion", {"patience": 0}, "run.health.loss_explosion.patience must be >= 1, got 0"),
        ("kl_explosion", {"limit": 0.0}, "run.health.kl_explosion.limit must be > 0"),
        ("entropy_collapse", {"frac": 1.0}, r"run.health.entropy_collapse.frac must be in \(0, 1\)"),
        ("repeated_text", {"limit": 1.0}, r"run.health.repeated_text.limit must be in \(0, 1\)"),
        ("length_drift", {"factor": 0.5}, "run.health.length_drift.factor must be > 1"),
        ("reward_above_training", {"margin": -0.1}, "run.health.reward_above_training.margin must be >= 0"),
    ],
)
def test_settings_out_of_range(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        health(name, **changes)


def test_the_page_has_the_defaults() -> None:
    """docs/reliability.md lists every setting but `action` and `patience`, which it gives in a sentence."""
    page = (Path(__file__).resolve().parents[3] / "docs" / "reliability.md").read_text(encoding="utf-8")
    section = page.split("## When training goes wrong")[1].split("\n## ")[0]
    listed = {name: yaml.safe_load(value) for name, value in re.findall(r"^\| `([\w.]+)` \| `(\S+)` \|", section, re.M)}
    config = HealthConfig()
    actual: dict[str, Any] = {"non_finite.action": config.non_finite.action}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in config.detectors:
            actual[field.name] = value
        elif field.name != "non_finite":
            assert (value.action, value.patience) == ("warn", 5 if field.name == "length_drift" else 3)
            settings = {f"{field.name}.{key}": x for key, x in vars(value).items() if key not in ("action", "patience")}
            actual.update(settings)
    assert listed == actual


def test_settings_of_rollbacks() -> None:
    with pytest.raises(ValueError, match="run.health.most_rollbacks must be >= 1, got 0. Use action=stop"):
        HealthConfig(most_rollbacks=0)
    with pytest.raises(ValueError, match=r"run.health.rollback_lr_factor must be in \(0, 1\], got 1.5"):
        HealthConfig(rollback_lr_factor=1.5)
    turning = health("kl_explosion", action="rollback").config
    with pytest.raises(ValueError, match=r"kl_explosion.action is rollback, but run.save_every is 0.*Set run\.save"):
        RunConfig(out_dir="x", health=turning)
    with pytest.raises(ValueError, match="run.save_every is 0"):
        RunConfig(out_dir="x", health=turning, save_minutes=1.0)
    config = RunConfig(out_dir="x", health=turning, save_every=5)
    with pytest.raises(ValueError, match="kl_explosion.action is rollback, but this stage has no responses"):
        config.check_supervised()
    RunConfig(out_dir="x", health=health("loss_explosion", action="stop").config).check_supervised()
