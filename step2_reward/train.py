"""Step 2: the reward model.

Run with `deepspeed --module step2_reward.train --config reward.yaml`, or as one plain process with `python -m`.
"""

from collections.abc import Mapping

import torch

from rlhf import artifacts, ds_config
from rlhf.checkpoint import Checkpoints
from rlhf.combinations import Role
from rlhf.config import parse_config
from rlhf.data.batching import Batching
from rlhf.data.collate import PreferenceBatch, collate_preferences
from rlhf.data.dataset import PreferenceRow, TokenDataset, build_dataset, report_lines
from rlhf.data.loader import Loader
from rlhf.data.prefetch import Prefetch
from rlhf.distributed import all_sum, device, shutdown
from rlhf.engine import TrainEngine, setup, zero3_init
from rlhf.models.build import build_reward_model, check_length_fits
from rlhf.models.scalar_head import ScalarModel, scores_at
from rlhf.run import Run
from rlhf.sharing import Sharing, join_groups
from rlhf.stage import Language, choose_batching, choose_scoring, export_model, flop_shape, load_language
from rlhf.watchdog import watched
from step2_reward.config import RewardConfig
from step2_reward.evaluate import histograms, judge, summarise
from step2_reward.loss import ranking_loss_sum
from step2_reward.normalise import normalise_on_policy

RANGE_ROWS = 256
"""Prompts of the training rows whose responses give the range of scores where no row is held out."""


