"""Model folders in one process without a group; from ranks: tests/distributed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from rlhf.model_folder import save_model_folder

VOCAB = 40
SIZES: dict[str, dict[str, Any]] = {
    "opt": {"hidden_size": 16, "word_embed_proj_dim": 8, "ffn_dim": 20, "do_layer_norm_before": False},  # 350M's kind
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "bloom": {"hidden_size": 16, "n_layer": 2, "n_head": 2},
    "gpt_neox": {"hidden_size": 16, "intermediate_size": 20},
    "llama": {"hidden_size": 16, "intermediate_size": 20, "num_key_value_heads": 1},
    "qwen2": {"hidden_size": 16, "intermediate_size": 20, "num_key_value_heads": 1, "tie_word_embeddings": True},
}


def tiny(family: str, auto_class: Any = AutoModelForCausalLM, **fields: Any) -> Any:
    common = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32, "vocab_size": VOCAB}
    common |= {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": None}
    config = AutoConfig.for_model(family, **{**common, **SIZES[family], **fields})
    torch.manual_seed(0)
    return auto_class.from_config(config)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {f"w{i}": i for i in range(VOCAB)}
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "w0")), eos_token="w2", pad_token="w2"
    )
    made.chat_template = "{{ messages[0].content }}"
    return made


@pytest.mark.parametrize("family", sorted(SIZES))
def test_round_trip_of_each_family(family: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """E12, A27: the same logits from the folder alone; its name says another architecture than its config."""
    folder = tmp_path / "llama-team" / "bloom"
    model = tiny(family).eval()
    save_model_folder(model, model.state_dict(), tokenizer, folder, stop_token_id=7)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    token_ids_BT = torch.tensor([[5, 9, 7, 33]])
    assert torch.equal(loaded(token_ids_BT).logits, model(token_ids_BT).logits)
    assert loaded.generation_config.eos_token_id == 7 and loaded.generation_config.pad_token_id == 2
    again = AutoTokenizer.from_pretrained(folder)
    assert again.chat_template == tokenizer.chat_template and again.eos_token_id == 2


def test_a_reward_model_and_bf16(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = tiny("opt", AutoModelForSequenceClassification, num_labels=1).to(torch.bfloat16).eval()
    folder = tmp_path / "model"
    save_model_folder(model, model.state_dict(), tokenizer, folder, stop_token_id=2)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert loaded.dtype == torch.bfloat16 and loaded.config.num_labels == 1
    assert torch.equal(loaded.score.weight, model.score.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.pop("model.layers.0.mlp.up_proj.weight"),
            r"missing \['model.layers.0.mlp.up_proj.weight'\]",
        ),
        (lambda state: state.update(strange=torch.zeros(1)), r"unexpected \['strange'\]"),
        (lambda state: state.update({"model.norm.weight": torch.zeros(0)}), r"model.norm.weight \(0,\) for \(16,\)"),
    ],
)
def test_weights_that_do_not_fit_leave_the_former_folder_alone(
    change: Any, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    model, folder = tiny("llama"), tmp_path / "model"
    save_model_folder(model, model.state_dict(), tokenizer, folder, stop_token_id=2)
    before = (folder / "model.safetensors").read_bytes()
    state = dict(model.state_dict())
    change(state)
    with pytest.raises(ValueError, match=message):
        save_model_folder(model, state, tokenizer, folder, stop_token_id=2)
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_config_that_does_not_describe_the_weights_is_found(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """A24: a config whose vocabulary did not follow the embedding would load with other shapes."""
    model = tiny("llama")
    model.config.vocab_size = VOCAB + 8
    with pytest.raises(ValueError, match=r"wrong shapes .*\(40, 16\) for \(48, 16\)"):
        save_model_folder(model, model.state_dict(), tokenizer, tmp_path / "model", stop_token_id=2)


def test_what_is_read_back_is_compared(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that loses a bit: the folder does not get its name."""
    model = tiny("llama")
    honest = type(model).save_pretrained

    def lossy(self: Any, folder: Path, **kwargs: Any) -> None:
        honest(self, folder, **kwargs)
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"][3] += 1e-6
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    monkeypatch.setattr(type(model), "save_pretrained", lossy)
    with pytest.raises(ValueError, match="model.norm.weight differs from the weights after writing"):
        save_model_folder(model, model.state_dict(), tokenizer, tmp_path / "model", stop_token_id=2)
    assert list(tmp_path.iterdir()) == []


def test_finish_sees_a_complete_folder_under_its_temporary_name(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    def finish(folder: Path) -> None:
        assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
        assert not (tmp_path / "model").exists()
        (folder / "manifest.json").write_text("{}")

    model = tiny("llama")
    save_model_folder(model, model.state_dict(), tokenizer, tmp_path / "model", stop_token_id=2, finish=finish)
    assert (tmp_path / "model" / "manifest.json").read_text() == "{}"
