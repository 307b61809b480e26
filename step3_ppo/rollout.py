"""From prompts to scored sequences: sample with the actor, then let each role say what it has to say of them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data.batching import micro_batches
from rlhf.data.collate import TokenBatch, rows_to_batch
from rlhf.data.dataset import PromptRow
from rlhf.distributed import all_gather_objects, all_max, rank
from rlhf.engine import FrozenEngine, TrainEngine
from rlhf.models.scalar_head import scores_at
from rlhf.ops import to_response
from rlhf.rollout.answers import Voice, draw_responses
from rlhf.rollout.decode import Response
from rlhf.rules import Rule
from step3_ppo.experience import ScoredSequence
from step3_ppo.roles import Roles


@dataclass(frozen=True, kw_only=True)
class Judges:
    """What scores a response beside the reward model."""

    rule: Rule | None
    """Part of the reward."""
    rule_weight: float
    model_weight: float
    gold: Rule | None
    """Measured only."""


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Statistics of the responses of one micro-batch under one policy; 0 outside the responses."""

    logprob_BR: Tensor
    entropy_BR: Tensor


def score_tokens(
    policy: TrainEngine | FrozenEngine, batch: TokenBatch, prompt_length_B: Tensor, voice: Voice, *, num_columns: int
) -> TokenScores:
    """Log-prob and entropy of each response token under the distribution that sampling draws from.

    Args:
        policy: engine of a `Policy`; gradients follow the caller's mode.
        batch: prompts and responses in right-padded rows; its loss mask marks the responses.
        prompt_length_B: tokens of each prompt.
        voice: the sampling transforms.
        num_columns: R of the result.
    """
    # A response token's number, which min_new_tokens counts by, is its column less the prompt's length.
    columns_T = torch.arange(batch.token_ids_BT.shape[1], device=batch.token_ids_BT.device)
    output = policy(
        token_ids_BT=batch.token_ids_BT,
        attention_mask_BT=batch.attention_mask_BT,
        position_ids_BT=batch.position_ids_BT,
        target_mask_BT=batch.loss_mask_BT,
        sampling=voice.sampling,
        response_position_BT=(columns_T[None, :] - prompt_length_B[:, None]).clamp(min=0),
        stop_token_ids=voice.stop_token_ids,
    )
    return TokenScores(
        logprob_BR=to_response(output.logprob_BT, prompt_length_B, num_columns),
        entropy_BR=to_response(output.entropy_BT, prompt_length_B, num_columns),
    )


def estimate_values(critic: TrainEngine, batch: TokenBatch, prompt_length_B: Tensor, *, num_columns: int) -> Tensor:
    """value_BR: the critic's estimate before each response token, that is after the token in front of it."""
    value_BT = critic(batch.token_ids_BT, batch.attention_mask_BT, batch.position_ids_BT)
    return to_response(value_BT, prompt_length_B - 1, num_columns)


def roll_out(
    roles: Roles, voice: Voice, prompts: list[PromptRow], *, samples_per_prompt: int, seed: int, step: int
) -> tuple[list[PromptRow], list[int], list[Response]]:
    """Sample responses to this rank's prompts. Collective under ZeRO-3.

    Returns:
        For each response its prompt, the number of the sample, and the response.
    """
    repeated = [row for row in prompts for _ in range(samples_per_prompt)]
    earlier = number_repeats([row.index for row in prompts])
    sample_ids = [n * samples_per_prompt + i for n in earlier for i in range(samples_per_prompt)]
    responses = draw_responses(roles.actor, voice, repeated, sample_ids=sample_ids, seed=seed, step=step)
    return repeated, sample_ids, responses


def number_repeats(indices: list[int]) -> list[int]:
    """For each of this rank's prompts, how often the same row stands before it in this step, over all ranks.

    A source drawn more than once, or a step across the end of an epoch, can hold a row twice; its samples get other
    numbers, so that they are other samples. Collective.
    """
    seen: Counter[int] = Counter()
    for part in all_gather_objects(indices)[: rank()]:
        seen.update(part)
    numbers = []
    for index in indices:
        numbers.append(seen[index])
        seen[index] += 1
    return numbers


