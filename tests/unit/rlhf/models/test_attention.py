"""Packed rows equal padded ones, in every family that takes them; the others say so."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf.config import ModelConfig
from rlhf.data.collate import collate_preferences, collate_responses
from rlhf.data.dataset import PreferenceRow
from rlhf.models import attention
from rlhf.models.build import build_reward_model
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import ScalarModel, scores_at
from rlhf.ops import to_columns

LLAMA_KIND = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {**LLAMA_KIND, "model_type": "qwen3", "head_dim": 8},
    "mistral": {**LLAMA_KIND, "model_type": "mistral", "sliding_window": None},
    "phi3": {**LLAMA_KIND, "model_type": "phi3", "pad_token_id": 0},
}
PROMPTS = [[9, 5, 7], [8], [12, 6, 6, 9, 30], [7, 8]]
RESPONSES = [[11, 1], [1], [6, 14, 9, 17, 8, 1], [10, 10, 1]]  # 1 is eos and pad


@pytest.fixture
def packable(families: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {**{name: config for name, config in families.items() if name != "bloom"}, **MORE_FAMILIES}


def both_batches() -> list[Any]:
    return [collate_responses(PROMPTS, RESPONSES, pad_id=1, device="cpu", packed=packed) for packed in (True, False)]


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"recompute": "selective"}])
def test_packed_rows_give_the_log_probs_and_gradients_of_padded_ones(
    packable: dict[str, dict[str, Any]], make: Any, options: dict[str, Any]
) -> None:
    assert {config["model_type"] for config in packable.values()} == set(attention.FAMILIES)
    for name, config in packable.items():
        policy = Policy(make.lm({**config, "attention_dropout": 0.0}, dropout=0.0, **options))
        policy.train()
        results: list[tuple[Tensor, dict[str, Tensor]]] = []
        for batch in both_batches():
            policy.zero_grad()
            logprob_BT = policy(**batch.sequences.inputs, target_mask_BT=batch.response_mask_BT).logprob_BT
            logprob_SR = to_columns(logprob_BT, batch.first_response_S, batch.response_length_S, 6)
            (logprob_SR * torch.linspace(0.5, 1.5, logprob_SR.numel()).view_as(logprob_SR)).sum().backward()
            results.append(
                (logprob_SR.detach(), {k: p.grad for k, p in policy.named_parameters() if p.grad is not None})
            )
        (packed, packed_grads), (padded, padded_grads) = results
        torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
        assert packed_grads.keys() == padded_grads.keys() and packed.abs().sum() > 1
        for key, grad in packed_grads.items():
            scale = max(1.0, float(padded_grads[key].abs().max()))
            assert float((grad - padded_grads[key]).abs().max()) < 2e-5 * scale, (name, key)


def test_packed_rows_give_the_scores_of_padded_ones(packable: dict[str, dict[str, Any]], tokenizer: Any) -> None:
    for name, config in packable.items():
        spread = {"init_std": 0.2, "initializer_range": 0.2}
        model = ScalarModel(build_reward_model(ModelConfig(config={**config, **spread}), tokenizer, seed=1).eval())
        packed, padded = (
            scores_at(model(**batch.sequences.inputs), batch.sequences.last_S).detach() for batch in both_batches()
        )
        torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
        assert packed.std() > 1e-3


def test_responses_that_share_a_prompt_score_and_teach_as_padded_rows(
    packable: dict[str, dict[str, Any]], tokenizer: Any
) -> None:
    rows = [
        PreferenceRow(np.array([9, 5, 7, 8]), [np.array(r) for r in ([11, 1], [6, 14, 9, 1], [3])], [2, 1, 0], 0, 0, 0),
        PreferenceRow(np.array([12]), [np.array([1]), np.array([6, 6, 30])], [0, 1], 0, 0, 1),
    ]
    for name, config in packable.items():
        spread = {"init_std": 0.2, "initializer_range": 0.2}
        model = ScalarModel(
            build_reward_model(ModelConfig(config={**config, **spread}, dropout=0.0), tokenizer, seed=1)
        )
        results = []
        for packed in (True, False):
            batch = collate_preferences(rows, pad_id=1, device="cpu", packed=packed)
            model.zero_grad()
            score_S = scores_at(model(**batch.sequences.inputs), batch.sequences.last_S)
            (score_S[batch.chosen_N] - score_S[batch.rejected_N]).square().sum().backward()
            grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
            results.append((score_S.detach(), grads, batch.sequences))
        (packed_S, packed_grads, shared), (padded_S, padded_grads, plain) = results
        assert shared.num_columns == 4 + 7 + 1 + 4 and shared.num_tokens == plain.num_tokens == 3 * 4 + 7 + 2 + 4
        torch.testing.assert_close(packed_S, padded_S, atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
        for key, grad in packed_grads.items():
            scale = max(1.0, float(padded_grads[key].abs().max()))
            assert float((grad - padded_grads[key]).abs().max()) < 2e-5 * scale, (name, key)


def test_samples_of_one_prompt_score_and_teach_as_padded_rows(
    packable: dict[str, dict[str, Any]], make: Any, tokenizer: Any
) -> None:
    """Step 3 with four samples: log-probs, entropies and values before each token, and the gradients of all three."""
    prompts = [[9, 5, 7, 8], [12], [9, 5, 7, 8], [9, 5, 7, 8], [6, 6, 30], [9, 5, 7, 8]]
    responses = [[11, 1], [1], [6, 14, 9, 17, 8, 1], [10], [10, 10, 1], [3, 9, 4, 1]]  # 1 is eos and pad
    spread = {"init_std": 0.2, "initializer_range": 0.2}
    for name, config in packable.items():
        policy = Policy(make.lm({**config, "attention_dropout": 0.0}, dropout=0.0).train())
        critic = ScalarModel(
            build_reward_model(ModelConfig(config={**config, **spread}, dropout=0.0), tokenizer, seed=1)
        )
        results: list[tuple[Tensor, dict[str, Tensor]]] = []
        for packed in (True, False):
            batch = collate_responses(prompts, responses, pad_id=1, device="cpu", packed=packed)
            sequences = batch.sequences
            assert sequences.num_columns == (4 + 1 + 3 + 17 if packed else 6 * 10)
            policy.zero_grad()
            critic.zero_grad()
            output = policy(**sequences.inputs, target_mask_BT=batch.response_mask_BT)
            value_BT = sequences.before(critic(**sequences.inputs))
            found_XSR = torch.stack(
                [
                    to_columns(x_BT, batch.first_response_S, batch.response_length_S, 6)
                    for x_BT in (output.logprob_BT, output.entropy_BT, value_BT)
                ]
            )
            (found_XSR * torch.linspace(0.5, 1.5, found_XSR.numel()).view_as(found_XSR)).sum().backward()
            grads = {
                f"{kind}.{key}": p.grad.clone()
                for kind, model in (("policy", policy), ("critic", critic))
                for key, p in model.named_parameters()
                if p.grad is not None
            }
            results.append((found_XSR.detach(), grads))
        (shared_XSR, shared_grads), (padded_XSR, padded_grads) = results
        torch.testing.assert_close(shared_XSR, padded_XSR, atol=1e-5, rtol=0, msg=lambda m, name=name: f"{name}: {m}")
        assert shared_grads.keys() == padded_grads.keys() and (shared_XSR.abs().sum(dim=(1, 2)) > 1).all()
        for key, grad in shared_grads.items():
            scale = max(1.0, float(padded_grads[key].abs().max()))
            assert float((grad - padded_grads[key]).abs().max()) < 2e-5 * scale, (name, key)


def test_a_sequence_does_not_see_its_neighbours(families: dict[str, dict[str, Any]], make: Any) -> None:
    """Other tokens in the first sequence leave the log-probs of the others as they are, bit for bit."""
    policy = Policy(make.lm(families["llama"]))
    found = []
    for first in ([9, 5, 7], [10, 11, 12]):
        batch = collate_responses([first, *PROMPTS[1:]], RESPONSES, pad_id=1, device="cpu", packed=True)
        with torch.no_grad():
            logprob_BT = policy(**batch.sequences.inputs, target_mask_BT=batch.response_mask_BT).logprob_BT
        found.append(to_columns(logprob_BT, batch.first_response_S, batch.response_length_S, 6))
    assert not torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1:], found[1][1:])


def test_families_without_it_are_known_by_their_config(families: dict[str, dict[str, Any]], make: Any) -> None:
    assert not attention.takes_layout(make.lm(families["bloom"]).config)
    assert not attention.is_installed(make.lm(families["bloom"]))
    assert attention.is_installed(make.lm(families["opt"]))
    assert not attention.is_installed(make.lm(families["opt"], attention="eager"))
    windowed = make.lm({**MORE_FAMILIES["mistral"], "sliding_window": 4})
    assert not attention.takes_layout(windowed.config)
    mixed = make.lm({**LLAMA_KIND, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4,
                     "max_window_layers": 1})  # fmt: skip
    assert not attention.takes_layout(mixed.config)


def test_without_a_layout_it_is_transformers_sdpa(families: dict[str, dict[str, Any]], make: Any) -> None:
    model = make.lm(families["opt"])
    batch = make.pad(make.rows(5, 1, 9), left=2)
    arguments = {"input_ids": batch["token_ids_BT"], "attention_mask": batch["attention_mask_BT"]}
    ours = model(**arguments).logits
    model.set_attn_implementation("sdpa")
    assert torch.equal(ours, model(**arguments).logits)
