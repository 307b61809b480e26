"""Resumable state and model folders on two ranks."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from rlhf import distributed, engine
from rlhf.engine import TrainEngine
from rlhf.model_folder import save_model_folder
from rlhf.states import StateError, read_record
from rlhf.universal import weights_of
from tests.distributed.harness import Ranks
from tests.distributed.tiny import (
    EOS,
    VOCAB,
    engine_of,
    loss_sum,
    micro_batches,
    steps_of_rows,
    tiny_opt,
    train_step,
)
from tests.saving import Counter, TinyRun, checkpoints, resume, save

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
        part = Counter(7)
        written = checkpoints(TinyRun(where, save_async=bf16), {"policy": first}, part=part)
        written.save(2)
        saved_state = first.full_state_dict()
        part.value = 8  # training goes on while an asynchronous state is on its way
        expected, expected_state = trained_losses(first, steps[2:]), first.full_state_dict()
        written.wait()
        torch.manual_seed(99)
        second = dropout_engine(name, changes)
        part.value = 0
        checkpoints(TinyRun(where, resume=True), {"policy": second}, part=part).resume()
        assert part.value == 7 and second.step_count == 2
        found, found_state = trained_losses(second, steps[2:]), second.full_state_dict()
        same = expected_state is None or all(torch.equal(expected_state[k], found_state[k]) for k in expected_state)
        same = same and (saved_state is None or read_alone(where / "state" / "step_00000002", saved_state))
        seen.append((case, found == expected, same))
    return seen


def turn_back_job(folder: str) -> list[tuple[str, bool, bool]]:
    """Two steps, a save, two others, one whose loss is no number; then back to the state, and the two again."""
    engine.setup(timeout_seconds=60)
    seen = []
    steps = steps_of_rows(4)
    for name, bf16 in itertools.product(STAGES, (False, True)):
        case = f"{name} {'bf16' if bf16 else 'fp32'}"
        torch.manual_seed(5)
        trained = dropout_engine(name, {"bf16": {"enabled": bf16}})
        trained_losses(trained, steps[:2])
        written = checkpoints(TinyRun(Path(folder) / case, resume=True), {"policy": trained})
        written.save(2)
        expected, expected_state = trained_losses(trained, steps[2:]), trained.full_state_dict()
        with written.guarded(5):
            loss = loss_sum(trained, micro_batches(steps[0], 1)[0])
            trained.accumulate(loss * (float("nan") if distributed.rank() == 1 else 1.0), count=9, last=True)
            trained.step()
            raise AssertionError("a loss that is not finite went through")
        written.resume()
        assert trained.step_count == 2
        found, found_state = trained_losses(trained, steps[2:]), trained.full_state_dict()
        same = expected_state is None or all(torch.equal(expected_state[k], found_state[k]) for k in expected_state)
        seen.append((case, found == expected, same))
    return seen


def test_an_engine_is_taken_back_to_a_state_bit_by_bit(ranks: Ranks, tmp_path: Path) -> None:
    """D20: also after a loss that was no number on one rank, whose gradients lie about; at every stage."""
    for case, same_losses, same_weights in ranks(turn_back_job, folder=str(tmp_path), timeout=120)[0]:
        assert same_losses and same_weights, case


def read_alone(state: Path, expected: dict[str, torch.Tensor]) -> bool:
    """Whether one rank reads the trained weights out of all ranks' files, by whole names and shapes."""
    layout = read_record(state)["engines"]["policy"]
    found = weights_of(state / "policy", layout)
    return found.keys() <= expected.keys() and all(
        torch.equal(weight.to(expected[name].dtype), expected[name]) for name, weight in found.items()
    )


def test_resume_is_bit_exact_at_every_stage(ranks: Ranks, tmp_path: Path) -> None:
    """F12, F13: weights, optimiser, schedule, step count and generators; losses, norms and rates equal to the bit."""
    for case, same_losses, same_weights in ranks(resume_job, folder=str(tmp_path), timeout=120)[0]:
        assert same_losses and same_weights, case


RESHAPES = [
    ("cpu_zero0", "cpu_zero0"), ("cpu_zero1", "cpu_zero1"), ("cpu_zero2", "cpu_zero2"), ("cpu_zero3", "cpu_zero3"),
    ("cpu_zero0", "cpu_zero2"), ("cpu_zero2", "cpu_zero3"), ("cpu_zero3", "cpu_zero1"), ("cpu_zero3", "cpu_zero0"),
    ("cpu_zero2", "cpu_zero0"), ("cpu_zero0", "cpu_zero3"), ("cpu_zero1", "cpu_zero2"),
]  # fmt: skip
TYPES = {"fp32": {"bf16": {"enabled": False}}, "bf16": {"bf16": {"enabled": True}}}


def decayed(name: str, seed: int, dtype: str) -> TrainEngine:
    """Two groups, of which only one decays, and a schedule: what a careless conversion loses."""
    return engine_of(
        tiny_opt(seed=seed), name, changes=TYPES[dtype], weight_decay=0.1, schedule="cosine", clip_norm=0.5
    )


def save_job(folder: str, names: list[str], dtype: str = "fp32") -> dict[str, Any]:
    """Two steps, a save, two more; what those two were."""
    engine.setup(timeout_seconds=60)
    after = {}
    for name in names:
        trained = decayed(name, 0, dtype)
        trained_losses(trained, steps_of_rows(4)[:2])
        save(f"{folder}/{name}", {"policy": trained}, step=2)
        after[name] = trained_losses(trained, steps_of_rows(4)[2:])
    return after


