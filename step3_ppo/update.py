"""Training actor and critic on one rollout."""

import torch
from torch import Tensor

from rlhf.data.collate import rows_to_batch
from rlhf.distributed import all_sum, rank, world_size
from rlhf.rollout.answers import Voice
from rlhf.run import Run
from step3_ppo.checks import ratio_is_one
from step3_ppo.config import UpdateConfig
from step3_ppo.experience import Experience
from step3_ppo.loss import policy_loss_sum, value_loss_sum
from step3_ppo.roles import Roles
from step3_ppo.rollout import estimate_values, score_tokens


def update(
    roles: Roles, experience: Experience, voice: Voice, config: UpdateConfig, run: Run, *, step: int, dtype: str
) -> None:
    """Several epochs of minibatches over the rollout; each minibatch is one step of the critic and of the actor.

    Args:
        roles: actor and critic are updated.
        experience: of all ranks.
        voice: the sampling transforms.
        config: of the update.
        run: takes the metrics; names the seeds.
        step: number of the PPO step, from 1.
        dtype: type that the actor computes in.
    """
    trains_actor = step > config.critic_warmup_steps
    micro_batch_size = min(roles.actor.micro_batch_size, roles.critic.micro_batch_size)
    num_skipped = 0
    num_minibatches = config.epochs * -(-len(experience.sequences) // config.minibatch_size)
    for epoch in range(config.epochs):
        for minibatch in experience.minibatches(
            minibatch_size=config.minibatch_size,
            micro_batch_size=micro_batch_size,
            rank=rank(),
            world_size=world_size(),
            seed=run.seed_for(f"shuffle {epoch}", step),
        ):
            if num_skipped:
                num_skipped += 1
                continue
            kl_old = _update_minibatch(
                roles, experience, minibatch, voice, config, run, trains_actor=trains_actor, dtype=dtype
            )
            if config.target_kl and kl_old > config.target_kl:
                num_skipped = 1
    num_left_out = max(0, num_skipped - 1)
    run.metrics.add({"policy/skipped_frac": (num_left_out, num_minibatches)})


def _update_minibatch(
    roles: Roles,
    experience: Experience,
    minibatch: list[list[int]],
    voice: Voice,
    config: UpdateConfig,
    run: Run,
    *,
    trains_actor: bool,
    dtype: str,
) -> float:
    """One optimiser step of critic and actor; returns KL of the rollout policy to the actor before it, per token."""
    device = roles.actor.device
    local_count = sum(int(experience.mask_BR[rows].sum()) for rows in minibatch)
    count = float(all_sum(torch.tensor(float(local_count), device=device)))
    kl_old_sum = torch.zeros((), device=device)
    for i, rows in enumerate(minibatch):
        last = i == len(minibatch) - 1
        batch, prompt_length_B = rows_to_batch(
            [experience.sequences[k].prompt_ids for k in rows],
            [experience.sequences[k].response_ids for k in rows],
            pad_id=int(voice.tokenizer.pad_token_id),
            device=device,
        )
        num_columns = max((len(experience.sequences[k].response_ids) for k in rows), default=1)

        def pick(x_BR: Tensor, rows: list[int] = rows, num_columns: int = num_columns) -> Tensor:
            """The micro-batch's part; the row of an empty micro-batch is all outside the mask."""
            return (x_BR[rows] if rows else torch.zeros_like(x_BR[:1]))[:, :num_columns].to(device)

        mask_BR = pick(experience.mask_BR)
        new_value_BR = estimate_values(roles.critic, batch, prompt_length_B, num_columns=num_columns)
        value_loss, value_stats = value_loss_sum(
            new_value_BR,
            pick(experience.old_value_BR),
            pick(experience.return_BR),
            mask_BR,
            clip_value=config.clip_value,
        )
        roles.critic.accumulate(value_loss, count=count, last=last)
        run.metrics.add(value_stats)
        if not trains_actor:
            continue
        actor = score_tokens(roles.actor, batch, prompt_length_B, voice, num_columns=num_columns)
        old_logprob_BR = pick(experience.old_logprob_BR)
        if roles.actor.step_count == 0:
            ratio_is_one(actor.logprob_BR, old_logprob_BR, mask_BR, dtype=dtype)
        policy_loss, policy_stats = policy_loss_sum(
            actor.logprob_BR, old_logprob_BR, pick(experience.advantage_BR), mask_BR, clip_ratio=config.clip_ratio
        )
        entropy_bonus = config.entropy_coef * (actor.entropy_BR * mask_BR).sum()
        roles.actor.accumulate(policy_loss - entropy_bonus, count=count, last=last)
        run.metrics.add(policy_stats)
        kl_old_sum += torch.as_tensor(policy_stats["policy/kl_old"][0])
    critic = roles.critic.step()
    run.metrics.set({"critic/lr": critic.lr, "critic/grad_norm": critic.grad_norm})
    if not trains_actor:
        return 0.0
    actor_step = roles.actor.step()
    run.metrics.set({"train/lr": actor_step.lr, "train/grad_norm": actor_step.grad_norm})
    return float(all_sum(kl_old_sum)) / count
