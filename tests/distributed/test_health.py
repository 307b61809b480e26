"""Training that goes wrong on two ranks: the ranks agree on what to do, and the launcher sees why a stage has ended."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from launch.command import stage_command
from launch.failure import explain
from launch.hostfile import Host
from launch.placement import Placement
from launch.process import Interrupt, run_watched
from launch.ranks import Ranks as Watched
from rlhf import engine
from rlhf.config import WatchdogConfig, save_config
from rlhf.health import EXIT_UNHEALTHY
from rlhf.health_config import HealthConfig, KLConfig, NonFiniteConfig
from rlhf.host import free_port
from rlhf.run import Run
from step1_sft.train import train as train_sft
from step2_reward.train import train as train_reward
from step3_ppo.train import train as train_ppo
from tests.distributed.harness import Ranks
from tests.distributed.test_watchdog import environment
from tests.distributed.tiny import engine_of, loss_sum, micro_batches, steps_of_rows, tiny_opt, train_step
from tests.saving import TinyRun, checkpoints, resume
from tests.stages import (
    NO_EVAL,
    Killed,
    digit_rows,
    ds_json,
    events,
    exploding,
    metric_lines,
    ppo_config,
    reward_config,
    series,
    sft_config,
    weights,
    write_rows,
)


def killed(cfg: Any) -> None:
    """Train until three steps after the rollback."""
    log, seen = Run.log, []

    def log_or_die(self: Any, step: int) -> None:
        seen.extend([step] * bool(self.health.rollbacks))
        if len(seen) == 3:
            raise Killed
        log(self, step)

    Run.log = log_or_die  # type: ignore[method-assign]
    try:
        train_sft(cfg)
    except Killed:
        return
    finally:
        Run.log = log  # type: ignore[method-assign]
    raise AssertionError("it was not rolled back")


def supervised_job(folder: Path) -> None:
    """Step 1: whole, and killed after its rollback and resumed; then with a loss that is no number."""
    engine.setup(timeout_seconds=60)
    rows = folder / "rows.jsonl"
    ds = ds_json(folder, "cpu_zero3", micro_batch_size=2)
    train_sft(exploding(folder / "whole", rows, action="rollback", deepspeed=ds))
    killed(exploding(folder / "parts", rows, action="rollback", deepspeed=ds))
    train_sft(exploding(folder / "parts", rows, action="rollback", deepspeed=ds, run__resume=True))
    health = HealthConfig(non_finite=NonFiniteConfig(action="rollback"), rollback_lr_factor=1e-33)
    ds = ds_json(folder, "cpu_zero2", micro_batch_size=2)
    changes = {"optim__lr": 1e30, "optim__warmup_frac": 0.0, "run__health": health, "max_steps": 6, "deepspeed": ds}
    train_sft(exploding(folder / "nan", rows, action="warn", **changes))


def ppo_job(folder: Path) -> None:
    """Step 3 with a sharded actor that leaves the reference at once."""
    engine.setup(timeout_seconds=60)
    rows = folder / "rows.jsonl"
    train_sft(sft_config(folder / "sft", rows, max_steps=12, **NO_EVAL))
    train_reward(reward_config(folder / "rm", rows, base=folder / "sft/model", **NO_EVAL))
    cfg = ppo_config(
        folder / "ppo",
        rows,
        actor=folder / "sft/model",
        reward=folder / "rm/model",
        deepspeed__actor=ds_json(folder, "cpu_zero3_hybrid", micro_batch_size=2),
        actor_optim__lr=0.3,
        run__save_every=1,
        run__health=HealthConfig(kl_explosion=KLConfig(action="rollback", patience=1), rollback_lr_factor=1e-3),
        max_steps=4,
        **NO_EVAL,
    )
    train_ppo(cfg)


def left_behind_job(folder: str) -> dict[Any, float]:
    """At each stage, how far a step after a rollback from a loss that is no number is from the same step without."""
    engine.setup(timeout_seconds=60)
    steps, found = steps_of_rows(3), {}
    for stage, bf16 in itertools.product(("cpu_zero0", "cpu_zero1", "cpu_zero2", "cpu_zero3"), (False, True)):
        changes, where = {"bf16": {"enabled": bf16}}, f"{folder}/{stage}_{bf16}"
        one, two = (engine_of(tiny_opt(), stage, changes=changes, lr=1e-2) for _ in range(2))
        for trained in (one, two):
            train_step(trained, steps[0])
        states = checkpoints(TinyRun(where), {"policy": two})
        states.save(1)
        states.wait()
        first, second = micro_batches(steps[1], 2)
        with states.guarded(2):
            two.accumulate(loss_sum(two, first), count=1, last=False)
            two.accumulate(loss_sum(two, second) * float("nan"), count=1, last=True)
            two.step()
        resume(where, {"policy": two})
        for trained in (one, two):
            train_step(trained, steps[2])
        whole, back = one.full_state_dict(), two.full_state_dict()
        if whole is not None and back is not None:
            found[stage, bf16] = max(float((whole[key] - back[key]).abs().max()) for key in whole)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_of_a_bad_step_are_left_behind(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    found = ranks(left_behind_job, world_size=world_size, timeout=120, folder=str(tmp_path))[0]
    assert len(found) == 8 and set(found.values()) == {0.0}, found


def test_step_1_is_turned_back_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", digit_rows(40))
    ranks(supervised_job, timeout=400, folder=tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert [event["event"] for event in events(whole)][:2] == ["fires", "rollback"]
    assert [line["step"] for line in metric_lines(whole) if line["split"] == "train"] == list(range(1, 25))
    record = json.loads((whole / "state/step_00000024/state.json").read_text())
    history = record["run"]["health"]["memories"]["loss_explosion"]["history"]
    assert history == pytest.approx(series(whole, "train/loss")[-4:], rel=1e-6), "over both ranks"
    assert metric_lines(parts) == metric_lines(whole) and events(parts) == events(whole)
    first, second = weights(whole / "model"), weights(parts / "model")
    assert all(bool((first[key] == second[key]).all()) for key in first)
    _, back = events(tmp_path / "nan")[:2]
    assert (back["detector"], back["event"], back["state"]) == ("non_finite", "rollback", "step_00000000")
    assert len([line for line in metric_lines(tmp_path / "nan") if line["split"] == "train"]) == 6


def test_step_3_is_turned_back_on_two_ranks(ranks: Ranks, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", digit_rows(40))
    ranks(ppo_job, timeout=300, folder=tmp_path)
    back = [event for event in events(tmp_path / "ppo") if event["event"] == "rollback"]
    assert [(event["detector"], event["step"], event["state"]) for event in back] == [
        ("kl_explosion", 2, "step_00000000")
    ]
    assert [line["step"] for line in metric_lines(tmp_path / "ppo") if line["split"] == "train"] == [1, 2, 3, 4]


def test_a_stop_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """Under the real launcher: 78, and the detector's sentence."""
    cfg = exploding(tmp_path / "sft", write_rows(tmp_path / "rows.jsonl", digit_rows(40)), action="stop")
    save_config(cfg, tmp_path / "sft.yaml")
    placement = Placement(hosts=(Host("localhost", (0, 1)),), num_gpus=2)
    watched = Watched(tmp_path / "ranks", world_size=2, config=WatchdogConfig())
    outcome = run_watched(
        stage_command("step1_sft.train", tmp_path / "sft.yaml", placement, port=free_port(), rank_logs=tmp_path / "l"),
        environment={**environment(tmp_path), **watched.variables},
        log_path=tmp_path / "log",
        interrupt=Interrupt(),
        on_tick=lambda: None,
        ranks=watched,
    )
    failure = explain(outcome, watched, tmp_path / "log")
    assert failure.exit_code == outcome.returncode == EXIT_UNHEALTHY == 78
    assert "failed: UnhealthyError: loss_explosion at step" in failure.text
    assert "Traceback" not in (tmp_path / "log").read_text()
    assert json.loads((tmp_path / "sft/progress.json").read_text())["phase"] == "unhealthy"
