"""Several sequences in one row without padding: their attention, block by block.

A packed row is `[1, T]`: sequences one after another, positions restarting in each. All layers but attention work token
by token and need to know nothing. In attention a token sees the tokens before it in its own sequence only; `attend`
gives sequences of like length to the kernel as one right-padded batch, where causality alone keeps padding away from
what is real, so that no mask has to be built or read.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# A group of sequences holds none shorter than this share of its longest: at most a quarter of its slots is padding,
# which only the attention kernel sees, and sequences of 10 to 350 tokens make a dozen groups.
GROUP_SHARE = 0.75


class PackedLayout:
    """Where the sequences of a packed row lie, and attention inside each of them."""

    def __init__(self, lengths: Sequence[int], *, device: torch.device | str = "cpu") -> None:
        """Plan the groups.

        Args:
            lengths: tokens of each sequence in the order of the row, each >= 1.
            device: of the tensors that `attend` will get.

        Raises:
            ValueError: no sequence, or one without tokens.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"a packed row needs sequences of at least one token, got the lengths {list(lengths)}.")
        self.lengths = list(lengths)
        longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
        groups: list[list[int]] = []
        for i in longest_first:
            if not groups or lengths[i] < GROUP_SHARE * lengths[groups[-1][0]]:
                groups.append([])
            groups[-1].append(i)
        self.group_shapes = [(len(group), lengths[group[0]]) for group in groups]
        start = torch.tensor([0, *lengths]).cumsum(0)
        # Padding repeats the sequence's last token: any row will do, as nothing real looks at it.
        columns = [torch.arange(width) for _, width in self.group_shapes]
        members = [torch.tensor(group) for group in groups]
        length_S = torch.tensor(lengths)
        token_P = torch.cat(
            [
                (start[s][:, None] + torch.minimum(c, length_S[s][:, None] - 1)).flatten()
                for s, c in zip(members, columns, strict=True)
            ]
        )
        real_P = torch.cat([(c < length_S[s][:, None]).flatten() for s, c in zip(members, columns, strict=True)])
        slot_T = torch.empty(int(length_S.sum()), dtype=torch.int64)
        slot_T[token_P[real_P]] = real_P.nonzero().flatten()
        self.token_P = token_P.to(device)
        """Token (column of the row) of each slot of the groups, one group after another."""
        self.slot_T = slot_T.to(device)
        """Slot of each token."""
        self.padding_Q = (~real_P).nonzero().flatten().to(device)
        """Slots that are padding."""
        self.in_order = bool((token_P == torch.arange(len(token_P))).all())
        """Whether the groups are the row as it stands: nothing to gather."""
        self.cumulative_S1 = start.to(device, torch.int32)

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
            parts = [_to_slots(x, self.token_P, self.slot_T) for x in parts]
        sizes = [count * width for count, width in self.group_shapes]
        outputs = []
        for (count, width), *group in zip(self.group_shapes, *(torch.split(x, sizes) for x in parts), strict=True):
            query, key, value = (x.view(count, width, *x.shape[1:]).transpose(1, 2) for x in group)
            out_NHLd = F.scaled_dot_product_attention(
                query,
                key,
                value,
                dropout_p=dropout,
                is_causal=True,
                scale=scaling,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(out_NHLd.transpose(1, 2).reshape(count * width, *group[0].shape[1:]))
        out_PHd = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        if not self.in_order:
            out_PHd = _from_slots(out_PHd, self.token_P, self.slot_T, self.padding_Q)
        return out_PHd[None]

    def _attend_cuda(self, query_THd: Tensor, key_TKd: Tensor, value_TKd: Tensor, *, scaling: float | None) -> Tensor:
        """The same by the kernel for sequences of different length, which knows no padding."""
        longest = max(self.lengths)
        out: Any = varlen_attn(
            query_THd,
            key_TKd,
            value_TKd,
            self.cumulative_S1,
            self.cumulative_S1,
            longest,
            longest,
            scale=scaling,
            window_size=(-1, 0),
            enable_gqa=query_THd.shape[1] != key_TKd.shape[1],
        )
        return cast(Tensor, out)[None]


class _ToSlots(torch.autograd.Function):
    """Tokens to slots. A token's gradient is that of its own slot: the copies in padding have none."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, token_P: Tensor, slot_T: Tensor) -> Tensor:
        ctx.save_for_backward(slot_T)
        return x_T.index_select(0, token_P)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slot_T,) = ctx.saved_tensors
        return grads[0].index_select(0, slot_T), None, None


class _FromSlots(torch.autograd.Function):
    """Slots back to tokens. What stands in padding is dropped, so its gradient is 0."""

    @staticmethod
    def forward(ctx: Any, x_P: Tensor, token_P: Tensor, slot_T: Tensor, padding_Q: Tensor) -> Tensor:
        ctx.save_for_backward(token_P, padding_Q)
        return x_P.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        token_P, padding_Q = ctx.saved_tensors
        return grads[0].index_select(0, token_P).index_fill_(0, padding_Q, 0), None, None, None


_to_slots = cast(Callable[[Tensor, Tensor, Tensor], Tensor], _ToSlots.apply)
_from_slots = cast(Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], _FromSlots.apply)
