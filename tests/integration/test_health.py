"""Training that goes wrong in real stages, in one process on the real engine: what the detectors do about it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlhf.artifacts import ArtifactError, read_manifest, write_json
from rlhf.checkpoint import Checkpoints
from rlhf.engine import NonFiniteError
from rlhf.health import UnhealthyError
from rlhf.health_config import HealthConfig, KLConfig, LossConfig, NonFiniteConfig, RewardConfig
from rlhf.run import Run
from step1_sft.train import train as train_sft
from step2_reward.train import train as train_reward
from step3_ppo.train import train as train_ppo
from tests.stages import (
    NO_EVAL,
    Killed,
    Models,
    digit_rows,
    events,
    exploding,
    metric_lines,
    result,
    reward_config,
    same_weights,
    series,
    sft_config,
    write_rows,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", digit_rows(40))


def state_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "state").glob("step_*"))


def test_rollback_goes_on_with_other_rows_and_a_lower_rate(rows: Path, tmp_path: Path) -> None:
    train_sft(exploding(tmp_path / "sft", rows, action="rollback"))
    fires, back = events(tmp_path / "sft")[:2]
    assert (fires["event"], back["event"]) == ("fires", "rollback")
    assert fires["detector"] == back["detector"] == "loss_explosion" and fires["step"] == back["step"]
    assert "2 steps in a row" in back["text"] and (back["rollbacks"], back["lr_scale"]) == (1, 0.01)
    saved = int(back["state"][5:])
    # The weights after the last step but two were found over the limit in the last but one, those before were not.
    assert saved % 3 == 0 and 3 <= back["step"] - saved <= 5
    lines = [line for line in metric_lines(tmp_path / "sft") if line["split"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 25)), "every step is on record once"
    rates = [line["train/lr"] for line in lines]
    scheduled = [3.0 * step / 24 for step in range(1, 25)]
    assert rates[:saved] == pytest.approx(scheduled[:saved])
    assert rates[saved:] == pytest.approx([0.01 * rate for rate in scheduled[saved:]])
    record = json.loads((tmp_path / "sft/state" / state_names(tmp_path / "sft")[-1] / "state.json").read_text())
    assert record["parts"]["loader"]["skipped_rows"] == 8 * (back["step"] - saved)
    assert (record["run"]["health"]["rollbacks"], record["run"]["health"]["good"]) == (1, True)
    history = record["run"]["health"]["memories"]["loss_explosion"]["history"]
    assert history == pytest.approx([line["train/loss"] for line in lines[-4:]], rel=1e-6), "the loss is the metric's"
    assert result(tmp_path / "sft")["rollbacks"] == 1
    progress = json.loads((tmp_path / "sft/progress.json").read_text())
    assert (progress["rollbacks"], progress["phase"]) == (1, "done")


def kill_after_a_rollback(monkeypatch: pytest.MonkeyPatch, *, steps: int) -> None:
    """End the process so many steps after it has been turned back."""
    log, left = Run.log, []

    def log_or_die(self: Any, step: int) -> None:
        if self.health.rollbacks:
            left.append(step)
            if len(left) == steps:
                raise Killed
        log(self, step)

    monkeypatch.setattr(Run, "log", log_or_die)


@pytest.mark.parametrize("steps", [1, 5])
def test_a_resume_after_a_rollback_equals_the_uninterrupted_run(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Before a new state is saved (the fault is met again, and again answered) and after: equal to the bit."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_sft(exploding(whole, rows, action="rollback"))
    with monkeypatch.context() as patch:
        kill_after_a_rollback(patch, steps=steps)
        with pytest.raises(Killed):
            train_sft(exploding(parts, rows, action="rollback"))
    assert events(parts)[-1]["event"] == "rollback"
    train_sft(exploding(parts, rows, action="rollback", run__resume=True))
    assert metric_lines(parts) == metric_lines(whole)
    assert events(parts) == events(whole)
    assert same_weights(parts / "model", whole / "model")
    assert result(parts)["num_tokens"] == result(whole)["num_tokens"]
    assert result(parts)["rollbacks"] == 1


def test_rollbacks_are_limited(rows: Path, tmp_path: Path) -> None:
    """A rate that stays too high; the second time is the last."""
    health = HealthConfig(
        loss_explosion=LossConfig(action="rollback", factor=1.2, window=4, patience=1),
        rollback_lr_factor=1.0,
        most_rollbacks=2,
    )
    with pytest.raises(UnhealthyError, match=r"loss_explosion at step .*run.health.most_rollbacks=2 are used up\. The"):
        train_sft(exploding(tmp_path / "sft", rows, action="rollback", run__health=health))
    kinds = [event["event"] for event in events(tmp_path / "sft")]
    assert kinds.count("rollback") == 2 and kinds[-1] == "stop"
    # Each time with other rows: the losses on the way to the same state's end differ.
    assert len({event["text"] for event in events(tmp_path / "sft")}) >= 3


def test_stop_keeps_the_last_good_state_and_says_so(rows: Path, tmp_path: Path) -> None:
    """States of every step: one lies between the two over the limit, one is of the weights that were the first so."""
    folder = tmp_path / "sft"
    with pytest.raises(UnhealthyError) as caught:
        train_sft(exploding(folder, rows, action="stop", run__save_every=1))
    stop = events(folder)[-1]
    good, first_bad, bad = (f"step_{stop['step'] - back:08d}" for back in (3, 2, 1))
    assert state_names(folder) == [good, f"{first_bad}.unhealthy", f"{bad}.unhealthy"]
    assert str(caught.value).startswith(f"loss_explosion at step {stop['step']}: the loss is ")
    assert str(caught.value).endswith(f"The last good state is {folder / 'state' / good}.")
    assert caught.value.exit_code == 78
    assert json.loads((folder / "progress.json").read_text())["phase"] == "unhealthy"
    assert not (folder / "result.json").exists() and not (folder / "model").exists()
    # Whoever decides that it was nothing goes on from there.
    train_sft(exploding(folder, rows, action="warn", run__save_every=1, run__resume=True))
    assert [line["step"] for line in metric_lines(folder) if line["split"] == "train"] == list(range(1, 25))
    assert {event["event"] for event in events(folder)} <= {"fires", "ceases"}


def test_stop_without_a_state(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(UnhealthyError, match="There is no state to go back to"):
        train_sft(exploding(tmp_path / "sft", rows, action="stop", run__save_every=0))


def test_the_newest_good_state_outlives_rotation(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three states are saved over the limit, two are kept, and the two good ones before them."""
    health = HealthConfig(loss_explosion=LossConfig(action="rollback", factor=1.1, window=4, patience=4))
    monkeypatch.setattr(Checkpoints, "_answer", lambda *_: pytest.fail("asked for", pytrace=False))
    with pytest.raises(pytest.fail.Exception, match="asked for"):
        train_sft(exploding(tmp_path / "sft", rows, action="rollback", run__save_every=1, run__health=health))
    steps = [int(name[5:]) for name in state_names(tmp_path / "sft")]
    fired = events(tmp_path / "sft")[-1]["step"]
    assert steps[0] < steps[1] and steps[1:] == [fired - 4, fired - 2, fired - 1]


