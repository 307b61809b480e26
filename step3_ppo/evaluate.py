"""What the actor says to held-out prompts, judged by the four roles and the gold rule."""

from collections.abc import Sequence
from typing import Any

from rlhf.data.batching import Batching
from rlhf.data.dataset import PromptRow
from rlhf.distributed import rank, world_size
from rlhf.health import repeat_frac
from rlhf.rollout.answers import Voice
from step3_ppo.experience import ScoredSequence
from step3_ppo.roles import Roles
from step3_ppo.rollout import Judges, roll_out, score_responses


def answer_held_out(
    roles: Roles, voice: Voice, rows: Sequence[PromptRow], judges: Judges, *, batching: Batching, seed: int
) -> list[ScoredSequence]:
    """One scored answer to each held-out prompt, on every rank and in the order of the rows. Collective."""
    mine = list(rows)[rank() :: world_size()]
    samples, _ = roll_out(roles, voice, mine, samples_per_prompt=1, seed=seed, step=0)
    return score_responses(roles, voice, samples, judges, batching=batching, rescore=True)


def describe(sequences: Sequence[ScoredSequence]) -> dict[str, float]:
    """Means over responses (entropy: over tokens), without a group in the name; empty without responses.

    kl_ref is k1 summed over the response's tokens, nats.
    """
    if not sequences:
        return {}
    count = len(sequences)
    num_tokens = sum(len(s.response_ids) for s in sequences)
    values = {
        "score": sum(s.score for s in sequences) / count,
        "kl_ref": sum(float((s.old_logprob_R - s.ref_logprob_R).sum()) for s in sequences) / count,
        "response_length": num_tokens / count,
        "stop_frac": sum(s.stopped for s in sequences) / count,
        "distinct_frac": len({s.text for s in sequences}) / count,
        "repeat_frac": repeat_frac([s.response_ids for s in sequences]),
    }
    entropies = [s.entropy * len(s.response_ids) for s in sequences if s.entropy is not None]
    if len(entropies) == count:
        values["entropy"] = sum(entropies) / num_tokens
    gold = [s.gold for s in sequences if s.gold is not None]
    if gold:
        values["gold"] = sum(gold) / len(gold)
    return values


def to_samples(sequences: Sequence[ScoredSequence], rows: Sequence[PromptRow]) -> list[dict[str, Any]]:
    """Sequence of samples.jsonl."""
    text = {row.index: row.text for row in rows}
    return [
        {
            "prompt": text[s.key[0]],
            "response": s.text,
            "stopped": s.stopped,
            "score": s.score,
            "gold": s.gold,
        }
        for s in sequences
    ]
