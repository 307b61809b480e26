"""How a step is started and read."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf import ds_config
from rlhf.bench import scaling
from rlhf.bench.result import Result
from rlhf.bench.scaling import grow, read_counts
from rlhf.bench.steps import Sources, command, lengths_of, measure, read
from rlhf.cli import _read_bench_recipe, main
from rlhf.plan.hardware import load_devices
from rlhf.plan.steps import plan_step

Make = Callable[..., Result]
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
            "memory/peak_bytes": 100.0, "speed/micro_batch_tokens": 40.0,
            "memory/weights_bytes": 10.0, "memory/gradients_bytes": 20.0,
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
        "seconds": 2.0, "ranks": [{"communication_frac": 0.25, "exposed_frac": 0.05},
                                  {"communication_frac": 0.1, "exposed_frac": 0.1}],
    }))  # fmt: skip


def test_a_stage_is_read_without_its_warm_up_and_its_profile(tmp_path: Path) -> None:
    """Of four steps the second and third count: 640 tokens and 64 GFLOPs in 5 s; 32 rows of 10 tokens, half targets."""
    write_stage(tmp_path / "stage")
    recipe = SOURCES.read_recipe("tiny_cpu", [])
    found = read(tmp_path / "stage", recipe, 1, slice(1, 3), settings=[], device=None, load=ds_config.load)
    assert list(found.step_seconds) == [2.0, 3.0] and found.tokens == 320.0 and found.rows == 32
    assert found.tokens_per_second == 128.0 and found.flops_per_second == pytest.approx(12.8e9)
    assert found.phases == {"update": pytest.approx(2.25)}
    assert found.memory == {"weights": 10.0, "gradients": 20.0, "optimizer": 30.0, "other": 40.0, "peak": 100.0}
    assert found.communication_frac == 0.25 and found.exposed_frac == 0.1
    assert found.hardware == "CPU" and found.ranks == 2 and found.dtype == "fp32" and found.foreseen is None


def test_a_stage_that_ended_early_is_an_error(tmp_path: Path) -> None:
    write_stage(tmp_path / "stage", steps=2)
    recipe = SOURCES.read_recipe("tiny_cpu", [])
    with pytest.raises(ValueError, match="holds 2 train lines, fewer than 3"):
        read(tmp_path / "stage", recipe, 1, slice(1, 3), settings=[], device=None, load=ds_config.load)


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


def test_what_cannot_end_well_is_refused_before_anything_runs(tmp_path: Path) -> None:
    """Keys of another stage, models that would be replaced, a file of something else, a device that lacks the type."""
    work = tmp_path / "work"
    with pytest.raises(ValueError, match="--ppo.KEY: stage ppo is not part of this measurement, only sft, reward"):
        measure(arguments(work=work, bench_command="step2"), ["--ppo.kl.coef=1"], SOURCES)
    models = work / "run"
    for folder in ("step1_sft", "step2_reward"):
        (models / folder / "model").mkdir(parents=True)
    (work / ".rlhf_bench").write_text("")
    with pytest.raises(ValueError, match="is the run that this measurement replaces"):
        measure(arguments(work=work, models=models), [], SOURCES)
    assert (models / "step1_sft" / "model").is_dir()
    other = tmp_path / "other.json"
    other.write_text("{}")
    with pytest.raises(ValueError, match=r"other.json is no result"):
        measure(arguments(work=work, json=other), [], SOURCES)
    with pytest.raises(ValueError, match="has no fp32 peak"):
        hardware = tmp_path / "h.yaml"
        hardware.write_text("x: {architecture: cpu, cores: 1, peak_tflops: {bf16: 1}, memory_gb: 1, bandwidth_gb_s: 1, "
                            "node: 1, link_gb_s: 1, nics: 1, nic_gbit_s: 1}\n")  # fmt: skip
        measure(arguments(work=work, hardware=hardware), [], SOURCES)
    assert (models / "step2_reward" / "model").is_dir()


def test_a_row_of_step_2_stands_for_a_pair_of_as_many_columns() -> None:
    """100 tokens in 80 columns: the prompt of 20 stands once, two responses of 30. In 40: four responses or more."""
    assert lengths_of([{"speed/columns_per_token": 0.8}], 2, 100.0) == pytest.approx((20.0, 30.0))
    assert lengths_of([{"speed/columns_per_token": 0.4}], 2, 100.0) == pytest.approx((40.0, 0.0))
    assert lengths_of([{"speed/columns_per_token": 1.2}], 2, 100.0) == lengths_of([{}], 2, 100.0) == (25.0, 25.0)


def test_lengths_of_the_other_steps_are_those_of_targets_and_responses() -> None:
    assert lengths_of([{"speed/target_frac": 0.3}, {"speed/target_frac": 0.5}], 1, 10.0) == pytest.approx((6.0, 4.0))
    assert lengths_of([{"ppo/response_length": 7.0}], 3, 10.0) == (3.0, 7.0)


def test_the_plan_is_made_of_what_was_measured(tmp_path: Path) -> None:
    """320 tokens of 32 rows on 2 ranks, micro-batches of 40 tokens: 4 of 4 rows each, 5 + 5 tokens long."""
    write_stage(tmp_path / "stage")
    recipe = SOURCES.read_recipe("tiny_cpu", [])
    seen = []

    def plan(setting: Any, number: int) -> Any:
        seen.append((setting, number))
        return plan_step(setting, number)

    device = load_devices()["a100-80"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlhf.bench.steps.plan_step", plan)
        found = read(tmp_path / "stage", recipe, 1, slice(1, 3), settings=[], device=device, load=ds_config.load)
    ((setting, number),) = seen
    layout = setting.sft.layout
    assert number == 1 and (layout.gpus, layout.length, layout.micro_batch, layout.accumulation) == (2, 10, 4, 4)
    assert setting.prompt == setting.response == 5
    assert found.foreseen is not None and found.peak_flops == device.peak("fp32")
    memory = plan_step(setting, 1).memory["update"]
    assert found.foreseen.peak_bytes == memory.total - memory.context - memory.reserve


def test_unknown_keys_are_an_error_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step1", "--recipe", "tiny_cpu", "--sft.nonsense=1"]) == 2
    assert "nonsense" in capsys.readouterr().err


def test_both_curves_share_the_run_on_the_fewest_ranks(monkeypatch: pytest.MonkeyPatch, make_result: Make) -> None:
    """Weak scaling has twice the rows on twice the ranks: 3 runs for 4 points."""
    runs: list[tuple[int, list[str]]] = []

    def measured(at: argparse.Namespace, overrides: list[str], _sources: Sources) -> Result:
        runs.append((at.num_gpus, overrides))
        return make_result(ranks=at.num_gpus, step_seconds=[float(len(runs))])

    monkeypatch.setattr(scaling, "measure", measured)
    weak, strong = scaling.measure_curves([1, 2], arguments(), [], SOURCES)
    assert runs == [(1, []), (2, ["--sft.global_batch_size=64"]), (2, [])]
    assert weak.results[0] is strong.results[0]
    # 640 tokens a step: 640 a rank in 1 s; 320 in 2 s and in 3 s.
    assert weak.efficiencies == pytest.approx([1, 0.25]) and strong.efficiencies == pytest.approx([1, 1 / 6])
    assert weak.planned is None


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