def test_without_a_good_state_nothing_is_removed(rows: Path, tmp_path: Path) -> None:
    """Rollback is asked for at a resume whose only state holds the weights that are over the limit at once."""
    folder = tmp_path / "sft"
    with pytest.raises(UnhealthyError):
        train_sft(exploding(folder, rows, action="stop", run__save_every=1))
    for name in state_names(folder):
        path = folder / "state" / name
        if name.endswith(".unhealthy") and name < f"step_{events(folder)[-1]['step'] - 1:08d}":
            path.rename(path.with_suffix(""))  # good by its record, and not by what follows
        else:
            shutil.rmtree(path)
    (only,) = state_names(folder)
    with pytest.raises(UnhealthyError, match="There is no state to go back to"):
        train_sft(exploding(folder, rows, action="rollback", run__save_every=100, run__resume=True))
    assert state_names(folder) == [f"{only}.unhealthy"]


def test_a_loss_that_is_no_number_is_rolled_back(rows: Path, tmp_path: Path) -> None:
    """D20: the first update breaks the weights, the second step finds it out; back to the start at a sane rate.

    The state after the first step lies there, and is not taken.
    """
    health = HealthConfig(non_finite=NonFiniteConfig(action="rollback"), rollback_lr_factor=1e-33)
    changes = {"optim__lr": 1e30, "optim__warmup_frac": 0.0, "run__health": health, "run__save_every": 1}
    train_sft(exploding(tmp_path / "sft", rows, action="warn", **changes))
    fires, back = events(tmp_path / "sft")[:2]
    assert fires["detector"] == back["detector"] == "non_finite" and back["step"] == 2
    assert fires["text"].startswith("policy: the loss is not finite at step 1 on rank 0")
    assert back["state"] == "step_00000000"
    losses = series(tmp_path / "sft", "train/loss")
    assert len(losses) == 24 and losses[-1] < losses[0]


