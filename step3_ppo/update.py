"""Training actor and critic, if there is one, on one rollout."""

import logging

import torch

from rlhf.data.batching import Batching
from rlhf.distributed import all_sum
from rlhf.engine import TrainEngine
from rlhf.ops import masked_sum
from rlhf.rollout.answers import Voice
from rlhf.rollout.importance import importance_weights
from rlhf.run import Run
from step3_ppo.algorithm import Objective, UpdateConfig
from step3_ppo.checks import TOLERANCE, ratio_is_one
from step3_ppo.experience import Experience, MicroBatch
from step3_ppo.loss import LOG_RATIOS, kl_loss_sum, policy_loss_sum, value_loss_sum
from step3_ppo.roles import Roles
from step3_ppo.rollout import estimate_values, score_tokens

logger = logging.getLogger(__name__)


def update(
    roles: Roles,
    experience: Experience,
    voice: Voice,
    objective: Objective,
    run: Run,
    *,
    batching: Batching,
    step: int,
    dtype: str,
) -> dict[str, float]:
    """Several epochs of minibatches over the rollout; each minibatch is one step of the critic and of the actor.

    Args:
        roles: actor and critic, if there is one, are updated.
        experience: of all ranks.
        voice: the sampling transforms.
        objective: what is minimised.
        run: takes the metrics; names the seeds.
        batching: how sequences become micro-batches, of actor and critic alike.
        step: number of the PPO step, from 1.
        dtype: type that the actor computes in.

    Returns:
        Over the minibatches and all ranks, per response token: `loss` of the critic, if there is one, and, where the
        actor was trained, `ppo/entropy`.
    """
    config = objective.update
    trains_actor = step > config.critic_warmup_steps
    num_skipped = 0
    num_tokens = loss_sum = entropy_sum = 0.0
    rounding = max(TOLERANCE[dtype], TOLERANCE[voice.lending.computes_in(dtype)])
    num_minibatches = config.epochs * -(-len(experience.sequences) // config.minibatch_size)
    for epoch in range(config.epochs):
        minibatches = experience.minibatches(
            minibatch_size=config.minibatch_size,
            batching=batching,
            rank=roles.sharing.rows.number,
            world_size=roles.sharing.rows.count,
            seed=run.seed_for(f"shuffle {epoch}", step),
        )
        for number, minibatch in enumerate(minibatches):
            if num_skipped:
                num_skipped += 1
                continue
            micro_batches = [
                experience.micro_batch(
                    rows,
                    pad_id=int(voice.tokenizer.pad_token_id),
                    device=roles.actor.device,
                    packed=batching.packed,
                    group=roles.sharing.sequence,
                )
                for rows in minibatch
            ]
            count = _global_count(micro_batches)
            if trains_actor:
                # Only there is the actor still the policy that sampled.
                gap_limit = rounding if epoch == number == 0 else None
                kl_old, entropy = _update_actor(
                    roles, micro_batches, voice, objective, run, count=count, gap_limit=gap_limit, dtype=dtype
                )
                entropy_sum += entropy * count
                if config.target_kl and kl_old > config.target_kl:
                    num_skipped = 1
            if roles.critic is not None:
                loss_sum += _update_critic(roles.critic, micro_batches, config, run, count=count) * count
            num_tokens += count
    num_left_out = max(0, num_skipped - 1)
    run.metrics.add({"policy/skipped_frac": (num_left_out, num_minibatches)})
    entropy_mean = {"ppo/entropy": entropy_sum / num_tokens} if trains_actor else {}
    loss_mean = {} if roles.critic is None else {"loss": loss_sum / num_tokens}
    return {**loss_mean, **entropy_mean}


def _global_count(micro_batches: list[MicroBatch]) -> float:
    """Response tokens of a minibatch over all ranks. Collective."""
    return float(all_sum(torch.stack([micro.mask_SR.sum() for micro in micro_batches]).sum().double()))


def _update_actor(
    roles: Roles,
    micro_batches: list[MicroBatch],
    voice: Voice,
    objective: Objective,
    run: Run,
    *,
    count: float,
    gap_limit: float | None,
    dtype: str,
) -> tuple[float, float]:
    """One optimiser step of the actor; returns KL of the rollout policy to the actor before it, and its entropy.

    Both are nats per token.

    With `gap_limit` the weights are those that sampled: how far the decoder's log-probs are from this forward's is
    measured, and said if it is more.
    """
    config, method = objective.update, objective.method
    sums = torch.zeros(3, device=roles.actor.device)
    # What the loss is a mean over; of tokens it is `count`.
    divisor = float(all_sum(torch.stack([masked_sum(m.share_SR, m.mask_SR) for m in micro_batches]).double().sum()))
    for i, micro in enumerate(micro_batches):
        actor = score_tokens(roles.actor, micro.batch, voice, num_columns=micro.mask_SR.shape[1])
        if roles.actor.step_count == 0:
            ratio_is_one(actor.logprob_SR, micro.old_logprob_SR, micro.mask_SR, dtype=dtype)
        advantage_SR = micro.advantage_SR
        if config.importance_cap:
            # A factor of the loss, which is linear in the advantage.
            advantage_SR = advantage_SR * importance_weights(
                micro.old_logprob_SR, micro.rollout_logprob_SR, micro.mask_SR, cap=config.importance_cap
            )
        weight_SR, share_SR = micro.weight_SR * micro.mask_SR, micro.share_SR * micro.mask_SR
        loss, stats = policy_loss_sum(
            LOG_RATIOS[method.ratio](actor.logprob_SR, micro.old_logprob_SR, micro.mask_SR),
            advantage_SR,
            weight_SR,
            share_SR,
            clip_low=config.clip_ratio,
            clip_high=config.upper_clip,
            dual_clip=config.dual_clip,
        )
        if objective.kl_loss_coef:
            kl_loss, kl_stats = kl_loss_sum(
                actor.logprob_SR, micro.ref_logprob_SR, weight_SR, estimator=method.kl_estimator
            )
            loss = loss + objective.kl_loss_coef * kl_loss
            stats.update(kl_stats)
        entropy_sum = masked_sum(actor.entropy_SR.detach(), micro.mask_SR)
        # Without a bonus nothing is asked of its gradient, which costs as much as the loss's own.
        if config.entropy_coef:
            loss = loss - config.entropy_coef * (actor.entropy_SR * weight_SR).sum()
        roles.actor.accumulate(loss, count=divisor, last=i == len(micro_batches) - 1)
        run.metrics.add({**stats, "ppo/entropy": (entropy_sum, micro.mask_SR.sum())})
        run.count_padding(micro.batch.sequences)
        gap_SR = (actor.logprob_SR.detach() - micro.rollout_logprob_SR).abs()
        kl_sum, gap_sum = torch.as_tensor(stats["policy/kl_old"][0]), masked_sum(gap_SR, micro.mask_SR)
        sums += torch.stack([kl_sum, gap_sum, entropy_sum])
    update = roles.actor.step()
    run.metrics.set({"train/lr": update.lr, "train/grad_norm": update.grad_norm})
    kl_old, gap, entropy = (all_sum(sums) / count).tolist()
    if gap_limit is not None:
        run.metrics.set({"ppo/logprob_gap": gap})
        if not gap <= gap_limit:
            logger.warning(
                "decoder and update differ by %.2e nats per token on the same weights, more than rounding (%.0e). Set "
                "rollout.old_logprobs=rescore and update.importance_cap=2.", gap, gap_limit,
            )  # fmt: skip
    return float(kl_old), float(entropy)


def _update_critic(
    critic: TrainEngine, micro_batches: list[MicroBatch], config: UpdateConfig, run: Run, *, count: float
) -> float:
    """One optimiser step of the critic; returns its loss, per token."""
    for i, micro in enumerate(micro_batches):
        loss, stats = value_loss_sum(
            estimate_values(critic, micro.batch, num_columns=micro.mask_SR.shape[1]),
            micro.old_value_SR,
            micro.return_SR,
            micro.mask_SR,
            clip_value=config.clip_value,
        )
        critic.accumulate(loss, count=count, last=i == len(micro_batches) - 1)
        run.metrics.add(stats)
    update = critic.step()
    run.metrics.set({"critic/lr": update.lr, "critic/grad_norm": update.grad_norm})
    return update.loss
