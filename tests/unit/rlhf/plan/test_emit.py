"""A plan written as a recipe, read back, checked by the launcher without starting anything, and run."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf import cli, ds_config
from rlhf.plan.emit import Template, emit, make_fit
from rlhf.plan.hardware import load_devices
from rlhf.plan.setting import Choices, Setting, from_models, from_recipe
from rlhf.plan.steps import plan_step

DEVICES = load_devices()
RECIPES = Path(__file__).parents[4] / "launch" / "recipes"
TEMPLATE = Template(folder=RECIPES / "opt_13b_350m_single_node", actor="facebook/opt-13b", reward="facebook/opt-350m")
CPU = """\
here:
  architecture: cpu
  cores: 1
  peak_tflops: {fp32: 0.1, bf16: 0.2}
  memory_gb: 8
  bandwidth_gb_s: 20
  node: 2
  link_gb_s: 2
  nics: 1
  nic_gbit_s: 10
"""


def setting(gpus: int = 8, gpu: str = "a100-80", **choices: Any) -> Setting:
    return from_models("opt-13b", "opt-350m", DEVICES[gpu], gpus, Choices(**choices))


def read(folder: Path, gpu: str = "a100-80") -> Setting:
    name, stages, gpus = cli._read_recipe(str(folder))
    return from_recipe(name, stages, DEVICES[gpu], gpus, load=ds_config.load)


def write(made: Setting, folder: Path) -> list[str]:
    return emit(made, folder, template=TEMPLATE, load=ds_config.load)


@pytest.mark.parametrize(
    ("gpus", "choices"),
    [
        (8, {}),
        (16, {"micro_batch": 2, "global_batch": 128}),
        (8, {"zero": 2, "recompute": "none", "prompt": 128, "response": 384, "lora": 64}),
        (8, {"zero": 3, "offload": True, "dtype": "fp16"}),
        (8, {"recompute": "selective"}),
        (8, {"dtype": "fp8"}),
        (8, {"offload_activations": True, "recompute_budget": 0.25}),
        (8, {"tensor": 2, "zero": 1}),
        (16, {"tensor": 4}),
        (1, {"zero": 0, "lora": 16}),
        (8, {"sp": 4}),
    ],
)
def test_what_is_read_back_is_what_was_planned(gpus: int, choices: dict[str, Any], tmp_path: Path) -> None:
    gpu = "h100-sxm" if choices.get("dtype") == "fp8" else "a100-80"
    made = setting(gpus, gpu, **choices)
    command = write(made, tmp_path / "mine")
    assert command[:4] == ["rlhf", "run", "--recipe", str(tmp_path / "mine")] and ("--hostfile" in command) == (
        gpus > 8
    )
    found = read(tmp_path / "mine", gpu)
    assert (found.name, found.gpus, found.actor, found.reward) == ("mine", gpus, made.actor, made.reward)
    assert (found.prompt, found.response) == (made.prompt, made.response)
    assert found.sft.layout == made.sft.layout and found.preference.layout == made.preference.layout
    for role in ("actor", "critic", "reference", "reward"):
        layout, planned = getattr(found.ppo, role), getattr(made.ppo, role)
        if role in ("reference", "reward"):  # frozen: nothing of theirs is recomputed, and updates are not theirs
            kept: dict[str, Any] = {"recompute": "none", "recompute_budget": 0.0, "offload_activations": False}
            layout, planned = (replace(one, **kept, accumulation=1) for one in (layout, planned))
        assert layout == planned, role
    for name in ("prompts_per_step", "decode_batch", "minibatch", "epochs"):
        assert getattr(found.ppo, name) == getattr(made.ppo, name)


def test_shared_rows_and_a_budget_are_written(tmp_path: Path) -> None:
    made = setting()
    layout = made.sft.layout
    shared = replace(layout, context=2, accumulation=2 * layout.accumulation, recompute="full", recompute_budget=0.25)
    write(replace(made, sft=replace(made.sft, layout=shared)), tmp_path / "mine")
    assert read(tmp_path / "mine").sft.layout == shared
    assert read(tmp_path / "mine").preference.layout.context == read(tmp_path / "mine").ppo.actor.context == 1
    second = replace(shared, recompute_every=2, recompute_budget=0.0)
    write(replace(made, sft=replace(made.sft, layout=second)), tmp_path / "second")
    assert read(tmp_path / "second").sft.layout == second
    with pytest.raises(ValueError, match="cannot write tensor 2 x pipeline 1 x context 2"):
        write(replace(made, sft=replace(made.sft, layout=replace(shared, tensor=2))), tmp_path / "other")


def test_layers_that_are_dealt_are_written(tmp_path: Path) -> None:
    made = setting()
    layout = made.sft.layout
    dealt = replace(layout, zero=1, pipeline=2, accumulation=2 * layout.accumulation)
    write(replace(made, sft=replace(made.sft, layout=dealt)), tmp_path / "mine")
    assert read(tmp_path / "mine").sft.layout == dealt
    for refused in (replace(dealt, virtual=2), replace(dealt, tensor=2)):
        with pytest.raises(ValueError, match="cannot write tensor [12] x pipeline [12] x context 1"):
            write(replace(made, sft=replace(made.sft, layout=refused)), tmp_path / "other")


def test_the_launcher_would_start_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All but the weights, which are not on this machine."""
    folder = tmp_path / "emitted"
    arguments = ["plan", "--actor", "opt-13b", "--gpus", "16", "--gpu", "a100-80", "--emit", str(folder)]
    assert cli.main(arguments) == 0
    out = capsys.readouterr().out
    assert f"start it with: rlhf run --recipe {folder} --hostfile HOSTFILE" in out.replace("\n", " ").replace("  ", " ")
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=8\nnode2 slots=8\n")
    cli.main(["run", "--recipe", str(folder), "--out", str(tmp_path / "run"), "--dry-run", "--hostfile", str(hosts)])
    out = capsys.readouterr().out
    assert all(f"--module {stage}.train" in out for stage in ("step1_sft", "step2_reward", "step3_ppo"))
    problems = out.partition("would stop before its first process")[2]
    lines = [line for line in problems.splitlines() if line.startswith("  - ")]
    assert all("model.path=facebook/" in line or "accelerator" in line for line in lines), problems


