"""Step 3 as a whole program, in one process on the real engine."""

import dataclasses
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.opt.modeling_opt import OPTDecoderLayer

from rlhf.artifacts import ArtifactError, read_manifest
from rlhf.config import TokenizerConfig
from rlhf.engine import NonFiniteError, TrainEngine
from rlhf.plan import flops
from rlhf.plan.shapes import find_shape
from rlhf.rollout import answers
from rlhf.rollout import weights as lending
from rlhf.rollout.selfcheck import SelfCheck
from rlhf.run import Run
from rlhf.stage import CPU_SCORE_TOKENS, load_language
from step2_reward.train import train as train_reward
from step3_ppo import roles as roles_module
from step3_ppo import rollout as rollout_module
from step3_ppo import train as program
from step3_ppo.checks import PolicyMismatchError
from step3_ppo.experience import Experience, ScoredSequence
from step3_ppo.train import train
from tests.stages import (
    MODEL,
    NO_EVAL,
    Killed,
    Models,
    changed,
    digit_rows,
    kill_at,
    metric_lines,
    result,
    reward_config,
    same_weights,
    series,
    weights,
    write_rows,
    yes_rows,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def with_dropout(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Models:
    """Dropout in the models' config: step 3 has to take it out by itself."""
    config = {"model__config": {**MODEL, "dropout": 0.1}, "model__dropout": None}
    path = write_rows(folder / "rows.jsonl", rows)
    return Models(folder, path, reward={"model__dropout": None}, **config, **changes)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Models:
    return with_dropout(tmp_path_factory.mktemp("models"), yes_rows(40), max_steps=12)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Models:
    """A policy that answers any prompt with any digit."""
    folder = tmp_path_factory.mktemp("digits")
    return with_dropout(folder, digit_rows(60), max_steps=40, optim__lr=1e-2, global_batch_size=16)


@pytest.mark.parametrize("old_logprobs", ["decoder", "rescore"])
def test_before_the_first_update_kl_is_0_and_the_ratio_1(
    models: Models, tmp_path: Path, experiences: list[Experience], old_logprobs: str
) -> None:
    """D6, D7, A9, A10: dropout 0.1 in the folders' config, prompts of different length, transforms on sampling."""
    assert json.loads((models.actor / "config.json").read_text())["dropout"] == 0.1
    cfg = models.config(
        tmp_path / "ppo",
        max_steps=1,
        update__epochs=1,
        update__minibatch_size=8,
        sampling__temperature=0.7,
        sampling__top_k=50,
        sampling__top_p=0.95,
        sampling__min_new_tokens=2,
        rollout__old_logprobs=old_logprobs,
    )
    train(cfg)
    (experience,) = experiences
    sequences = experience.sequences
    assert len({len(s.prompt_ids) for s in sequences}) > 2 and len({len(s.response_ids) for s in sequences}) > 1
    for s in sequences:
        if old_logprobs == "rescore":
            # Bit for bit: reference and actor are the same weights in the same forward.
            assert torch.equal(s.old_logprob_R, s.ref_logprob_R)
        else:
            assert torch.equal(s.old_logprob_R, s.rollout_logprob_R)
        torch.testing.assert_close(s.rollout_logprob_R, s.ref_logprob_R, atol=1e-5, rtol=0)  # cached against whole rows
    assert series(tmp_path / "ppo", "ppo/kl_ref") == [pytest.approx(0.0, abs=1e-5)]
    # Rows of other shape than when they were scored: rounding of a few ulp, squared in k3.
    assert series(tmp_path / "ppo", "policy/kl_old") == [pytest.approx(0.0, abs=1e-9)]
    assert series(tmp_path / "ppo", "policy/clip_frac") == [0.0]
    # With ratio 1 the loss is minus the mean of advantages that were whitened over these very tokens: 0.
    assert series(tmp_path / "ppo", "policy/loss") == [pytest.approx(0.0, abs=1e-5)]


def test_a_rollout_in_another_type(
    models: Models, tmp_path: Path, experiences: list[Experience], caplog: pytest.LogCaptureFixture
) -> None:
    """The ratio is between two forwards of the actor, hence 1; how far the decoder is from them is measured."""
    # One minibatch, so that the measured gap is over all sequences.
    update = {"update__epochs": 1, "update__minibatch_size": 8}
    named = {"rollout__dtype": "bfloat16", "rollout__old_logprobs": "rescore", "max_steps": 1, **update, **NO_EVAL}
    train(models.config(tmp_path / "cap", update__importance_cap=2.0, **named))
    assert "Set update.importance_cap=2" not in caplog.text
    (experience,) = experiences
    gaps = torch.cat([(s.old_logprob_R - s.rollout_logprob_R).abs() for s in experience.sequences])
    assert 1e-5 < float(gaps.mean()) < 2e-2
    assert all(torch.equal(s.old_logprob_R, s.ref_logprob_R) for s in experience.sequences)
    assert series(tmp_path / "cap", "ppo/logprob_gap") == [pytest.approx(float(gaps.mean()), rel=1e-2)]
    (planned,), (risen,) = (
        [line[name] for line in metric_lines(tmp_path / "cap", measured=True) if name in line]
        for name in ("memory/rollout_planned_bytes", "memory/rollout_peak_bytes")
    )
    weights_bytes = 2 * sum(p.numel() for p in weights(tmp_path / "cap/model").values())
    assert planned > weights_bytes and risen >= 0
    train(models.config(tmp_path / "no_cap", **named))
    assert "the rollout draws in bfloat16 from a policy that rounds otherwise" in caplog.text
    with pytest.raises(ValueError, match="rollout.old_logprobs is `decoder`"):
        train(models.config(tmp_path / "refused", rollout__dtype="bfloat16"))
    assert not (tmp_path / "refused").exists(), "refused before anything is written"


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_float8(
    models: Models, tmp_path: Path, experiences: list[Experience], caplog: pytest.LogCaptureFixture, recipe: str
) -> None:
    """The reference, the actor's start, rounds as the actor does: the first KL is 0. The decoder does not round so."""
    pytest.importorskip("torchao")
    named = {"rollout__old_logprobs": "rescore", "max_steps": 1, **NO_EVAL}
    cfg = models.config(tmp_path / "ppo", **named)
    float8 = {role: dataclasses.replace(getattr(cfg, role), float8=recipe) for role in ("actor", "critic")}
    train(dataclasses.replace(cfg, **float8))
    (experience,) = experiences
    assert all(torch.equal(s.old_logprob_R, s.ref_logprob_R) for s in experience.sequences)
    gaps = torch.cat([(s.old_logprob_R - s.rollout_logprob_R).abs() for s in experience.sequences])
    assert 1e-4 < float(gaps.mean()) < 5e-2
    assert (
        "the rollout draws in float32 from a policy that rounds otherwise than the one trained in float8" in caplog.text
    )
    assert {p.dtype for p in weights(tmp_path / "ppo/model").values()} == {torch.float32}


def test_a_rollout_that_does_not_fit_is_an_error_before_it(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E17: with what it needs, what is free and what to change."""
    monkeypatch.setattr(lending, "free_bytes", lambda: 50_000)
    monkeypatch.setattr(program, "check_greedy", lambda *_, **__: pytest.fail("it decodes"))
    with pytest.raises(ValueError, match=r"the rollout needs .* free it may take 90%. Lower rollout.batch_size"):
        train(models.config(tmp_path / "ppo"))


def test_a_reference_that_is_not_the_actors_start_is_an_error(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D7."""
    build_roles = program.build_roles

    def moved(*arguments: Any, **named: Any) -> roles_module.Roles:
        roles = build_roles(*arguments, **named)
        with torch.no_grad():
            for parameter in roles.reference.module.parameters():
                parameter.mul_(1.02)
        return roles

    monkeypatch.setattr(program, "build_roles", moved)
    with pytest.raises(PolicyMismatchError, match="actor and reference before the first update: log-probs"):
        train(models.config(tmp_path / "ppo"))
    assert not (tmp_path / "ppo/model").exists()


def test_dropout_in_the_update_is_an_error(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D6: scoring is without it, so the first ratio would not be 1."""
    model_configs = roles_module.model_configs

    def with_dropout(cfg: Any) -> dict[str, Any]:
        return {role: changed(model, dropout=0.1) for role, model in model_configs(cfg).items()}

    monkeypatch.setattr(roles_module, "model_configs", with_dropout)
    with pytest.raises(PolicyMismatchError, match="scoring and update before the first update: .*dropout"):
        train(models.config(tmp_path / "ppo"))


def test_raises_a_programmable_reward(digits: Models, tmp_path: Path) -> None:
    """D5: from any digit to the one that the rule pays for. D29: decoder and scorer agree all the way."""
    cfg = digits.config(
        tmp_path / "ppo",
        max_steps=20,
        shaping__rule="final_number",
        shaping__model_weight=0.0,
        gold_rule="final_number",
        rollout__prompts_per_step=32,
        rollout__batch_size=32,
        update__minibatch_size=16,
        actor_optim__lr=3e-3,
        critic_optim__lr=3e-3,
        data__max_response_tokens=4,
    )
    train(cfg)
    score = series(tmp_path / "ppo", "ppo/score")
    assert score[0] < 0.4 and sum(score[-3:]) / 3 > 0.8
    assert series(tmp_path / "ppo", "ppo/gold") == score, "the same rule measures"
    gaps = series(tmp_path / "ppo", "ppo/logprob_gap")
    assert len(gaps) == 20 and max(gaps) < 1e-5
    assert series(tmp_path / "ppo", "ppo/kl_ref")[-1] > 1.0, "it had to move"
    metrics = result(tmp_path / "ppo")["metrics"]
    assert metrics["gold_ppo"] > metrics["gold_sft"]


def test_every_answer_of_one_token(models: Models, tmp_path: Path, experiences: list[Experience]) -> None:
    """D13: a stop token alone is an answer; none is left out, and nothing divides by 0."""
    train(models.config(tmp_path / "ppo", data__max_response_tokens=1, **NO_EVAL))
    for experience in experiences:
        assert [len(s.response_ids) for s in experience.sequences] == [1] * 8
        assert experience.advantage_BR.isfinite().all() and experience.advantage_BR.shape == (8, 1)
    for name in ("policy/loss", "value/loss", "train/grad_norm", "critic/grad_norm"):
        values = series(tmp_path / "ppo", name)
        assert len(values) == 2 and all(map(math.isfinite, values)), (name, values)


def test_activations_are_recomputed_in_the_update_alone(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D8: the update is in train mode, where checkpointing works; decoding and scoring are in eval mode.

    Each layer's forward is counted by (mode, with gradient): recomputed ones double those of the update.
    """
    forward, calls = OPTDecoderLayer.forward, Counter[tuple[bool, bool]]()

    def counting(layer: OPTDecoderLayer, *arguments: Any, **named: Any) -> Any:
        calls[layer.training, torch.is_grad_enabled()] += 1
        return forward(layer, *arguments, **named)

    monkeypatch.setattr(OPTDecoderLayer, "forward", counting)
    found = []
    for how in ("none", "full"):
        calls.clear()
        changes = {"actor__recompute": how, "critic__recompute": how, "max_steps": 1}
        train(models.config(tmp_path / f"ppo_{how}", **changes, **NO_EVAL))
        found.append(dict(calls))
    without, checkpointed = found
    assert set(without) == set(checkpointed) == {(True, True), (False, False)}
    assert checkpointed[True, True] == 2 * without[True, True]
    assert checkpointed[False, False] == without[False, False]
    for part in ("policy/loss", "value/loss", "train/grad_norm", "critic/grad_norm"):
        assert series(tmp_path / "ppo_full", part) == pytest.approx(series(tmp_path / "ppo_none", part), abs=1e-6)


def test_a_constant_reward_does_not_move_the_policy_far(digits: Models, tmp_path: Path) -> None:
    """D4: the same run as the one that learns, but nothing to gain."""
    cfg = digits.config(
        tmp_path / "ppo",
        max_steps=20,
        shaping__model_weight=0.0,
        rollout__prompts_per_step=32,
        rollout__batch_size=32,
        update__minibatch_size=16,
        actor_optim__lr=3e-3,
        critic_optim__lr=3e-3,
        data__max_response_tokens=4,
        **NO_EVAL,
    )
    train(cfg)
    assert set(series(tmp_path / "ppo", "ppo/score")) == {0.0}
    kl, entropy = series(tmp_path / "ppo", "ppo/kl_ref"), series(tmp_path / "ppo", "ppo/entropy")
    # Whitened noise pushes the policy about; the penalty holds it. The run that learns goes ten times as far.
    assert sum(kl[-5:]) / 5 < 0.25
    assert min(entropy) / entropy[0] > 0.7 and max(entropy) / entropy[0] < 1.3


def kill_in_update(patch: pytest.MonkeyPatch, *, after_steps: int) -> None:
    """End the program when an optimiser has made so many steps, of all engines together."""
    step, made = TrainEngine.step, []

    def step_or_die(self: TrainEngine) -> Any:
        if len(made) == after_steps:
            raise Killed
        made.append(self.role)
        return step(self)

    patch.setattr(TrainEngine, "step", step_or_die)


@pytest.mark.parametrize("moment", ["between steps", "in the second epoch of updates"])
def test_resume_equals_an_uninterrupted_run(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """F12, F13, F14: adaptive KL, running scale, critic, both optimisers, order of prompts: equal to the bit."""
    changes = {
        "max_steps": 4,
        "run__save_every": 2,
        "run__eval_every": 2,
        "kl__adaptive": True,
        "kl__target": 0.01,
        "kl__horizon": 50.0,
        "shaping__scale": "running",
        "actor_optim__schedule": "cosine",
        "critic_optim__warmup_frac": 0.5,
        "rollout__prompts_per_step": 8,
        "rollout__samples_per_prompt": 2,
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(models.config(whole, **changes))
    with monkeypatch.context() as patch:
        if moment == "between steps":
            kill_at(patch, Run, step=4)
        else:
            kill_in_update(patch, after_steps=3 * 16 + 11)  # a step: 2 epochs of 4 minibatches, actor and critic
        with pytest.raises(Killed):
            train(models.config(parts, **changes))
    assert len(series(parts, "ppo/score")) == 3
    train(models.config(parts, **changes, run__resume=True))
    assert metric_lines(parts) == metric_lines(whole)
    assert len(set(series(whole, "ppo/kl_coef"))) == 4, "the coefficient moves at every step"
    for name in ("model", "critic"):
        assert same_weights(parts / name, whole / name), name
    assert result(parts)["metrics"] == result(whole)["metrics"]
    assert (parts / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


def test_records_of_a_run(models: Models, tmp_path: Path) -> None:
    """The summary's keys, the samples before and after, the critic's folder (F13)."""
    train(models.config(tmp_path / "ppo", gold_rule="final_number"))
    done = result(tmp_path / "ppo")
    assert done["status"] == "done" and done["model_dir"] == "model" and done["tokens_per_second"] > 0
    for name in ("gold_sft", "gold_ppo", "gold_max", "score_sft", "score_ppo", "kl", "entropy", "distinct_frac",
                 "response_length", "stop_frac"):  # fmt: skip
        assert isinstance(done["metrics"][name], float), name
    line = next(x for x in metric_lines(tmp_path / "ppo", measured=True) if x["split"] == "train")
    for name in (
        *(f"ppo/{x}" for x in ("score", "reward", "kl_ref", "kl_coef", "entropy", "response_length", "stop_frac")),
        *("ppo/distinct_frac", "ppo/gold", "ppo/logprob_gap", "train/lr", "train/grad_norm"),
        *(f"policy/{x}" for x in ("loss", "clip_frac", "kl_old")),
        *(f"value/{x}" for x in ("loss", "clip_frac", "explained_variance")),
        *("critic/lr", "critic/grad_norm", "time/rollout_seconds", "time/score_seconds", "time/update_seconds"),
    ):
        assert name in line, name
    samples = [json.loads(text) for text in (tmp_path / "ppo/samples.jsonl").read_text().splitlines()]
    assert [s["when"] for s in samples] == ["before"] * 4 + ["after"] * 4
    assert [s["prompt"] for s in samples[:4]] == [s["prompt"] for s in samples[4:]]
    assert all(isinstance(s["score"], float) and isinstance(s["gold"], float) for s in samples)
    after = [s["score"] for s in samples[4:]]
    assert done["metrics"]["score_ppo"] == pytest.approx(sum(after) / 4)
    for name, kind in (("model", "policy"), ("critic", "critic")):
        manifest = read_manifest(tmp_path / "ppo" / name)
        assert manifest.kind == kind and len(manifest.parents) == 2
    assert weights(tmp_path / "ppo/critic")["score.weight"].shape == (1, 32)
    assert "score.weight" not in weights(tmp_path / "ppo/model")
    assert read_manifest(tmp_path / "ppo/model").contract == read_manifest(models.actor).contract


def test_flops_of_all_phases_are_counted(models: Models, tmp_path: Path, experiences: list[Experience]) -> None:
    """Of each response drawn: rollout, three forwards, two models trained in each of three epochs."""
    train(models.config(tmp_path / "ppo", max_steps=2, update__epochs=3, **NO_EVAL))
    policy, scorer = (find_shape(str(tmp_path / "ppo" / name)) for name in ("model", "critic"))
    needed = sum(
        flops.ppo_row(policy, scorer, len(sequence.prompt_ids), len(sequence.response_ids), epochs=3)
        for experience in experiences
        for sequence in experience.sequences
    )
    assert len(experiences) == 2 and result(tmp_path / "ppo")["model_flops"] == pytest.approx(needed)


def test_shaping_reaches_the_rewards(models: Models, tmp_path: Path, experiences: list[Experience]) -> None:
    """Clip, penalties, rule beside the model, KL penalty: recomputed from each sequence by hand."""
    cfg = models.config(
        tmp_path / "ppo",
        shaping__rule="final_number",
        shaping__rule_weight=3.0,
        shaping__model_weight=2.0,
        shaping__clip=0.05,
        shaping__missing_stop_penalty=1.0,
        shaping__length_penalty=0.125,
        kl__coef=0.5,
        kl__estimator="k3",
        gae__gamma=0.9,
        gae__lam=0.8,
        **NO_EVAL,
    )
    train(cfg)
    for experience, logged in zip(experiences, series(tmp_path / "ppo", "ppo/reward"), strict=True):
        totals = []
        for i, s in enumerate(experience.sequences):
            score = min(max(s.score, -0.05), 0.05) - (0.0 if s.stopped else 1.0) - 0.125 * len(s.response_ids)
            gap = s.ref_logprob_R - s.old_logprob_R
            expected = -0.5 * (gap.exp() - 1 - gap)
            expected[-1] += score
            found = experience.reward_BR[i, : len(s.response_ids)]
            torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
            totals.append(float(expected.sum()))
        assert logged == pytest.approx(sum(totals) / len(totals), rel=1e-5)
        tokens = experience.advantage_BR[experience.mask_BR]
        assert tokens.mean().item() == pytest.approx(0, abs=1e-6) and tokens.std(correction=0).item() == pytest.approx(
            1, abs=1e-3
        )
        assert experience.advantage_BR[~experience.mask_BR].abs().sum() == 0
    assert any(abs(s.score) > 0.05 for e in experiences for s in e.sequences), "the clip had something to do"
    assert experiences[1].sequences[0].ref_logprob_R.ne(experiences[1].sequences[0].old_logprob_R).any()


def test_scoring_has_a_budget_of_its_own(models: Models, tmp_path: Path) -> None:
    """data.micro_batch_tokens is about training, which holds activations and gradients."""
    cfg = models.config(tmp_path / "ppo", data__micro_batch_tokens=40)
    language = load_language(cfg.data, TokenizerConfig(), cfg.actor, stage="ppo")
    scoring, training = program.make_batchings(cfg, language, roles_module.load_ds_configs(cfg))
    assert (training.max_tokens, scoring.max_tokens) == (40, CPU_SCORE_TOKENS)


def test_samples_of_one_prompt_are_scored_together(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four samples of four prompts in a budget of a few: one prompt to each micro-batch. Evaluation's are empty."""
    batches = []
    collate = rollout_module.collate_responses

    def spy(prompt_ids: Any, response_ids: Any, **named: Any) -> Any:
        batches.append({tuple(prompt) for prompt in prompt_ids})
        return collate(prompt_ids, response_ids, **named)

    monkeypatch.setattr(rollout_module, "collate_responses", spy)
    sizes = {"rollout__prompts_per_step": 4, "rollout__samples_per_prompt": 4, "update__minibatch_size": 16}
    train(models.config(tmp_path / "ppo", max_steps=1, data__score_micro_batch_tokens=80, **sizes, **NO_EVAL))
    assert [len(prompts) for prompts in batches if prompts] == [1, 1, 1, 1]


@pytest.mark.parametrize("stage", ["cpu_zero0", "cpu_zero3_hybrid"])
def test_the_adapters_base_is_the_reference(models: Models, tmp_path: Path, stage: str) -> None:
    """With LoRA the KL is measured to the actor with its adapters off: as to a second copy of its folder."""
    lora = {"actor__lora__rank": 4, "actor_optim__lr": 5e-2, "max_steps": 3, "deepspeed__actor": stage, **NO_EVAL}
    train(models.config(tmp_path / "shared", **lora))
    train(models.config(tmp_path / "apart", reference__path=str(models.actor), **lora))
    kl = [series(tmp_path / name, "ppo/kl_ref") for name in ("shared", "apart")]
    assert kl[0] == pytest.approx(kl[1], abs=1e-5) and abs(kl[0][-1]) > 1e-3, "the adapters have moved the policy"
    assert same_weights(tmp_path / "shared/model", tmp_path / "apart/model")


def test_target_kl_leaves_the_rest_of_the_update_out(models: Models, tmp_path: Path) -> None:
    """The first minibatch has KL 0, the second one does not: of 2 x 2 minibatches the last two are left out."""
    strict, lax = tmp_path / "strict", tmp_path / "lax"
    for folder, target in ((strict, 1e-12), (lax, 1e9)):
        train(models.config(folder, max_steps=1, update__target_kl=target, actor_optim__lr=1e-2, **NO_EVAL))
    assert series(strict, "policy/skipped_frac") == [0.5]
    assert series(lax, "policy/skipped_frac") == [0.0]
    assert not same_weights(strict / "model", lax / "model")
    # The same two minibatches as a run of one epoch.
    train(models.config(tmp_path / "one", max_steps=1, update__epochs=1, actor_optim__lr=1e-2, **NO_EVAL))
    assert same_weights(strict / "model", tmp_path / "one/model")
    assert same_weights(strict / "critic", tmp_path / "one/critic")


def test_critic_warmup_leaves_the_actor_as_it_is(models: Models, tmp_path: Path, experiences: list[Experience]) -> None:
    """Two steps of warm-up: the actor's log-probs are the reference's to rounding; then it moves."""
    train(models.config(tmp_path / "ppo", max_steps=4, update__critic_warmup_steps=2, **NO_EVAL))

    def moved(sequences: list[ScoredSequence]) -> bool:
        return any(float((s.old_logprob_R - s.ref_logprob_R).abs().max()) > 1e-5 for s in sequences)

    # Step 3 samples before it updates.
    assert [moved(experience.sequences) for experience in experiences] == [False, False, False, True]
    assert len(series(tmp_path / "ppo", "value/loss")) == 4
    assert len(series(tmp_path / "ppo", "policy/loss")) == 2
    values = [experience.old_value_BR[0, 0].item() for experience in experiences]
    assert len(set(values)) > 2, "the critic moves from the start"


def test_the_plain_path_says_the_same(models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E4, E7: where the self-check fails, Hugging Face's generate takes over, with a warning and the same responses."""
    train(models.config(tmp_path / "own", max_steps=1))
    monkeypatch.setattr(program, "check_greedy", lambda *_, **__: SelfCheck(ok=False, message="as if they differed"))
    monkeypatch.setattr(answers, "generate", lambda *_, **__: pytest.fail("our decoder was asked"))
    train(models.config(tmp_path / "plain", max_steps=1))
    log = (tmp_path / "plain/log.txt").read_text()
    assert "WARNING" in log and "self-check failed, decoding by Hugging Face's generate: as if they differed" in log
    for first, second in zip(metric_lines(tmp_path / "own"), metric_lines(tmp_path / "plain"), strict=True):
        assert second == {
            k: v if isinstance(v, str) else pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in first.items()
        }


def test_an_empty_evaluation_split_is_skipped_with_a_notice(models: Models, tmp_path: Path) -> None:
    """B8."""
    train(models.config(tmp_path / "ppo", max_steps=1, data__split__eval=0.0, gold_rule="final_number"))
    assert "no evaluation rows for step 3: evaluation is skipped" in (tmp_path / "ppo/log.txt").read_text()
    assert result(tmp_path / "ppo")["metrics"] == {"gold_max": 1.0}


@pytest.mark.parametrize("role", ["critic", "actor"])
def test_what_is_not_finite_stops_the_run(models: Models, tmp_path: Path, role: str) -> None:
    cfg = changed(
        models.config(tmp_path / "ppo", **NO_EVAL), **{f"{role}_optim__lr": 1e30, f"{role}_optim__clip_norm": 0.0}
    )
    # The first minibatch breaks the weights; the second one's loss is found out.
    with pytest.raises(NonFiniteError, match=rf"^{role}: the loss is not finite at step 1 on rank 0"):
        train(cfg)
    assert not (tmp_path / "ppo/model").exists() and not (tmp_path / "ppo/result.json").exists()


def test_folders_that_do_not_fit_are_errors_before_models_are_built(
    models: Models, digits: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12, C13, F9: kind, tokenizer, template, missing manifest, truncated or changed weights; nothing is written."""

    def copy(folder: Path, change: Callable[[Path], Any]) -> str:
        target = tmp_path / f"copy{len(list(tmp_path.glob('copy*')))}"
        shutil.copytree(folder, target)
        change(target)
        return str(target)

    def flip_last_byte(folder: Path) -> None:
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)

    def truncate(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-4])

    cases: list[tuple[dict[str, Any], str]] = [
        ({"actor__path": str(models.reward)}, "actor.path=.* is a reward model .*needs a policy"),
        ({"reward__path": str(models.actor)}, "reward.path=.* is a policy model .*needs a reward"),
        ({"reward__path": str(digits.reward)}, "was trained with tokenizer"),
        ({"reward__path": copy(models.reward, truncate)}, "model.safetensors is truncated"),
        ({"actor__path": copy(models.actor, flip_last_byte)}, "model.safetensors is changed"),
        ({"actor__path": copy(models.actor, lambda f: (f / "manifest.json").unlink())}, "holds no manifest.json"),
        ({"actor__path": copy(models.actor, lambda f: (f / "tokenizer.json").unlink())}, "tokenizer.json is missing"),
        ({"critic__path": str(models.actor)}, "critic.path=.* is a policy model"),
        ({"critic__path": str(digits.reward)}, "was trained with tokenizer"),
        ({"reference__path": str(digits.actor)}, "was trained with tokenizer"),
        ({"reference__path": str(models.reward)}, "reference.path=.* is a reward model"),
        ({"data__template": "plain"}, "was trained with chat template human_assistant .*this run uses plain"),
    ]
    for name in ("build_causal_lm", "build_reward_model"):
        monkeypatch.setattr(roles_module, name, lambda *_, **__: pytest.fail("a model was built before the check"))
    for changes, message in cases:
        with pytest.raises(ArtifactError, match=message):
            train(models.config(tmp_path / "ppo", **changes))
    assert not (tmp_path / "ppo").exists()


def test_a_reward_model_of_another_template_is_an_error(models: Models, tmp_path: Path) -> None:
    cfg = reward_config(tmp_path / "rm", models.rows, base=models.actor, data__template="plain", max_steps=1, **NO_EVAL)
    train_reward(cfg)
    with pytest.raises(ArtifactError, match="was trained with chat template plain"):
        train(models.config(tmp_path / "ppo", reward__path=str(tmp_path / "rm/model")))