def load_job(folder: str, pairs: list[tuple[str, str]], dtype: str = "fp32", **config: Any) -> dict[Any, Any]:
    engine.setup(timeout_seconds=60)
    after = {}
    for saved, name in pairs:
        trained = decayed(name, 8, dtype)
        resume(f"{folder}/{saved}", {"policy": trained}, **config)
        assert trained.step_count == 2
        after[saved, name] = trained_losses(trained, steps_of_rows(4)[2:])
        assert not list(Path(folder).glob("*/state/.*")), "nothing of the conversion is left"
    return after


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_e20_another_number_of_ranks_and_another_zero_stage(
    ranks: Ranks, tmp_path: Path, sizes: tuple[int, int], dtype: str
) -> None:
    """E20: 2 -> 1 and 1 -> 2 ranks, within and across stages: losses, norms, rates of the next steps, to rounding."""
    folder, names = str(tmp_path), [f"cpu_zero{stage}" for stage in range(4)]
    expected = ranks(save_job, world_size=sizes[0], folder=folder, names=names, dtype=dtype)[0]
    found = ranks(load_job, world_size=sizes[1], folder=folder, pairs=RESHAPES, dtype=dtype, timeout=120)[0]
    tolerance = 2e-6 if dtype == "fp32" else 4e-3
    for (saved, name), after in found.items():
        assert torch.allclose(torch.tensor(after), torch.tensor(expected[saved]), rtol=tolerance, atol=tolerance), (
            saved, name, after, expected[saved],
        )  # fmt: skip


def test_weights_alone(ranks: Ranks, tmp_path: Path) -> None:
    """The first loss is that of the weights; Adam starts anew, so the second is another; the rate goes on."""
    folder, names = str(tmp_path), ["cpu_zero0", "cpu_zero2", "cpu_zero3"]
    expected = ranks(save_job, folder=folder, names=names)[0]
    pairs = [("cpu_zero0", "cpu_zero3"), ("cpu_zero2", "cpu_zero2"), ("cpu_zero3", "cpu_zero0")]
    found = ranks(load_job, world_size=1, folder=folder, pairs=pairs, resume_weights_only=True)[0]
    for (saved, _), after in found.items():
        assert after[0] == pytest.approx(expected[saved][0], rel=1e-5)
        assert after[1][0] != pytest.approx(expected[saved][1][0], rel=1e-5)
        assert after[1][2] == expected[saved][1][2], "the learning rate"


def refuse_job(folder: str) -> list[str]:
    """What a state says to runs that it does not fit."""
    engine.setup(timeout_seconds=60)
    said = []
    save(folder, {"policy": decayed("cpu_zero2", 0, "fp32")}, step=0)
    attempts: list[tuple[str, dict[str, Any]]] = [
        (folder, {"policy": engine_of(tiny_opt(ffn_dim=40), "cpu_zero2", lr=0.5)}),
        (folder, {"critic": decayed("cpu_zero2", 0, "fp32")}),
        (folder, {"policy": decayed("cpu_zero2", 0, "bf16")}),
        (f"{folder}/nothing", {"policy": decayed("cpu_zero2", 0, "fp32")}),
    ]
    for where, engines in attempts:
        try:
            resume(where, engines, num_steps=9, seed=3)
        except StateError as error:
            said.append(str(error))
    return said


def test_what_does_not_fit_is_listed(ranks: Ranks, tmp_path: Path) -> None:
    """Optimiser, shape, type, length, seed, all in one message, on every rank; and no state at all."""
    both = ranks(refuse_job, folder=str(tmp_path))
    assert both[0] == both[1] and len(both[0]) == 4
    shape, critic, dtype, nothing = both[0]
    for part in (
        "policy.optimiser: lr is", "0.5 in this run", "policy.optimiser: clip_norm is 0.5", "seed is 1 in the state, 3",
        "steps of the run is 10 in the state, 9 in this run", "policy.weights: model.decoder.layers.0.fc1.weight is",
        "[48, 32] in the state, [40, 32] in this run", "Resume with the config that the run began with",
    ):  # fmt: skip
        assert part in shape, (part, shape)
    assert "it holds the models ['policy'], this run trains ['critic']" in critic
    assert 'policy.dtype is "float32" in the state, "bfloat16" in this run' in dtype
    assert nothing.startswith("nothing to resume") and "run.resume=false" in nothing


def folder_job(*, folder: str, name: str, tie: bool) -> float:
    engine.setup(timeout_seconds=60)
    trained = engine_of(tiny_opt(tie_word_embeddings=tie), name, lr=1e-2)
    train_step(trained, steps_of_rows(1)[0])
    finished: list[Path] = []
    save_model_folder(
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
        save_model_folder(trained.module, state, tokenizer(), folder, stop_token_id=EOS)
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
    save_model_folder(trained.module, trained, tokenizer(), folder, stop_token_id=EOS)
    where = Path(folder).parent
    save(where, {"policy": trained}, step=2)
    expected = train_step(trained, steps_of_rows(3)[2])[0]
    torch.manual_seed(1)
    again = engine_of(
        get_peft_model(tiny_opt(), LoraConfig(r=4, target_modules=["q_proj", "fc1"])), "cpu_zero3", lr=1e-2
    )
    resume(where, {"policy": again})
    assert train_step(again, steps_of_rows(3)[2])[0] == expected
    plain = AutoModelForCausalLM.from_pretrained(folder)
    token_ids_BT = torch.tensor([[5, 9, 7, 33]])
    resume(where, {"policy": trained})
    with torch.no_grad(), trained.generation_module() as module:
        return (plain(token_ids_BT).logits - module(token_ids_BT).logits).abs().max().item()


def test_adapters_are_merged_in_the_folder_and_kept_in_the_state(ranks: Ranks, tmp_path: Path) -> None:
    assert max(ranks(lora_folder_job, folder=str(tmp_path / "model"))) < 1e-5
