"""What a DeepSpeed JSON and an optimiser may hold where ranks share the weights of a trained model. No torch."""

from collections.abc import Mapping
from typing import Any

from rlhf.config import OptimConfig
from rlhf.ds_config import dtype_name, zero_stage

_ACROSS_NEIGHBOURS = ("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients")


def check_tensor(size: int, ds: Mapping[str, Any], optim: OptimConfig, *, name: str) -> None:
    """Check that a model can be trained in shares of so many ranks.

    Args:
        size: parallel.tp.
        ds: content of the model's DeepSpeed JSON.
        optim: of the model.
        name: of the model's section.

    Raises:
        ValueError: it cannot.
    """
    if size == 1:
        return
    tp = f"parallel.tp={size}"
    if optim.name != "adamw":
        raise ValueError(
            f"{tp}, but {name} is trained by {optim.name}, which would take a rank's share of a weight for the whole. "
            "Set the optimiser's name to adamw."
        )
    if zero_stage(ds) == 0 and dtype_name(ds) != "float32":
        raise ValueError(
            f"{tp}, but the DeepSpeed JSON of {name} says {dtype_name(ds)} at ZeRO stage 0, where DeepSpeed's clip "
            "counts the first rank's shares alone. Set zero_optimization.stage to 1."
        )
    zero = ds.get("zero_optimization", {})
    for key in _ACROSS_NEIGHBOURS:
        if zero.get(key) is True or (zero.get(key) or 1) != 1:
            raise ValueError(
                f"{tp}, but {key}={zero[key]} in the DeepSpeed JSON of {name}: ZeRO++ has neighbouring ranks hold the "
                "same weights, and here they have different shares. Leave it out, or set parallel.tp=1."
            )
