"""Held-out loss per token, perplexity per source, and answers to held-out prompts."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from rlhf.data.batching import Batching
from rlhf.data.collate import collate_sft
from rlhf.data.dataset import SFTRow, TokenDataset
from rlhf.data.loader import eval_micro_batches
from rlhf.distributed import all_sum
from rlhf.engine import TrainEngine
from rlhf.health import repeat_frac
from rlhf.ops import to_columns
from rlhf.rollout.answers import Answer
from rlhf.sharing import Sharing


def evaluate_loss(
    policy: TrainEngine,
    dataset: TokenDataset[SFTRow],
    *,
    batching: Batching,
    sharing: Sharing,
    max_rows: int,
    pad_id: int,
) -> dict[str, float]:
    """Loss, perplexity and accuracy over held-out response tokens of all ranks; empty without rows. Collective.

    Sums over tokens are taken over all ranks and batches first, divided once, then exponentiated: the mean of per-rank
    or per-batch perplexities is another, larger number.

    Args:
        policy: of a `Policy`.
        dataset: the held-out rows.
        batching: how they become micro-batches.
        sharing: ranks that work on each of them together.
        max_rows: most rows.
        pad_id: id of the padding.

    Returns:
        eval/loss, eval/perplexity and eval/token_accuracy, and with several sources each of them by source.
    """
    if not (len(dataset) and max_rows):
        return {}
    # Per source: negative log-likelihood, correct tokens, tokens.
    sums = torch.zeros(len(dataset.source_names), 3, dtype=torch.float64, device=policy.device)
    policy.eval()
    with torch.no_grad():
        for rows in eval_micro_batches(
            dataset, batching=batching, rank=sharing.rows.number, world_size=sharing.rows.count, max_rows=max_rows
        ):
            batch = collate_sft(
                rows, pad_id=pad_id, device=policy.device, packed=batching.packed, group=sharing.divided
            )
            sequences = batch.sequences
            output = policy(**sequences.inputs, target_mask_BT=batch.loss_mask_BT)
            num_columns = max((len(row.token_ids) for row in rows), default=1)
            sums_S = [
                to_columns(x_BT.double(), sequences.first_S, sequences.length_S, num_columns).sum(dim=1)
                for x_BT in (-output.logprob_BT, output.greedy_BT, batch.loss_mask_BT)
            ]
            sums.index_add_(0, batch.source_S, torch.stack(sums_S, dim=1))
    policy.train()
    table = all_sum(sums).tolist()
    values = _ratios([sum(column) for column in zip(*table, strict=True)])
    if len(table) > 1:
        for name, row in zip(dataset.source_names, table, strict=True):
            values.update({f"{key}/{name}": value for key, value in _ratios(row).items()})
    return values


def _ratios(sums: Sequence[float]) -> dict[str, float]:
    loss, correct, count = sums
    if not count:
        return {}
    return {
        "eval/loss": loss / count,
        "eval/perplexity": math.exp(loss / count),
        "eval/token_accuracy": correct / count,
    }


def summarise_answers(answers: Sequence[Answer]) -> dict[str, float]:
    """Numbers of answers that need no model; empty without answers."""
    if not answers:
        return {}
    return {
        "eval/stop_frac": sum(a.stopped for a in answers) / len(answers),
        "eval/distinct_frac": len({a.text for a in answers}) / len(answers),
        "eval/repeat_frac": repeat_frac([a.response_ids for a in answers]),
        "eval/response_length": sum(len(a.response_ids) for a in answers) / len(answers),
    }


def to_samples(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Rows of samples.jsonl."""
    return [
        {"prompt": a.prompt, "response": a.text, "stopped": a.stopped, "score": None, "gold": None} for a in answers
    ]
