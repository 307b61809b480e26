"""Bytes that an engine's states take of this rank's device at this moment, counted tensor by tensor."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from rlhf import distributed


def weight_bytes(module: nn.Module) -> int:
    """Weights: this rank's shards, and what is gathered of them now."""
    tensors: list[Tensor] = []
    for parameter in module.parameters():
        shard = getattr(parameter, "ds_tensor", None)
        tensors += [parameter.data] if shard is None else [parameter.data, shard]
    return num_bytes(tensors)


def optimizer_bytes(engine: Any, module: nn.Module) -> int:
    """What DeepSpeed's optimiser keeps beside the weights: its own copy of them and its moments; 0 before a step."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    weights = {parameter.data_ptr() for parameter in module.parameters()}
    kept = []
    for parameter, state in optimizer.state.items():
        kept += [parameter.data] if parameter.data_ptr() not in weights else []
        kept += [value for value in state.values() if isinstance(value, Tensor)]
    return num_bytes(kept)


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of tensors on this rank's device, each piece of memory once; what is offloaded does not count."""
    kind = distributed.device_type()
    here = [tensor for tensor in tensors if tensor.device.type == kind and tensor.numel()]
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in here}.values())
