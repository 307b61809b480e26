import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from rlhf.config import LoRAConfig, ModelConfig
from rlhf.models import build

POLITE = build.train_bpe(["please answer politely"], vocab_size=270)
OPT_TOKENIZER = Path(__file__).parents[4].parent / "shared" / "data" / "opt-tokenizer"


@pytest.fixture(scope="session")
def larger_tokenizer() -> PreTrainedTokenizerFast:
    texts = ["the quick brown fox jumps over the lazy dog while many other animals watch"] * 3
    return build.train_bpe(texts, vocab_size=300)


def rewrite(folder: Path, **changes: Any) -> None:
    """Change the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Random weights


def test_random_weights_are_a_function_of_the_seed(family: dict[str, Any], tokenizer: Any):
    torch.manual_seed(77)
    before = torch.get_rng_state()
    first, again, other = (
        build.build_causal_lm(ModelConfig(config=family), tokenizer, seed=seed).state_dict() for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_random_weights_have_the_familys_spread(family: dict[str, Any], tokenizer: Any):
    model = build.build_causal_lm(ModelConfig(config=family), tokenizer, seed=1)
    assert 0.015 < model.get_input_embeddings().weight.std() < 0.025
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert parameter.eq(0 if name.endswith("bias") else 1).all(), name
        else:
            assert 0.005 < parameter.std() < 0.03, name


def test_the_vocabulary_of_a_new_model_is_the_tokenizers_or_the_configs_if_larger(families: Any, tokenizer: Any):
    for vocab_size, expected in ((None, len(tokenizer)), (10, len(tokenizer)), (512, 512)):
        config = {**families["opt"], **({"vocab_size": vocab_size} if vocab_size else {})}
        model = build.build_causal_lm(ModelConfig(config=config), tokenizer, seed=1)
        assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == expected


def test_special_ids_of_a_new_model_are_the_tokenizers(families: Any, tokenizer: Any):
    model = build.build_causal_lm(ModelConfig(config=families["opt"]), tokenizer, seed=1)
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, 1, 2)


def test_weights_are_in_the_asked_type(families: Any, tokenizer: Any):
    model = build.build_causal_lm(ModelConfig(config=families["llama"], dtype="bfloat16"), tokenizer, seed=1)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# Loading


def test_a_saved_model_loads_with_equal_weights(family: dict[str, Any], tokenizer: Any, tmp_path: Path):
    model = build.build_causal_lm(ModelConfig(config=family), tokenizer, seed=1)
    model.save_pretrained(tmp_path)
    loaded = build.build_causal_lm(ModelConfig(path=str(tmp_path)), tokenizer, seed=2)
    assert type(loaded) is type(model)
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())


def test_a27_the_architecture_is_the_configs_never_the_paths(families: Any, tokenizer: Any, tmp_path: Path):
    folder = tmp_path / "llama-team" / "bloom"
    build.build_causal_lm(ModelConfig(config=families["opt"]), tokenizer, seed=1).save_pretrained(folder)
    assert build.build_causal_lm(ModelConfig(path=str(folder)), tokenizer, seed=1).config.model_type == "opt"


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
@pytest.mark.parametrize("make_model", [build.build_causal_lm, build.build_reward_model])
def test_loading_is_strict_and_names_the_keys(
    families: Any, tokenizer: Any, tmp_path: Path, change: str, make_model: Any
):
    make_model(ModelConfig(config=families["llama"]), tokenizer, seed=1).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    key = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del weights[key]
    elif change == "unexpected":
        key = "model.layers.7.mlp.up_proj.weight"
        weights[key] = torch.zeros(2, 2)
    else:
        weights[key] = weights[key][:-1].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"do not fit its config.json"):
        make_model(ModelConfig(path=str(tmp_path)), tokenizer, seed=1)


@pytest.mark.parametrize("make_model", [build.build_causal_lm, build.build_reward_model])
def test_a_missing_folder_config_or_weight_file_is_named(
    families: Any, tokenizer: Any, tmp_path: Path, make_model: Any
):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        make_model(ModelConfig(path=str(tmp_path / "absent")), tokenizer, seed=1)
    with pytest.raises(FileNotFoundError, match="no model config"):
        make_model(ModelConfig(path=str(tmp_path)), tokenizer, seed=1)
    AutoConfig.for_model(**families["opt"]).save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no weights could be loaded"):
        make_model(ModelConfig(path=str(tmp_path)), tokenizer, seed=1)


def test_an_encoder_decoder_is_refused(tokenizer: Any):
    """A16: padding and positions here are those of a decoder."""
    with pytest.raises(ValueError, match="decoder-only"):
        build.build_causal_lm(ModelConfig(config={"model_type": "t5"}), tokenizer, seed=1)


# Vocabulary


def test_a24_vocabulary_grows_with_the_tokenizer_and_the_config_follows(
    family: dict[str, Any], tokenizer: Any, larger_tokenizer: Any, tmp_path: Path
):
    """F20: tokenizer and model from different places. Old rows and old logits stay."""
    model = build.build_causal_lm(ModelConfig(config=family), tokenizer, seed=1).eval()
    model.save_pretrained(tmp_path)
    old, new = len(tokenizer), len(larger_tokenizer)
    assert old < new
    grown = build.build_causal_lm(ModelConfig(path=str(tmp_path)), larger_tokenizer, seed=1).eval()
    assert grown.config.vocab_size == grown.get_input_embeddings().num_embeddings == new
    assert grown.get_output_embeddings().weight.shape[0] == grown.get_output_embeddings().out_features == new
    ids = torch.tensor([[0, 5, 6, 9]])
    assert torch.allclose(grown(input_ids=ids).logits[..., :old], model(input_ids=ids).logits, atol=1e-6)
    assert grown(input_ids=torch.tensor([[0, new - 1]])).logits.shape == (1, 2, new)
    assert grown.get_input_embeddings().weight[old:].std() < 0.1
    reward = build.build_reward_model(ModelConfig(path=str(tmp_path)), larger_tokenizer, seed=1)
    assert reward.config.vocab_size == reward.get_input_embeddings().num_embeddings == new


def test_vocabulary_never_shrinks(families: Any, tokenizer: Any, larger_tokenizer: Any, tmp_path: Path):
    build.build_causal_lm(ModelConfig(config=families["opt"]), larger_tokenizer, seed=1).save_pretrained(tmp_path)
    model = build.build_causal_lm(ModelConfig(path=str(tmp_path)), tokenizer, seed=1)
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == len(larger_tokenizer)


def test_a_tokenizer_with_holes_counts_to_its_largest_id(tokenizer: Any):
    class Holes:
        def __len__(self) -> int:
            return 3

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 1, "c": 9}

    assert build.vocabulary_size(Holes()) == 10  # type: ignore[arg-type]
    assert build.vocabulary_size(tokenizer) == len(tokenizer)


# Reward models


def test_c19_a_new_head_is_finite_in_its_band_and_announced(
    family: dict[str, Any], tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    build.build_causal_lm(ModelConfig(config=family), tokenizer, seed=1).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="rlhf.models.build"):
        first = build.build_reward_model(ModelConfig(path=str(tmp_path)), tokenizer, seed=1)
    assert "new one starts from random weights" in caplog.text
    weight = first.score.weight.detach()
    assert weight.isfinite().all()
    assert weight.std() * math.sqrt(weight.shape[-1] + 1) == pytest.approx(1, abs=0.4)
    again, other = (build.build_reward_model(ModelConfig(path=str(tmp_path)), tokenizer, seed=s) for s in (1, 2))
    assert torch.equal(weight, again.score.weight) and not torch.equal(weight, other.score.weight)


def test_c21_an_existing_reward_model_keeps_its_head(
    family: dict[str, Any], tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    model = build.build_reward_model(ModelConfig(config=family), tokenizer, seed=1).eval()
    model.save_pretrained(tmp_path)
    caplog.clear()
    ids = torch.tensor([[0, 5, 6, 9, 1]])
    for seed in (2, 3):
        loaded = build.build_reward_model(ModelConfig(path=str(tmp_path)), tokenizer, seed=seed).eval()
        assert torch.equal(loaded.score.weight, model.score.weight)
        # Loaded weights may lie at other addresses, which changes the order of sums.
        assert torch.allclose(loaded(input_ids=ids).logits, model(input_ids=ids).logits, rtol=1e-4, atol=1e-6)
    assert not [record for record in caplog.records if "reward head" in record.getMessage()]


def test_a_reward_model_whose_head_is_gone_is_refused_and_so_is_a_classifier(
    families: Any, tokenizer: Any, tmp_path: Path
):
    build.build_reward_model(ModelConfig(config=families["opt"]), tokenizer, seed=1).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing \['score.weight'\]"):
        build.build_reward_model(ModelConfig(path=str(tmp_path)), tokenizer, seed=1)
    rewrite(tmp_path, id2label={"0": "a", "1": "b", "2": "c"}, label2id={"a": 0, "b": 1, "c": 2})
    with pytest.raises(ValueError, match="classifier with 3 labels"):
        build.build_reward_model(ModelConfig(path=str(tmp_path)), tokenizer, seed=1)


def test_a_reward_model_is_no_policy(families: Any, tokenizer: Any, tmp_path: Path):
    build.build_reward_model(ModelConfig(config=families["opt"]), tokenizer, seed=1).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a reward model"):
        build.build_causal_lm(ModelConfig(path=str(tmp_path)), tokenizer, seed=1)


# Set-up


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("opt", ["dropout", "attention_dropout"]),
        ("gpt2", ["resid_pdrop", "embd_pdrop", "attn_pdrop"]),
        ("gpt_neox", ["attention_dropout", "hidden_dropout"]),
        ("bloom", ["hidden_dropout", "attention_dropout"]),
        ("llama", ["attention_dropout"]),
    ],
)
def test_dropout_sets_every_probability(families: Any, tokenizer: Any, name: str, fields: list[str]):
    batch = torch.tensor([[0, 5, 6, 9, 8, 12]])
    for dropout in (0.3, 0.0):
        model = build.build_causal_lm(ModelConfig(config=families[name], dropout=dropout), tokenizer, seed=1).train()
        assert [getattr(model.config, field) for field in fields] == [dropout] * len(fields)
        assert torch.equal(model(input_ids=batch).logits, model(input_ids=batch).logits) == (dropout == 0)


def test_dropout_null_keeps_the_models_own_and_layerdrop_goes(families: Any, tokenizer: Any):
    config = {**families["opt"], "dropout": 0.2, "layerdrop": 0.5}
    kept = build.build_causal_lm(ModelConfig(config=config), tokenizer, seed=1).config
    assert (kept.dropout, kept.layerdrop) == (0.2, 0.5)
    changed = build.build_causal_lm(ModelConfig(config=config, dropout=0.1), tokenizer, seed=1).config
    assert (changed.dropout, changed.layerdrop) == (0.1, 0.0)


def test_a_family_without_sdpa_uses_eager(families: Any, tokenizer: Any):
    attention = {
        name: build.build_causal_lm(ModelConfig(config=families[name]), tokenizer, seed=1).config._attn_implementation
        for name in ("bloom", "opt")
    }
    assert attention == {"bloom": "eager", "opt": "rlhf"}, "rlhf is sdpa, and takes layouts"


def test_rows_have_to_fit_the_models_positions(family: dict[str, Any]):
    config = AutoConfig.for_model(**family)
    build.check_length_fits(config, 64)
    if family["model_type"] == "bloom":  # ALiBi has no last position
        build.check_length_fits(config, 10**6)
    else:
        with pytest.raises(ValueError, match=r"rows of 65 tokens .*=64.*max_prompt_tokens"):
            build.check_length_fits(config, 65)


def test_adapters_are_added_where_asked(families: Any, tokenizer: Any):
    cfg = ModelConfig(config=families["opt"], lora=LoRAConfig(rank=2))
    model = build.build_causal_lm(cfg, tokenizer, seed=1)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    again = build.build_causal_lm(cfg, tokenizer, seed=1)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))


# Tokenizers


def test_bpe_training_is_deterministic(tokenizer: Any):
    texts = ["a b ab abc", "abc bcd cde", "x y z xy yz", "\n\nHuman: hi\n\nAssistant: hello"] * 2
    first, again = (build.train_bpe(texts, vocab_size=290) for _ in range(2))
    assert first.backend_tokenizer.to_str() == again.backend_tokenizer.to_str()
    assert build.tokenizer_fingerprint(first) == build.tokenizer_fingerprint(again)
    assert build.tokenizer_fingerprint(first) != build.tokenizer_fingerprint(tokenizer)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_bpe_round_trips_any_text(text: str):
    tokenizer = POLITE
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert not {0, 1, 2, 3} & set(ids[1:])
    assert tokenizer.decode(ids[1:]) == tokenizer.decode(ids, skip_special_tokens=True) == text


def test_names_of_special_tokens_in_a_text_are_plain_characters(tokenizer: Any):
    text = "stop <eos> <pad><bos>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert not {0, 1, 2, 3} & set(ids)
    assert tokenizer.decode(ids) == text


def test_bpe_ids_and_size(tokenizer: Any):
    ids = [tokenizer.convert_tokens_to_ids(t) for t in ("<bos>", "<eos>", "<pad>", "<unk>")]
    assert ids == [0, 1, 2, 3]
    assert len(tokenizer) <= 280
    with pytest.raises(ValueError, match="at least 260"):
        build.train_bpe(["a"], vocab_size=259)


def test_f19_a_saved_tokenizer_loads_alone_and_does_the_same(tokenizer: Any, tmp_path: Path):
    tokenizer.save_pretrained(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    for loaded in (build.load_tokenizer(str(tmp_path / "b")), AutoTokenizer.from_pretrained(tmp_path / "b")):
        assert build.tokenizer_fingerprint(loaded) == build.tokenizer_fingerprint(tokenizer)
        text = "a <eos> b \u4f60\u597d"
        assert loaded(text).input_ids == tokenizer(text).input_ids
        assert loaded.decode(loaded(text).input_ids, skip_special_tokens=True) == text
        assert (loaded.bos_token_id, loaded.eos_token_id, loaded.pad_token_id) == (0, 1, 2)


def test_f19_a_folder_without_tokenizer_files_is_refused_and_its_name_or_path_not_followed(
    tokenizer: Any, tmp_path: Path
):
    tokenizer.save_pretrained(tmp_path / "original")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "opt", "_name_or_path": str(tmp_path / "original")}))
    with pytest.raises(FileNotFoundError, match=r"model has no vocabulary|no tokenizer could be loaded"):
        build.load_tokenizer(str(folder))
    with pytest.raises(FileNotFoundError, match="no such folder"):
        build.load_tokenizer(str(tmp_path / "absent"))


def test_a_tokenizer_without_pad_pads_with_eos_and_without_eos_is_refused(tokenizer: Any, tmp_path: Path):
    backend = tokenizer.backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path / "no_pad")
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>").save_pretrained(tmp_path / "no_eos")
    assert build.load_tokenizer(str(tmp_path / "no_pad")).pad_token_id == 1
    with pytest.raises(ValueError, match="no eos token"):
        build.load_tokenizer(str(tmp_path / "no_eos"))


def test_fingerprints_tell_apart_what_numbers_or_splits_differently(tokenizer: Any):
    def variant(**options: Any) -> str:
        tokens = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
        return build.tokenizer_fingerprint(
            PreTrainedTokenizerFast(
                tokenizer_object=tokenizer.backend_tokenizer, split_special_tokens=True, **{**tokens, **options}
            )
        )

    same = build.tokenizer_fingerprint(tokenizer)
    assert variant() == same
    assert variant(pad_token="<eos>") == same  # no model reads the pad id
    assert variant(padding_side="left") == same
    assert variant(eos_token="<unk>") != same


@pytest.mark.skipif(not OPT_TOKENIZER.is_dir(), reason=f"the OPT tokenizer is not at {OPT_TOKENIZER}")
def test_the_opt_tokenizer(tmp_path: Path):
    tokenizer = build.load_tokenizer(str(OPT_TOKENIZER))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 2, 1, 50265)
    assert tokenizer("hi there").input_ids[0] == 2
    text = "H\u00e9llo  w\u00f6rld\n\n \u4f60\u597d \t end "
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text
    tokenizer.save_pretrained(tmp_path)
    assert build.tokenizer_fingerprint(build.load_tokenizer(str(tmp_path))) == build.tokenizer_fingerprint(tokenizer)
