"""Step 3: PPO, or another algorithm, against the reward model, on the hybrid engine.

Run with `deepspeed --module step3_ppo.train --config ppo.yaml`, or as one plain process with `python -m`.
"""

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch

from rlhf import ds_config
from rlhf.checkpoint import Checkpoints
from rlhf.config import TokenizerConfig, parse_config
from rlhf.data.batching import Batching
from rlhf.data.dataset import PromptRow, build_dataset, report_lines
from rlhf.data.loader import Loader, evenly_spaced
from rlhf.distributed import all_gather_objects, all_max, device, device_type, rank, shutdown, world_size
from rlhf.engine import setup
from rlhf.memory import measure_growth
from rlhf.models.build import read_config
from rlhf.models.split import check_rollout_split
from rlhf.plan import flops
from rlhf.resumable import Stateful
from rlhf.rollout.answers import Voice
from rlhf.rollout.graphs import check_graphs
from rlhf.rollout.plan import Demand, MemoryPlan
from rlhf.rollout.selfcheck import check_greedy
from rlhf.rollout.vllm import VLLMEngine
from rlhf.rollout.weights import Lending, choose_lending, lend_weights
from rlhf.rules import rule_named
from rlhf.run import Run
from rlhf.sharing import Sharing, join_groups
from rlhf.stage import Language, choose_batching, choose_scoring, export_model, flop_shape, load_language
from rlhf.watchdog import watched
from step3_ppo.algorithm import Objective
from step3_ppo.checks import kl_is_zero
from step3_ppo.config import PPOConfig, RolloutConfig
from step3_ppo.drawing import Draw, Drawn, draw_step, shaped_scores
from step3_ppo.evaluate import answer_held_out, describe, to_samples
from step3_ppo.experience import to_experience
from step3_ppo.kl import KLCoefficient
from step3_ppo.rewards import RunningScale
from step3_ppo.roles import (
    Roles,
    build_roles,
    check_artifacts,
    check_language,
    load_ds_configs,
    model_configs,
    score_range,
    trained_roles,
)
from step3_ppo.rollout import Judges, describe_decoding, roll_out, score_responses
from step3_ppo.summary import headline, summarise
from step3_ppo.update import update

logger = logging.getLogger(__name__)


def train(cfg: PPOConfig) -> None:
    """Improve the SFT policy and leave folders of the policy and, if there is one, the critic."""
    check_artifacts(cfg)
    reward_range = score_range(cfg)
    ds = load_ds_configs(cfg)
    language = load_language(cfg.data, TokenizerConfig(), cfg.actor, stage="ppo")
    check_language(cfg, language)
    sharing = join_ranks(cfg, language, ds)
    prompts = build_dataset(
        cfg.data, stage="ppo", part="train", template=language.template, tokenizer=language.tokenizer
    )
    loader = Loader(
        prompts,
        global_batch_size=cfg.rollout.prompts_per_step,
        batching=Batching(max_rows=1),
        rank=rank(),
        world_size=world_size(),
        seed=cfg.run.seed,
        epochs=math.inf,
        max_steps=cfg.max_steps,
    )
    run = Run.start(cfg, stage="step3_ppo", ds_configs=ds, num_steps=len(loader))
    run.write_data_report(prompts.report, report_lines(prompts.report))
    roles = build_roles(cfg, language, ds, sharing, num_updates=cfg.num_updates)
    judges = make_judges(cfg)
    rows = held_out_rows(cfg, language)
    kl_coef, scale = KLCoefficient(cfg.kl), RunningScale()
    count = make_count(cfg, roles, run)
    parts: dict[str, Stateful] = {"loader": loader, "kl_coef": kl_coef, "scale": scale}
    checkpoints = Checkpoints(run, roles.trained, parts, language=language)
    checkpoints.resume()
    voice = trusted_voice(roles, make_voice(cfg, language, roles), rows or [prompts[0]])
    dtype = "float8" if cfg.actor.float8 != "none" else ds_config.dtype_name(ds["actor"])
    score_batching, update_batching = make_batchings(cfg, language, ds)

    draw = make_draw(cfg, roles, voice, judges, score_batching, scale, run, dtype=dtype)
    evaluate = make_evaluation(cfg, roles, voice, judges, score_batching, rows, run)
    before = run.once("before", lambda: evaluate(0, "before"))
    for step, micro_batches in checkpoints.steps(loader):
        with checkpoints.guarded(step):
            drawn = draw_step(
                partial(draw, step), micro_batches, partial(more_prompts, loader, cfg.rollout, step), cfg.rollout
            )
            experience, updated = None, {}
            if drawn.kept:
                with run.timer("score"):
                    experience = to_experience(
                        drawn.kept_sequences,
                        drawn.kept_score_B,
                        kl_coef=kl_coef.value,
                        method=cfg.method,
                        gae_config=cfg.gae,
                    )
                with run.timer("update"):
                    objective = Objective(update=cfg.update, method=cfg.method, kl_coef=kl_coef.value)
                    updated = update(
                        roles, experience, voice, objective, run, batching=update_batching, step=step, dtype=dtype
                    )
            else:
                logger.warning("step %d: all responses to each prompt score alike; nothing is trained on", step)
            values = summarise(drawn, experience, kl_coef=kl_coef.value, has_critic=cfg.has_critic)
            run.metrics.set({**values, **describe_decoding(drawn.decoded)})
            kl_coef.update(values["ppo/kl_ref"], num_sequences=len(drawn.sequences))
            count(drawn)
            run.observe(step, {**values, **updated, **reward_range})
            run.log(step)
            if run.every(cfg.run.eval_every, step) and step < len(loader):
                evaluate(step, "after")

    metrics = headline(before, evaluate(len(loader), "after"), judges)
    parents = [cfg.actor.path, cfg.reward.path]
    folder = export_model(roles.actor, language, run, kind="policy", parents=parents, metrics=metrics)
    if roles.critic is not None:
        export_model(roles.critic, language, run, kind="critic", parents=parents, metrics={}, name="critic")
    run.finish(metrics, folder)


