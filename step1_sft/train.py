"""Step 1: supervised fine-tuning.

Run with `deepspeed --module step1_sft.train --config sft.yaml`, or as one plain process with `python -m`.
"""

import logging
from pathlib import Path
from typing import Any

from rlhf import checkpoint, distributed, ds_config, engine
from rlhf.config import parse_config
from rlhf.data.collate import collate_sft
from rlhf.data.dataset import TokenDataset, build_dataset
from rlhf.data.loader import Loader
from rlhf.engine import TrainEngine, zero3_init
from rlhf.models.build import build_causal_lm, check_length_fits
from rlhf.models.policy import Policy
from rlhf.rollout.answers import Voice
from rlhf.run import Run
from rlhf.stage import load_language, prompt_rows
from step1_sft.config import SFTConfig
from step1_sft.evaluate import evaluate_answers, evaluate_loss, to_samples
from step1_sft.loss import sft_loss_sum

logger = logging.getLogger(__name__)


def train(cfg: SFTConfig) -> None:
    """Fine-tune a causal LM on demonstrations and leave a model folder."""
    ds = ds_config.resolve(
        ds_config.load(cfg.deepspeed),
        optim=cfg.optim,
        world_size=distributed.world_size(),
        trainable=True,
        lora=cfg.model.lora.rank > 0,
        source=cfg.deepspeed,
    )
    language = load_language(cfg.data, cfg.tokenizer, cfg.model, stage="sft")
    dataset = build_dataset(
        cfg.data, stage="sft", part="train", template=language.template, tokenizer=language.tokenizer
    )
    loader = Loader(
        dataset,
        global_batch_size=cfg.global_batch_size,
        micro_batch_size=ds_config.micro_batch_size(ds),
        rank=distributed.rank(),
        world_size=distributed.world_size(),
        seed=cfg.run.seed,
        epochs=cfg.epochs,
        max_steps=cfg.max_steps,
    )
    run = Run.start(cfg, stage="step1_sft", ds_configs={"": ds}, num_steps=len(loader))
    run.write_data_report(dataset.report)
    with zero3_init(ds):
        model = build_causal_lm(cfg.model, language.tokenizer, seed=cfg.run.seed)
    check_length_fits(model.config, cfg.data.max_prompt_tokens + cfg.data.max_response_tokens)
    policy = TrainEngine(Policy(model), ds=ds, optim=cfg.optim, role="policy", num_steps=len(loader))
    evaluation = Evaluation(cfg, ds, policy, language, run)
    checkpoint.resume(run, {"policy": policy}, {"loader": loader})
    if run.first_step == 0:
        evaluation.before()

    for step, micro_batches in run.steps(loader):
        with run.timer("update"):
            batches = [
                collate_sft(rows, pad_id=language.pad_id, device=policy.device) for rows in micro_batches
            ]
            count = distributed.all_sum(sum(batch.loss_mask_BT.sum() for batch in batches))
            for i, batch in enumerate(batches):
                output = policy(
                    token_ids_BT=batch.token_ids_BT,
                    attention_mask_BT=batch.attention_mask_BT,
                    position_ids_BT=batch.position_ids_BT,
                    target_mask_BT=batch.loss_mask_BT,
                )
                loss_sum, stats = sft_loss_sum(output, batch.loss_mask_BT)
                policy.accumulate(loss_sum, count=count, last=i == len(batches) - 1)
                run.metrics.add(stats)
                run.count_batch(batch.attention_mask_BT)
            update = policy.step()
        run.metrics.set({"train/lr": update.lr, "train/grad_norm": update.grad_norm})
        run.log(step)
        if run.every(cfg.run.eval_every, step):
            evaluation.during(step)
        if run.every(cfg.run.save_every, step):
            checkpoint.save(run, {"policy": policy}, {"loader": loader})
