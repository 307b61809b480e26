"""Which ranks work on the same rows: those that share each row's tokens, or the model's weights, or its layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf.combinations import Role
from rlhf.config import ModelConfig
from rlhf.distributed import Group, group_of, pipeline_of, world_size
from rlhf.models import pipeline_split
from rlhf.models.attention import FAMILIES, takes_layout
from rlhf.models.build import read_config
from rlhf.models.split import check_heads, check_training_split
from rlhf.models.tensor_parallel import share_model

T = TypeVar("T")
Model = TypeVar("Model", bound=nn.Module)


def _nobody() -> Group:
    return group_of(1)


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """This rank's groups; at most one of them has more than one rank."""

    sequence: Group = field(default_factory=_nobody)
    """Each has a part of a row's tokens."""
    tensor: Group = field(default_factory=_nobody)
    """Each has a share of every large weight."""
    pipeline: Group = field(default_factory=_nobody)
    """Each has some of the layers."""

    @property
    def rows(self) -> Group:
        """The ranks that are given the same rows."""
        return self.tensor if self.tensor.size > 1 else self.divided

    @property
    def divided(self) -> Group:
        """The ranks among which a batch's tokens or targets are divided when it is collated."""
        return self.pipeline if self.pipeline.size > 1 else self.sequence

    def one_of_each(self, parts: Sequence[T]) -> Sequence[T]:
        """Of what all ranks have said of their rows, in rank order, what the first rank of each group has."""
        return parts[:: self.tensor.size]

    def share(self, model: Model) -> Model:
        """Leave this rank its share of the weights of a model that is whole on all ranks; gives it back."""
        share_model(model, self.tensor)
        return model


def join_groups(
    models: Mapping[str, Role], tokenizer: PreTrainedTokenizerBase, *, readers: Sequence[ModelConfig] | None = None
) -> Sharing:
    """The groups that the stage's `parallel` asks for. Collective.

    Args:
        models: that are trained, by the name of their section.
        tokenizer: of the models.
        readers: all models that read the rows, where there are others beside.

    Raises:
        ValueError: the ranks or a model's heads do not divide, or it cannot be shared so.
    """
    parallel = next(iter(models.values())).parallel
    parallel.check_ranks(world_size())
    if parallel.sp > 1:
        said = f"parallel.sp={parallel.sp}"
        for model in [role.model for role in models.values()] if readers is None else readers:
            config = read_config(model, tokenizer)
            if not takes_layout(config):
                raise ValueError(
                    f"{said} shares packed rows between ranks, but a model of model_type {config.model_type} cannot "
                    f"read them: that takes one of the families {', '.join(FAMILIES)} without a sliding window. Use "
                    "parallel.sp=1 or another model."
                )
            check_heads(config.get_text_config().to_dict(), parallel.sp, said=said)
    if parallel.tp > 1 or parallel.pp > 1:
        for name, role in models.items():
            shape = read_config(role.model, tokenizer).get_text_config().to_dict()
            check_training_split(shape, parallel.tp, name=name)
            pipeline_split.check(shape, role.ds, parallel.pp)
    return Sharing(sequence=group_of(parallel.sp), tensor=group_of(parallel.tp), pipeline=pipeline_of(parallel.pp))
