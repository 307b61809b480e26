"""Low-rank adapters through peft, and their merge into the base weights for saving."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.config import LoRAConfig
from rlhf.models.backbone import base_of


def add_lora(model: PreTrainedModel, cfg: LoRAConfig) -> nn.Module:
    """Freeze a model and give its linear layers low-rank adapters; a reward head stays trainable.

    Adapters are float32 over a bfloat16 base; A starts random, B at 0, so the model's function does not change yet.

    Args:
        model: causal LM or sequence classifier.
        cfg: rank >= 1.

    Raises:
        ValueError: a name of cfg.target_modules matches no linear layer.
    """
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  1 s that runs without adapters need not pay

    names = linear_layers(model)
    targets = cfg.target_modules or sorted({name.rsplit(".", 1)[-1] for name in names})
    for target in targets:
        if not any(name == target or name.endswith("." + target) for name in names):
            candidates = sorted({name.rsplit(".", 1)[-1] for name in names})
            raise ValueError(
                f"lora.target_modules: 0 modules matched {target!r} in {type(model).__name__}. Its linear layers but "
                f"the head, which takes no adapter, are {candidates}; name some of them, or leave the list empty for "
                "all."
            )
    peft_config = cast(Any, LoraConfig)(
        r=cfg.rank,
        lora_alpha=cfg.alpha,
        lora_dropout=cfg.dropout,
        target_modules=list(targets),
        bias="none",
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    wrapped = get_peft_model(model, peft_config)
    if (head := getattr(model, "score", None)) is not None:
        head.requires_grad_(True)
    if model.is_gradient_checkpointing:
        # The embedding is frozen; without this no input of a checkpointed layer has a gradient.
        cast(Any, model).enable_input_require_grads()
    return cast(nn.Module, wrapped)


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of all linear layers but the heads (language-model head, reward head)."""
    heads = {id(cast(Any, model).get_output_embeddings()), id(getattr(model, "score", None))}
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and id(module) not in heads
    ]


def is_adapted(module: nn.Module) -> bool:
    """Whether this is a linear layer of peft with active low-rank adapters of the plain kind, not merged."""
    layer = cast(Any, module)
    if not (hasattr(module, "base_layer") and getattr(module, "lora_A", None)):
        return False
    plain = not layer.lora_variant and not any(layer.lora_bias.values())
    return plain and not layer.merged and not layer.disable_adapters


def adapter_weights(module: nn.Module) -> list[tuple[nn.Parameter, nn.Parameter, float]]:
    """A, B and the scaling of each active adapter of a layer; none for a layer without."""
    layer = cast(Any, module)
    if not is_adapted(module):
        return []
    return [
        (layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name]))
        for name in layer.active_adapters
        if name in layer.lora_A
    ]


def merged_weight(module: nn.Module) -> Tensor:
    """W + scaling * B A of an adapted layer, in float32, in W's layout and type; W is not changed."""
    base = cast(Any, module).base_layer
    is_transposed = isinstance(base, Conv1D)
    weight_OI = cast(Tensor, base.weight.detach().T if is_transposed else base.weight.detach()).float()
    for lora_A, lora_B, scaling in adapter_weights(module):
        weight_OI = torch.addmm(weight_OI, lora_B.detach().float(), lora_A.detach().float(), alpha=scaling)
    return (weight_OI.T if is_transposed else weight_OI).to(base.weight.dtype)


def merged_state_dict(state_dict: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """State dict of the base model with the adapters added to its weights: W + alpha / rank * B A, in float32.

    Args:
        state_dict: of `model`, whole tensors (under ZeRO-3: gathered), on any device; it is not changed.
        model: what `add_lora` returned; a model without adapters gives the state dict back.

    Returns:
        Keys as the base model had them before `add_lora`, each tensor in its base weight's type.
    """
    if base_of(model) is model:
        return dict(state_dict)
    prefix = "base_model.model."
    merged = {
        key.removeprefix(prefix).replace(".base_layer.", "."): value
        for key, value in state_dict.items()
        if ".lora_" not in key
    }
    for name, module in base_of(model).named_modules():
        adapters = cast(Any, module)
        for adapter in getattr(module, "lora_A", {}):
            lora_A, lora_B = (state_dict[f"{prefix}{name}.{side}.{adapter}.weight"] for side in ("lora_A", "lora_B"))
            delta = adapters.scaling[adapter] * (lora_B.float() @ lora_A.float())
            weight = merged[f"{name}.weight"]
            if adapters.fan_in_fan_out:  # GPT-2's Conv1D keeps its weight transposed
                delta = delta.T
            merged[f"{name}.weight"] = (weight.float() + delta.to(weight.device)).to(weight.dtype)
    return merged


def num_trainable(model: nn.Module) -> int:
    """Number of parameters that are trained; whole sizes, also under ZeRO-3."""
    return sum(
        int(torch.Size(getattr(parameter, "ds_shape", parameter.shape)).numel())
        for parameter in model.parameters()
        if parameter.requires_grad
    )
