"""Recipes: every one parses, resolves and dry-runs; overrides; pipeline.yaml's own rules. Fault rows F26, F30."""

import re
import shlex
from pathlib import Path

import pytest

from launch.recipe import (
    RECIPES,
    RecipeError,
    find_recipe,
    load_recipe,
    recipe_names,
    resolve_stages,
    split_overrides,
)
from rlhf.cli import main

PRESETS = ("quick_prototype", "production_throughput", "extreme_scale", "frontier_175b", "frontier_1t")
REPOSITORY = Path(__file__).resolve().parents[3]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def documented_commands() -> list[str]:
    """Lines of bash blocks that start a run."""
    commands = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8") if document.exists() else ""
        for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            commands += [
                line.split("  #")[0].strip() for line in lines if re.match(r"(rlhf run|bash launch/run_e2e)", line)
            ]
    return sorted(set(commands))


def recipe_commands() -> list[str]:
    """The command that each recipe's head gives."""
    return [
        re.search(
            r"^# +(?:Command: +)?(?:bash launch/run_e2e.sh +or: )?(rlhf run .*)$", path.read_text(), re.MULTILINE
        )[1]
        for path in sorted(RECIPES.glob("*/pipeline.yaml"))
    ]


@pytest.mark.parametrize("line", recipe_commands())
def test_f26_commands_of_recipe_heads_dry_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F26: each recipe's own command is accepted as printed; for the documents: tests/architecture/test_docs.py."""
    words = shlex.split(line.replace("DIR", str(tmp_path)).replace("HOSTFILE", str(tmp_path / "hosts")))
    arguments = ["run", *words[2:]]
    if "--recipe" not in arguments:
        arguments += ["--recipe", "tiny_cpu"]
    monkeypatch.chdir(REPOSITORY)
    recipe = load_recipe(find_recipe(arguments[arguments.index("--recipe") + 1]))
    hosts = [f"node{number} slots={recipe.num_gpus}\n" for number in range(recipe.num_nodes)]
    (tmp_path / "hosts").write_text("".join(hosts))
    if "--out" not in arguments:
        arguments += ["--out", str(tmp_path / "out")]
    assert main([argument for argument in arguments if argument != "--dry-run"] + ["--dry-run"]) == 0


def test_f30_every_flag_of_run_is_documented_and_exercised() -> None:
    """F30: no flag that is parsed and then goes nowhere."""
    import argparse

    from rlhf.cli import _parser

    commands = next(a for a in _parser()._actions if isinstance(a, argparse._SubParsersAction))
    flags = {flag for a in commands.choices["run"]._actions for flag in a.option_strings if flag.startswith("--")}
    text = (REPOSITORY / "docs" / "recipes.md").read_text()
    examples = " ".join(documented_commands())
    assert {flag for flag in flags - {"--help"} if f"`{flag}" not in text} == set()
    assert {flag for flag in flags - {"--help", "--dry-run"} if flag not in examples} == set()


def test_the_recipes_that_are_promised() -> None:
    assert set(recipe_names()) >= {
        "tiny_cpu", "gsm8k_small", "smollm2_cpu", "opt_1.3b_350m_single_gpu", "opt_13b_350m_single_node",
        "opt_13b_350m_multi_node", "opt_66b_350m_multi_node", "llama3_8b_single_node", *PRESETS,
    }  # fmt: skip


@pytest.mark.parametrize("name", recipe_names())
def test_recipe(name: str, tmp_path: Path) -> None:
    path = find_recipe(name)
    recipe = load_recipe(path)
    assert recipe.name == path.parent.name
    assert recipe.stage_names == (("sft",) if name.startswith("frontier") else ("sft", "reward", "ppo"))
    head = path.read_text().split("\nname:")[0]
    assert all(word in head for word in ("# Tested on:", "# Command:", f"# {name}"))
    if recipe.needs_accelerator:
        assert "never run on a GPU" in head
    stages = resolve_stages(recipe, path, tmp_path)
    assert stages[0].module == "step1_sft.train"
    if len(stages) == 1:
        return
    assert [stage.module for stage in stages[1:]] == ["step2_reward.train", "step3_ppo.train"]
    assert stages[2].config.actor.path == str(tmp_path / "step1_sft" / "model")
    assert stages[2].config.reward.path == str(tmp_path / "step2_reward" / "model")
    assert stages[1].config.normalise.policy == str(tmp_path / "step1_sft" / "model")
    splits = {str(stage.config.data.split) for stage in stages}
    assert len(splits) == 1


