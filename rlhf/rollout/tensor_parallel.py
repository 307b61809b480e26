"""One copy of the weights over a group of ranks, for generation (`split` says which layers).

The layers of a copy are exchanged for ones that compute a share and talk to the group: the model's own code runs
unchanged on fewer heads, and keys and values of a rank's heads are all that its cache holds. All members pass the same
tokens. The logits that tokens are drawn from are gathered, not summed, so that they are the same bytes on every member
whatever a sum rounds like: the members draw the same tokens, and need not agree on anything else.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rlhf.distributed import Group
from rlhf.rollout.split import FAMILIES, Family


@dataclass(frozen=True)
class Shares:
    """Cuts a rank's share of each weight, and fits a model whose weights are shares."""

    model: nn.Module
    """A Hugging Face causal LM whose layers are those of a whole model."""
    rank: int
    size: int

    @property
    def family(self) -> Family:
        """Of the model."""
        return FAMILIES[cast(Any, self.model).config.model_type]

    def cut(self, name: str, weight: Tensor) -> Tensor:
        """This rank's share of a parameter; a view where that is possible.

        Args:
            name: of the parameter in the model.
            weight: whole.
        """
        path, _, leaf = name.rpartition(".")
        module, layer = self.model.get_submodule(path), path.rpartition(".")[2]
        if module in self._vocabulary_layers():
            return self._cut_vocabulary(weight)
        # The outputs of a layer are its weight's first dimension, of a Conv1D the second.
        outputs = weight.ndim - 1 if isinstance(module, Conv1D) else 0
        if layer in self.family.columns:
            return self._part(weight, dim=outputs)
        if layer in self.family.thirds:
            return torch.cat([self._part(third, dim=outputs) for third in weight.chunk(3, dim=outputs)], dim=outputs)
        if layer in self.family.rows and leaf == "weight":
            return self._part(weight, dim=1 - outputs)
        return weight

    def _part(self, weight: Tensor, *, dim: int) -> Tensor:
        return weight.chunk(self.size, dim=dim)[self.rank]

    def _cut_vocabulary(self, weight: Tensor) -> Tensor:
        """Equally many rows on each rank: zeros follow the last token's."""
        per_rank = -(-len(weight) // self.size)
        part = weight[self.rank * per_rank : (self.rank + 1) * per_rank]
        missing = per_rank - len(part)
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part

    def _vocabulary_layers(self) -> tuple[nn.Module, nn.Module]:
        model = cast(Any, self.model)
        return model.get_input_embeddings(), model.get_output_embeddings()

    def install(self, group: Group) -> None:
        """Let the model, whose parameters are shares by now, compute as the whole one together with the group."""
        embedding, head = self._vocabulary_layers()
        layers = [(parent, name, child) for parent in self.model.modules() for name, child in parent.named_children()]
        owners: set[nn.Module] = set()
        for parent, name, child in layers:
            if child is embedding:
                setattr(parent, name, SplitEmbedding(cast(nn.Embedding, child), group))
            elif child is head:
                vocab_size = cast(Any, self.model).config.vocab_size
                setattr(parent, name, SplitHead(cast(nn.Linear, child), group, vocab_size=vocab_size))
            elif name in self.family.rows:
                setattr(parent, name, SummedLinear(cast(nn.Linear | Conv1D, child), group))
            elif name in (*self.family.columns, *self.family.thirds):
                if isinstance(child, Conv1D):
                    child.nf = child.weight.shape[1]
                owners.add(parent)
        for owner in owners:
            for number in self.family.divided:
                if hasattr(owner, number):
                    setattr(owner, number, getattr(owner, number) // self.size)


class SummedLinear(nn.Module):
    """A linear layer on a share of its inputs; the outputs are summed over the group, the bias is added once."""

    def __init__(self, linear: nn.Linear | Conv1D, group: Group) -> None:
        super().__init__()
        weight = linear.weight
        if isinstance(linear, Conv1D):
            weight = nn.Parameter(weight.T.contiguous(), requires_grad=False)
        self.share = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.share.weight = weight
        self.bias = linear.bias
        self.group = group

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name of nn.Linear's argument
        """As nn.Linear's."""
        output = self.group.sum_(self.share(input))
        return output if self.bias is None else output + self.bias


class SplitEmbedding(nn.Module):
    """An embedding whose rows lie on the ranks of a group."""

    def __init__(self, embedding: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.share = embedding
        self.group = group

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """As nn.Embedding's: one rank has the row, the others add zeros."""
        num_rows = len(self.share.weight)
        row = input - self.group.rank * num_rows
        is_mine = (row >= 0) & (row < num_rows)
        found = nn.functional.embedding(row.masked_fill(~is_mine, 0), self.share.weight)
        return self.group.sum_(found.masked_fill_(~is_mine[..., None], 0.0))


class SplitHead(nn.Module):
    """A language-model head whose rows lie on the ranks of a group; each gets all logits."""

    def __init__(self, head: nn.Linear, group: Group, *, vocab_size: int) -> None:
        super().__init__()
        self.share = head
        self.group = group
        self.vocab_size = vocab_size

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """As nn.Linear's."""
        return torch.cat(self.group.gather(self.share(input)), dim=-1)[..., : self.vocab_size]
