from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.config import LoRAConfig, ModelConfig
from rlhf.models.backbone import base_of
from rlhf.models.build import build_causal_lm, build_reward_model
from rlhf.models.lora import linear_layers, merged_state_dict, num_trainable
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import ScalarModel

IDS = torch.tensor([[0, 5, 6, 9, 8, 12]])


def adapted(make: Any, config: dict[str, Any], *, trained: bool = True, **options: Any) -> Any:
    """A model with adapters, B away from its start at 0 if `trained`."""
    model = make.lm(config, lora=LoRAConfig(rank=2, alpha=8.0), **options)
    if trained:
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def test_adapters_start_as_the_identity(family: dict[str, Any], make: Any):
    with_adapters, without = adapted(make, family, trained=False), make.lm(family)
    assert torch.equal(with_adapters(input_ids=IDS).logits, without(input_ids=IDS).logits)


def test_every_linear_layer_but_the_head_has_an_adapter(family: dict[str, Any], make: Any):
    model = adapted(make, family)
    names = {name.split(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    layers = base_of(model).base_model
    expected = [m for m in layers.modules() if type(m).__name__ == "Linear" and hasattr(m, "base_layer")]
    assert len(names) == len(linear_layers(make.lm(family))) == len(expected)
    assert not any("lm_head" in name or "embed_out" in name for name in names)
    assert num_trainable(model) == sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)


def test_merged_weights_give_the_adapted_models_logits_and_load_strictly(
    family: dict[str, Any], make: Any, tmp_path: Path
):
    """GPT-2 among them, whose Conv1D keeps its weight transposed."""
    model = adapted(make, family)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    merged = merged_state_dict(model.state_dict(), model)
    assert set(merged) == set(make.lm(family).state_dict())
    base_of(model).save_pretrained(tmp_path, state_dict=merged)
    loaded = build_causal_lm(ModelConfig(path=str(tmp_path)), make.tokenizer, seed=9).eval()
    assert (loaded(input_ids=IDS).logits - model(input_ids=IDS).logits).abs().max() < 1e-4
    assert (loaded(input_ids=IDS).logits - make.lm(family)(input_ids=IDS).logits).abs().max() > 1e-2
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_merge_by_hand(families: Any, make: Any):
    """W + alpha / rank * B A with alpha 8 and rank 2."""
    model = adapted(make, families["llama"])
    merged = merged_state_dict(model.state_dict(), model)
    layer = base_of(model).model.layers[0].self_attn.q_proj
    delta = 4.0 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    assert torch.allclose(merged["model.layers.0.self_attn.q_proj.weight"], layer.base_layer.weight + delta, atol=1e-6)


def test_e6_merging_untrained_adapters_gives_back_the_exact_weights(family: dict[str, Any], make: Any):
    merged = merged_state_dict((model := adapted(make, family, trained=False)).state_dict(), model)
    assert all(torch.equal(merged[key], value) for key, value in make.lm(family).state_dict().items())


def test_the_merge_of_bfloat16_weights_rounds_once(families: Any, make: Any):
    model = adapted(make, families["llama"], dtype="bfloat16")
    layer = base_of(model).model.layers[1].mlp.up_proj
    assert layer.lora_A["default"].weight.dtype == torch.float32
    merged = merged_state_dict(model.state_dict(), model)["model.layers.1.mlp.up_proj.weight"]
    exact = layer.base_layer.weight.double() + 4.0 * (
        layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    )
    assert merged.dtype == torch.bfloat16
    assert (merged == exact.bfloat16()).float().mean() > 0.999


def test_a_model_without_adapters_is_given_back(families: Any, make: Any):
    model = make.lm(families["opt"])
    merged = merged_state_dict(model.state_dict(), model)
    assert all(torch.equal(merged[key], value) for key, value in model.state_dict().items())


def test_d25_a_name_that_matches_nothing_is_refused_with_the_candidates(families: Any, make: Any):
    for target in ("decoder.layers.", "lm_head", "proj"):
        with pytest.raises(ValueError, match=r"0 modules matched .*'fc1', .*'q_proj'"):
            make.lm(families["opt"], lora=LoRAConfig(rank=2, target_modules=["q_proj", target]))


def test_named_targets_alone_get_adapters(families: Any, make: Any):
    model = make.lm(families["opt"], lora=LoRAConfig(rank=2, target_modules=["q_proj", "layers.1.fc1"]))
    names = {
        name.split(".lora_")[0].removeprefix("base_model.model.model.decoder.")
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    assert names == {"layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj", "layers.1.fc1"}


def test_d25_adapters_alone_train_under_recomputation(family: dict[str, Any], make: Any):
    gradients = []
    for how in ("none", "full", "selective"):
        model = adapted(make, family, recompute=how, dropout=0.0).train()
        batch = make.pad(make.rows(5, 3))
        Policy(model)(**batch, target_mask_BT=make.targets(batch)).logprob_BT.sum().backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
        gradients.append(torch.cat([p.grad.flatten() for p in trained]))
    for other in gradients[1:]:
        assert torch.allclose(gradients[0], other, rtol=1e-4, atol=1e-5)


def test_c6_the_reward_head_trains_beside_the_adapters(family: dict[str, Any], make: Any):
    model = build_reward_model(ModelConfig(config=family, lora=LoRAConfig(rank=2)), make.tokenizer, seed=1)
    head = base_of(model).score.weight
    before: Tensor = head.detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    ScalarModel(model)(**make.pad(make.rows(5))).sum().backward()
    optimizer.step()
    assert not torch.equal(head, before)
    merged = merged_state_dict(model.state_dict(), model)
    assert torch.equal(merged["score.weight"], head)
    assert {name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name} == {
        "base_model.model.score.weight"
    }