def test_what_does_not_fit_is_changed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """OPT-13B's rollout of 64 rows does not fit eight devices of 80 GB beside the gathered actor: E17."""
    made, changes = make_fit(setting(), (1, 2, 3))
    assert plan_step(setting(), 3).missing > 0 >= plan_step(made, 3).missing
    assert len(changes) == 1 and changes[0].startswith("step 3: ") and "devices" not in changes[0]
    assert (
        cli.main(["plan", "--actor", "opt-13b", "--gpus", "8", "--gpu", "a100-80", "--emit", str(tmp_path / "r")]) == 0
    )
    assert f"changed so that it fits: {changes[0]}" in capsys.readouterr().out
    assert plan_step(read(tmp_path / "r"), 3).missing <= 0
    with pytest.raises(ValueError, match="no change of settings makes it fit. Take more devices"):
        make_fit(from_models("opt-175b", "opt-350m", DEVICES["a100-40"], 1, Choices()), (1,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tensor": 2, "pipeline": 2}, "cannot write tensor 2 with norms split x pipeline 2"),
    ],
)
def test_what_this_code_cannot_run_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        write(setting(gpu="h100-sxm", **change), tmp_path / "r")
    with pytest.raises(ValueError, match="12 devices are not whole machines of 8"):
        write(setting(12), tmp_path / "r")
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(FileExistsError, match="is not empty. Name a new folder"):
        write(setting(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    arguments = ["plan", "--actor", "llama3-8b", "--gpus", "8", "--gpu", "a100-80", "--emit", str(tmp_path / "r")]
    assert cli.main(arguments) == 2  # opt-350m reads other tokens
    assert cli.main([*arguments[:2], "gpt-22b", "--reward", "gpt-22b", *arguments[3:]]) == 2  # has no weights
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.slow
def test_a_recipe_that_fits_here_runs(tmp_path: Path) -> None:
    """tiny_cpu for one rank in place of two, cut to a few steps, from the plan to the three models."""
    (tmp_path / "hardware.yaml").write_text(CPU)
    folder = tmp_path / "tiny"
    arguments = ["--recipe", "tiny_cpu", "--gpu", "here", "--gpus", "1", "--hardware", str(tmp_path / "hardware.yaml")]

    def rlhf(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "rlhf.cli", *words], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    rlhf("plan", *arguments, "--emit", str(folder))
    assert yaml.safe_load((folder / "pipeline.yaml").read_text())["num_gpus"] == 1
    short = ["--sft.epochs", "0.2", "--reward.epochs", "0.2", "--ppo.max_steps", "2", "--ppo.eval.generate_rows", "8"]
    rlhf("run", "--recipe", str(folder), "--out", str(tmp_path / "run"), *short)
    stages = json.loads((tmp_path / "run" / "summary.json").read_text())["stages"]
    assert [stage["status"] for stage in stages.values()] == ["done"] * 3


def test_float8_is_fp8_where_there_are_kernels_for_it(tmp_path: Path) -> None:
    """A recipe's own choice is kept and read; other types, emulation and devices without it are no fp8."""
    write(setting(gpu="h100-sxm", dtype="fp8"), tmp_path / "mine")
    docs = {key: yaml.safe_load((tmp_path / f"mine/{key}.yaml").read_text()) for key in ("sft", "reward", "ppo")}
    trained = [docs["sft"]["model"], docs["reward"]["model"], docs["ppo"]["actor"], docs["ppo"]["critic"]]
    assert all(model["float8"] == "tensorwise" for model in trained)
    assert "float8" not in docs["ppo"].get("reference", {}) and "float8" not in docs["ppo"].get("reward", {})
    assert docs["ppo"]["rollout"]["old_logprobs"] == "rescore"
    found = read(tmp_path / "mine", "h100-sxm")
    assert found.sft.layout.dtype == "fp8"
    template = Template(folder=tmp_path / "template", actor="facebook/opt-13b")
    shutil.copytree(TEMPLATE.folder, template.folder)
    own = yaml.safe_load((template.folder / "sft.yaml").read_text())
    own["model"].update(float8="rowwise", float8_filter_fqns=["fc1"])
    (template.folder / "sft.yaml").write_text(yaml.safe_dump(own))
    for dtype, kept in (("fp8", {"float8": "rowwise", "float8_filter_fqns": ["fc1"]}), ("bf16", {})):
        made = replace(found, sft=replace(found.sft, layout=replace(found.sft.layout, dtype=dtype)))
        emit(made, tmp_path / dtype, template=template, load=ds_config.load)
        model = yaml.safe_load((tmp_path / dtype / "sft.yaml").read_text())["model"]
        assert {key: value for key, value in model.items() if "float8" in key} == kept
    with pytest.raises(ValueError, match="a100-80 has no fp8 peak"):
        read(tmp_path / "mine")
    docs["sft"]["model"].update(float8_emulate=True)
    (tmp_path / "mine/sft.yaml").write_text(yaml.safe_dump(docs["sft"]))
    assert read(tmp_path / "mine", "h100-sxm").sft.layout.dtype == "bf16"


def test_fp8_is_for_what_is_trained() -> None:
    """A rollout and the reward model are those of bf16; actor, its reference and critic are faster."""
    one, other = (plan_step(setting(gpu="h100-sxm", dtype=dtype), 3).seconds for dtype in ("bf16", "fp8"))
    assert all(one[phase] == other[phase] for phase in ("gather", "prefill", "decode"))
    assert other["update actor"] < 0.9 * one["update actor"] and other["score"] < 0.9 * one["score"]
    made = setting(gpu="h100-sxm", dtype="fp8").ppo
    assert [getattr(made, role).dtype for role in ("actor", "critic", "reference", "reward")] == ["fp8"] * 3 + ["bf16"]


def test_a_recipe_without_a_critic_stays_one(tmp_path: Path) -> None:
    """No DeepSpeed JSON of a critic is written, and none is planned when the recipe is read back."""
    template = tmp_path / "rloo"
    shutil.copytree(TEMPLATE.folder, template)
    doc = yaml.safe_load((template / "ppo.yaml").read_text())
    doc["algorithm"] = "rloo"
    doc["rollout"]["samples_per_prompt"] = 4
    (template / "ppo.yaml").write_text(yaml.safe_dump(doc))
    made = replace(setting(), ppo=replace(setting().ppo, critic=None))
    emit(made, tmp_path / "mine", template=replace(TEMPLATE, folder=template), load=ds_config.load)
    assert not (tmp_path / "mine/critic.json").exists() and (tmp_path / "mine/actor.json").exists()
    assert "critic" not in yaml.safe_load((tmp_path / "mine/ppo.yaml").read_text())["deepspeed"]
    found = read(tmp_path / "mine")
    assert found.ppo.critic is None and found.ppo.prompts_per_step == made.ppo.prompts_per_step