def train(cfg: RewardConfig) -> None:
    """Train a reward model on preferences and leave a model folder."""
    ds = ds_config.load(cfg.deepspeed)
    language = load_language(cfg.data, cfg.tokenizer, cfg.model, stage="reward")
    sharing = join_groups(
        {"model": Role(model=cfg.model, ds=ds, optim=cfg.optim, parallel=cfg.parallel)}, language.tokenizer
    )
    if cfg.normalise.policy:
        policy = artifacts.verify(cfg.normalise.policy)
        artifacts.check_kind(policy, "normalise.policy", allowed=("policy",))
        artifacts.check_reads(policy, language.contract)
    dataset = build_dataset(
        cfg.data, stage="reward", part="train", template=language.template, tokenizer=language.tokenizer
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

    def collate(micro_batches: list[list[PreferenceRow]]) -> list[PreferenceBatch]:
        return [
            collate_preferences(
                rows, pad_id=language.pad_id, device=device(), packed=batching.packed, group=sharing.sequence
            )
            for rows in micro_batches
        ]

    loader = Prefetch(order, collate)
    run = Run.start(cfg, stage="step2_reward", ds_configs={"": ds}, num_steps=len(loader), share=sharing.sequence.rank)
    run.write_data_report(dataset.report, report_lines(dataset.report))
    held_out = build_dataset(
        cfg.data, stage="reward", part="eval", template=language.template, tokenizer=language.tokenizer
    )
    with zero3_init(ds, shares=cfg.parallel.tp > 1):
        model = build_reward_model(cfg.model, language.tokenizer, seed=cfg.run.seed)
    check_length_fits(model.config, cfg.data.max_prompt_tokens + cfg.data.max_response_tokens)
    reward = TrainEngine(
        ScalarModel(sharing.share(model)),
        ds=ds,
        optim=cfg.optim,
        role="reward",
        num_steps=len(loader),
        tensor=sharing.tensor,
    )
    scoring = choose_scoring(
        batching,
        {"reward": cfg.model},
        {"reward": ds_config.dtype_name(ds)},
        cfg.data,
        language,
        longest_row=int((held_out if len(held_out) else dataset).lengths.max(initial=1)),
    )
    run.watch([reward], shape=flop_shape(reward.module), lora=cfg.model.lora.rank,
              counts=sharing.tensor.rank == 0)  # fmt: skip
    checkpoints = Checkpoints(run, {"reward": reward}, {"loader": loader}, language=language)
    checkpoints.resume()

    def evaluate(step: int) -> dict[str, float]:
        with run.timer("eval"):
            judgements = judge(
                reward, held_out, batching=scoring, sharing=sharing, max_rows=cfg.eval.max_rows, pad_id=language.pad_id
            )
        values = summarise(judgements, held_out.source_names)
        run.log_eval(step, values)
        run.write_histograms(histograms(judgements))
        return values

    before = run.once("before", lambda: evaluate(0))
    for step, batches in checkpoints.steps(loader):
        with checkpoints.guarded(step):
            with run.timer("update"):
                count = all_sum(torch.stack([batch.weight_N.sum() for batch in batches]).sum())
                for i, batch in enumerate(batches):
                    loss_sum, stats = ranking_loss_sum(
                        batch.sequences.summed(scores_at(reward(**batch.sequences.inputs), batch.sequences.last_S)),
                        chosen_N=batch.chosen_N,
                        rejected_N=batch.rejected_N,
                        weight_N=batch.weight_N,
                        margin_N=batch.margin_N if cfg.ranking.use_margin else batch.margin_N * 0,
                        centring_coef=cfg.ranking.centring_coef,
                    )
                    reward.accumulate(loss_sum, count=count, last=i == len(batches) - 1)
                    run.metrics.add(stats)
                    run.count_batch(batch.sequences)
                update = reward.step()
            run.metrics.set({"train/lr": update.lr, "train/grad_norm": update.grad_norm})
            run.observe(step, {"loss": update.loss})
            run.log(step)
            if run.every(cfg.run.eval_every, step) and step < len(loader):
                evaluate(step)

    after = evaluate(len(loader))
    with run.timer("eval"):
        scores = final_scores(cfg, reward, language, dataset, after, batching=scoring, sharing=sharing, run=run)
    metrics = {**headline(before, after), **scores}
    folder = export_model(
        reward, language, run, kind="reward", parents=[cfg.model.path, cfg.normalise.policy], metrics=metrics
    )
    run.finish(metrics, folder)


def final_scores(
    cfg: RewardConfig,
    reward: TrainEngine,
    language: Language,
    dataset: TokenDataset[PreferenceRow],
    after: Mapping[str, float],
    *,
    batching: Batching,
    sharing: Sharing,
    run: Run,
) -> dict[str, float]:
    """Range of the scores on preferences, in the unit of the exported model, and what normalised them. Collective.

    Step 3 reads the range (`score_low`, `score_high`) in the manifest: what lies far above it, the model has not seen.

    Args:
        cfg: of the stage.
        reward: the trained model; it is normalised here, if that is asked for.
        language: of the model.
        dataset: training rows, looked at where no row is held out.
        after: the last evaluation.
        batching: micro-batches without gradients.
        sharing: ranks that work on each of them together.
        run: names the seed of the answers that normalise.
    """
    if "eval/score_low" not in after:
        seen = judge(reward, dataset, batching=batching, sharing=sharing, max_rows=RANGE_ROWS, pad_id=language.pad_id)
        after = summarise(seen, [])
    scores = {name: after[f"eval/{name}"] for name in ("score_low", "score_high") if f"eval/{name}" in after}
    if not cfg.normalise.policy:
        return scores
    found = normalise_on_policy(cfg, reward, language, batching, sharing, seed=run.seed_for("normalise", 0))
    normalised = {name: (score - found["score_mean"]) / found["score_std"] for name, score in scores.items()}
    return {**found, **normalised}


def headline(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """The stage's entries of summary.json; what was not measured is left out."""
    metrics = {
        short: after[f"eval/{short}"]
        for short in ("pair_accuracy", "tie_frac", "calibration_error", "length_correlation", "margin")
        if f"eval/{short}" in after
    }
    for when, values in (("before", before), ("after", after)):
        for short in ("loss", "pair_accuracy"):
            if f"eval/{short}" in values:
                metrics[f"eval_{short}_{when}"] = values[f"eval/{short}"]
    return metrics


def main() -> None:
    """Entry point of the deepspeed launcher."""
    cfg = parse_config(RewardConfig, prog="step2_reward.train")
    with watched(cfg.run.watchdog):
        setup()
        train(cfg)
        shutdown()


if __name__ == "__main__":
    main()
