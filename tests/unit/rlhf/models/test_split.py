"""Which models can be split over how many ranks, and the shares of their weights."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf.models.split import FAMILIES, check_rollout_split
from rlhf.models.tensor_parallel import Shares

LLAMA = {"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("shape", "num_ranks", "message"),
    [
        ({"model_type": "bloom", "n_head": 8}, 2, "tensor_parallel=2: models of model_type bloom cannot be .*opt"),
        (LLAMA, 4, r"the model's 2 key and value heads do not divide over 4 ranks.*Use a divisor of 2"),
        ({"model_type": "gpt2", "n_head": 12}, 8, "the model's 12 attention heads do not divide over 8 ranks"),
        ({"model_type": "opt", "num_attention_heads": 4, "ffn_dim": 6}, 4, "the model's 6 hidden units do not divide"),
    ],
)
def test_what_cannot_be_split_is_refused(shape, num_ranks, message):
    with pytest.raises(ValueError, match=message):
        check_rollout_split(shape, num_ranks)


def test_what_can_be_split():
    check_rollout_split(LLAMA, 2)
    check_rollout_split({"model_type": "gpt2", "n_head": 12, "n_inner": None}, 4)


def test_shares_worked_by_hand():
    """GPT-2, 2 heads of 2, over 2 ranks: queries 0-3, keys 4-7, values 8-11 of the fused layer's outputs."""
    config = AutoConfig.for_model("gpt2", n_embd=4, n_head=2, n_layer=1, vocab_size=5)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    block = "transformer.h.0."
    outputs_IO = torch.arange(12.0).expand(4, 12)  # as Conv1D keeps it, inputs first
    second = Shares(model, rank=1, size=2)
    assert second.cut(f"{block}attn.c_attn.weight", outputs_IO)[0].tolist() == [2, 3, 6, 7, 10, 11]
    assert second.cut(f"{block}attn.c_attn.bias", torch.arange(12.0)).tolist() == [2, 3, 6, 7, 10, 11]
    inputs_IO = torch.arange(4.0)[:, None].expand(4, 4)
    assert second.cut(f"{block}attn.c_proj.weight", inputs_IO)[:, 0].tolist() == [2, 3]
    assert len(second.cut(f"{block}attn.c_proj.bias", torch.zeros(4))) == 4, "added once, after the sum"
    assert second.cut(f"{block}mlp.c_fc.weight", torch.arange(16.0).expand(4, 16))[0].tolist() == list(range(8, 16))
    # Five tokens: three rows on each rank, the last one of zeros.
    table_VD = torch.arange(1.0, 6.0)[:, None].expand(5, 4)
    assert second.cut("transformer.wte.weight", table_VD)[:, 0].tolist() == [4, 5, 0]
    assert second.cut("lm_head.weight", table_VD)[:, 0].tolist() == [4, 5, 0]
    assert len(second.cut("transformer.wpe.weight", torch.zeros(9, 4))) == 9


def test_fused_layers_of_gpt_neox_are_split_between_heads():
    """Property: the share of a head's query, key and value is what the whole layer gives for that head."""
    config = AutoConfig.for_model(
        "gpt_neox", hidden_size=8, num_attention_heads=4, num_hidden_layers=1, intermediate_size=16, vocab_size=7
    )
    model = AutoModelForCausalLM.from_config(config)
    layer = model.gpt_neox.layers[0].attention.query_key_value
    hidden_1D = torch.randn(1, 8)
    with torch.no_grad():
        whole = layer(hidden_1D).view(4, 3, 2)
        for rank in range(2):
            shares = Shares(model, rank=rank, size=2)
            name = "gpt_neox.layers.0.attention.query_key_value"
            weight, bias = shares.cut(f"{name}.weight", layer.weight), shares.cut(f"{name}.bias", layer.bias)
            share = nn.functional.linear(hidden_1D, weight, bias).view(2, 3, 2)
            torch.testing.assert_close(share, whole[2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_name_of_the_table_is_a_layer(model_type):
    """A layer that transformers renames would silently stay whole."""
    shape = {"num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 8}
    config = AutoConfig.for_model(model_type, hidden_size=32, **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    family = FAMILIES[model_type]
    assert {*family.columns, *family.rows, *family.thirds} <= found
    assert all(any(hasattr(module, number) for module in model.modules()) for number in family.divided)
    # And the other way round: all linear layers are known, but head and (here absent) projections.
    linear = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m).__name__ in ("Linear", "Conv1D")}
    assert linear - {"lm_head", "embed_out"} == {*family.columns, *family.rows, *family.thirds}
