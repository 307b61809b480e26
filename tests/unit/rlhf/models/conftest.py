"""Tiny configs of every family, a tokenizer, and ragged batches."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from rlhf.config import ModelConfig
from rlhf.models.build import build_causal_lm, train_bpe
from rlhf.ops import position_ids_from_mask

OPT = {
    "model_type": "opt",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 32,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": OPT,
    "opt_350m_kind": {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": NEOX,
    "bloom": {"model_type": "bloom", "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "llama": LLAMA,
    "qwen2": {**LLAMA, "model_type": "qwen2", "tie_word_embeddings": True},
}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_bpe(["please answer politely, thank you very much"] * 3, vocab_size=280)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FAMILIES[request.param]


@pytest.fixture
def families() -> dict[str, dict[str, Any]]:
    return FAMILIES


class Make:
    """What tests make: models with livelier weights than the usual 0.02, and padded batches."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def lm(self, config: dict[str, Any], *, seed: int = 1, **options: Any) -> PreTrainedModel:
        spread = {"init_std": 0.2, "initializer_range": 0.2}
        return build_causal_lm(ModelConfig(config={**config, **spread}, **options), self.tokenizer, seed=seed).eval()

    def rows(self, *lengths: int, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(4, len(self.tokenizer), (n,), generator=generator) for n in lengths]

    def pad(self, rows: list[Tensor], *, left: int = 0, right: int = 0, pad_id: int = 2) -> dict[str, Tensor]:
        """Rows of one length each side: right-padded to the longest and `right` more, `left` columns in front."""
        width = max(len(row) for row in rows)
        token_ids_BT = torch.full((len(rows), left + width + right), pad_id)
        mask_BT = torch.zeros_like(token_ids_BT, dtype=torch.bool)
        for b, row in enumerate(rows):
            token_ids_BT[b, left : left + len(row)] = row
            mask_BT[b, left : left + len(row)] = True
        return {
            "token_ids_BT": token_ids_BT,
            "attention_mask_BT": mask_BT,
            "position_ids_BT": position_ids_from_mask(mask_BT),
        }

    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        """All real tokens but each row's first."""
        return batch["attention_mask_BT"] & (batch["position_ids_BT"] > 0)


@pytest.fixture
def make(tokenizer: PreTrainedTokenizerFast) -> Make:
    return Make(tokenizer)
