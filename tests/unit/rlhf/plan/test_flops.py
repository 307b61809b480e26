"""FLOPs: worked by hand, and against PyTorch's own counter on real models of every family."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.plan import flops
from rlhf.plan.shapes import Shape, shape_of

BASE = {"vocab_size": 40, "max_position_embeddings": 32}
USUAL = {**BASE, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {**USUAL, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "opt projected": {**USUAL, "ffn_dim": 24, "word_embed_proj_dim": 8},
    "gpt2": {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 4},
    "gpt_neox": {**USUAL, "intermediate_size": 24},
    "llama": {**USUAL, "intermediate_size": 24, "num_key_value_heads": 2},
    "qwen2": {**USUAL, "intermediate_size": 24, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "bloom": {"vocab_size": 40, "hidden_size": 16, "n_layer": 3, "n_head": 4},
}
ROWS, LENGTH = 2, 7


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_pytorchs_counter(name: str) -> None:
    """Forward, and forward with backward, rows without padding through a plain kernel, which computes all pairs."""
    family = name.split()[0]
    config = AutoConfig.for_model(family, **FAMILIES[name])
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config)
    token_ids_BT = torch.randint(5, 40, (ROWS, LENGTH))
    expected = ROWS * flops.forward(shape_of(config.to_dict()), LENGTH, targets=LENGTH, causal=False)
    with FlopCounterMode(display=False) as counter:
        loss = model(input_ids=token_ids_BT).logits.float().sum()
        forward = counter.get_total_flops()
        loss.backward()
    assert forward == expected
    assert counter.get_total_flops() == flops.TRAINING * expected


SMALL = Shape(
    layers=1, hidden=4, heads=2, kv_heads=1, head_size=2, intermediate=8, mlp_matrices=3, embedding=4, vocabulary=10
)


def test_worked_by_hand() -> None:
    """Per token: q and out 2 x 16, k and v 2 x 8, three matrices of 32: 144 multiply-adds. Per pair: 2 x 4."""
    assert SMALL.linear_per_token == 288
    assert SMALL.attention_per_pair == 16
    assert SMALL.head_per_token == 80
    # Three tokens: 6 pairs at or below the diagonal, 9 in all.
    assert flops.forward(SMALL, 3, targets=2) == 3 * 288 + 6 * 16 + 2 * 80
    assert flops.forward(SMALL, 3, causal=False) == 3 * 288 + 9 * 16


def test_rows_of_each_kind() -> None:
    def forward(length: float, targets: float = 0) -> float:
        return length * 288 + length * (length + 1) / 2 * 16 + targets * 80

    assert flops.sft_row(SMALL, 2, 3) == 3 * forward(5, 3)
    assert flops.preference_row(SMALL, 2, 3, 1) == 3 * (forward(5) + forward(3))
    assert flops.rollout_row(SMALL, 2, 1) == forward(2, 1)  # a response of one token: the prompt alone is read
    one_epoch = forward(4, 3) + forward(5, 3) + 2 * forward(5) + 3 * (forward(5, 3) + forward(5))
    assert flops.ppo_row(SMALL, SMALL, 2, 3) == one_epoch
    assert flops.ppo_row(SMALL, SMALL, 2, 3, epochs=2) == one_epoch + 3 * (forward(5, 3) + forward(5))


def test_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match=r"model_type='t5' has no FLOP count. Use one of opt, gpt2"):
        shape_of({"model_type": "t5"})


def test_lora_and_recomputation() -> None:
    """Adapters of rank 1 on SMALL: q and out 2 x 8, k and v 2 x 6, three of 12: 64 weights."""
    assert SMALL.lora_parameters(1) == 64
    plain = flops.sft_row(SMALL, 2, 3)
    assert flops.sft_row(SMALL, 2, 3, lora=1) == plain - 5 * 288 + 3 * 2 * 64 * 5
    assert flops.recomputed(SMALL, 3, "none") == 0
    assert flops.recomputed(SMALL, 3, "selective", on_chip=False) == 6 * 16
    assert flops.recomputed(SMALL, 3, "selective") == 3 * 288 / 2
    assert flops.recomputed(SMALL, 3, "full") == 6 * 16 + 3 * 288