@torch.no_grad()
def score_responses(
    roles: Roles,
    voice: Voice,
    prompts: list[PromptRow],
    sample_ids: list[int],
    responses: list[Response],
    judges: Judges,
    *,
    batch_size: int,
) -> list[ScoredSequence]:
    """Let all four roles score this rank's responses, each row once by each role. Collective under ZeRO-3.

    The actor scores with the forward that the update uses, so that before the first update the ratio is 1 and the KL
    to an equal reference 0 to rounding, whatever the decoder's kernels round differently.
    """
    for engine in (roles.actor, roles.critic):
        engine.eval()
    sequences: dict[int, ScoredSequence] = {}
    lengths = [len(p.prompt_ids) + len(r.token_ids) for p, r in zip(prompts, responses, strict=True)]
    for rows in _equal_micro_batches(lengths, batch_size, device=roles.actor.device):
        batch, prompt_length_B = rows_to_batch(
            [list(map(int, prompts[i].prompt_ids)) for i in rows],
            [responses[i].token_ids for i in rows],
            pad_id=int(voice.tokenizer.pad_token_id),
            device=roles.actor.device,
        )
        num_columns = max((len(responses[i].token_ids) for i in rows), default=1)
        actor = score_tokens(roles.actor, batch, prompt_length_B, voice, num_columns=num_columns)
        reference = score_tokens(roles.reference, batch, prompt_length_B, voice, num_columns=num_columns)
        value_BR = estimate_values(roles.critic, batch, prompt_length_B, num_columns=num_columns)
        last_B = batch.attention_mask_BT.sum(dim=1) - 1
        score_B = scores_at(roles.reward(batch.token_ids_BT, batch.attention_mask_BT, batch.position_ids_BT), last_B)
        on_cpu = [
            x.float().cpu() for x in (actor.logprob_BR, reference.logprob_BR, value_BR, actor.entropy_BR, score_B)
        ]
        for k, i in enumerate(rows):
            length = len(responses[i].token_ids)
            old_logprob_R, ref_logprob_R, old_value_R, entropy_R = (x[k, :length].clone() for x in on_cpu[:4])
            text = voice.template.decode_response(responses[i].token_ids)
            score = judges.model_weight * float(on_cpu[4][k])
            if judges.rule is not None:
                score += judges.rule_weight * judges.rule.score(prompts[i].meta, text, responses[i].stopped)
            gold = judges.gold.score(prompts[i].meta, text, responses[i].stopped) if judges.gold else None
            sequences[i] = ScoredSequence(
                key=(prompts[i].index, sample_ids[i]),
                prompt_ids=list(map(int, prompts[i].prompt_ids)),
                response_ids=responses[i].token_ids,
                text=text,
                stopped=responses[i].stopped,
                rollout_logprob_R=torch.tensor(responses[i].logprobs),
                old_logprob_R=old_logprob_R,
                ref_logprob_R=ref_logprob_R,
                old_value_R=old_value_R,
                entropy=float(entropy_R.mean()),
                score=score,
                gold=gold,
            )
    for engine in (roles.actor, roles.critic):
        engine.train()
    return [sequences[i] for i in range(len(responses))]


def _equal_micro_batches(lengths: list[int], batch_size: int, *, device: torch.device) -> Iterator[list[int]]:
    """Micro-batches of rows of like length, as many on every rank; empty ones at the end where a rank has fewer."""
    plan = micro_batches(lengths, world_size=1, micro_batch_size=batch_size)[0] if lengths else []
    wanted = int(all_max(torch.tensor(len(plan), device=device)).item())
    yield from plan
    for _ in range(wanted - len(plan)):
        yield []
