"""Rows to tensors. Masks come from lengths: pad, bos and eos may share an id.

A batch is either packed, all sequences in one row without padding, or right-padded to its longest sequence. What comes
of a sequence is found by its place, counted through all rows, so that whoever reads a batch need not know which it is.
A micro-batch without rows gives one sequence of one token without a loss, so that a rank that ran out of rows makes the
same calls as the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlhf.data.dataset import PreferenceRow, SFTRow
from rlhf.data.packing import PackedLayout
from rlhf.data.split_layout import SplitLayout
from rlhf.distributed import Group

T = TypeVar("T")


@dataclass(frozen=True)
class Sequences:
    """Sequences as a model takes them."""

    token_ids_BT: Tensor
    attention_mask_BT: Tensor | None
    """True on real tokens; None where all are."""
    position_ids_BT: Tensor
    layout: PackedLayout | SplitLayout | None
    """Of the packed row; None for padded rows."""
    first_S: Tensor
    """Place of each sequence's first token: its index in `token_ids_BT.flatten()`."""
    last_S: Tensor
    """Place of its last token; all others lie between, unless sequences share their prompt."""
    length_S: Tensor
    lengths: tuple[int, ...]
    """The same on the host; the stand-in of an empty micro-batch has none."""
    num_padding: int
    """Columns without a token, of those that go through the model on this rank."""

    @property
    def num_tokens(self) -> int:
        """Real tokens, a shared prompt counted for each of its sequences; of a split row, this rank's."""
        if isinstance(self.layout, SplitLayout) and self.lengths:
            return self.layout.num_tokens
        return sum(self.lengths)

    @property
    def num_columns(self) -> int:
        """Tokens that go through the model on this rank, padding included."""
        return self.layout.width if isinstance(self.layout, SplitLayout) else self.token_ids_BT.numel()

    @property
    def num_sharers(self) -> int:
        """Ranks that have a part of these sequences each; the fields are the whole's on all of them."""
        return 1 if self.group is None else self.group.size

    @property
    def group(self) -> Group | None:
        """The ranks that have a part of these sequences each; None where this rank has them whole."""
        return self.layout.group if isinstance(self.layout, SplitLayout) else None

    def summed(self, x: Tensor) -> Tensor:
        """Put together what ranks that share the sequences found in their columns, 0 elsewhere; with gradient."""
        return x if self.group is None else self.group.total(x)

    def shared_out(self, items: list[T]) -> list[T]:
        """Those of `items`, one for each sequence or pair, that this rank counts: each is counted by one of its group.

        What it leaves out, another rank of the group has.
        """
        return items if self.group is None else items[self.group.rank :: self.group.size]

    def before(self, x_BT: Tensor) -> Tensor:
        """What x says at the token before each one in its sequence; without meaning at a sequence's first token."""
        return x_BT.roll(1, dims=1) if self.layout is None else x_BT[:, self.layout.before_T]

    @property
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of `Policy` and `ScalarModel`."""
        return {
            "token_ids_BT": self.token_ids_BT,
            "attention_mask_BT": self.attention_mask_BT,
            "position_ids_BT": self.position_ids_BT,
            "layout": self.layout,
        }


@dataclass(frozen=True)
class TokenBatch:
    """Sequences; `loss_mask_BT` is True where a token is predicted with a loss, never at a sequence's first."""

    sequences: Sequences
    loss_mask_BT: Tensor
    source_S: Tensor
    num_targets: int
    """Tokens with a loss."""


@dataclass(frozen=True)
class PreferenceBatch:
    """Prompt + response sequences, K of each prompt, and the pairs among them.

    `chosen_N` and `rejected_N` count sequences. Pairs of equal rank (`num_ties`) and pairs whose token ids are equal
    after truncation (`num_truncated_ties`) are not among them. Of a row that ranks share, each pair and each tie is in
    the batch of one of them, its sequences in those of all.
    """

    sequences: Sequences
    counted_S: Tensor
    """bool: this rank counts the sequence. Of ranks that share it one does, of the stand-in nobody."""
    response_length_S: Tensor
    source_S: Tensor
    chosen_N: Tensor
    rejected_N: Tensor
    weight_N: Tensor
    """1 / number of the prompt's pairs: every prompt weighs 1, whatever its number of responses."""
    margin_N: Tensor
    source_N: Tensor
    num_ties: int
    num_truncated_ties: int


