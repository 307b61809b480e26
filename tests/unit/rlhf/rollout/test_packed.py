"""Copies of weights in the order of the kernels: the same function, and nothing left of them afterwards."""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlhf.config import LoRAConfig
from rlhf.models.lora import add_lora
from rlhf.rollout import packed
from rlhf.rollout.packed import onednn_multiplies, packed_linears


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    monkeypatch.setattr(packed, "FEWEST_WEIGHTS", 0)


def with_adapters(model, *, bfloat16=False):
    """Adapters that say something, two layers of them with a bias in the base."""
    model = add_lora(model.bfloat16() if bfloat16 else model, LoRAConfig(rank=4, alpha=6))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.tensor([[5, 6, 7, 8, 9], [1, 1, 3, 2, 0]])).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 3, 200])
def test_layers_compute_what_they_computed(dtype, num_rows):
    """Oracle: float64. Linear with and without bias, Conv1D, any number of leading dimensions."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(17, 40), nn.Linear(17, 33, bias=False), Conv1D(24, 17)]).to(dtype)
    input_1SI = torch.randn(1, num_rows, 17).to(dtype)
    with torch.no_grad(), packed_linears(model) as packing:
        got = [layer(input_1SI) for layer in model]
        flat = [layer(input_1SI[0]) for layer in model]
    weights = [model[0].weight, model[1].weight, model[2].weight.T]
    for layer, weight, out, out_flat in zip(model, weights, got, flat, strict=True):
        bias = None if layer.bias is None else layer.bias.double()
        expected = F.linear(input_1SI.double(), weight.double(), bias)
        torch.testing.assert_close(out.double(), expected, atol=8 * torch.finfo(dtype).eps, rtol=torch.finfo(dtype).eps)
        assert out.dtype == dtype and torch.equal(out_flat, out[0])
    if onednn_multiplies(dtype):
        size = torch.finfo(dtype).bits // 8
        assert packing.num_layers == 3 and packing.num_bytes == size * 17 * (40 + 33 + 24) and packing.seconds >= 0


def test_models_of_each_family(tiny_model, family):
    model = tiny_model(family).eval()
    expected, before = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    with packed_linears(model) as packing:
        assert packing.num_layers == sum(isinstance(m, nn.Linear | Conv1D) for m in model.modules())
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        if "lm_head" in dict(model.named_modules()):
            hidden = torch.ones(1, 1, model.get_output_embeddings().in_features)
            assert model.get_output_embeddings()(hidden).count_nonzero(), "the copy is what computes, tied or not"
        model.load_state_dict(before)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("family", ["opt", "gpt2", "qwen2"])
def test_adapters_are_merged_into_the_copy_alone(tiny_model, family):
    """LoRA: the same function by one product a layer; weights and adapters keep every bit."""
    model = with_adapters(tiny_model(family))
    expected, before = logits(model), {name: value.clone() for name, value in model.state_dict().items()}
    calls = []
    for name, module in model.named_modules():
        if "lora_" in name or name.endswith("base_layer"):
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
    with packed_linears(model):
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
        assert not calls
    assert torch.equal(logits(model), expected) and calls
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.allclose(expected, logits(tiny_model(family).eval()), atol=1e-2), "the adapters count"


def test_merged_weight_by_hand(tiny_model):
    """W + alpha / rank * B A, rounded once to the base's type."""
    model = with_adapters(tiny_model("llama"), bfloat16=True)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    lora_A, lora_B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    merged = (layer.base_layer.weight.float() + 1.5 * lora_B @ lora_A).bfloat16()
    input_SI = torch.randn(3, merged.shape[1]).bfloat16()
    with torch.no_grad(), packed_linears(model):
        torch.testing.assert_close(layer(input_SI).float(), input_SI.float() @ merged.float().T, atol=2e-2, rtol=2**-7)


@pytest.mark.parametrize("change", ["disable", "merge", "dora"])
def test_other_states_of_adapters_are_left_to_peft(tiny_model, change):
    model = with_adapters(tiny_model("opt"))
    layers = [module for module in model.modules() if getattr(module, "lora_A", None)]
    if change == "dora":
        for layer in layers:
            layer.lora_variant["default"] = None
    with torch.no_grad():
        for layer in layers if change == "merge" else ():
            layer.merge()
        for layer in layers if change == "disable" else ():
            layer.enable_adapters(False)
    with packed_linears(model):
        assert not any("forward" in vars(layer) for layer in layers)
        assert all("forward" in vars(layer.base_layer) for layer in layers) == onednn_multiplies(torch.float32)


def test_forwards_come_back_after_an_exception():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="device lost"), packed_linears(model):
        raise RuntimeError("device lost")
    assert not any("forward" in vars(layer) for layer in model)


def test_what_is_not_a_plain_linear_stays():
    class Doubled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    own = nn.Linear(4, 4)
    own.forward = lambda input: input
    kept = own.forward
    model = nn.ModuleList([Doubled(4, 4), own, nn.Embedding(4, 4), nn.LayerNorm(4)])
    with packed_linears(model) as packing:
        assert packing.num_layers == packing.num_bytes == 0
        assert own.forward is kept
    assert own.forward is kept


def test_hooks_still_run():
    model = nn.Linear(4, 4)
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad(), packed_linears(model):
        model(torch.ones(1, 4))
    assert seen


def test_without_the_kernels_only_adapters_change(tiny_model, monkeypatch):
    """A torch without the operations, or an accelerator: merged weights by F.linear, all else untouched."""
    model = with_adapters(tiny_model("gpt2"))
    expected = logits(model)
    monkeypatch.setattr(packed, "onednn_multiplies", lambda dtype: False)
    with packed_linears(model) as packing:
        assert packing.num_layers == sum(bool(getattr(m, "lora_A", None)) for m in model.modules()) > 0
        torch.testing.assert_close(logits(model), expected, atol=1e-4, rtol=1e-4)
    with packed_linears(tiny_model("llama")) as packing:
        assert packing.num_layers == 0


def test_small_float32_layers_are_left_alone(monkeypatch):
    monkeypatch.setattr(packed, "FEWEST_WEIGHTS", 101)
    model = nn.ModuleList([nn.Linear(10, 10), nn.Linear(10, 11), nn.Linear(10, 10).bfloat16()])
    with packed_linears(model):
        changed = ["forward" in vars(layer) for layer in model]
    assert changed == [False, onednn_multiplies(torch.float32), onednn_multiplies(torch.bfloat16)]


def test_the_cost_is_said_once(caplog):
    packed._announced.clear()
    model = nn.Linear(32, 16)
    with caplog.at_level(logging.INFO, logger="rlhf.rollout.packed"):
        for _ in range(3):
            with packed_linears(model):
                pass
    assert len(caplog.records) == (1 if onednn_multiplies(torch.float32) else 0)
    assert not caplog.records or "1 linear layers" in caplog.text