def make_draw(
    cfg: PPOConfig,
    roles: Roles,
    voice: Voice,
    judges: Judges,
    batching: Batching,
    scale: RunningScale,
    run: Run,
    *,
    dtype: str,
) -> Callable[[int, list[list[PromptRow]], Counter[int]], Draw]:
    """A function that draws and scores responses: of (step, this rank's prompts, rows drawn in this step before)."""

    def draw(step: int, micro_batches: list[list[PromptRow]], seen: Counter[int]) -> Draw:
        prompts = [row for micro in micro_batches for row in micro]
        with run.timer("rollout"), rollout_memory(run, None if seen else voice.plan, step=step):
            samples, decoded = roll_out(
                roles, voice, prompts, samples_per_prompt=cfg.rollout.samples_per_prompt, seed=cfg.run.seed, step=step,
                drawn=seen,
            )  # fmt: skip
        with run.timer("score"):
            rescore = cfg.rollout.old_logprobs == "rescore"
            sequences = score_responses(roles, voice, samples, judges, batching=batching, rescore=rescore)
            if roles.actor.step_count == 0 and not cfg.reference.path:
                kl_is_zero(sequences, dtype=dtype)
            score_B = shaped_scores(
                sequences, scale, cfg.shaping, max_response_tokens=cfg.data.max_response_tokens
            )  # fmt: skip
        return Draw(sequences=sequences, score_B=score_B, decoded=decoded)

    return draw


def more_prompts(loader: Loader[PromptRow], rollout: RolloutConfig, step: int, number: int) -> list[list[PromptRow]]:
    """This rank's prompts of the step's further rollout `number`, from 1: rows that come after those of the last step.

    They are a function of step and number, so a resume draws the same ones, and no step loses its own.
    """
    size = rollout.prompts_per_step
    place = len(loader) + (step - 1) * (rollout.most_draws - 1) + number - 1
    return loader.batch_at(range(place * size, (place + 1) * size))


