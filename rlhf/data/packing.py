"""Several sequences in one row without padding: their attention, block by block.

A packed row is `[1, T]`: sequences one after another, positions restarting in each. All layers but attention work token
by token and need to know nothing. In attention a token sees the tokens before it in its own sequence only; `attend`
gives sequences of like length to the kernel as one right-padded batch, where causality alone keeps padding away from
what is real, so that no mask has to be built or read.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rlhf.data import cpu_attention

# A group of sequences holds none shorter than this share of its longest: at most a quarter of its slots is padding,
# which only the attention kernel sees, and sequences of 10 to 350 tokens make a dozen groups.
GROUP_SHARE = 0.75


class PackedLayout:
    """Where the sequences of a packed row lie, and attention inside each of them."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        columns: Sequence[npt.NDArray[np.int64]] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Plan the groups.

        Args:
            lengths: tokens of each sequence, each >= 1.
            columns: columns of the row that each sequence consists of, in order; None: one sequence after another.
                Columns at the start of several sequences are a prompt that they share: it goes through all layers
                once, and is repeated for the attention alone. Every column of the row is in some sequence.
            device: of the tensors that `attend` will get.

        Raises:
            ValueError: no sequence, or one without tokens.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a packed row needs sequences of at least one token, got the lengths {lengths}.")
        self.lengths = list(lengths)
        ends = np.cumsum(lengths)
        sequences = columns or [np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        groups: list[list[int]] = []
        for i in longest_first:
            if not groups or lengths[i] < GROUP_SHARE * lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(i)
        self.group_shapes = [(len(group), lengths[group[0]]) for group in groups]
        # Padding repeats the sequence's last token: any will do, as nothing real looks at it.
        slots = [
            np.pad(sequences[i], (0, width - lengths[i]), mode="edge")
            for group, (_, width) in zip(groups, self.group_shapes, strict=True)
            for i in group
        ]
        token_P = np.concatenate(slots)
        members = itertools.chain.from_iterable(groups)
        real_P = np.concatenate([np.arange(len(s)) < lengths[i] for s, i in zip(slots, members, strict=True)])
        real_slots = real_P.nonzero()[0]
        first = np.unique(token_P[real_P], return_index=True)[1]
        self.is_shared = len(real_slots) > len(first)
        """Whether a column is part of several sequences."""
        before_T = np.maximum(np.arange(len(first)) - 1, 0)
        for sequence in columns or []:
            before_T[sequence[1:]] = sequence[:-1]
        self.before = before_T
        """As `before_T`, on the host."""
        self.before_T = torch.from_numpy(before_T).to(device)
        """Column of the token before each token in its sequence; without meaning at a sequence's first."""
        self.in_order = bool((token_P == np.arange(len(token_P))).all())
        """Whether the groups are the row as it stands: nothing to gather."""
        self.token_P = torch.from_numpy(token_P).to(device)
        """Token (column of the row) of each slot of the groups, one group after another."""
        self.slot_T = torch.from_numpy(real_slots[first]).to(device)
        """First slot of each token."""
        unread = np.ones(len(token_P), np.bool_)
        unread[real_slots[first]] = False
        self.unread_Q = torch.from_numpy(unread.nonzero()[0]).to(device)
        """Slots whose output is dropped: padding, and the repetitions of shared tokens."""
        self.cumulative_S1 = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        self.sequence_P: Tensor | None = None
        """Token of each place, sequence by sequence without padding, where that is not the row as it stands."""
        self.place_T: Tensor | None = None
        """First place of each token, likewise."""
        self.places = places = np.concatenate(list(sequences))
        """Columns of all sequences, one after another, on the host."""
        if not np.array_equal(places, np.arange(len(first))):
            self.sequence_P = torch.from_numpy(places).to(device)
            self.place_T = torch.from_numpy(np.unique(places, return_index=True)[1]).to(device)

    def attend(
        self, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor, *, scaling: float | None, dropout: float
    ) -> Tensor:
        """Causal attention inside each sequence.

        Args:
            query_BHTd: B = 1, H heads.
            key_BKTd: K heads, each shared by H / K query heads in a row.
            value_BKTd: as the keys.
            scaling: of the scores; None is 1 / sqrt(d).
            dropout: probability on attention weights.

        Returns:
            out_BTHd, contiguous.
        """
        # [1, heads, T, d] is a view of [1, T, heads, d]: one row of memory for each token.
        parts = [x_B.transpose(1, 2)[0] for x_B in (query_BHTd, key_BKTd, value_BKTd)]
        if query_BHTd.device.type == "cuda" and query_BHTd.dtype in (torch.float16, torch.bfloat16) and not dropout:
            return self._attend_cuda(*parts, scaling=scaling)
        if not self.in_order:
            parts = [_to_slots(x, self.token_P, None if self.is_shared else self.slot_T) for x in parts]
        sizes = [count * width for count, width in self.group_shapes]
        outputs = []
        for (count, width), *group in zip(self.group_shapes, *(torch.split(x, sizes) for x in parts), strict=True):
            query, key, value = (x.view(count, width, *x.shape[1:]).transpose(1, 2) for x in group)
            shares_keys = query.shape[1] != key.shape[1]
            if cpu_attention.pays(query, dropout=dropout) and not shares_keys:
                out_NHLd = cpu_attention.attend(query, key, value, scaling=scaling)
            else:
                out_NHLd = F.scaled_dot_product_attention(
                    query, key, value, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=shares_keys
                )
            outputs.append(out_NHLd.transpose(1, 2).reshape(count * width, *group[0].shape[1:]))
        out_PHd = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        if not self.in_order:
            out_PHd = _from_slots(out_PHd, self.token_P, self.slot_T, self.unread_Q)
        # A single group's output may lie in memory as its queries do, heads first.
        return out_PHd.contiguous()[None]

    def _attend_cuda(self, query_THd: Tensor, key_TKd: Tensor, value_TKd: Tensor, *, scaling: float | None) -> Tensor:
        """The same by the kernel for sequences of different length, which knows no padding."""
        query, key, value = query_THd, key_TKd, value_TKd
        if self.sequence_P is not None:
            query, key, value = (x.index_select(0, self.sequence_P) for x in (query, key, value))
        out_PHd: Any = varlen_attn(
            query,
            key,
            value,
            self.cumulative_S1,
            self.cumulative_S1,
            max(self.lengths),
            max(self.lengths),
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=query_THd.shape[1] != key_TKd.shape[1],
        )
        out_THd = out_PHd if self.place_T is None else out_PHd.index_select(0, self.place_T)
        return cast(Tensor, out_THd)[None]


class _ToSlots(torch.autograd.Function):
    """Tokens to slots. A token's gradient is the sum over its slots; where it has but one, that one's is fetched."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, token_P: Tensor, slot_T: Tensor | None) -> Tensor:
        ctx.num_tokens = len(x_T)
        ctx.save_for_backward(token_P, slot_T)
        return x_T.index_select(0, token_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        token_P, slot_T = ctx.saved_tensors
        if slot_T is not None:
            return grads[0].index_select(0, slot_T), None, None
        grad_T = grads[0].new_zeros(ctx.num_tokens, *grads[0].shape[1:])
        return grad_T.index_add_(0, token_P, grads[0]), None, None


class _FromSlots(torch.autograd.Function):
    """Slots back to tokens. What is dropped has the gradient 0, so padding and repetitions give their queries none."""

    @staticmethod
    def forward(ctx: Any, x_P: Tensor, token_P: Tensor, slot_T: Tensor, unread_Q: Tensor) -> Tensor:
        ctx.save_for_backward(token_P, unread_Q)
        return x_P.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        token_P, unread_Q = ctx.saved_tensors
        return grads[0].index_select(0, token_P).index_fill_(0, unread_Q, 0), None, None, None


_to_slots = cast(Callable[[Tensor, Tensor, Tensor | None], Tensor], _ToSlots.apply)
_from_slots = cast(Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], _FromSlots.apply)