@pytest.mark.parametrize(
    "path", [path for name in ("*_350m_*", "llama3*", *PRESETS) for path in sorted(RECIPES.glob(f"{name}/*.yaml"))]
)
def test_numbers_have_a_source(path: Path) -> None:
    """Learning rates, batch sizes and PPO's constants of the GPU recipes say where they come from."""
    keys = (
        "lr:",
        "global_batch_size:",
        "epochs:",
        "prompts_per_step:",
        "minibatch_size:",
        "coef:",
        "clip:",
        "lam:",
        "max_steps:",
    )
    for line in path.read_text().splitlines():
        if line.strip().startswith(keys):
            assert " # " in line, f"{path}: {line}"


def test_overrides_reach_one_stage(tmp_path: Path) -> None:
    path = find_recipe("tiny_cpu")
    stages = resolve_stages(
        load_recipe(path), path, tmp_path, seed=7, data_root="/data",
        overrides=["--sft.optim.lr", "1e-5", "--ppo.kl.coef=0.5", "--ppo.shaping.clip", "-0.0"],
    )  # fmt: skip
    assert [stage.config.run.seed for stage in stages] == [7, 7, 7]
    assert [stage.config.data.root for stage in stages] == ["/data"] * 3
    assert (stages[0].config.optim.lr, stages[1].config.optim.lr != 1e-5, stages[2].config.kl.coef) == (1e-5, True, 0.5)


def test_data_placeholder(tmp_path: Path) -> None:
    path = find_recipe("gsm8k_small")
    recipe = load_recipe(path)
    assert resolve_stages(recipe, path, tmp_path)[0].config.tokenizer.path == "./data/opt-tokenizer"
    assert resolve_stages(recipe, path, tmp_path, data_root="/d")[0].config.tokenizer.path == "/d/opt-tokenizer"


def test_an_override_of_a_fed_key_cuts_the_feed(tmp_path: Path) -> None:
    path = find_recipe("tiny_cpu")
    stage = resolve_stages(load_recipe(path), path, tmp_path, stages=["reward"], overrides=["--reward.model.path=/m"])[
        0
    ]
    assert stage.config.model.path == "/m" and "model.path" not in stage.feeds and stage.parents == ("sft",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optim.lr", "1"], "--optim.lr: unknown argument"),
        (["--sft.optim.lr"], "has no value"),
        (["--sft.optim.lr", "--seed"], "has no value"),
        (["--ppo.max_steps", "3"], "stage ppo is not part of this run, only sft"),
        (["--sft.run.out_dir=x"], "belongs to the launcher"),
        (["--num-gpus", "2"], "--num-gpus: unknown argument"),
    ],
)
def test_bad_overrides(arguments: list[str], message: str) -> None:
    _, problems = split_overrides(arguments, ["sft"])
    assert len(problems) == 1 + ("--seed" in arguments) and message in problems[0]


def test_all_stages_problems_at_once(tmp_path: Path) -> None:
    path = find_recipe("tiny_cpu")
    overrides = ["--sft.optim.lr=-1", "--reward.optim.lrr=1", "--ppo.max_steps=0"]
    with pytest.raises(RecipeError) as caught:
        resolve_stages(load_recipe(path), path, tmp_path, overrides=overrides)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert (
        "optim.lr must be > 0, got -1" in lines[0] and "optim.lrr" in lines[1] and "max_steps must be >= 1" in lines[2]
    )


PIPELINE = """
name: mine
version: 1
description: x
deployment: single_node
num_gpus: 1
stages: {sft: {config: sft.yaml}}
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("num_gpus: 1", "num_gpu: 1"), "num_gpu"),
        (("num_gpus: 1", "num_gpus: 0"), "must be >= 1"),
        (("num_gpus: 1", "num_gpus: many"), "num_gpus"),
        (("single_node", "cluster"), "deployment"),
        (("num_gpus: 1", "num_gpus: 1\nnum_nodes: 2"), "num_nodes is 2"),
        (("{sft: {config: sft.yaml}}", "{}"), "stages is empty"),
        (("config: sft.yaml", "config: sft.yaml, feeds: {model.path: '{actor}'}"), "names {actor}"),
        (("config: sft.yaml", "config: sft.yaml, feeds: {model.path: '{reward}'}"), "written after sft has run"),
        (("name: mine", "name: ../mine"), "name must be made of"),
        (("description: x", "description: x\nenvironment: {'A-B': '1'}"), "not a variable name"),
    ],
)
def test_pipeline_yaml_is_strict(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(PIPELINE)
    assert load_recipe(path).name == "mine"
    path.write_text(PIPELINE.replace(*change))
    with pytest.raises(RecipeError, match=re.escape(message)):
        load_recipe(path)


def test_unknown_recipe_lists_the_known() -> None:
    with pytest.raises(RecipeError, match="neither a recipe .*tiny_cpu"):
        find_recipe("tiny_gpu")
