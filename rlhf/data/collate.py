"""Rows to padded tensors. Masks come from lengths: pad, bos and eos may share an id.

All batches are right-padded to their longest row. A micro-batch without rows gives one row of one token without a loss,
so that a rank that ran out of rows makes the same calls as the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rlhf.data.dataset import PreferenceRow, SFTRow


@dataclass(frozen=True)
class TokenBatch:
    """Sequences; `loss_mask_BT[:, t]` is True where token t is predicted with a loss, never at t = 0."""

    token_ids_BT: Tensor
    attention_mask_BT: Tensor
    position_ids_BT: Tensor
    loss_mask_BT: Tensor
    source_B: Tensor


@dataclass(frozen=True)
class PreferenceBatch:
    """Prompt + response sequences, K of each prompt, and the pairs among them.

    `chosen_N` and `rejected_N` are rows of the batch. Pairs of equal rank (`num_ties`) and pairs whose token ids are
    equal after truncation (`num_truncated_ties`) are not among them.
    """

    token_ids_BT: Tensor
    attention_mask_BT: Tensor
    position_ids_BT: Tensor
    last_index_B: Tensor
    response_length_B: Tensor
    source_B: Tensor
    chosen_N: Tensor
    rejected_N: Tensor
    weight_N: Tensor
    """1 / number of the prompt's pairs: every prompt weighs 1, whatever its number of responses."""
    margin_N: Tensor
    source_N: Tensor
    num_ties: int
    num_truncated_ties: int


def collate_sft(
    rows: Sequence[SFTRow],
    *,
    pad_id: int,
    device: torch.device | str,
    loss_on: Literal["responses", "all"] = "responses",
) -> TokenBatch:
    """Batch of step 1.

    Args:
        rows: may be empty.
        pad_id: id of the padding; any id will do.
        device: of the tensors.
        loss_on: `responses`: the rows' own masks; `all`: every token but the first.
    """
    sequences = [row.token_ids for row in rows]
    masks = [row.loss_mask if loss_on == "responses" else np.ones(len(row.token_ids), np.bool_) for row in rows]
    return _token_batch(sequences, masks, [row.source for row in rows], pad_id=pad_id, device=device)


def rows_to_batch(
    prompt_ids: Sequence[Sequence[int]],
    response_ids: Sequence[Sequence[int]],
    *,
    pad_id: int,
    device: torch.device | str,
) -> tuple[TokenBatch, Tensor]:
    """Prompts with their responses, for scoring; the loss mask is True on the response tokens, the stop token included.

    Args:
        prompt_ids: not padded, each with at least one token; may be empty.
        response_ids: not padded, one for each prompt.
        pad_id: id of the padding.
        device: of the tensors.

    Returns:
        The batch and prompt_length_B.
    """
    sequences = [np.array([*p, *r], np.int32) for p, r in zip(prompt_ids, response_ids, strict=True)]
    lengths = [len(prompt) for prompt in prompt_ids]
    if 0 in lengths:
        raise ValueError(f"prompt {lengths.index(0)} has no token, so its response has nothing to be predicted from.")
    masks = [np.arange(len(row)) >= length for row, length in zip(sequences, lengths, strict=True)]
    batch = _token_batch(sequences, masks, [0] * len(sequences), pad_id=pad_id, device=device)
    return batch, torch.tensor(lengths or [1], device=device)


def collate_preferences(rows: Sequence[PreferenceRow], *, pad_id: int, device: torch.device | str) -> PreferenceBatch:
    """Batch of step 2: all responses of all rows, and all pairs of different rank of each row.

    Args:
        rows: may be empty.
        pad_id: id of the padding.
        device: of the tensors.
    """
    sequences: list[np.ndarray] = []
    response_lengths: list[int] = []
    sources: list[int] = []
    pairs: list[tuple[int, int, float, int]] = []
    weights: list[float] = []
    num_ties = num_truncated_ties = 0
    for row in rows:
        first, first_pair = len(sequences), len(pairs)
        sequences += [np.concatenate([row.prompt_ids, response]) for response in row.responses]
        response_lengths += [len(response) for response in row.responses]
        sources += [row.source] * len(row.responses)
        for i in range(len(row.responses)):
            for j in range(i + 1, len(row.responses)):
                if row.ranks[i] == row.ranks[j]:
                    num_ties += 1
                elif np.array_equal(row.responses[i], row.responses[j]):
                    num_truncated_ties += 1
                else:
                    chosen, rejected = (i, j) if row.ranks[i] > row.ranks[j] else (j, i)
                    pairs.append((first + chosen, first + rejected, row.margin, row.source))
        num_pairs = len(pairs) - first_pair
        weights += [1 / num_pairs] * num_pairs
    token_ids_BT, length_B = _right_pad(sequences, pad_id=pad_id, device=device)
    attention_mask_BT, position_ids_BT = _mask_and_positions(length_B, token_ids_BT.shape[1])
    return PreferenceBatch(
        token_ids_BT=token_ids_BT,
        attention_mask_BT=attention_mask_BT,
        position_ids_BT=position_ids_BT,
        last_index_B=length_B - 1,
        response_length_B=torch.tensor(response_lengths or [0], device=device),
        source_B=torch.tensor(sources or [0], device=device),
        chosen_N=torch.tensor([pair[0] for pair in pairs], dtype=torch.int64, device=device),
        rejected_N=torch.tensor([pair[1] for pair in pairs], dtype=torch.int64, device=device),
        weight_N=torch.tensor(weights, dtype=torch.float32, device=device),
        margin_N=torch.tensor([pair[2] for pair in pairs], dtype=torch.float32, device=device),
        source_N=torch.tensor([pair[3] for pair in pairs], dtype=torch.int64, device=device),
        num_ties=num_ties,
        num_truncated_ties=num_truncated_ties,
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


def _token_batch(
    sequences: Sequence[np.ndarray],
    loss_masks: Sequence[np.ndarray],
    sources: Sequence[int],
    *,
    pad_id: int,
    device: torch.device | str,
) -> TokenBatch:
    token_ids_BT, length_B = _right_pad(sequences, pad_id=pad_id, device=device)
    attention_mask_BT, position_ids_BT = _mask_and_positions(length_B, token_ids_BT.shape[1])
    loss_mask = np.zeros(token_ids_BT.shape, np.bool_)
    for row, mask in enumerate(loss_masks):
        loss_mask[row, 1 : len(mask)] = mask[1:]  # nothing stands before token 0 to predict it from
    return TokenBatch(
        token_ids_BT=token_ids_BT,
        attention_mask_BT=attention_mask_BT,
        position_ids_BT=position_ids_BT,
        loss_mask_BT=torch.from_numpy(loss_mask).to(device),
        source_B=torch.tensor(list(sources) or [0], device=device),
    )


def _right_pad(sequences: Sequence[np.ndarray], *, pad_id: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """token_ids_BT and length_B; without sequences, one pad token that counts as real, because attention needs one."""
    rows = sequences or [np.array([pad_id])]
    token_ids = np.full((len(rows), max(len(row) for row in rows)), pad_id, np.int64)
    for i, row in enumerate(rows):
        token_ids[i, : len(row)] = row
    return torch.from_numpy(token_ids).to(device), torch.tensor([len(row) for row in rows], device=device)


def _mask_and_positions(length_B: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """attention_mask_BT and position_ids_BT; padding repeats the last position, which every position table has."""
    index_T = torch.arange(width, device=length_B.device)
    return index_T < length_B[:, None], torch.minimum(index_T, length_B[:, None] - 1)
