"""Tiny random models of each family, with logits spread enough that sampling is varied and greedy ties are rare."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf.models import attention

VOCAB_SIZE = 97
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "dropout": 0.3},
    # The 350M kind: norm after the block, projected embeddings.
    "opt_post_norm": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
        "dropout": 0.3,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.3, "attn_pdrop": 0.3, "embd_pdrop": 0.3},
    "gpt_neox": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.3, "attention_dropout": 0.3},
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "attention_dropout": 0.3,
    },
    "qwen2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
        "attention_dropout": 0.3,
    },
}


@pytest.fixture
def tiny_model() -> Callable[..., PreTrainedModel]:
    def build(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
        torch.manual_seed(seed)
        shape = {"vocab_size": VOCAB_SIZE, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1}
        if family != "bloom":  # ALiBi has no last position
            shape["max_position_embeddings"] = 64
        shape.update(FAMILIES[family], **changes)
        # As models.build does: the attention that takes a layout, where the family allows it.
        attention.register()
        config = AutoConfig.for_model(family.removesuffix("_post_norm"), **shape)
        if "attn_implementation" not in changes and attention.takes_layout(config):
            config._attn_implementation = attention.NAME
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.mul_(4)
        return model

    return build


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)
