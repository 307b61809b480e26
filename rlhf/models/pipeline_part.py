"""The part of a decoder of transformers that one stage of a pipeline has.

What other stages have is replaced by modules without weights, so that the model's own code runs as it is on each stage:
the first embeds, the others take hidden states in the place of embeddings, and the weights that are left keep the names
they have in the whole model.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlhf.models.backbone import base_of
from rlhf.models.pipeline_split import FAMILIES, deal


class Elsewhere(nn.Module):
    """In the place of what another stage has: gives back what it is given."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x itself."""
        return x


class NoPositions(nn.Module):
    """In the place of position embeddings, which the first stage has added."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """0, to be added."""
        return torch.zeros(())


@dataclass(frozen=True)
class Part:
    """What a stage has kept of a model."""

    layers: range
    names: list[str]
    """Of all weights and buffers that the whole model saves, in its order."""
    tied: dict[str, str]
    """Name of a tied head -> name of the embedding that it is; empty without."""


def keep_part(model: nn.Module, *, number: int, num_stages: int) -> Part:
    """Take from a whole causal LM all that other stages have. Layers are dealt by multiplications, the head counted.

    Args:
        model: of one of `pipeline.FAMILIES`, without adapters; it is changed.
        number: of the stage, from 0.
        num_stages: at most as many as layers.

    Raises:
        ValueError: fewer layers than stages.
    """
    base = cast(Any, base_of(model))
    family = FAMILIES[base.config.get_text_config().model_type]
    decoder = getattr(base.base_model, "decoder", base.base_model)
    layers: nn.ModuleList = getattr(decoder, family.layers)
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    names = list(model.state_dict())
    tied = {}
    if head.weight is embedding.weight:
        by_module = {id(module): name for name, module in model.named_modules()}
        tied = {f"{by_module[id(head)]}.weight": f"{by_module[id(embedding)]}.weight"}
    costs = [float(sum(weight.numel() for weight in layer.parameters())) for layer in layers]
    costs[-1] += head.weight.numel()
    own = deal(costs, num_stages)[number]
    for i in set(range(len(layers))) - set(own):
        layers[i] = Elsewhere()
    if number > 0:
        _replace(decoder, family.first)
        if family.positions:
            setattr(decoder, family.positions, NoPositions())
    if number < num_stages - 1:
        _replace(decoder, family.last)
        _replace(base, tuple(name for name, child in base.named_children() if child is head))
    return Part(own, names, tied)


def _replace(owner: nn.Module, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(owner, name) is not None:  # OPT has some of its parts in some of its models
            setattr(owner, name, Elsewhere())
