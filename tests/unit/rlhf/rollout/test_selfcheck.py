"""E4, E5: a decoding path that differs from Hugging Face's is found out, rounding is not."""

import pytest
import torch
from transformers import GenerationConfig

from rlhf.config import LoRAConfig
from rlhf.models.lora import add_lora
from rlhf.rollout.selfcheck import check_greedy, compare_greedy

PROMPTS = [[5, 6, 7, 8, 9], [3], [10, 20, 30]]
ARGUMENTS = {"stop_token_ids": (1, 2, 3), "max_new_tokens": 12, "pad_id": 1}


def reference(model):
    return [
        model.eval()
        .generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=12, eos_token_id=[1, 2, 3], pad_token_id=1
            ),
        )[0, len(prompt) :]
        .tolist()
        for prompt in PROMPTS
    ]


def test_each_family_passes_before_and_after_an_update(tiny_model, family):
    model = tiny_model(family).train()
    for _ in range(2):
        check = check_greedy(model, PROMPTS, **ARGUMENTS)
        assert check.ok and check.mismatch is None, check.message
        assert model.training
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)


def test_weights_of_before_the_update_are_found_out(tiny_model):
    """E4: what a rollout on stale weights would say."""
    stale = tiny_model("opt")
    decoded = reference(stale)
    assert compare_greedy(decoded, stale, PROMPTS, **ARGUMENTS).ok
    updated = tiny_model("opt", seed=1)
    check = compare_greedy(decoded, updated, PROMPTS, **ARGUMENTS)
    assert not check.ok and check.mismatch is not None and check.mismatch.row == 0
    assert check.mismatch.reference == reference(updated)[0][check.mismatch.position]
    assert "prompt 0, response token" in check.message and check.mismatch.gap > 0


def test_the_first_wrong_token_is_named(tiny_model):
    model = tiny_model("gpt2")
    decoded = reference(model)
    row = max(range(3), key=lambda i: len(decoded[i]))
    position = len(decoded[row]) - 1
    right = decoded[row][position]
    decoded[row][position] = 50 if right != 50 else 51
    check = compare_greedy(decoded, model, PROMPTS, **ARGUMENTS)
    assert not check.ok and check.mismatch is not None
    assert (check.mismatch.row, check.mismatch.position, check.mismatch.reference) == (row, position, right)


@pytest.mark.parametrize("change", [lambda row: row[:-1], lambda row: [*row, 7]])
def test_a_response_of_another_length_is_found_out(tiny_model, change):
    """A forced or missing end (D1, D2)."""
    model = tiny_model("llama")
    decoded = reference(model)
    decoded[0] = change(decoded[0])
    check = compare_greedy(decoded, model, PROMPTS, **ARGUMENTS)
    assert not check.ok and check.mismatch is not None and check.mismatch.row == 0
    assert None in (check.mismatch.ours, check.mismatch.reference)


def test_a_near_tie_is_no_mismatch(tiny_model):
    """Two tokens with one embedding have equal logits: either is right, and what follows cannot be compared."""
    model = tiny_model("qwen2")
    first = reference(model)[0][0]
    twin = 60 if first != 60 else 61
    with torch.no_grad():
        model.get_input_embeddings().weight[twin] = model.get_input_embeddings().weight[first]
    decoded = reference(model)
    assert decoded[0][0] in (first, twin)
    decoded[0] = [first + twin - decoded[0][0], 1]
    check = compare_greedy(decoded, model, PROMPTS, **ARGUMENTS)
    assert check.ok and check.num_near_ties == 1 and "near-tie" in check.message
    with torch.no_grad():
        model.get_input_embeddings().weight[twin] *= 0.9
    assert not compare_greedy([[twin, 1], *decoded[1:]], model, PROMPTS, **ARGUMENTS).ok


def test_the_models_own_generation_config_plays_no_part(tiny_model):
    """A repetition penalty in the model folder is not greedy decoding; it is back afterwards."""
    model = tiny_model("gpt2")
    own = GenerationConfig(repetition_penalty=5.0, do_sample=True, top_k=3, eos_token_id=4)
    model.generation_config = own
    assert check_greedy(model, PROMPTS, **ARGUMENTS).ok
    assert model.generation_config is own


def test_no_prompts_is_an_error(tiny_model):
    with pytest.raises(ValueError, match="no prompts"):
        check_greedy(tiny_model("opt"), [], **ARGUMENTS)


def test_adapters_speak(tiny_model):
    """A peft model is decoded with its adapters, by us and by the reference."""
    plain = check_greedy(tiny_model("opt"), PROMPTS, **ARGUMENTS)
    model = add_lora(tiny_model("opt"), LoRAConfig(rank=4))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.5)
    assert plain.ok and check_greedy(model, PROMPTS, **ARGUMENTS).ok
    assert not compare_greedy(reference(tiny_model("opt")), model, PROMPTS, **ARGUMENTS).ok
