"""What policy and scalar head share: from tokens to hidden states, for any decoder of transformers."""

import inspect
from typing import Any, cast

from torch import Tensor, nn


def base_of(model: nn.Module) -> nn.Module:
    """The Hugging Face model itself: what peft has wrapped, or the model as it is. Adapters stay in its layers."""
    get_base_model = getattr(model, "get_base_model", None)
    return cast(nn.Module, get_base_model()) if get_base_model else model


def hidden_states(
    model: nn.Module, *, token_ids_BT: Tensor, attention_mask_BT: Tensor, position_ids_BT: Tensor
) -> Tensor:
    """Last hidden states [B, T, D] of a model with a head, without running the head.

    Position ids go to every family whose forward names them. BLOOM does not: its ALiBi counts the attention mask.
    The head's owner is not called but its parts are, so that hooks on the parts (ZeRO-3, adapters) run as ever.
    """
    backbone = cast(Any, base_of(model)).base_model
    kwargs: dict[str, Any] = {"attention_mask": attention_mask_BT.long(), "use_cache": False}
    if "position_ids" in inspect.signature(backbone.forward).parameters:
        kwargs["position_ids"] = position_ids_BT
    return cast(Tensor, backbone(input_ids=token_ids_BT, **kwargs)[0])
