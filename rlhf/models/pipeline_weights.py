"""The whole model of a pipeline, whose stages have a part of the weights each: to be saved, or to generate with."""

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from rlhf import distributed
from rlhf.distributed import Group
from rlhf.models.pipeline_part import Part


def gather_weights(model: nn.Module, part: Part, group: Group) -> dict[str, Tensor]:
    """All that the whole model saves, on the CPU of the first stage, which never holds more than one weight of others.

    Args:
        model: this stage's part of it.
        part: what that is.
        group: the pipeline; its ranks call this together.

    Returns:
        Name -> tensor, a tied weight one tensor under two names; empty on the other stages.
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in part.tied}
    found: dict[str, Tensor] = {}
    for number, kinds in enumerate(group.gather_objects({name: (x.shape, x.dtype) for name, x in own.items()})):
        for name, (shape, dtype) in kinds.items():
            if number == group.rank == 0:
                found[name] = own[name].to("cpu", copy=True)
            elif group.rank == 0:
                weight = torch.empty(shape, dtype=dtype, device=distributed.device())
                found[name] = group.receive_(weight, number).to("cpu", copy=True)
            elif number == group.rank:
                group.send(own[name], 0)
    if group.rank > 0:
        return {}
    found.update({head: found[embedding] for head, embedding in part.tied.items()})
    return {name: found[name] for name in part.names}


@torch.no_grad()
def whole_model(model: nn.Module, part: Part, group: Group) -> nn.Module:
    """A copy of the whole model on this rank, in eval mode, of plain tensors that are not trained.

    Args:
        model: this stage's part of a Hugging Face model.
        part: what that is.
        group: the pipeline; its ranks call this together.
    """
    with torch.device("meta"), no_init_weights():
        whole = type(model)(copy.deepcopy(cast(Any, model).config)).eval()
    cast(Any, whole).generation_config = cast(Any, model).generation_config
    left = {name for name, _ in whole.named_parameters(remove_duplicate=False)}
    own = {name: weight for name, weight in model.named_parameters() if name not in part.tied}
    for number, kinds in enumerate(group.gather_objects({name: (x.shape, x.dtype) for name, x in own.items()})):
        for name, (shape, dtype) in kinds.items():
            is_mine = number == group.rank
            empty = torch.empty(shape, dtype=dtype, device=distributed.device())
            value = group.broadcast_(own[name].detach().clone() if is_mine else empty, number)
            weight = nn.Parameter(value, requires_grad=False)
            for target in [name, *(head for head, embedding in part.tied.items() if embedding == name)]:
                path, _, leaf = target.rpartition(".")
                setattr(whole.get_submodule(path), leaf, weight)
                left.discard(target)
    assert not left, f"no stage has {sorted(left)}"
    _take_buffers(whole, model)
    return whole


def _take_buffers(whole: nn.Module, part: nn.Module) -> None:
    """Use the part's tensors that are not weights, such as rotary frequencies, which every stage has."""
    theirs = dict(part.named_modules())
    for path, module in whole.named_modules():
        for name in [n for n, value in vars(module).items() if isinstance(value, Tensor)]:
            setattr(module, name, getattr(theirs[path], name))
        for name in module._buffers:
            module._buffers[name] = theirs[path]._buffers[name]