def make_count(cfg: PPOConfig, roles: Roles, run: Run) -> Callable[[Drawn], None]:
    """A function that counts the tokens of responses, and the model FLOPs that they take in all phases."""
    run.watch(roles.engines)
    policy, scorer = flop_shape(roles.actor.module), flop_shape(roles.reward.module)

    def count(drawn: Drawn) -> None:
        kept = set(drawn.kept)
        for i in range(rank(), len(drawn.sequences), world_size()):
            prompt, response = len(drawn.sequences[i].prompt_ids), len(drawn.sequences[i].response_ids)
            run.count_tokens(prompt + response)
            if policy is None or scorer is None:
                continue
            run.count_flops(flops.ppo_row(
                policy, scorer, prompt, response, epochs=cfg.update.epochs if i in kept else 0,
                lora=cfg.actor.lora.rank, critic=cfg.has_critic,
            ))  # fmt: skip

    return count


def held_out_rows(cfg: PPOConfig, language: Language) -> list[PromptRow]:
    """Prompts that the evaluation answers."""
    held_out = build_dataset(
        cfg.data, stage="ppo", part="eval", template=language.template, tokenizer=language.tokenizer
    )
    return [held_out[i] for i in evenly_spaced(len(held_out), cfg.eval.generate_rows)]