@dataclass(frozen=True)
class ResponseBatch:
    """Prompts with their responses, for scoring."""

    sequences: Sequences
    response_mask_BT: Tensor
    """True on response tokens, the stop token included; of a row that ranks share, on those that this rank predicts."""
    response_position_BT: Tensor
    """Number of a token in its response; 0 in prompts."""
    prompt_length_S: Tensor
    response_length_S: Tensor
    first_response_S: Tensor
    """Place of each response's first token."""


def collate_sft(
    rows: Sequence[SFTRow],
    *,
    pad_id: int,
    device: torch.device | str,
    packed: bool,
    loss_on: Literal["responses", "all"] = "responses",
    group: Group | None = None,
) -> TokenBatch:
    """Batch of step 1; with a group, the targets are those that this rank predicts.

    Args:
        rows: may be empty.
        pad_id: id of the padding; any id will do.
        device: of the tensors.
        packed: one row without padding, for models that take it (`models.attention.takes_layout`).
        loss_on: `responses`: the rows' own masks; `all`: every token but the first.
        group: of ranks that collate the same rows, and share the packed row or the model's layers; None: of one rank.
    """
    sequences, place_T = _sequences([row.token_ids for row in rows], pad_id=pad_id, device=device, packed=packed)
    loss_mask = np.zeros(sequences.token_ids_BT.numel(), np.bool_)
    if rows:
        masks = [row.loss_mask if loss_on == "responses" else np.ones(len(row.token_ids), np.bool_) for row in rows]
        loss_mask[place_T] = np.concatenate([_but_first(mask) for mask in masks])
    if group is not None and group.by_layers:
        loss_mask &= group.rank == group.size - 1  # the last layers predict
    else:
        sequences, predicted = _split(sequences, group)
        loss_mask &= predicted
    return TokenBatch(
        sequences=sequences,
        loss_mask_BT=_like_tokens(loss_mask, sequences),
        source_S=torch.tensor([row.source for row in rows] or [0], device=device),
        num_targets=int(loss_mask.sum()),
    )


def collate_responses(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    *,
    pad_id: int,
    device: torch.device | str,
    packed: bool,
    group: Group | None = None,
) -> ResponseBatch:
    """Prompts with their responses, for scoring and for the update of step 3.

    Args:
        prompt_ids: not padded, each with at least one token; may be empty.
        response_ids: not padded, one for each prompt.
        pad_id: id of the padding.
        device: of the tensors.
        packed: one row without padding, in which equal prompts stand once.
        group: as `collate_sft`'s.

    Raises:
        ValueError: a prompt has no token.
    """
    lengths = [len(prompt) for prompt in prompt_ids]
    if 0 in lengths:
        raise ValueError(f"prompt {lengths.index(0)} has no token, so its response has nothing to be predicted from.")
    prompts, responses = ([np.array(ids, np.int32) for ids in lists] for lists in (prompt_ids, response_ids))
    sequences, place_T = _answers(prompts, responses, pad_id=pad_id, device=device, packed=packed)
    number = np.full(sequences.num_columns, -1, np.int64)
    if prompts:
        number[place_T] = np.concatenate([np.arange(-len(p), len(r)) for p, r in zip(prompts, responses, strict=True)])
    sequences, predicted = _split(sequences, group)
    response_length_S = torch.tensor([len(r) for r in responses] or [0], device=device)
    return ResponseBatch(
        sequences=sequences,
        response_mask_BT=_like_tokens((number >= 0) & predicted, sequences),
        response_position_BT=_like_tokens(number.clip(min=0), sequences),
        prompt_length_S=torch.tensor(lengths or [1], device=device),
        response_length_S=response_length_S,
        first_response_S=sequences.last_S + 1 - response_length_S,
    )


