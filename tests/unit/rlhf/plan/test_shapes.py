"""Parameters: worked by hand, and against the models that transformers builds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.plan.shapes import MODELS, Shape, find_shape, gpt, shape_of

BASE = {"vocab_size": 40, "max_position_embeddings": 32}
USUAL = {**BASE, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
CASES: dict[str, dict[str, Any]] = {
    "opt": {**USUAL, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "opt like 350M": {**USUAL, "ffn_dim": 24, "word_embed_proj_dim": 8, "do_layer_norm_before": False},
    "gpt2": {"vocab_size": 40, "n_positions": 32, "n_embd": 16, "n_layer": 3, "n_head": 4},
    "gpt_neox": {**USUAL, "intermediate_size": 24},
    "gpt_neox tied": {**USUAL, "intermediate_size": 24, "tie_word_embeddings": True, "attention_bias": False},
    "llama": {**USUAL, "intermediate_size": 24, "num_key_value_heads": 2},
    "llama biases": {**USUAL, "intermediate_size": 24, "attention_bias": True, "mlp_bias": True, "head_dim": 8},
    "qwen2": {**USUAL, "intermediate_size": 24, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "bloom": {"vocab_size": 40, "hidden_size": 16, "n_layer": 3, "n_head": 4},
}


def built(config: Any) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


@pytest.mark.parametrize("name", CASES)
def test_equals_the_built_model(name: str) -> None:
    config = AutoConfig.for_model(name.split()[0], **CASES[name])
    assert shape_of(config.to_dict()).parameters == built(config)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("opt-350m", {"model_type": "opt", "vocab_size": 50272, "hidden_size": 1024, "num_hidden_layers": 24,
                      "ffn_dim": 4096, "num_attention_heads": 16, "word_embed_proj_dim": 512,
                      "do_layer_norm_before": False}),
        ("opt-13b", {"model_type": "opt", "vocab_size": 50272, "hidden_size": 5120, "num_hidden_layers": 40,
                     "ffn_dim": 20480, "num_attention_heads": 40, "word_embed_proj_dim": 5120}),
        ("llama3-8b", {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
                       "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}),
        ("llama3-405b", {"model_type": "llama", "vocab_size": 128256, "hidden_size": 16384, "num_hidden_layers": 126,
                         "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}),
    ],
)  # fmt: skip
def test_named_models_are_exact(name: str, config: dict[str, Any]) -> None:
    kind = config.pop("model_type")
    assert MODELS[name].parameters == built(AutoConfig.for_model(kind, **config))


def test_published_sizes() -> None:
    """Names say the size; Llama's are published to three digits: 8.03, 70.6 and 405.9 billion."""
    sizes = {"llama3-8b": 8.03, "llama3-70b": 70.55, "llama3-405b": 405.85, "llama2-7b": 6.74, "gpt-1t": 1008.0}
    for name, billions in sizes.items():
        assert MODELS[name].parameters / 1e9 == pytest.approx(billions, rel=1e-3), name
    for name, shape in MODELS.items():
        said = name.rsplit("-", 1)[1]
        billions = float(said[:-1]) * {"m": 1e-3, "b": 1, "t": 1000}[said[-1]]
        assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.08), name


def test_worked_by_hand() -> None:
    """GPT of one layer, hidden 4, two heads, 10 tokens, 3 positions.

    Attention 4 x 16 + biases 12 + 4, MLP 2 x 64 + biases 16 + 4, two norms of 8: 244. Embedding 40 + 12, final norm 8.
    """
    shape = gpt(1, 4, 2, vocabulary=10, positions=3)
    assert shape.layer_parameters == 244
    assert shape.parameters == 244 + 52 + 8
    # Adapters of rank 2: four of 2 x (4 + 4), two of 2 x (4 + 16).
    assert shape.lora_parameters(2) == 4 * 16 + 2 * 40
    assert shape.cache_elements == 2 * 4


def test_a_folder_and_a_file(tmp_path: Path) -> None:
    config = {"model_type": "llama", **CASES["llama"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected: Shape = shape_of(config)
    assert find_shape(str(tmp_path)) == find_shape(str(tmp_path / "config.json")) == expected
    assert find_shape("facebook/opt-13b") == MODELS["opt-13b"]
    assert find_shape("meta-llama/Llama-2-7b-hf") == MODELS["llama2-7b"]


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'opt-14b' is neither a folder"):
        find_shape("opt-14b")
    with pytest.raises(ValueError, match="lacks num_hidden_layers"):
        shape_of({"model_type": "opt", "hidden_size": 4, "num_attention_heads": 2, "vocab_size": 8})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        find_shape(str(tmp_path))
