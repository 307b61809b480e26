"""Step 1: supervised fine-tuning.

Run with `deepspeed --module step1_sft.train --config sft.yaml`, or as one plain process with `python -m`.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from rlhf import ds_config
from rlhf.checkpoint import Checkpoints
from rlhf.combinations import Role
from rlhf.config import parse_config
from rlhf.data.batching import Batching
from rlhf.data.collate import TokenBatch, collate_sft
from rlhf.data.dataset import SFTRow, build_dataset, report_lines
from rlhf.data.loader import Loader, evenly_spaced
from rlhf.data.prefetch import Prefetch
from rlhf.distributed import all_sum, device, device_type, shutdown
from rlhf.engine import TrainEngine, setup, zero3_init
from rlhf.metrics import Stats
from rlhf.models import liger
from rlhf.models.build import build_causal_lm, check_length_fits
from rlhf.models.policy import Policy
from rlhf.models.token_stats import TokenStats, token_stats
from rlhf.pipeline_engine import PipelineTrainEngine, train_engine
from rlhf.rollout.answers import Voice, answer_rows
from rlhf.run import Run
from rlhf.sharing import Sharing, join_groups
from rlhf.stage import (
    Language,
    choose_batching,
    choose_scoring,
    export_model,
    flop_shape,
    load_language,
)
from rlhf.watchdog import watched
from step1_sft.config import SFTConfig
from step1_sft.evaluate import evaluate_loss, summarise_answers, to_samples
from step1_sft.loss import sft_loss_sum

logger = logging.getLogger(__name__)


def train(cfg: SFTConfig) -> None:
    """Fine-tune a causal LM on demonstrations and leave a model folder."""
    ds = ds_config.load(cfg.deepspeed)
    role = Role(model=cfg.model, ds=ds, optim=cfg.optim, parallel=cfg.parallel)
    language = load_language(cfg.data, cfg.tokenizer, cfg.model, stage="sft")
    sharing = join_groups({"model": role}, language.tokenizer)
    dataset = build_dataset(
        cfg.data, stage="sft", part="train", template=language.template, tokenizer=language.tokenizer
    )
    batching = choose_batching(
        [cfg.model],
        cfg.data,
        language,
        max_rows=ds_config.micro_batch_size(ds),
        longest_row=int(dataset.lengths.max(initial=1)),
    )
    order = Loader(
        dataset,
        global_batch_size=cfg.global_batch_size,
        batching=batching,
        rank=sharing.rows.number,
        world_size=sharing.rows.count,
        seed=cfg.run.seed,
        epochs=cfg.epochs,
        max_steps=cfg.max_steps,
    )

    def collate(micro_batches: list[list[SFTRow]]) -> list[TokenBatch]:
        return [
            collate_sft(
                rows,
                pad_id=language.pad_id,
                device=device(),
                packed=batching.packed,
                loss_on=cfg.loss_on,
                group=sharing.divided,
            )
            for rows in micro_batches
        ]

    loader = Prefetch(order, collate)
    run = Run.start(cfg, stage="step1_sft", ds_configs={"": ds}, num_steps=len(loader), share=sharing.sequence.rank)
    run.write_data_report(dataset.report, report_lines(dataset.report))
    with zero3_init(ds, shares=cfg.parallel.tp > 1):
        model = build_causal_lm(cfg.model, language.tokenizer, seed=cfg.run.seed)
    check_length_fits(model.config, cfg.data.max_prompt_tokens + cfg.data.max_response_tokens)
    wrapped = Policy(sharing.share(model), closed_form=choose_loss(cfg.fused_loss, zero_stage=ds_config.zero_stage(ds)))
    policy = train_engine(wrapped, sharing=sharing, ds=ds, optim=cfg.optim, role="policy", num_steps=len(loader))
    evaluate = make_evaluation(cfg, policy, language, batching, sharing, run)
    run.watch([policy], shape=flop_shape(wrapped), lora=cfg.model.lora.rank, counts=sharing.tensor.rank == 0)
    checkpoints = Checkpoints(run, {"policy": policy}, {"loader": loader}, language=language)
    checkpoints.resume()
    before = run.once("before", lambda: evaluate(0, answers=False))

    for step, batches in checkpoints.steps(loader):
        with checkpoints.guarded(step):
            with run.timer("update"):
                count = all_sum(torch.stack([batch.loss_mask_BT.sum() for batch in batches]).sum())
                for batch, stats in policy.accumulate_all(batches, loss_of, count=count):
                    run.metrics.add(stats)
                    run.count_batch(batch.sequences, num_targets=batch.num_targets)
                update = policy.step()
            run.metrics.add(update.stats)
            run.metrics.set({"train/lr": update.lr, "train/grad_norm": update.grad_norm})
            run.observe(step, {"loss": update.loss})
            run.log(step)
            if run.every(cfg.run.eval_every, step) and step < len(loader):
                evaluate(step, answers=False)

    after = evaluate(len(loader), answers=True)
    metrics = headline(before, after)
    folder = export_model(policy, language, run, kind="policy", parents=[cfg.model.path], metrics=metrics)
    run.finish(metrics, folder)


def loss_of(policy: Callable[..., Any], batch: TokenBatch) -> tuple[Tensor, Stats]:
    """The summed loss of a micro-batch, and its metrics."""
    output = policy(**batch.sequences.inputs, target_mask_BT=batch.loss_mask_BT)
    return sft_loss_sum(output, batch.loss_mask_BT)


def choose_loss(fused: str, *, zero_stage: int) -> TokenStats:
    """Who computes the log-probabilities that are trained on: Liger where it fits, else our own closed form."""
    if fused == "off" or zero_stage == 3 or device_type() != "cuda" or not liger.is_installed():
        return token_stats
    logger.info("the loss is computed by Liger's kernels; fused_loss=off switches to our own")
    return liger.liger_stats


class Evaluation(Protocol):
    """Evaluates the policy as it is after `step` steps."""

    def __call__(self, step: int, *, answers: bool) -> dict[str, float]:
        """Held-out loss, and answers to held-out prompts if asked for. Collective."""


def make_evaluation(
    cfg: SFTConfig, policy: TrainEngine, language: Language, batching: Batching, sharing: Sharing, run: Run
) -> Evaluation:
    """Read the held-out rows once and return the function that evaluates on them."""
    held_out = build_dataset(
        cfg.data, stage="sft", part="eval", template=language.template, tokenizer=language.tokenizer
    )
    prompts = build_dataset(
        cfg.data, stage="ppo", part="eval", template=language.template, tokenizer=language.tokenizer
    )
    rows = [prompts[i] for i in evenly_spaced(len(prompts), cfg.eval.generate_rows)]
    if rows and isinstance(policy, PipelineTrainEngine):
        policy.check_lendable()
    scoring = choose_scoring(
        batching,
        {"policy": cfg.model},
        {"policy": ds_config.dtype_name(policy.ds)},
        cfg.data,
        language,
        longest_row=int(held_out.lengths.max(initial=1)),
    )
    voice = Voice(
        tokenizer=language.tokenizer,
        template=language.template,
        sampling=replace(cfg.sampling, temperature=0.0) if cfg.eval.greedy else cfg.sampling,
        max_new_tokens=cfg.data.max_response_tokens,
        batch_size=max(1, len(rows)),
    )

    def evaluate(step: int, *, answers: bool) -> dict[str, float]:
        with run.timer("eval"):
            values = evaluate_loss(
                policy,
                held_out,
                batching=scoring,
                sharing=sharing,
                max_rows=cfg.eval.max_rows,
                pad_id=language.pad_id,
            )
            if answers and rows:
                given = answer_rows(policy, voice, rows, seed=run.seed_for("answers", 0))
                values.update(summarise_answers(given))
                run.write_samples("after", to_samples(given))
        run.log_eval(step, values)
        return values

    return evaluate


def headline(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The stage's entries of summary.json; what was not measured is left out."""
    names = {"eval_loss": "eval/loss", "perplexity": "eval/perplexity", "token_accuracy": "eval/token_accuracy"}
    metrics = {
        f"{short}_{when}": values[name]
        for when, values in (("before", before), ("after", after))
        for short, name in names.items()
        if name in values
    }
    for short in ("stop_frac", "distinct_frac", "response_length"):
        if f"eval/{short}" in after:
            metrics[short] = after[f"eval/{short}"]
    return metrics


def main() -> None:
    """Entry point of the deepspeed launcher."""
    cfg = parse_config(SFTConfig, prog="step1_sft.train")
    with watched(cfg.run.watchdog):
        setup()
        train(cfg)
        shutdown()


if __name__ == "__main__":
    main()
