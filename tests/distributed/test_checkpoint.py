"""Resumable state and model folders on two ranks."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlhf import checkpoint, distributed, engine
from rlhf.engine import TrainEngine
from tests.distributed.harness import Ranks
from tests.distributed.tiny import EOS, VOCAB, engine_of, steps_of_rows, tiny_opt, train_step

STAGES = ["cpu_zero0", "cpu_zero1", "cpu_zero2", "cpu_zero3"]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "w0")), eos_token="w2")


def dropout_engine(name: str, changes: dict[str, Any] | None = None) -> TrainEngine:
    """With dropout, so that a resume that forgets the random generators differs."""
    return engine_of(tiny_opt(dropout=0.1), name, changes=changes, schedule="cosine", warmup_frac=0.2, clip_norm=0.5)


def trained_losses(trained: TrainEngine, steps: list[Any]) -> list[tuple[float, float, float]]:
    results = [train_step(trained, rows, num_micro=2) for rows in steps]
    return [(loss, stats.grad_norm, stats.lr) for loss, stats in results]


def resume_job(folder: str) -> list[tuple[str, bool, bool]]:
    """Four steps, against two, a save, two others, a load into a new engine, and the last two again."""
    engine.setup(timeout_seconds=60)
    seen = []
    steps = steps_of_rows(4)
    for name, bf16 in itertools.product(STAGES, (False, True)):
        case, changes = f"{name} {'bf16' if bf16 else 'fp32'}", {"bf16": {"enabled": bf16}}
        torch.manual_seed(5)
        first = dropout_engine(name, changes)
        trained_losses(first, steps[:2])
        where = Path(folder) / case
        checkpoint.save_state(where, step=2, engines={"policy": first}, state={"position": 7}, keep=2)
        expected, expected_state = trained_losses(first, steps[2:]), first.full_state_dict()
        torch.manual_seed(99)
        second = dropout_engine(name, changes)
        state = checkpoint.load_state(where, engines={"policy": second})
        assert state == {"position": 7} and second.step_count == 2
        found, found_state = trained_losses(second, steps[2:]), second.full_state_dict()
        same = expected_state is None or all(torch.equal(expected_state[k], found_state[k]) for k in expected_state)
        seen.append((case, found == expected, same))
    return seen


def test_resume_is_bit_exact_at_every_stage(ranks: Ranks, tmp_path: Path) -> None:
    """F12, F13: weights, optimiser, schedule, step count and generators; losses, norms and rates equal to the bit."""
    for case, same_losses, same_weights in ranks(resume_job, folder=str(tmp_path), timeout=120)[0]:
        assert same_losses and same_weights, case


def save_job(folder: str, name: str) -> list[tuple[float, float, float]]:
    engine.setup(timeout_seconds=60)
    trained = engine_of(tiny_opt(), name)
    trained_losses(trained, steps_of_rows(3)[:2])
    checkpoint.save_state(folder, step=2, engines={"policy": trained}, state={}, keep=1)
    return trained_losses(trained, steps_of_rows(3)[2:])


def load_job(folder: str, name: str) -> Any:
    engine.setup(timeout_seconds=60)
    trained = engine_of(tiny_opt(seed=8), name)
    try:
        checkpoint.load_state(folder, engines={"policy": trained})
    except (ValueError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return trained_losses(trained, steps_of_rows(3)[2:])


def test_another_number_of_ranks_and_no_state_at_all(ranks: Ranks, tmp_path: Path) -> None:
    """E20: a sharded state says which sizes do not fit, ZeRO-0 loads anywhere; nothing ever starts over in silence."""
    sharded, plain = str(tmp_path / "z3"), str(tmp_path / "z0")
    ranks(save_job, folder=sharded, name="cpu_zero3")
    message = ranks(load_job, world_size=1, folder=sharded, name="cpu_zero3")[0]
    assert "saved on 2 ranks, this run has 1" in message and "Resume on 2 ranks" in message
    assert (
        "ZeRO stages {'policy': 3}, this run has {'policy': 2}" in ranks(load_job, folder=sharded, name="cpu_zero2")[1]
    )
    expected = ranks(save_job, folder=plain, name="cpu_zero0")[0]
    found = ranks(load_job, world_size=1, folder=plain, name="cpu_zero0")[0]
    assert torch.allclose(torch.tensor(found), torch.tensor(expected), atol=2e-6)
    for message in ranks(load_job, folder=str(tmp_path / "nothing"), name="cpu_zero0"):
        assert message.startswith("FileNotFoundError: nothing to resume") and "run.resume=false" in message


def folder_job(*, folder: str, name: str, tie: bool) -> float:
    engine.setup(timeout_seconds=60)
    trained = engine_of(tiny_opt(tie_word_embeddings=tie), name, lr=1e-2)
    train_step(trained, steps_of_rows(1)[0])
    finished: list[Path] = []
    checkpoint.save_model_folder(
        trained.module, trained, tokenizer(), folder, stop_token_id=EOS, finish=finished.append
    )  # fmt: skip
    assert len(finished) == (distributed.rank() == 0)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    token_ids_BT = torch.tensor([[5, 9, 7, 33]])
    with torch.no_grad(), trained.generation_module() as module:
        difference = (loaded(token_ids_BT).logits - module(token_ids_BT).logits).abs().max()
    return float(difference)


@pytest.mark.parametrize("tie", [True, False])
def test_a_model_folder_is_what_was_trained(ranks: Ranks, tmp_path: Path, *, tie: bool) -> None:
    """E12, F19: saved from ZeRO-3 on two ranks, loaded by transformers alone, tokenizer and stop token beside it."""
    folder = tmp_path / "model"
    for _ in range(2):  # the second replaces the first
        assert max(ranks(folder_job, folder=str(folder), name="cpu_zero3", tie=tie)) < 1e-6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    assert AutoTokenizer.from_pretrained(folder).eos_token_id == EOS
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id == EOS


def failing_folder_job(folder: str) -> str:
    """Rank 0 alone fails while it writes."""
    engine.setup(timeout_seconds=60)
    trained = engine_of(tiny_opt(), "cpu_zero3")
    state = trained.full_state_dict()
    if state is not None:
        state["model.decoder.layers.0.fc1.weight"] = state["model.decoder.layers.0.fc1.weight"][:-1]
    try:
        checkpoint.save_model_folder(trained.module, state, tokenizer(), folder, stop_token_id=EOS)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_failed_save_fails_on_every_rank_and_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(failing_folder_job, folder=str(tmp_path / "model"))
    assert first.startswith("ValueError") and "wrong shapes" in first and "layers.0.fc1.weight" in first
    assert second.startswith("RuntimeError") and "failed on rank 0" in second and "wrong shapes" in second
    assert list(tmp_path.iterdir()) == []


def lora_folder_job(folder: str) -> float:
    from peft import LoraConfig, get_peft_model

    engine.setup(timeout_seconds=60)
    torch.manual_seed(1)
    adapted = get_peft_model(tiny_opt(), LoraConfig(r=4, target_modules=["q_proj", "fc1"]))
    trained = engine_of(adapted, "cpu_zero3", lr=1e-2)
    for rows in steps_of_rows(2):
        train_step(trained, rows)
    checkpoint.save_model_folder(trained.module, trained, tokenizer(), folder, stop_token_id=EOS)
    where = Path(folder).parent
    checkpoint.save_state(where, step=1, engines={"policy": trained}, state={}, keep=1)
    expected = train_step(trained, steps_of_rows(3)[2])[0]
    torch.manual_seed(1)
    again = engine_of(
        get_peft_model(tiny_opt(), LoraConfig(r=4, target_modules=["q_proj", "fc1"])), "cpu_zero3", lr=1e-2
    )
    checkpoint.load_state(where, engines={"policy": again})
    assert train_step(again, steps_of_rows(3)[2])[0] == expected
    plain = AutoModelForCausalLM.from_pretrained(folder)
    token_ids_BT = torch.tensor([[5, 9, 7, 33]])
    checkpoint.load_state(where, engines={"policy": trained})
    with torch.no_grad(), trained.generation_module() as module:
        return (plain(token_ids_BT).logits - module(token_ids_BT).logits).abs().max().item()


def test_adapters_are_merged_in_the_folder_and_kept_in_the_state(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks(lora_folder_job, folder=str(tmp_path / "model"))) < 1e-5
