"""What policy and scalar head share: from tokens to hidden states, for any decoder of transformers."""

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.data.packing import PackedLayout
from rlhf.data.split_layout import SplitLayout


def base_of(model: nn.Module) -> nn.Module:
    """The Hugging Face model itself: what peft has wrapped, or the model as it is. Adapters stay in its layers."""
    get_base_model = getattr(model, "get_base_model", None)
    return cast(nn.Module, get_base_model()) if get_base_model else model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: what transformers can recompute one by one."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def known_blocks(model: nn.Module, *, setting: str, off: str) -> list[nn.Module]:
    """The decoder layers, for a setting that works on each.

    Raises:
        ValueError: the model has none that are known as such; `setting` asked for it, `off` does not.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(
            f"{setting}, but no decoder layers are known in {type(model).__name__}: transformers' "
            f"GradientCheckpointingLayer is not among its modules. Set {off} for this model."
        )
    return blocks


def layout_arguments(layout: object, device: torch.device) -> dict[str, Any]:
    """What a model's forward gets in place of an attention mask where a layout attends (`models.attention`).

    transformers takes a mask of four dimensions as finished and builds none, and the layout does not look at it.
    """
    return {"attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device), "layout": layout}


def hidden_states(
    model: nn.Module,
    *,
    token_ids_BT: Tensor,
    attention_mask_BT: Tensor | None,
    position_ids_BT: Tensor,
    layout: PackedLayout | SplitLayout | None,
    inputs_BTD: Tensor | None = None,
) -> Tensor:
    """Last hidden states [B, T, D] of a model with a head, without running the head; [1, U, D] of a split row.

    Position ids go to every family whose forward names them. BLOOM does not: its ALiBi counts the attention mask.
    The head's owner is not called but its parts are, so that hooks on the parts (ZeRO-3, adapters) run as ever.

    Args:
        model: whose attention is `rlhf.models.attention`'s if there is a layout.
        token_ids_BT: padded rows, or one packed row.
        attention_mask_BT: True on real tokens; None for a packed row.
        position_ids_BT: positions that count real tokens of each sequence.
        layout: of a packed row, which may be split over ranks; None for padded ones.
        inputs_BTD: what the first of the layers gets, where the layers before it are another rank's; None: embeddings
            of the tokens.
    """
    backbone = cast(Any, base_of(model)).base_model
    kwargs: dict[str, Any] = {"use_cache": False}
    if isinstance(layout, SplitLayout):
        token_ids_BT, position_ids_BT = layout.own(token_ids_BT), layout.own(position_ids_BT)
    if layout is not None:
        kwargs.update(layout_arguments(layout, token_ids_BT.device))
    else:
        assert attention_mask_BT is not None, "padded rows have a mask"
        kwargs["attention_mask"] = attention_mask_BT.long()
    if "position_ids" in inspect.signature(backbone.forward).parameters:
        kwargs["position_ids"] = position_ids_BT
    kwargs.update({"input_ids": token_ids_BT} if inputs_BTD is None else {"inputs_embeds": inputs_BTD})
    return cast(Tensor, backbone(**kwargs)[0])