def collate_preferences(
    rows: Sequence[PreferenceRow],
    *,
    pad_id: int,
    device: torch.device | str,
    packed: bool,
    group: Group | None = None,
) -> PreferenceBatch:
    """Batch of step 2: all responses of all rows, and all pairs of different rank of each row.

    Args:
        rows: may be empty.
        pad_id: id of the padding.
        device: of the tensors.
        packed: one row without padding, in which equal prompts stand once.
        group: as `collate_sft`'s.
    """
    response_lengths: list[int] = []
    sources: list[int] = []
    pairs: list[tuple[int, int, float, int]] = []
    weights: list[float] = []
    ties: list[tuple[int, int]] = []
    truncated_ties: list[tuple[int, int]] = []
    for row in rows:
        first, first_pair = len(response_lengths), len(pairs)
        response_lengths += [len(response) for response in row.responses]
        sources += [row.source] * len(row.responses)
        for i in range(len(row.responses)):
            for j in range(i + 1, len(row.responses)):
                if row.ranks[i] == row.ranks[j]:
                    ties.append((first + i, first + j))
                elif np.array_equal(row.responses[i], row.responses[j]):
                    truncated_ties.append((first + i, first + j))
                else:
                    chosen, rejected = (i, j) if row.ranks[i] > row.ranks[j] else (j, i)
                    pairs.append((first + chosen, first + rejected, row.margin, row.source))
        num_pairs = len(pairs) - first_pair
        weights += [1 / num_pairs] * num_pairs
    sequences, _ = _answers(
        [row.prompt_ids for row in rows for _ in row.responses],
        [response for row in rows for response in row.responses],
        pad_id=pad_id,
        device=device,
        packed=packed,
    )
    sequences, _ = _split(sequences, group)
    pairs, weights = sequences.shared_out(pairs), sequences.shared_out(weights)
    counted = set(sequences.shared_out(list(range(len(response_lengths)))))
    return PreferenceBatch(
        sequences=sequences,
        counted_S=torch.tensor([i in counted for i in range(len(response_lengths))] or [False], device=device),
        response_length_S=torch.tensor(response_lengths or [0], device=device),
        source_S=torch.tensor(sources or [0], device=device),
        chosen_N=torch.tensor([pair[0] for pair in pairs], dtype=torch.int64, device=device),
        rejected_N=torch.tensor([pair[1] for pair in pairs], dtype=torch.int64, device=device),
        weight_N=torch.tensor(weights, dtype=torch.float32, device=device),
        margin_N=torch.tensor([pair[2] for pair in pairs], dtype=torch.float32, device=device),
        source_N=torch.tensor([pair[3] for pair in pairs], dtype=torch.int64, device=device),
        num_ties=len(sequences.shared_out(ties)),
        num_truncated_ties=len(sequences.shared_out(truncated_ties)),
    )


