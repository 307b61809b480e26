"""Held-out loss per token, perplexity per source, and answers to held-out prompts."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from rlhf.data.collate import collate_sft
from rlhf.data.dataset import PromptRow, TokenDataset
from rlhf.data.loader import eval_micro_batches
from rlhf.distributed import all_sum, rank, world_size
from rlhf.engine import TrainEngine
from rlhf.rollout.answers import Answer, Voice, answer_rows


def evaluate_loss(
    policy: TrainEngine, dataset: TokenDataset, *, micro_batch_size: int, max_rows: int, pad_id: int
) -> dict[str, float]:
    """Loss, perplexity and accuracy over held-out tokens of all ranks; empty without rows.

    Sums over tokens are taken over all ranks and sources first and divided once, then exponentiated: the mean of
    per-rank or per-batch perplexities is another, larger number.

    Returns:
        eval/loss and eval/token_accuracy in all, eval/loss/<source> and eval/perplexity/<source> where a source has
        tokens.
    """
    if not (len(dataset) and max_rows):
        return {}
    num_sources = len(dataset.source_names)
    # Per source: negative log-likelihood, correct tokens, tokens.
    sums = torch.zeros(num_sources, 3, dtype=torch.float64, device=policy.device)
    policy.eval()
    with torch.no_grad():
        for rows in eval_micro_batches(
            dataset,
            micro_batch_size=micro_batch_size,
            rank=rank(),
            world_size=world_size(),
            max_rows=max_rows,
        ):
            batch = collate_sft(rows, pad_id=pad_id, device=policy.device)
            output = policy(
                token_ids_BT=batch.token_ids_BT,
                attention_mask_BT=batch.attention_mask_BT,
                position_ids_BT=batch.position_ids_BT,
                target_mask_BT=batch.loss_mask_BT,
            )
            per_row = torch.stack(
                [
                    -output.logprob_BT.double().sum(dim=1),
                    (output.greedy_BT & batch.loss_mask_BT).double().sum(dim=1),
                    batch.loss_mask_BT.double().sum(dim=1),
                ],
                dim=1,
            )
            sums.index_add_(0, batch.source_B, per_row)
    policy.train()
    table = all_sum(sums).tolist()
    loss, correct, count = (sum(row[i] for row in table) for i in range(3))
    values = {
        "eval/loss": loss / count,
        "eval/perplexity": math.exp(loss / count),
        "eval/token_accuracy": correct / count,
    }
    for name, (source_loss, _, source_count) in zip(dataset.source_names, table, strict=True):
        if source_count:
            values[f"eval/loss/{name}"] = source_loss / source_count
            values[f"eval/perplexity/{name}"] = math.exp(source_loss / source_count)
    return values


def evaluate_answers(
    policy: TrainEngine, voice: Voice, rows: Sequence[PromptRow], *, seed: int
) -> tuple[dict[str, float], list[Answer]]:
    """Answer held-out prompts: share that stop, share that differ, mean length; empty without rows."""
    if not rows:
        return {}, []
    answers = answer_rows(policy, voice, rows, seed=seed)
    return summarise(answers), answers


def summarise(answers: Sequence[Answer]) -> dict[str, float]:
    """Numbers of a non-empty list of answers that need no model."""
    return {
        "eval/stop_frac": sum(a.stopped for a in answers) / len(answers),
        "eval/distinct_frac": len({a.text for a in answers}) / len(answers),
        "eval/response_length": sum(len(a.response_ids) for a in answers) / len(answers),
    }


def to_samples(answers: Sequence[Answer], *, limit: int) -> list[dict[str, Any]]:
    """Rows of samples.jsonl."""
    return [
        {"prompt": a.prompt, "response": a.text, "stopped": a.stopped, "score": None, "gold": None}
        for a in answers[:limit]
    ]
