"""Attention of one forward of a rollout: rows that decode, against their slots, and prompts that come in.

The forward's one row `[1, N]` holds first the newest token of each decoding row, then whole prompts, one after another.

On a CPU the scores of all decoding rows are one sparse product, of queries and just the keys that each may see, and the
sums of values another: no place of a slot is read that is not its row's, however different the lengths. Batched dense
products read up to the longest row, and for one query each they are slower even at equal lengths (docs/design/002).
On other devices all slots are one masked call whose shapes seldom change.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.data.packing import PackedLayout
from rlhf.rollout.cache import SlotCache

# Lengths are rounded up to a multiple of it where one masked call reads all slots.
LENGTH_STEP = 64


class SlotLayout:
    """What `models.attention` needs to attend in a forward over a `SlotCache`."""

    def __init__(
        self,
        cache: SlotCache,
        *,
        slots: Sequence[int],
        lengths: Sequence[int],
        prompt_lengths: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:
        """Plan a forward.

        Args:
            cache: which holds the rows.
            slots: of the decoding rows, ascending.
            lengths: tokens of each of them, the newest, which this forward writes, included.
            prompt_lengths: tokens of each prompt that follows them in the forward's row.
            device: of the model.
        """
        self.cache = cache
        self.num_rows = len(slots)
        self.top = max(slots, default=-1) + 1
        self.longest = max(lengths, default=0)
        self.slot_N = torch.tensor(list(slots), dtype=torch.int64, device=device)
        self.length_N = torch.tensor(list(lengths), dtype=torch.int64, device=device)
        self.prompts = PackedLayout(prompt_lengths, device=device) if prompt_lengths else None
        self._sparse: _SparsePlan | None = None
        self._mask_S11L: Tensor | None = None

    @classmethod
    def of_first_slots(cls, cache: SlotCache, slot_N: Tensor, length_N: Tensor, *, longest: int) -> "SlotLayout":
        """Of a forward of the first N slots whose lengths the host does not know; `longest` is at least each of them.

        It copies nothing from the host, so that it can be part of a captured graph; for accelerators.
        """
        layout = cls(cache, slots=(), lengths=(), device=slot_N.device)
        layout.num_rows = layout.top = len(slot_N)
        layout.slot_N, layout.length_N, layout.longest = slot_N, length_N, longest
        return layout

    def excess(self) -> int:
        """What attention reads in each layer because of empty slots among the others, in bytes."""
        if self.slot_N.device.type == "cpu":
            return 0
        return (self.top - self.num_rows) * self.longest * self.cache.bytes_per_token

    def advance(self) -> None:
        """Move on to the next forward of the same rows, each a token longer; only without prompts."""
        assert self.prompts is None, "prompts are in the cache after their forward"
        self.length_N = self.length_N + 1
        self.longest += 1
        self._sparse = self._mask_S11L = None

    def attend(
        self, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor, *, scaling: float | None, dropout: float
    ) -> Tensor:
        """Attention of the forward's tokens in the layer that the cache was updated with just now.

        Args:
            query_BHTd: B = 1, T = N.
            key_BKTd: of the same tokens; those of decoding rows are read from the cache.
            value_BKTd: as the keys.
            scaling: of the scores; None is 1 / sqrt(d).
            dropout: probability on attention weights; rollouts have none.

        Returns:
            out_BTHd.
        """
        parts = []
        if self.num_rows:
            scale = query_BHTd.shape[-1] ** -0.5 if scaling is None else scaling
            query_NHd = query_BHTd[0, :, : self.num_rows].transpose(0, 1)
            attend = self.attend_sparse if query_BHTd.device.type == "cpu" else self.attend_masked
            parts.append(attend(query_NHd, *self.cache.buffers[self.cache.layer], scale=scale)[None])
        if self.prompts is not None:
            parts.append(
                self.prompts.attend(
                    *(x[:, :, self.num_rows :] for x in (query_BHTd, key_BKTd, value_BKTd)),
                    scaling=scaling,
                    dropout=dropout,
                )
            )
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]

    def attend_sparse(self, query_NHd: Tensor, key_SKLd: Tensor, value_SKLd: Tensor, *, scale: float) -> Tensor:
        """Attention of the decoding rows by sparse products, out_NHd; for CPUs, in float32."""
        num_rows, num_heads, head_size = query_NHd.shape
        if self._sparse is None:
            self._sparse = _SparsePlan(self.slot_N, self.length_N, num_heads, *key_SKLd.shape[:3])
        plan = self._sparse
        query_Qd = query_NHd.reshape(-1, head_size).to(key_SKLd.dtype)
        key_Wd, value_Wd = (buffer_SKLd.view(-1, head_size) for buffer_SKLd in (key_SKLd, value_SKLd))
        score_Z = torch.sparse.sampled_addmm(plan.pattern_QW, query_Qd, key_Wd.T, beta=0.0, alpha=scale).values()
        plan.score_QL.view(-1).scatter_(0, plan.padded_Z, score_Z)
        weight_Z = plan.score_QL.softmax(-1).view(-1).index_select(0, plan.padded_Z)
        out_Qd = torch.embedding_bag(
            value_Wd, plan.row_Z, plan.start_Q, scale_grad_by_freq=False, mode=0, sparse=False,
            per_sample_weights=weight_Z,
        )[0]  # fmt: skip
        return out_Qd.to(query_NHd.dtype).view(num_rows, num_heads, head_size)

    def attend_masked(self, query_NHd: Tensor, key_SKLd: Tensor, value_SKLd: Tensor, *, scale: float) -> Tensor:
        """The same by one masked call over the slots up to the last one in use; for accelerators."""
        longest = min(-(-self.longest // LENGTH_STEP) * LENGTH_STEP, self.cache.capacity)
        if self._mask_S11L is None:
            length_S = torch.ones(self.top, dtype=torch.int64, device=query_NHd.device)  # of an empty slot: anything
            length_S[self.slot_N] = self.length_N
            self._mask_S11L = (torch.arange(longest, device=query_NHd.device) < length_S[:, None])[:, None, None]
        # The queries that share a key head take the place of time, so that no key is repeated for them.
        query_NKmd = query_NHd.reshape(self.num_rows, key_SKLd.shape[1], -1, query_NHd.shape[-1])
        has_gaps = self.top != self.num_rows
        query_SKmd = query_NKmd
        if has_gaps:
            query_SKmd = query_NKmd.new_zeros(self.top, *query_NKmd.shape[1:])
            query_SKmd[self.slot_N] = query_NKmd
        out_SKmd = F.scaled_dot_product_attention(
            query_SKmd,
            key_SKLd[: self.top, :, :longest],
            value_SKLd[: self.top, :, :longest],
            attn_mask=self._mask_S11L,
            scale=scale,
        )
        return (out_SKmd[self.slot_N] if has_gaps else out_SKmd).flatten(1, 2)


class _SparsePlan:
    """Which rows W of the cache each query Q = (decoding row, head) sees: Z pairs, in the order of the queries."""

    def __init__(
        self, slot_N: Tensor, length_N: Tensor, num_heads: int, num_slots: int, num_key_heads: int, capacity: int
    ) -> None:
        head_H = torch.arange(num_heads) // (num_heads // num_key_heads)
        first_Q = ((slot_N[:, None] * num_key_heads + head_H) * capacity).flatten()
        length_Q = length_N.repeat_interleave(num_heads)
        bounds = torch.nn.functional.pad(length_Q.cumsum(0), (1, 0))
        self.start_Q = bounds[:-1]
        query_Z = torch.repeat_interleave(length_Q)
        place_Z = torch.arange(len(query_Z)) - self.start_Q[query_Z]
        self.row_Z = first_Q[query_Z] + place_Z
        """Row of the cache of each pair."""
        longest = int(length_N.max())
        self.padded_Z = query_Z * longest + place_Z
        """Where each pair stands in `score_QL`."""
        self.score_QL = torch.full((len(first_Q), longest), -torch.inf)
        """Scores, one query a line; what lies behind a query's own length stays -inf."""
        shape = (len(first_Q), num_slots * num_key_heads * capacity)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that sparse tensors are in beta
            self.pattern_QW = torch.sparse_csr_tensor(
                bounds, self.row_Z, torch.zeros(len(query_Z)), shape, check_invariants=False
            )
