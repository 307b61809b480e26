"""Muon's direction by singular values, and which weights it takes."""

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from rlhf.config import LoRAConfig, OptimConfig
from rlhf.models.lora import add_lora
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import ScalarModel
from rlhf.optimizers import Muon, orthogonalise, parameter_groups

LLAMA = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 1, "pad_token_id": 0}  # fmt: skip
LAYER = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
def test_each_singular_value_goes_through_the_polynomial_five_times(shape: tuple[int, int]) -> None:
    """x -> 3.4445 x - 4.775 x^3 + 2.0315 x^5 keeps the singular vectors; values are near 1 after it."""
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(orthogonalise(matrix).double(), left * values @ right, atol=1e-5, rtol=0)
    assert values.min() > 0.6 and values.max() < 1.25
    torch.testing.assert_close(orthogonalise(1000 * matrix), orthogonalise(matrix), atol=1e-5, rtol=0)


def test_a_step_by_hand() -> None:
    """A 1 x 1 matrix: momentum 0.05 of the gradient, whatever its size; five times the polynomial of 1; 0.2 of it."""
    weight = nn.Parameter(torch.tensor([[2.0]]))
    optimizer = Muon([{"params": [weight], "weight_decay": 0.5, "matrices": True}], OptimConfig(lr=0.1))
    weight.grad = torch.tensor([[-7.0]])
    optimizer.step()
    direction = 1.0
    for _ in range(5):
        direction = 3.4445 * direction - 4.775 * direction**3 + 2.0315 * direction**5
    assert weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) + 0.1 * 0.2 * direction, rel=1e-5)


def taken(model: nn.Module) -> set[str]:
    """Names of the weights that Muon takes, without `.weight`."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = parameter_groups(model, OptimConfig(lr=1e-3, name="muon", weight_decay=0.1))
    assert sorted(id(p) for g in groups for p in g["params"]) == sorted(
        id(p) for p in model.parameters() if p.requires_grad
    )
    assert all(group["weight_decay"] == 0.1 for group in groups if group["matrices"])
    return {names[id(p)].removesuffix(".weight") for g in groups if g["matrices"] for p in g["params"]}


def test_it_takes_the_matrices_of_layers_and_no_head() -> None:
    policy = taken(Policy(LlamaForCausalLM(LlamaConfig(**LLAMA))))
    assert {name.rpartition(".")[2] for name in policy} == LAYER and len(policy) == 14
    reward = taken(ScalarModel(LlamaForSequenceClassification(LlamaConfig(**LLAMA, num_labels=1))))
    assert {name.rpartition(".")[2] for name in reward} == LAYER and len(reward) == 14
    gpt2 = taken(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)))
    assert {name.rpartition(".")[2] for name in gpt2} == {"c_attn", "c_proj", "c_fc"} and len(gpt2) == 4
    adapters = taken(Policy(add_lora(LlamaForCausalLM(LlamaConfig(**LLAMA)), LoRAConfig(rank=2, alpha=4))))
    assert len(adapters) == 28 and all("lora_" in name for name in adapters)


def test_nothing_for_muon_to_take() -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    with pytest.raises(ValueError, match="no matrix of a linear layer is trained. Use optim.name=adamw"):
        parameter_groups(model, OptimConfig(lr=1e-3, name="muon"))
