"""From prompts to scored sequences: sample with the actor, then let each role say what it has to say of them."""

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data.batching import Batching
from rlhf.data.collate import ResponseBatch, collate_responses
from rlhf.data.dataset import PromptRow
from rlhf.distributed import all_gather_objects, rank
from rlhf.engine import FrozenEngine, TrainEngine
from rlhf.models.scalar_head import scores_at
from rlhf.ops import to_columns
from rlhf.rollout.answers import Voice, draw_responses
from rlhf.rollout.decode import Response, RolloutStats
from rlhf.rules import Rule
from step3_ppo.experience import ScoredSequence, gather_sequences
from step3_ppo.roles import AdapterOff, Roles


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
class Sample:
    """One prompt and one response to it."""

    prompt: PromptRow
    sample_id: int
    response: Response

    @property
    def key(self) -> tuple[int, int]:
        """Row of the prompt and number of the sample: the order of samples, whatever rank drew them."""
        return self.prompt.index, self.sample_id

    @property
    def num_tokens(self) -> int:
        """Of prompt and response."""
        return len(self.prompt.prompt_ids) + len(self.response.token_ids)


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Statistics of the responses of one micro-batch under one policy; 0 outside the responses.

    Of a row that ranks share, each has those of the tokens it predicts, 0 at the others.
    """

    logprob_SR: Tensor
    entropy_SR: Tensor


def score_tokens(
    policy: TrainEngine | FrozenEngine | AdapterOff, batch: ResponseBatch, voice: Voice, *, num_columns: int
) -> TokenScores:
    """Log-prob and entropy of each response token under the distribution that sampling draws from.

    Args:
        policy: engine of a `Policy`; gradients follow the caller's mode.
        batch: prompts and responses.
        voice: the sampling transforms.
        num_columns: R of the result.
    """
    output = policy(
        **batch.sequences.inputs,
        target_mask_BT=batch.response_mask_BT,
        sampling=voice.sampling,
        response_position_BT=batch.response_position_BT,
        stop_token_ids=voice.stop_token_ids,
    )
    logprob_SR, entropy_SR = (
        to_columns(x_BT, batch.first_response_S, batch.response_length_S, num_columns)
        for x_BT in (output.logprob_BT, output.entropy_BT)
    )
    return TokenScores(logprob_SR=logprob_SR, entropy_SR=entropy_SR)


def estimate_values(critic: TrainEngine, batch: ResponseBatch, *, num_columns: int) -> Tensor:
    """value_SR: the critic's estimate before each response token, that is after the token in front of it.

    Of a row that ranks share, at the tokens that this rank predicts; 0 at the others.
    """
    value_BT = batch.sequences.before(critic(**batch.sequences.inputs))
    return to_columns(value_BT, batch.first_response_S, batch.response_length_S, num_columns)


def roll_out(
    roles: Roles,
    voice: Voice,
    prompts: list[PromptRow],
    *,
    samples_per_prompt: int,
    seed: int,
    step: int,
    drawn: Counter[int] | None = None,
) -> tuple[list[Sample], list[RolloutStats]]:
    """Sample responses to each rank's prompts. Collective.

    Args:
        roles: the actor speaks.
        voice: how it speaks.
        prompts: this rank's.
        samples_per_prompt: responses to each.
        seed: of the run.
        step: of training.
        drawn: how often each row of the data was drawn in this step before; those of this rollout are added.

    Returns:
        The samples of all ranks in one order, and what each rank's decoder counted (none where it was Hugging Face's).
    """
    repeated = [row for row in prompts for _ in range(samples_per_prompt)]
    earlier = number_repeats([row.index for row in prompts], Counter() if drawn is None else drawn)
    sample_ids = [n * samples_per_prompt + i for n in earlier for i in range(samples_per_prompt)]
    counted: list[RolloutStats] = []
    responses = draw_responses(
        roles.actor, voice, repeated, sample_ids=sample_ids, seed=seed, step=step, on_stats=counted.append
    )
    mine = [
        Sample(prompt=prompt, sample_id=sample_id, response=response)
        for prompt, sample_id, response in zip(repeated, sample_ids, responses, strict=True)
    ]
    everything = all_gather_objects((mine, counted))
    samples = sorted((sample for part, _ in everything for sample in part), key=lambda sample: sample.key)
    return samples, [stats for _, part in everything for stats in part]


def describe_decoding(stats: list[RolloutStats]) -> dict[str, float]:
    """How busy the decoders of all ranks were; empty without numbers."""
    forwards = sum(s.forwards for s in stats)
    seconds = [s.prefill_seconds + s.decode_seconds for s in stats]
    if not forwards or max(seconds) == 0:
        return {}
    return {
        "speed/decode_tokens_per_second": sum(s.tokens for s in stats) / max(seconds),
        "speed/decode_occupancy": sum(s.occupancy * s.forwards for s in stats) / forwards,
        "speed/decode_tail_frac": sum(s.tail_frac * s.forwards for s in stats) / forwards,
        "speed/decode_prefill_frac": sum(s.prefill_seconds for s in stats) / sum(seconds),
        "speed/decode_idle_frac": 1.0 - sum(seconds) / (len(seconds) * max(seconds)),
    }


def number_repeats(indices: list[int], drawn: Counter[int]) -> list[int]:
    """For each of this rank's prompts, how often the same row stands before it in this step, over all ranks.

    A source drawn more than once, a step across the end of an epoch, or prompts that make up for others can hold a row
    twice; its samples get other numbers, so that they are other samples. Collective.

    Args:
        indices: rows of this rank's prompts.
        drawn: rows of earlier rollouts of the step; those of all ranks are added.
    """
    parts = all_gather_objects(indices)
    seen = drawn.copy()
    for part in parts[: rank()]:
        seen.update(part)
    numbers = []
    for index in indices:
        numbers.append(seen[index])
        seen[index] += 1
    for part in parts:
        drawn.update(part)
    return numbers


@torch.no_grad()
def score_responses(
    roles: Roles, voice: Voice, samples: list[Sample], judges: Judges, *, batching: Batching, rescore: bool
) -> list[ScoredSequence]:
    """Let the roles score all ranks' samples, each sample once by each role; every rank gets all. Collective.

    The samples are divided anew over the ranks, or groups of ranks that share rows, by their lengths, which nobody knew
    when the prompts were dealt.

    Args:
        roles: actor, critic if there is one, reference, reward.
        voice: the sampling transforms.
        samples: of all ranks, the same on each.
        judges: what scores beside the reward model.
        batching: how samples become micro-batches, on all roles alike.
        rescore: let the actor score too, by the forward that the update uses; else its log-probs are the decoder's, and
            its entropy stays unknown.
    """
    for engine in roles.trained.values():
        engine.eval()
    mine: list[ScoredSequence] = []
    prompts = [(s.prompt.index, len(s.prompt.prompt_ids)) for s in samples]
    sharers = roles.sharing.rows
    shares = batching.split([s.num_tokens for s in samples], world_size=sharers.count, prompts=prompts)
    for rows in shares[sharers.number]:
        chosen = [samples[i] for i in rows]
        batch = collate_responses(
            [list(map(int, sample.prompt.prompt_ids)) for sample in chosen],
            [sample.response.token_ids for sample in chosen],
            pad_id=int(voice.tokenizer.pad_token_id),
            device=roles.actor.device,
            packed=batching.packed,
            group=roles.sharing.sequence,
        )
        num_columns = max((len(sample.response.token_ids) for sample in chosen), default=1)
        sequences = batch.sequences
        reference = score_tokens(roles.reference, batch, voice, num_columns=num_columns)
        actor = score_tokens(roles.actor, batch, voice, num_columns=num_columns) if rescore else None
        value_SR = torch.zeros_like(reference.logprob_SR, dtype=torch.float32)
        if roles.critic is not None:
            value_SR = estimate_values(roles.critic, batch, num_columns=num_columns).float()
        value_SR = sequences.summed(value_SR).cpu()
        score_S = sequences.summed(scores_at(roles.reward(**sequences.inputs), sequences.last_S)).tolist()
        ref_logprob_SR = sequences.summed(reference.logprob_SR).cpu()
        logprob_SR, entropy_SR = (
            (sequences.summed(actor.logprob_SR).cpu(), sequences.summed(actor.entropy_SR).cpu())
            if actor
            else (None, None)
        )
        for k, sample in sequences.shared_out(list(enumerate(chosen))):
            length = len(sample.response.token_ids)
            rollout_logprob_R = torch.tensor(sample.response.logprobs)
            text, score, gold = _judge(sample, voice, judges, score=score_S[k])
            mine.append(
                ScoredSequence(
                    key=sample.key,
                    prompt_ids=list(map(int, sample.prompt.prompt_ids)),
                    response_ids=sample.response.token_ids,
                    text=text,
                    stopped=sample.response.stopped,
                    rollout_logprob_R=rollout_logprob_R,
                    old_logprob_R=rollout_logprob_R if logprob_SR is None else logprob_SR[k, :length].clone(),
                    ref_logprob_R=ref_logprob_SR[k, :length].clone(),
                    old_value_R=value_SR[k, :length].clone(),
                    entropy=None if entropy_SR is None else float(entropy_SR[k, :length].mean()),
                    score=score,
                    model_score=score_S[k],
                    gold=gold,
                )
            )
    for engine in roles.trained.values():
        engine.train()
    return gather_sequences(mine, roles.sharing)


def _judge(sample: Sample, voice: Voice, judges: Judges, *, score: float) -> tuple[str, float, float | None]:
    """The response as a person reads it, the score of reward model and rule, and the gold rule's."""
    text = voice.template.decode_response(sample.response.token_ids)
    said = (sample.prompt.meta, text, sample.response.stopped)
    total = judges.model_weight * score
    if judges.rule is not None:
        total += judges.rule_weight * judges.rule.score(*said)
    return text, total, judges.gold.score(*said) if judges.gold else None
