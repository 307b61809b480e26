"""What one rollout teaches: log-probs, values, rewards and advantages per token, and its minibatches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data.batching import Batching
from rlhf.data.collate import ResponseBatch, collate_responses
from rlhf.distributed import Group, all_gather_objects
from rlhf.ops import masked_mean, masked_var, response_mask, to_columns, whiten_with
from rlhf.sharing import Sharing
from step3_ppo.advantages import gae, group_advantages, rewards_to_go
from step3_ppo.algorithm import GAEConfig, KLEstimator, Method
from step3_ppo.loss import token_shares, token_weights
from step3_ppo.rewards import KL_ESTIMATORS, token_rewards


@dataclass(frozen=True, kw_only=True)
class ScoredSequence:
    """One prompt, one sampled response, and what the four roles say of it. Tensors are float32 on the CPU, [R]."""

    key: tuple[int, int]
    """Row of the prompt and number of the sample: the order of sequences, whatever rank made them."""
    prompt_ids: list[int]
    response_ids: list[int]
    """Stop token included."""
    text: str
    """The response as a person reads it."""
    stopped: bool
    """Ended by itself, not by the length limit."""
    rollout_logprob_R: Tensor
    """Nats, as the decoder computed it while sampling."""
    old_logprob_R: Tensor
    """Nats, of the policy that sampled, under the sampling transforms: the decoder's, or those of a scoring forward."""
    ref_logprob_R: Tensor
    """Nats, of the reference, under the same transforms."""
    old_value_R: Tensor
    """Reward units, the critic's estimate before each token; 0 without a critic."""
    entropy: float | None
    """Mean over tokens, nats, of the policy that sampled; None where only the decoder looked."""
    score: float
    """Score as the reward model and the rule give it, before clipping and penalties."""
    model_score: float
    """Score of the reward model alone."""
    gold: float | None
    """Score of the gold rule, which is measured and not trained on."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """All sequences of one PPO step, on every rank: column i of a `*_BR` tensor is response token i."""

    sequences: list[ScoredSequence]
    mask_BR: Tensor
    rollout_logprob_BR: Tensor
    old_logprob_BR: Tensor
    ref_logprob_BR: Tensor
    old_value_BR: Tensor
    reward_BR: Tensor
    advantage_BR: Tensor
    return_BR: Tensor
    """Value targets; 0 without a critic."""
    weight_BR: Tensor
    """What a token's term counts for in the policy loss (`loss.token_weights`)."""
    share_BR: Tensor
    """What a token adds to that loss's divisor (`loss.token_shares`)."""

    def minibatches(
        self, *, minibatch_size: int, batching: Batching, rank: int, world_size: int, seed: int
    ) -> Iterator[list[list[int]]]:
        """Split the sequences at random into minibatches, and each of them over ranks by prompt and length.

        The shuffle is over all ranks' sequences, so a minibatch holds the same ones on one rank and on eight.

        Args:
            minibatch_size: sequences of one optimiser step, over all ranks.
            batching: how a minibatch's sequences become micro-batches.
            rank: this rank.
            world_size: number of ranks.
            seed: of the shuffle, the same on all ranks.

        Yields:
            This rank's micro-batches as sequence numbers; their number is the same on every rank, some may be empty.
        """
        order = torch.randperm(len(self.sequences), generator=torch.Generator().manual_seed(seed)).tolist()
        for start in range(0, len(order), minibatch_size):
            chosen = order[start : start + minibatch_size]
            prompts = [(self.sequences[i].key[0], len(self.sequences[i].prompt_ids)) for i in chosen]
            lengths = [n + len(self.sequences[i].response_ids) for i, (_, n) in zip(chosen, prompts, strict=True)]
            shares = batching.split(lengths, world_size=world_size, prompts=prompts)
            yield [[chosen[i] for i in micro] for micro in shares[rank]]

    def micro_batch(
        self, rows: list[int], *, pad_id: int, device: torch.device, packed: bool, group: Group | None = None
    ) -> "MicroBatch":
        """What one forward of actor and critic trains on; without rows, one sequence outside the mask.

        With a group, whose ranks share the row, a response token is in the mask of the rank that predicts it.
        """
        num_columns = max((len(self.sequences[k].response_ids) for k in rows), default=1)

        def pick(x_BR: Tensor) -> Tensor:
            return (x_BR[rows] if rows else torch.zeros_like(x_BR[:1]))[:, :num_columns].to(device)

        batch = collate_responses(
            [self.sequences[k].prompt_ids for k in rows],
            [self.sequences[k].response_ids for k in rows],
            pad_id=pad_id,
            device=device,
            packed=packed,
            group=group,
        )
        return MicroBatch(
            batch=batch,
            mask_SR=to_columns(batch.response_mask_BT, batch.first_response_S, batch.response_length_S, num_columns),
            rollout_logprob_SR=pick(self.rollout_logprob_BR),
            old_logprob_SR=pick(self.old_logprob_BR),
            ref_logprob_SR=pick(self.ref_logprob_BR),
            old_value_SR=pick(self.old_value_BR),
            advantage_SR=pick(self.advantage_BR),
            return_SR=pick(self.return_BR),
            weight_SR=pick(self.weight_BR),
            share_SR=pick(self.share_BR),
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences of one forward, and column by column what is known of their response tokens."""

    batch: ResponseBatch
    mask_SR: Tensor
    rollout_logprob_SR: Tensor
    old_logprob_SR: Tensor
    ref_logprob_SR: Tensor
    old_value_SR: Tensor
    advantage_SR: Tensor
    return_SR: Tensor
    weight_SR: Tensor
    share_SR: Tensor


def gather_sequences(local: list[ScoredSequence], sharing: Sharing) -> list[ScoredSequence]:
    """All ranks' sequences, each once, in one order on every rank. Collective."""
    everything = [sequence for part in sharing.one_of_each(all_gather_objects(local)) for sequence in part]
    return sorted(everything, key=lambda sequence: sequence.key)


def to_experience(
    sequences: list[ScoredSequence],
    score_B: Tensor,
    *,
    kl_coef: float,
    method: Method,
    gae_config: GAEConfig,
) -> Experience:
    """Rewards, advantages, value targets and the weights of the loss.

    Every rank holds all sequences and computes the same numbers, so that neither whitening nor groups nor minibatches
    depend on how the rollout was divided.

    Args:
        sequences: of the whole step, in order of their keys; with a method that compares, whole groups.
        score_B: shaped score of each.
        kl_coef: weight of the penalty.
        method: how rewards become advantages.
        gae_config: discount and lambda, for `gae`.
    """
    mask_BR = sequence_mask(sequences)
    old_value_BR = right_pad([s.old_value_R for s in sequences])
    kl_BR = penalty_kl(sequences, method.kl_estimator)
    reward_BR = token_rewards(score_B, kl_BR, mask_BR, kl_coef=kl_coef if method.kl_place == "reward" else 0.0)
    return_BR = torch.zeros_like(reward_BR)
    if method.advantage == "gae":
        advantage_BR, return_BR = gae(reward_BR, old_value_BR, mask_BR, gamma=gae_config.gamma, lam=gae_config.lam)
    elif method.advantage == "return":
        advantage_BR = rewards_to_go(reward_BR, mask_BR)
    else:
        advantage_B = group_advantages(reward_BR.sum(dim=1), method.group_size, advantage=method.advantage)
        advantage_BR = advantage_B[:, None] * mask_BR
    if method.whitens:
        advantage_BR = whiten_with(
            advantage_BR, mask_BR, mean=masked_mean(advantage_BR, mask_BR), var=masked_var(advantage_BR, mask_BR)
        )
    return Experience(
        sequences=sequences,
        mask_BR=mask_BR,
        rollout_logprob_BR=right_pad([s.rollout_logprob_R for s in sequences]),
        old_logprob_BR=right_pad([s.old_logprob_R for s in sequences]),
        ref_logprob_BR=right_pad([s.ref_logprob_R for s in sequences]),
        old_value_BR=old_value_BR,
        reward_BR=reward_BR,
        advantage_BR=advantage_BR,
        return_BR=return_BR,
        weight_BR=token_weights(mask_BR, method.loss_mean),
        share_BR=token_shares(mask_BR, method.loss_mean, max_response_tokens=method.max_response_tokens),
    )


def penalty_kl(sequences: Sequence[ScoredSequence], estimator: KLEstimator) -> Tensor:
    """kl_BR by the penalty's estimator, nats; 0 outside the responses."""
    kl_BR = KL_ESTIMATORS[estimator](
        right_pad([s.old_logprob_R for s in sequences]), right_pad([s.ref_logprob_R for s in sequences])
    )
    return kl_BR * sequence_mask(sequences)


def sequence_mask(sequences: Sequence[ScoredSequence]) -> Tensor:
    """mask_BR, True on response tokens, stop token included."""
    length_B = torch.tensor([len(s.response_ids) for s in sequences], dtype=torch.long)
    return response_mask(length_B, int(length_B.max()))


def right_pad(rows: list[Tensor]) -> Tensor:
    """Stack [R] tensors of different length into [B, R], zeros at the end."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
