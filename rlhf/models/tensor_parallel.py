"""A model whose weights are divided over the ranks of a group, for training and for generation (`split`: which layers).

The layers are exchanged for ones that compute a share and talk to the group: the model's own code runs unchanged on
fewer heads and hidden units, under the names it has. All members pass the same tokens, and what lies between the
blocks is equal on all of them (Shoeybi et al. 2019, arXiv:1909.08053, sec. 3). A block's input is handed out
(`Group.fan_out`) and its output summed (`Group.sum`); so the gradient of a weight that each rank has whole is whole,
and the same on all.

The logits that tokens are drawn from are gathered, not summed, so that they are the same bytes on every member
whatever a sum rounds like: the members draw the same tokens, and need not agree on anything else.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.distributed import Group
from rlhf.models.linear import multiply
from rlhf.models.split import FAMILIES, Family
from rlhf.models.token_stats import VocabularyPart


@dataclass(frozen=True)
class Cut:
    """How a weight is divided: each of `blocks` equal parts of a dimension in equal pieces, zeros behind the last."""

    dim: int
    length: int
    """Of the dimension, whole."""
    blocks: int = 1

    @property
    def block_length(self) -> int:
        """Whole."""
        return self.length // self.blocks

    def share(self, weight: Tensor, rank: int, size: int) -> Tensor:
        """A rank's pieces of a whole weight; a view where that is possible."""
        pieces = [self._piece(block, rank, size) for block in weight.chunk(self.blocks, dim=self.dim)]
        return torch.cat(pieces, dim=self.dim) if len(pieces) > 1 else pieces[0]

    def _piece(self, block: Tensor, rank: int, size: int) -> Tensor:
        width = math.ceil(self.block_length / size)
        start = min(rank * width, self.block_length)
        piece = block.narrow(self.dim, start, min(width, self.block_length - start))
        if (missing := width - piece.shape[self.dim]) == 0:
            return piece
        shape = list(piece.shape)
        shape[self.dim] = missing
        return torch.cat([piece, piece.new_zeros(shape)], dim=self.dim)

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole weight from the shares of all ranks, in their order."""
        blocks = zip(*(share.chunk(self.blocks, dim=self.dim) for share in shares), strict=True)
        joined = [torch.cat(pieces, dim=self.dim).narrow(self.dim, 0, self.block_length) for pieces in blocks]
        return torch.cat(joined, dim=self.dim)


@dataclass(frozen=True)
class Shares:
    """Cuts a rank's share of each weight, and fits a model whose weights are shares."""

    model: nn.Module
    """A Hugging Face model, causal LM or classifier, whose layers are those of a whole model."""
    rank: int
    size: int

    @property
    def family(self) -> Family:
        """Of the model."""
        return FAMILIES[cast(Any, self.model).config.model_type]

    def cut_of(self, name: str, shape: Sequence[int]) -> Cut | None:
        """How a parameter is divided; None: each rank has it whole.

        Args:
            name: of the parameter in the model.
            shape: of the whole.
        """
        path, _, leaf = name.rpartition(".")
        module, layer = self.model.get_submodule(path), path.rpartition(".")[2]
        if module in self._vocabulary_layers():
            return Cut(0, shape[0])
        # The outputs of a layer are its weight's first dimension, of a Conv1D the second.
        outputs = len(shape) - 1 if isinstance(module, Conv1D) else 0
        if layer in self.family.columns:
            return Cut(outputs, shape[outputs])
        if layer in self.family.thirds:
            return Cut(outputs, shape[outputs], blocks=3)
        if layer in self.family.rows and leaf == "weight":
            return Cut(1 - outputs, shape[1 - outputs])
        return None

    def cut(self, name: str, weight: Tensor) -> Tensor:
        """This rank's share of a parameter; a view where that is possible.

        Args:
            name: of the parameter in the model.
            weight: whole.
        """
        cut = self.cut_of(name, weight.shape)
        return weight if cut is None else cut.share(weight, self.rank, self.size)

    def _vocabulary_layers(self) -> tuple[nn.Module, nn.Module | None]:
        """Embedding and language-model head; a classifier has no such head."""
        model = cast(Any, self.model)
        head = model.get_output_embeddings()
        return model.get_input_embeddings(), None if head is getattr(model, "score", None) else head

    def install(self, group: Group) -> None:
        """Let the model, whose parameters are shares by now, compute as the whole one together with the group."""
        self._install_vocabulary(group)
        owners: set[nn.Module] = set()
        for parent in list(self.model.modules()):
            for name, child in parent.named_children():
                if name in self.family.rows:
                    child.__class__ = SummedConv1D if isinstance(child, Conv1D) else SummedLinear
                    cast(Any, child).group = group
                elif name in (*self.family.columns, *self.family.thirds):
                    if isinstance(child, Conv1D):
                        child.nf = child.weight.shape[1]
                    owners.add(parent)
                if name in self.family.entries:
                    child.register_forward_pre_hook(_entry(group), with_kwargs=True)
        for owner in owners:
            cast(Any, owner).dropout_stream = group.rank
            for number in self.family.divided:
                if hasattr(owner, number):
                    setattr(owner, number, getattr(owner, number) // self.size)

    def _install_vocabulary(self, group: Group) -> None:
        embedding, head = cast(tuple[Any, Any], self._vocabulary_layers())
        embedding.__class__, embedding.group = SplitEmbedding, group
        if head is not None:
            vocab_size = int(cast(Any, self.model).config.get_text_config().vocab_size)
            head.__class__ = SplitHead
            head.part = VocabularyPart.of(group, num_rows=len(head.weight), vocab_size=vocab_size)


def share_model(model: nn.Module, group: Group) -> None:
    """Leave this rank its share of a whole model's weights, and let it compute together with the group.

    Args:
        model: a Hugging Face model with the same weights on all ranks; changed in place.
        group: at size 1 nothing happens.
    """
    if group.size == 1:
        return
    shares = Shares(model, group.rank, group.size)
    for name, parameter in model.named_parameters():
        if (cut := shares.cut_of(name, parameter.shape)) is not None:
            parameter.data = cut.share(parameter.data, group.rank, group.size).clone()
            cast(Any, parameter).tensor_cut = cut
            cast(Any, parameter).tensor_model_parallel = True  # Megatron's name, which DeepSpeed's norms look for
    shares.install(group)


def is_share(parameter: Tensor) -> bool:
    """Whether this rank holds a share of the weight, and not all of it."""
    return cut_of(parameter) is not None


def cut_of(parameter: Tensor) -> Cut | None:
    """How `share_model` has divided a weight."""
    return getattr(parameter, "tensor_cut", None)


def _entry(group: Group) -> Callable[..., Any]:
    """Hook that hands a module's input, its first argument or `hidden_states`, out to the group."""

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (group.fan_out(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": group.fan_out(kwargs["hidden_states"])}

    return enter


class SummedLinear(nn.Linear):
    """A linear layer on a share of its inputs; the outputs are summed over the group, the bias is added once."""

    group: Group

    def product(self, input: Tensor) -> Tensor:  # noqa: A002  the name of nn.Linear's argument
        """This rank's part of the sum."""
        return multiply(input, self.weight)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """As nn.Linear's."""
        output = self.group.sum(self.product(input))
        return output if self.bias is None else output + self.bias


class SummedConv1D(Conv1D):
    """The same for GPT-2's layer, whose weight lies transposed."""

    group: Group

    def product(self, input: Tensor) -> Tensor:  # noqa: A002
        """This rank's part of the sum."""
        return torch.mm(input.reshape(-1, input.shape[-1]), self.weight).view(*input.shape[:-1], self.nf)

    def forward(self, x: Tensor) -> Tensor:
        """As Conv1D's."""
        return self.group.sum(self.product(x)) + self.bias


class SplitEmbedding(nn.Embedding):
    """An embedding whose rows lie on the ranks of a group."""

    group: Group

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """As nn.Embedding's: one rank has the row, the others add zeros."""
        num_rows = len(self.weight)
        row = input - self.group.rank * num_rows
        is_mine = (row >= 0) & (row < num_rows)
        found = nn.functional.embedding(row.masked_fill(~is_mine, 0), self.weight)
        return self.group.sum(found.masked_fill(~is_mine[..., None], 0.0))


class SplitHead(nn.Linear):
    """A language-model head whose rows lie on the ranks of a group; each gets all logits.

    `models.policy` takes the statistics of tokens from the shares, without the logits of all.
    """

    part: VocabularyPart

    def product(self, input: Tensor) -> Tensor:  # noqa: A002
        """Logits of this rank's rows."""
        return multiply(input, self.weight, self.bias)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """As nn.Linear's."""
        group = self.part.group
        return group.join(self.product(group.fan_out(input)))[..., : self.part.vocab_size]
