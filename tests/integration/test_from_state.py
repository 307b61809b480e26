"""`rlhf convert` of saved states: what it writes is what the run itself exported, to the bit."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from rlhf import artifacts, cli, distributed
from step1_sft import train as sft_program
from step2_reward import train as reward_program
from step3_ppo import train as ppo_program
from tests.stages import ds_json, ppo_config, reward_config, same_weights, sft_config, write_rows, yes_rows

pytestmark = pytest.mark.usefixtures("one_rank")
STATES = {"max_steps": 2, "run__save_every": 2}


def convert(*arguments: Any) -> int:
    return cli.main(["convert", *map(str, arguments)])


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", yes_rows(30))


@pytest.fixture(scope="module")
def base(rows: Path, tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Path:
    folder = tmp_path_factory.mktemp("base")
    sft_program.train(sft_config(folder, rows, **STATES, deepspeed="cpu_zero3"))
    return folder


def test_a_policy_that_started_from_nothing(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its tokenizer is nowhere but in the state; no group is asked for."""
    out = tmp_path / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "world_size", lambda: 1)
        assert convert(base, "--out", out) == 0
    said = capsys.readouterr().out
    assert same_weights(base / "model", out)
    assert f"{out}: policy model OPTForCausalLM" in said and "step 2, 1 ranks, ZeRO-3" in said
    manifest = artifacts.verify(out)
    assert manifest.kind == "policy" and manifest.contract == artifacts.verify(base / "model").contract
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert AutoModelForCausalLM.from_pretrained(out).generation_config.eos_token_id == manifest.contract.stop_token_id


@pytest.mark.parametrize("name", ["cpu_zero0", "cpu_zero3"])
def test_adapters_are_merged(
    base: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    changes = {"model__config": None, "model__path": str(base / "model"), "tokenizer__train_vocab_size": 0}
    lora = {"model__lora__rank": 4, "optim__lr": 5e-2, "deepspeed": ds_json(tmp_path, name, micro_batch_size=4)}
    folder = tmp_path / "lora"
    sft_program.train(sft_config(folder, rows, **STATES, **changes, **lora))
    assert convert(folder / "state" / "step_00000002", "--out", tmp_path / "model") == 0
    assert "adapters of rank 4 merged" in capsys.readouterr().out
    assert same_weights(folder / "model", tmp_path / "model") and not same_weights(base / "model", tmp_path / "model")


def test_reward_model_actor_and_critic(
    base: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward, ppo = tmp_path / "reward", tmp_path / "ppo"
    reward_program.train(reward_config(reward, rows, base=base / "model", **STATES))
    assert convert(reward, "--out", tmp_path / "rm") == 0
    assert same_weights(reward / "model", tmp_path / "rm") and artifacts.verify(tmp_path / "rm").kind == "reward"
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm").config.num_labels == 1
    assert "not normalised" in capsys.readouterr().out
    ppo_program.train(ppo_config(ppo, rows, actor=base / "model", reward=reward / "model", **STATES))
    assert convert(ppo, "--out", tmp_path / "actor") == 0
    assert convert(ppo, "--out", tmp_path / "critic", "--model", "critic") == 0
    assert same_weights(ppo / "model", tmp_path / "actor") and artifacts.verify(tmp_path / "actor").kind == "policy"
    assert same_weights(ppo / "critic", tmp_path / "critic") and artifacts.verify(tmp_path / "critic").kind == "critic"
    assert convert(ppo, "--out", tmp_path / "x", "--model", "policy") == 2
    assert "holds actor, critic" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_what_cannot_be_converted(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An existing folder, no state, a damaged one: one line and exit code 2; nothing is written."""
    (tmp_path / "there").mkdir()
    assert convert(base, "--out", tmp_path / "there") == 2
    assert "exists. Remove it" in capsys.readouterr().err
    (tmp_path / "empty" / "state").mkdir(parents=True)
    assert convert(tmp_path / "empty", "--out", tmp_path / "x") == 2
    assert "holds no intact state" in capsys.readouterr().err
    state = base / "state" / "step_00000002"
    victim = next((state / "policy").iterdir())
    content = victim.read_bytes()
    try:
        victim.write_bytes(content[:-1])
        assert convert(state, "--out", tmp_path / "x") == 2
        assert "is truncated" in capsys.readouterr().err and not (tmp_path / "x").exists()
    finally:
        victim.write_bytes(content)
