"""Score normalisation: mean 0 and variance 1 on what the SFT policy answers."""

import math

import torch

from rlhf import ds_config
from rlhf.config import ModelConfig
from rlhf.data.batching import Batching
from rlhf.data.collate import collate_responses
from rlhf.data.dataset import build_dataset
from rlhf.data.loader import evenly_spaced
from rlhf.distributed import all_gather_objects
from rlhf.engine import FrozenEngine, TrainEngine, zero3_init
from rlhf.models.build import build_causal_lm
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import normalise_scores, scores_at
from rlhf.rollout.answers import Answer, Voice, answer_rows
from rlhf.sharing import Sharing
from rlhf.stage import Language
from step2_reward.config import RewardConfig


def normalise_on_policy(
    cfg: RewardConfig, reward: TrainEngine, language: Language, batching: Batching, sharing: Sharing, *, seed: int
) -> dict[str, float]:
    """Let the policy answer prompts of step 3, score the answers, and store what normalises them in the model's config.

    Without it a reward model's scores have no zero and no unit: KL and score weigh otherwise with each new model.
    Collective.

    Returns:
        Mean and standard deviation that the scores had.

    Source: Ziegler et al. 2019, arXiv:1909.08593, sec. 2.1.
    """
    prompts = build_dataset(
        cfg.data, stage="ppo", part="train", template=language.template, tokenizer=language.tokenizer
    )
    rows = [prompts[i] for i in evenly_spaced(len(prompts), cfg.normalise.rows)]
    ds = ds_config.load(cfg.normalise.deepspeed)
    with zero3_init(ds):
        model = build_causal_lm(
            ModelConfig(path=cfg.normalise.policy, dtype=cfg.model.dtype, attention=cfg.model.attention),
            language.tokenizer,
            seed=0,
        )
    policy = FrozenEngine(Policy(model), ds=ds, role="policy")
    voice = Voice(
        tokenizer=language.tokenizer,
        template=language.template,
        sampling=cfg.normalise.sampling,
        max_new_tokens=cfg.data.max_response_tokens,
        batch_size=64,
    )
    scores = score_answers(reward, language, batching, sharing, answer_rows(policy, voice, rows, seed=seed))
    mean = sum(scores) / len(scores)
    std = math.sqrt(sum((score - mean) ** 2 for score in scores) / len(scores))
    normalise_scores(reward.module.config, mean=mean, std=std)
    return {"score_mean": mean, "score_std": std}


@torch.no_grad()
def score_answers(
    reward: TrainEngine, language: Language, batching: Batching, sharing: Sharing, answers: list[Answer]
) -> list[float]:
    """Score of each answer, on every rank. Collective."""
    reward.eval()
    lengths = [len(a.prompt_ids) + len(a.response_ids) for a in answers]
    mine: list[tuple[int, float]] = []
    for rows in batching.split(lengths, world_size=sharing.rows.count)[sharing.rows.number]:
        batch = collate_responses(
            [answers[i].prompt_ids for i in rows],
            [answers[i].response_ids for i in rows],
            pad_id=language.pad_id,
            device=reward.device,
            packed=batching.packed,
            group=sharing.sequence,
        )
        score_S = batch.sequences.summed(scores_at(reward(**batch.sequences.inputs), batch.sequences.last_S))
        # An empty micro-batch has the score of its stand-in.
        mine += batch.sequences.shared_out(list(zip(rows, score_S.tolist(), strict=False)))
    reward.train()
    parts = sharing.one_of_each(all_gather_objects(mine))
    return [score for _, score in sorted(pair for part in parts for pair in part)]