def test_a_loss_that_is_no_number_stops(rows: Path, tmp_path: Path) -> None:
    """The default, with its own exit code."""
    with pytest.raises(NonFiniteError) as caught:
        train_sft(sft_config(tmp_path / "sft", rows, optim__lr=1e30, optim__clip_norm=0.0, **NO_EVAL))
    assert isinstance(caught.value, UnhealthyError) and caught.value.exit_code == 78
    said = [(event["detector"], event["event"], event["step"]) for event in events(tmp_path / "sft")]
    assert said == [("non_finite", "fires", 2), ("non_finite", "stop", 2)]


@pytest.fixture(scope="module")
def models(rows: Path, tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Models:
    return Models(tmp_path_factory.mktemp("models"), rows, max_steps=12)


def test_kl_explodes_and_step_3_goes_on_at_a_lower_rate(models: Models, tmp_path: Path) -> None:
    """D4: a rate that tears the policy from the reference in its first updates."""
    health = HealthConfig(kl_explosion=KLConfig(action="rollback", patience=1), rollback_lr_factor=1e-3)
    changes = {"actor_optim__lr": 0.3, "run__save_every": 1, "run__health": health, "max_steps": 4}
    train_ppo(models.config(tmp_path / "ppo", **changes, **NO_EVAL))
    back = [event for event in events(tmp_path / "ppo") if event["event"] == "rollback"]
    assert [event["detector"] for event in back] == ["kl_explosion"] and back[0]["rollbacks"] == 1
    assert "nats per response token, beyond 1" in back[0]["text"]
    assert [line["step"] for line in metric_lines(tmp_path / "ppo") if line["split"] == "train"] == [1, 2, 3, 4]
    per_token = [
        abs(kl) / length
        for kl, length in zip(
            series(tmp_path / "ppo", "ppo/kl_ref"), series(tmp_path / "ppo", "ppo/response_length"), strict=True
        )
    ]
    assert max(per_token) < 1
    assert result(tmp_path / "ppo")["rollbacks"] == 1
    # Both rates, since neither model is what it would have been without the other.
    saved = int(back[0]["state"][5:])
    for name, rate in (("train/lr", 0.3), ("critic/lr", 1e-3)):
        scales = [value / rate for value in series(tmp_path / "ppo", name)]
        assert scales == pytest.approx([1.0] * saved + [1e-3] * (4 - saved))


@pytest.mark.parametrize(
    ("action", "ds"), [("rollback", "cpu_zero0"), ("rollback", "cpu_zero2"), ("stop", "cpu_zero0")]
)
def test_a_rollout_that_is_not_finite(models: Models, tmp_path: Path, action: Any, ds: str) -> None:
    """D20: the one update of the first step breaks the weights; nothing looks at them before the next rollout."""
    health = HealthConfig(non_finite=NonFiniteConfig(action=action), rollback_lr_factor=1e-33)
    changes = {"actor_optim__lr": 1e30, "update__epochs": 1, "update__minibatch_size": 8, "run__save_every": 1}
    config = models.config(tmp_path / "ppo", run__health=health, max_steps=4, deepspeed__actor=ds, **changes, **NO_EVAL)
    if action == "stop":
        with pytest.raises(NonFiniteError, match="actor: the logits of a rollout are not finite at step 1 on rank 0"):
            train_ppo(config)
        said = [(event["detector"], event["event"], event["step"]) for event in events(tmp_path / "ppo")]
        assert said == [("non_finite", "fires", 2), ("non_finite", "stop", 2)]
        return
    train_ppo(config)
    fires, back = events(tmp_path / "ppo")[:2]
    assert fires["text"].startswith("actor: the logits of a rollout are not finite at step 1")
    assert (back["event"], back["step"], back["state"]) == ("rollback", 2, "step_00000000")
    assert len(series(tmp_path / "ppo", "ppo/score")) == 4


def test_kl_explosion_stops_step_3(models: Models, tmp_path: Path) -> None:
    health = HealthConfig(kl_explosion=KLConfig(action="stop", patience=2))
    with pytest.raises(UnhealthyError, match="kl_explosion at step 3"):
        train_ppo(models.config(tmp_path / "ppo", actor_optim__lr=0.3, run__health=health, max_steps=6, **NO_EVAL))
    assert [line["step"] for line in metric_lines(tmp_path / "ppo") if line["split"] == "train"] == [1, 2, 3]


def test_nothing_fires_where_nothing_is_wrong(models: Models, tmp_path: Path) -> None:
    train_ppo(models.config(tmp_path / "ppo", max_steps=6, run__save_every=6, **NO_EVAL))
    record = json.loads((tmp_path / "ppo/state/step_00000006/state.json").read_text())
    memories = record["run"]["health"]["memories"]
    # What is looked at without a collective of its own is what is logged.
    assert memories["loss_explosion"]["history"] == pytest.approx(series(tmp_path / "ppo", "value/loss"), rel=1e-6)
    assert memories["entropy_collapse"]["start"] == pytest.approx(series(tmp_path / "ppo", "ppo/entropy")[0], rel=1e-6)
    for folder in (tmp_path / "ppo", models.actor.parent, models.reward.parent):
        assert not (folder / "health.jsonl").exists()
        assert result(folder)["rollbacks"] == 0
        assert json.loads((folder / "progress.json").read_text())["firing"] == []
    for name in ("ppo/repeat_frac", "ppo/model_score"):
        assert len(series(tmp_path / "ppo", name)) == 6
    assert series(tmp_path / "ppo", "ppo/model_score") == series(tmp_path / "ppo", "ppo/score"), "there is no rule"


def test_step_3_reads_what_the_reward_model_has_seen(models: Models, tmp_path: Path) -> None:
    """A range that lies far below what it says: the mean of the scores is above it in every step."""
    seen = read_manifest(models.reward).metrics
    low, high = seen["score_low"], seen["score_high"]
    assert low is not None and high is not None and low < high
    copy = tmp_path / "rm"
    shutil.copytree(models.reward, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["metrics"].update(score_low=low - 100.0, score_high=low - 99.0)
    write_json(copy / "manifest.json", manifest)
    health = HealthConfig(reward_above_training=RewardConfig(action="stop", patience=2))
    changes = {"reward__path": str(copy), "run__health": health, "max_steps": 4}
    with pytest.raises(
        UnhealthyError, match=r"reward_above_training at step 2: ppo/model_score is .*in step 2 the rewa"
    ):
        train_ppo(models.config(tmp_path / "ppo", **changes, **NO_EVAL))
    del manifest["metrics"]["score_high"]
    write_json(copy / "manifest.json", manifest)
    with pytest.raises(
        ArtifactError, match="reward_above_training.action is stop, but the manifest of .*Run step 2 aga"
    ):
        train_ppo(models.config(tmp_path / "none", **changes, **NO_EVAL))
    assert not (tmp_path / "none").exists()
    train_ppo(models.config(tmp_path / "warns", reward__path=str(copy), max_steps=1, **NO_EVAL))


def test_the_range_is_that_of_held_out_responses_in_the_exported_unit(models: Models, tmp_path: Path) -> None:
    """Normalised scores are other numbers than those of the evaluation before the normalisation."""
    changes = {"normalise__policy": str(models.actor), "normalise__deepspeed": "cpu_frozen", "data__split__ppo": 0.4}
    train_reward(reward_config(tmp_path / "rm", models.rows, base=models.actor, **changes))
    metrics = read_manifest(tmp_path / "rm/model").metrics
    for name in ("score_low", "score_high"):
        raw = series(tmp_path / "rm", f"eval/{name}", split="eval")[-1]
        mean, std = metrics["score_mean"], metrics["score_std"]
        assert mean is not None and std is not None
        assert metrics[name] == pytest.approx((raw - mean) / std)
    assert result(tmp_path / "rm")["metrics"]["score_high"] == metrics["score_high"]