def left_pad(prompts: Sequence[Sequence[int]], *, pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Prompts for generation, right-aligned: token_ids_BP and attention_mask_BP, whose last column is all True.

    Raises:
        ValueError: no prompt, or one without a token.
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or 0 in lengths:
        raise ValueError(f"every prompt needs a token to generate from, got the lengths {lengths}.")
    width = max(lengths)
    token_ids_BP = torch.full((len(prompts), width), pad_id, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        token_ids_BP[row, width - len(prompt) :] = torch.as_tensor(np.asarray(prompt, np.int64))
    attention_mask_BP = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return token_ids_BP.to(device), attention_mask_BP.to(device)


def _sequences(
    token_lists: Sequence[np.ndarray], *, pad_id: int, device: torch.device | str, packed: bool
) -> tuple[Sequences, np.ndarray]:
    """Sequences, and the place of each of their tokens, one sequence after another.

    Without sequences there is one pad token that counts as real, because attention needs one.
    """
    rows = list(token_lists) or [np.array([pad_id])]
    lengths = np.array([len(row) for row in rows])
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    position_T = np.concatenate([np.arange(length) for length in lengths])
    if packed:
        shape, first = (1, int(lengths.sum())), starts
    else:
        shape = (len(rows), int(lengths.max()))
        first = np.arange(len(rows)) * shape[1]
    place_T = np.repeat(first, lengths) + position_T
    token_ids = np.full(shape, pad_id, np.int64)
    token_ids.reshape(-1)[place_T] = np.concatenate(rows)
    # Padding repeats the last position, which every position table has.
    positions = np.minimum(np.arange(shape[1]), lengths[:, None] - 1) if not packed else position_T[None]
    mask = None if packed else torch.from_numpy(np.arange(shape[1]) < lengths[:, None]).to(device)
    sequences = Sequences(
        token_ids_BT=torch.from_numpy(token_ids).to(device),
        attention_mask_BT=mask,
        position_ids_BT=torch.from_numpy(positions.astype(np.int64)).to(device),
        layout=PackedLayout(lengths.tolist(), device=device) if packed else None,
        first_S=torch.from_numpy(first.astype(np.int64)).to(device),
        last_S=torch.from_numpy(first + lengths - 1).to(device),
        length_S=torch.from_numpy(lengths.astype(np.int64)).to(device),
        lengths=tuple(lengths.tolist()) if token_lists else (),
        num_padding=int(token_ids.size - lengths.sum()) if token_lists else 1,
    )
    return sequences, place_T


def _split(sequences: Sequences, group: Group | None) -> tuple[Sequences, np.ndarray]:
    """A packed row, of which each rank of the group computes its part, and which of all tokens this rank predicts."""
    if group is None or group.size == 1:
        return sequences, np.ones(sequences.token_ids_BT.numel(), np.bool_)
    assert isinstance(sequences.layout, PackedLayout), "only packed rows are split"
    layout = SplitLayout(sequences.layout, group)
    num_real = layout.num_real if sequences.lengths else 0
    return replace(sequences, layout=layout, num_padding=layout.width - num_real), layout.predicted


def _answers(
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    pad_id: int,
    device: torch.device | str,
    packed: bool,
) -> tuple[Sequences, np.ndarray]:
    """As `_sequences`, of prompts with a response each; in a packed row, equal prompts stand once."""
    if packed and len({prompt.tobytes() for prompt in prompts}) < len(prompts):
        return _sharing_prompts(prompts, responses, device=device)
    rows = [np.concatenate([prompt, response]) for prompt, response in zip(prompts, responses, strict=True)]
    return _sequences(rows, pad_id=pad_id, device=device, packed=packed)


def _sharing_prompts(
    prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], *, device: torch.device | str
) -> tuple[Sequences, np.ndarray]:
    """A packed row of each prompt and its responses, whose sequences are prompt and response: prompts stand once."""
    members: dict[bytes, list[int]] = {}
    for i, prompt in enumerate(prompts):
        members.setdefault(prompt.tobytes(), []).append(i)
    parts: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    columns: list[np.ndarray] = [np.empty(0)] * len(prompts)
    end = 0
    for same in members.values():
        prompt = prompts[same[0]]
        shared = np.arange(end, end + len(prompt))
        parts.append(prompt)
        positions.append(np.arange(len(prompt)))
        end += len(prompt)
        for i in same:
            own = np.arange(len(responses[i]))
            parts.append(responses[i])
            positions.append(len(prompt) + own)
            columns[i] = np.concatenate([shared, end + own])
            end += len(own)
    lengths = [len(c) for c in columns]
    sequences = Sequences(
        token_ids_BT=torch.from_numpy(np.concatenate(parts).astype(np.int64)[None]).to(device),
        attention_mask_BT=None,
        position_ids_BT=torch.from_numpy(np.concatenate(positions)[None]).to(device),
        layout=PackedLayout(lengths, columns=columns, device=device),
        first_S=torch.tensor([c[0] for c in columns], device=device),
        last_S=torch.tensor([c[-1] for c in columns], device=device),
        length_S=torch.tensor(lengths, device=device),
        lengths=tuple(lengths),
        num_padding=0,
    )
    return sequences, np.concatenate(columns)


def _like_tokens(flat: np.ndarray, sequences: Sequences) -> Tensor:
    """Numbers of places in the shape and on the device of the tokens."""
    return torch.from_numpy(flat).view(sequences.token_ids_BT.shape).to(sequences.token_ids_BT.device)


def _but_first(mask: np.ndarray) -> np.ndarray:
    """Nothing stands before a sequence's first token to predict it from."""
    return np.concatenate([[False], mask[1:]])
