"""How a step is started and read."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf import ds_config
from rlhf.bench.scaling import grow, read_counts
from rlhf.bench.steps import Sources, command, measure, read
from rlhf.cli import _read_bench_recipe, main

SOURCES = Sources(read_recipe=_read_bench_recipe, load=ds_config.load)


def arguments(**changes: Any) -> argparse.Namespace:
    values: dict[str, Any] = {
        "bench_command": "step3", "recipe": "tiny_cpu", "models": None, "warmup": 1, "steps": 2, "profile": 1,
        "hardware": None, "gpu": None, "data": None, "no_check": False, "work": Path("work"), "timeout": 10.0,
        "json": None, "num_gpus": 2, "hostfile": None, "include": "", "exclude": "", "master_addr": None,
        "master_port": None, "launcher": "pdsh", "launcher_args": "", "step": 1,
    }  # fmt: skip
    return argparse.Namespace(**{**values, **changes})


def test_the_stages_before_it_make_one_step_each() -> None:
    recipe = SOURCES.read_recipe("tiny_cpu", [])
    argv = command(arguments(), recipe, "ppo", ["--ppo.kl.coef=0.2"], Path("run"))
    assert argv[argv.index("--stages") + 1 : argv.index("--stages") + 4] == ["sft", "reward", "ppo"]
    assert "--sft.max_steps=1" in argv and "--reward.max_steps=1" in argv and "--ppo.max_steps=4" in argv
    assert (
        "--ppo.run.profile_steps=1" in argv and "--ppo.eval.max_rows=0" in argv and "--reward.normalise.rows=16" in argv
    )
    assert argv[-1] == "--ppo.kl.coef=0.2" and argv[argv.index("--num_gpus") + 1] == "2" and "--launcher" not in argv
    assert not any(argument.startswith("--ppo.epochs") for argument in argv)


def test_models_of_a_run_are_read_instead(tmp_path: Path) -> None:
    recipe = SOURCES.read_recipe("tiny_cpu", [])
    for folder in ("step1_sft", "step2_reward"):
        (tmp_path / folder / "model").mkdir(parents=True)
    argv = command(arguments(models=tmp_path), recipe, "ppo", [], Path("run"))
    assert argv[argv.index("--stages") + 1] == "ppo" and argv[argv.index("--stages") + 2].startswith("--")
    assert f"--ppo.actor.path={tmp_path / 'step1_sft' / 'model'}" in argv
    with pytest.raises(ValueError, match=r"--models .*none/step1_sft/model is not there"):
        command(arguments(models=tmp_path / "none"), recipe, "ppo", [], Path("run"))


def test_detectors_only_warn_and_nothing_is_saved() -> None:
    """A recipe whose detectors roll back needs states, which a measurement does not write."""
    overrides = ["--sft.run.save_every=2", "--sft.run.health.loss_explosion.action=rollback"]
    recipe = SOURCES.read_recipe("tiny_cpu", overrides)
    argv = command(arguments(bench_command="step1"), recipe, "sft", [], Path("run"))
    assert "--sft.run.health.loss_explosion.action=warn" in argv and "--sft.run.save_every=0" in argv


def write_stage(folder: Path, *, steps: int = 4) -> None:
    """Steps of 1, 2, 3, 4 s; 320 tokens and 32 GFLOPs each."""
    folder.mkdir(parents=True)
    lines = [
        {
            "step": n, "split": "train", "time": 0.0, "time/step_seconds": float(n), "time/update_seconds": n * 0.9,
            "time/cpu_seconds": 1.0, "speed/tokens_per_second": 320 / n, "speed/model_flops_per_second": 32e9 / n,
            "memory/peak_bytes": 100.0, "memory/weights_bytes": 10.0, "memory/gradients_bytes": 20.0,
            "memory/optimizer_bytes": 30.0, "data/padding_frac": 0.25, "speed/target_frac": 0.5,
        }
        for n in range(1, steps + 1)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "environment.json").write_text(json.dumps({
        "world_size": 2, "started": "2026-01-02T03:04:05", "git_commit": "abc", "versions": {"torch": "2"},
        "hardware": {"accelerator": "none (CPU)", "cpu": "CPU"},
    }))  # fmt: skip
    (folder / "profile").mkdir()
    (folder / "profile" / "profile.json").write_text(json.dumps({
        "seconds": 2.0, "ranks": [{"communication_seconds": 0.5, "exposed_seconds": 0.1},
                                  {"communication_seconds": 0.2, "exposed_seconds": 0.2}],
    }))  # fmt: skip


def test_a_stage_is_read_without_its_warm_up_and_its_profile(tmp_path: Path) -> None:
    """Of four steps the second and third count: 640 tokens and 64 GFLOPs in 5 s; 32 rows of 10 tokens, half targets."""
    write_stage(tmp_path / "stage")
    recipe = SOURCES.read_recipe("tiny_cpu", [])
    found = read(tmp_path / "stage", recipe, 1, arguments(), settings=[], device=None, load=ds_config.load)
    assert list(found.step_seconds) == [2.0, 3.0] and found.tokens == 320.0 and found.rows == 32
    assert found.tokens_per_second == 128.0 and found.flops_per_second == pytest.approx(12.8e9)
    assert found.response_tokens == 5.0 and found.phases == {"update": pytest.approx(2.25)}
    assert found.memory == {"weights": 10.0, "gradients": 20.0, "optimizer": 30.0, "other": 40.0, "peak": 100.0}
    assert found.communication_frac == 0.25 and found.exposed_frac == 0.1
    assert found.hardware == "CPU" and found.ranks == 2 and found.dtype == "fp32" and found.foreseen is None


def test_a_stage_that_ended_early_is_an_error(tmp_path: Path) -> None:
    write_stage(tmp_path / "stage", steps=2)
    recipe = SOURCES.read_recipe("tiny_cpu", [])
    with pytest.raises(ValueError, match="holds 2 train lines, but 2 were asked for after 1"):
        read(tmp_path / "stage", recipe, 1, arguments(), settings=[], device=None, load=ds_config.load)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"steps": 0}, "--steps=0 must be >= 1"), ({"warmup": -1}, "--warmup=-1 must be >= 0"),
     ({"gpu": "h900"}, "hardware 'h900' is not known"), ({"recipe": "none"}, "--recipe none")],
)  # fmt: skip
def test_bad_flags_are_refused_before_anything_is_written(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        measure(arguments(work=tmp_path / "work", **changes), [], SOURCES)
    assert not (tmp_path / "work").exists()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("x")
    with pytest.raises(ValueError, match="holds a `run` that this command did not make"):
        measure(arguments(work=tmp_path), [], SOURCES)
    assert (tmp_path / "run" / "precious").is_file()


def test_unknown_keys_are_an_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step1", "--recipe", "tiny_cpu", "--sft.nonsense=1"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_weak_scaling_grows_the_batch_and_strong_scaling_does_not() -> None:
    assert grow("strong", 2, 1, arguments(), [], SOURCES) == [] == grow("weak", 2, 2, arguments(), [], SOURCES)
    assert grow("weak", 4, 2, arguments(), [], SOURCES) == ["--sft.global_batch_size=64"]
    assert grow("weak", 4, 2, arguments(step=3), [], SOURCES) == [
        "--ppo.rollout.prompts_per_step=128", "--ppo.update.minibatch_size=64"
    ]  # fmt: skip
    assert grow("weak", 2, 1, arguments(), ["--sft.global_batch_size=6"], SOURCES) == ["--sft.global_batch_size=12"]
    with pytest.raises(ValueError, match="of 3 ranks cannot be 4 / 3 times as many"):
        grow("weak", 4, 3, arguments(), [], SOURCES)


@pytest.mark.parametrize("text", ["", "2,1", "1,1", "0,1", "1,x", "1.5"])
def test_numbers_of_ranks_ascend(text: str) -> None:
    with pytest.raises(ValueError, match="must be different numbers from 1, ascending"):
        read_counts(text)
    assert read_counts("1,2,8") == [1, 2, 8]