def make_voice(cfg: PPOConfig, language: Language, roles: Roles) -> Voice:
    """How the actor speaks: in rollouts and in evaluation. Collective.

    Raises:
        ValueError: the rollout does not fit the memory that is free.
    """
    trained_in = ds_config.dtype_name(roles.actor.ds)
    drawn_in = cfg.rollout.dtype or trained_in
    trained_in = "float8" if cfg.actor.float8 != "none" else trained_in
    if drawn_in != trained_in and not cfg.update.importance_cap:
        logger.warning(
            "the rollout draws in %s from a policy that rounds otherwise than the one trained in %s, and nothing "
            "weighs the difference. Set update.importance_cap=2, or watch ppo/logprob_gap.", drawn_in, trained_in,
        )  # fmt: skip
    dtype = None if cfg.rollout.dtype is None else getattr(torch, cfg.rollout.dtype)
    lending, plan, vllm = Lending(dtype=dtype), None, None
    if cfg.rollout.engine == "vllm":
        vllm = make_vllm(cfg, language, roles)
    else:
        num_rows = -(-max(cfg.rollout.num_sequences, cfg.eval.generate_rows) // world_size())
        num_tokens = cfg.data.max_prompt_tokens + cfg.data.max_response_tokens
        lending, plan = choose_lending(
            roles.actor,
            Demand(num_rows=min(cfg.rollout.batch_size, num_rows), num_tokens=num_tokens),
            weights=cfg.rollout.weights,
            tensor_parallel=cfg.rollout.tensor_parallel,
            dtype=dtype,
        )
    return Voice(
        tokenizer=language.tokenizer,
        template=language.template,
        sampling=cfg.sampling,
        max_new_tokens=cfg.data.max_response_tokens,
        batch_size=cfg.rollout.batch_size,
        lending=lending,
        plan=plan,
        vllm=vllm,
        graphs=cfg.rollout.graphs,
    )


def join_ranks(cfg: PPOConfig, language: Language, ds: dict[str, dict[str, Any]]) -> Sharing:
    """Which ranks share rows or weights, once it is sure that this fits the models, and the rollout. Collective.

    Raises:
        ValueError: they do not.
    """
    trained_in = ds_config.dtype_name(ds["actor"])
    cfg.check_rollout(trained_in=trained_in, zero_stage=ds_config.zero_stage(ds["actor"]), world_size=world_size())
    config = read_config(model_configs(cfg)["actor"], language.tokenizer)
    if cfg.rollout.tensor_parallel is not None and cfg.rollout.tensor_parallel > 1:
        check_rollout_split(config.to_dict(), cfg.rollout.tensor_parallel)
    if cfg.rollout.graphs:
        check_graphs(config, device_type())
    return join_groups(trained_roles(cfg, ds), language.tokenizer, readers=list(model_configs(cfg).values()))


@contextmanager
def rollout_memory(run: Run, plan: MemoryPlan | None, *, step: int) -> Iterator[None]:
    """In the first step, set the metrics of planned and measured memory; without a plan nothing is measured."""
    if plan is None or step != run.first_step + 1:
        yield
        return
    risen = measure_growth()
    yield
    peak = all_max(torch.tensor(risen(), device=device()))
    run.metrics.set({"memory/rollout_planned_bytes": float(plan.peak), "memory/rollout_peak_bytes": float(peak)})


def make_vllm(cfg: PPOConfig, language: Language, roles: Roles) -> VLLMEngine:
    """vLLM in this rank's process, for the actor's weights. Collective."""
    return VLLMEngine(
        cast(Any, roles.actor.module).config,
        options=cfg.rollout.vllm,
        max_num_seqs=cfg.rollout.batch_size,
        dtype=getattr(torch, cfg.rollout.dtype or ds_config.dtype_name(roles.actor.ds)),
        max_model_len=cfg.data.max_prompt_tokens + cfg.data.max_response_tokens,
        tokenizer=language.tokenizer,
    )


def make_batchings(cfg: PPOConfig, language: Language, ds: dict[str, dict[str, Any]]) -> tuple[Batching, Batching]:
    """How sequences become micro-batches when they are scored, and when actor and critic are trained on them.

    Collective; the models are in memory.
    """
    models = model_configs(cfg)
    longest_row = cfg.data.max_prompt_tokens + cfg.data.max_response_tokens
    micro_batch_size = min(ds_config.micro_batch_size(ds[role]) for role in ("actor", "critic") if role in ds)
    training = choose_batching(
        list(models.values()), cfg.data, language, max_rows=micro_batch_size, longest_row=longest_row
    )
    dtypes = {role: ds_config.dtype_name(ds[role]) for role in models}
    return choose_scoring(training, models, dtypes, cfg.data, language, longest_row=longest_row), training


def make_judges(cfg: PPOConfig) -> Judges:
    """Rules by name, and their weights."""
    return Judges(
        rule=rule_named(cfg.shaping.rule) if cfg.shaping.rule else None,
        rule_weight=cfg.shaping.rule_weight,
        model_weight=cfg.shaping.model_weight,
        gold=rule_named(cfg.gold_rule) if cfg.gold_rule else None,
    )


Evaluation = Callable[[int, str], dict[str, float]]


def make_evaluation(
    cfg: PPOConfig,
    roles: Roles,
    voice: Voice,
    judges: Judges,
    batching: Batching,
    rows: Sequence[PromptRow],
    run: Run,
) -> Evaluation:
    """A function of (step, "before" or "after") that lets the actor answer held-out rows and writes what it said."""
    greedy = dataclasses.replace(voice, sampling=dataclasses.replace(cfg.sampling, temperature=0.0))
    speaker = greedy if cfg.eval.greedy else voice

    def evaluate(step: int, when: str) -> dict[str, float]:
        with run.timer("eval"):
            answers = answer_held_out(roles, speaker, rows, judges, batching=batching, seed=run.seed_for("answers", 0))
        values = describe(answers)
        run.log_eval(step, {f"eval/{name}": value for name, value in values.items()})
        run.write_samples(when, to_samples(answers, rows))
        return values

    return evaluate


def trusted_voice(roles: Roles, voice: Voice, rows: Sequence[PromptRow]) -> Voice:
    """Compare our greedy decoding with Hugging Face's on this model; where they differ, take Hugging Face's.

    Collective. All ranks take the same path, whatever each of them found. vLLM's decoding is its own affair.
    """
    if voice.vllm is not None:
        return voice
    with lend_weights(roles.actor, voice.lending) as lent:
        check = check_greedy(
            lent.model,
            [list(map(int, row.prompt_ids)) for row in rows[:4]],
            stop_token_ids=voice.stop_token_ids,
            max_new_tokens=min(20, voice.max_new_tokens),
            pad_id=int(voice.tokenizer.pad_token_id),
            all_ranks_running=lent.all_ranks_running,
            graphs=voice.graphs,
        )
    agreed = all(all_gather_objects(check.ok))
    if agreed:
        logger.info("rollout self-check: %s", check.message)
        return voice
    logger.warning("rollout self-check failed, decoding by Hugging Face's generate: %s", check.message)
    return dataclasses.replace(voice, plain=True)


def main() -> None:
    """Entry point of the deepspeed launcher."""
    cfg = parse_config(PPOConfig, prog="step3_ppo.train")
    with watched(cfg.run.watchdog):
        setup()
        train(cfg)
        shutdown()


if __name__ == "__main__":
    main()
