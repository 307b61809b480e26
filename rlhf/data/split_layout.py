"""A packed row whose tokens are divided over ranks: sequence parallelism as in DeepSpeed-Ulysses.

Each rank of a group holds an equal part of the columns, in a row, and computes all layers for them alone. Around
attention the group exchanges tokens for heads: each rank attends with its share of the heads over all tokens, by the
packed row's own layout, and gives the outputs back. No rank ever holds all tokens with all heads.

Source: Jacobs et al. 2023, arXiv:2309.14509.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.data.packing import PackedLayout
from rlhf.distributed import Group


class SplitLayout:
    """Which columns of a packed row are this rank's, and attention over all of them."""

    def __init__(self, row: PackedLayout, group: Group) -> None:
        """Divide a row.

        Args:
            row: layout of the whole row, equal on all ranks of the group.
            group: the ranks that share it.
        """
        self.row = row
        self.group = group
        self.num_columns = len(row.before)
        """Of the whole row."""
        self.width = math.ceil(self.num_columns / group.size)
        """Columns of each rank; behind the row's end, they are padding that nothing attends to."""
        self.first = group.rank * self.width
        """Column of the row that is this rank's first."""
        self.num_real = min(max(self.num_columns - self.first, 0), self.width)
        """Columns of this rank that are not padding."""
        self.num_tokens = int((row.places // self.width == group.rank).sum())
        """Of all sequences, those in this rank's columns: a shared prompt's count for each of its sequences."""
        self.before_T = row.before_T
        self.predicted = row.before // self.width == group.rank
        """Whether the token before each one is this rank's; on exactly one rank for each token."""
        self.predicted_T = torch.from_numpy(self.predicted).to(row.before_T.device)

    def own(self, x_BT: Tensor) -> Tensor:
        """This rank's columns [1, U] of a whole row; 0 in its padding."""
        own_BU = x_BT[:, self.first : self.first + self.num_real]
        return F.pad(own_BU, (0, self.width - self.num_real))

    def whole(self, x_BU: Tensor) -> Tensor:
        """This rank's columns in their place of the whole row [1, T], 0 in those of others; with gradient."""
        before = min(self.first, self.num_columns)
        return F.pad(x_BU[:, : self.num_real], (before, self.num_columns - before - self.num_real))

    def attend(
        self, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor, *, scaling: float | None, dropout: float
    ) -> Tensor:
        """Causal attention inside each sequence of the whole row, for this rank's columns. Collective in the group.

        Args:
            query_BHTd: B = 1, all H heads of this rank's U columns; H and K are multiples of the group's size.
            key_BKTd: K heads, each shared by H / K query heads in a row.
            value_BKTd: as the keys.
            scaling: of the scores; None is 1 / sqrt(d).
            dropout: probability on attention weights.

        Returns:
            out_BTHd of the same columns, 0 in padding.
        """
        ranks = self.group.size
        # For each rank, its heads of all three side by side: one exchange. [ranks, U, heads / ranks, d]
        parts = [
            x_B[0].reshape(ranks, -1, *x_B.shape[2:]).transpose(1, 2) for x_B in (query_BHTd, key_BKTd, value_BKTd)
        ]
        num_heads = [part.shape[2] for part in parts]
        all_THd = self.group.exchange(torch.cat(parts, dim=2)).flatten(0, 1)[: self.num_columns]
        query, key, value = (x.transpose(0, 1)[None] for x in torch.split(all_THd, num_heads, dim=1))
        out_THd = self.row.attend(query, key, value, scaling=scaling, dropout=dropout)[0]
        padded_THd = F.pad(out_THd, (0, 0, 0, 0, 0, ranks * self.width - self.num_columns))
        # From each rank its heads of this rank's columns.
        own = self.group.exchange(padded_THd.view(ranks, self.width, *padded_THd.shape[1:]))
        return own.transpose(0, 1).flatten(1, 2)[None]
