"""Step 2 as a whole program, in one process on the real engine."""

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from rlhf.artifacts import ArtifactError
from rlhf.data.dataset import PreferenceRow, TokenDataset, build_dataset
from rlhf.data.template import load_template
from rlhf.engine import NonFiniteError
from rlhf.rollout.answers import Answer
from rlhf.run import Run
from step1_sft.train import train as train_sft
from step2_reward import normalise
from step2_reward import train as reward_program
from step2_reward.config import RewardConfig
from step2_reward.train import train
from tests.stages import (
    Killed,
    changed,
    ds_json,
    kill_at,
    metric_lines,
    result,
    reward_config,
    series,
    sft_config,
    weights,
    write_rows,
    yes_rows,
)

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", yes_rows(60))


@pytest.fixture(scope="module")
def policy(rows: Path, one_rank: None) -> Path:
    """Model folder of a short step 1."""
    train_sft(sft_config(rows.parent / "sft", rows, max_steps=8))
    return rows.parent / "sft/model"


def load(folder: Path) -> tuple[PreTrainedModel, tuple[float, float]]:
    """The exported model as anyone loads it, and its normalisation."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    return model, (getattr(model.config, "rlhf_score_mean", 0.0), getattr(model.config, "rlhf_score_std", 1.0))


def dataset(cfg: RewardConfig, folder: Path, part: str) -> list[PreferenceRow]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = load_template("auto", tokenizer)
    data: TokenDataset = build_dataset(cfg.data, stage="reward", part=part, template=template, tokenizer=tokenizer)  # type: ignore[arg-type]
    return [data[i] for i in range(len(data))]


@torch.no_grad()
def head_output(model: PreTrainedModel, token_ids: list[int]) -> float:
    """What the model says of one unpadded row."""
    return float(model(input_ids=torch.tensor([token_ids])).logits.item())


def naive_judgement(model: PreTrainedModel, rows: list[PreferenceRow]) -> dict[str, Any]:
    """Pairs and scores by plain double loops."""
    margins, scores, lengths, losses, num_ties = [], [], [], [], 0
    for row in rows:
        own = [head_output(model, [*row.prompt_ids.tolist(), *r.tolist()]) for r in row.responses]
        scores += own
        lengths += [len(r) for r in row.responses]
        pairs = []
        for i, j in itertools.combinations(range(len(own)), 2):
            if row.ranks[i] == row.ranks[j]:
                num_ties += 1
                continue
            better, worse = (i, j) if row.ranks[i] > row.ranks[j] else (j, i)
            pairs.append(own[better] - own[worse])
        margins += pairs
        losses.append(sum(math.log1p(math.exp(-margin)) for margin in pairs) / len(pairs))
    return {
        "pair_accuracy": sum(m > 0 for m in margins) / len(margins),
        "margin": sum(margins) / len(margins),
        "loss": sum(math.log1p(math.exp(-m)) for m in margins) / len(margins),
        "loss_by_prompt": sum(losses) / len(losses),
        "tie_frac": num_ties / (num_ties + len(margins)),
        "length_correlation": float(np.corrcoef(scores, lengths)[0, 1]),
    }


def test_separates_synthetic_pairs_and_exports_what_it_says(rows: Path, policy: Path, tmp_path: Path) -> None:
    """Learning on held-out prompts; A5, C2, C10: the exported folder gives the evaluation's numbers in plain loops."""
    cfg = reward_config(tmp_path / "rm", rows, base=policy, max_steps=40, optim__lr=5e-3, model__dropout=0.05)
    train(cfg)
    done = result(tmp_path / "rm")["metrics"]
    assert done["pair_accuracy"] > 0.9
    assert done["eval_pair_accuracy_before"] < done["eval_pair_accuracy_after"] == done["pair_accuracy"]
    model, normalisation = load(tmp_path / "rm/model")
    assert normalisation == (0.0, 1.0)
    assert type(model).__name__ == "OPTForSequenceClassification" and model.config.num_labels == 1
    naive = naive_judgement(model, dataset(cfg, tmp_path / "rm/model", "eval"))
    last = metric_lines(tmp_path / "rm")[-1]
    for name in ("pair_accuracy", "margin", "loss", "tie_frac", "length_correlation"):
        assert last[f"eval/{name}"] == pytest.approx(naive[name], rel=1e-4, abs=1e-6), name
    assert 0 < naive["tie_frac"] < 0.5, "some answers are tied"
    for name in ("pair_accuracy", "tie_frac", "calibration_error", "length_correlation"):
        assert done[name] == last[f"eval/{name}"], name
    drawn = json.loads((tmp_path / "rm/histograms.json").read_text())
    assert set(drawn) == {"margin", "calibration"} and sum(drawn["margin"]["counts"]) > 20


def test_training_loss_counts_each_prompt_once(rows: Path, policy: Path, tmp_path: Path) -> None:
    """C15, C17: 2 to 4 ranked answers, all pairs, one division over ragged micro-batches; the model stays as it is."""
    cfg = reward_config(
        tmp_path / "rm",
        rows,
        base=policy,
        global_batch_size=1000,
        epochs=1.0,
        max_steps=0,
        optim__lr=1e-12,
        deepspeed=ds_json(tmp_path, "cpu_zero0", micro_batch_size=3),
        eval__max_rows=0,
    )
    train(cfg)
    model, _ = load(tmp_path / "rm/model")
    naive = naive_judgement(model, dataset(cfg, tmp_path / "rm/model", "train"))
    line = metric_lines(tmp_path / "rm")[1]
    assert line["train/loss"] == pytest.approx(naive["loss_by_prompt"], rel=1e-5)
    assert abs(naive["loss_by_prompt"] - naive["loss"]) > 1e-4, "prompts differ in their number of pairs"
    assert line["train/pair_accuracy"] == pytest.approx(naive["pair_accuracy"])
    assert line["train/margin"] == pytest.approx(naive["margin"], rel=1e-4, abs=1e-6)


def test_scores_are_normalised_on_the_policys_answers(
    rows: Path, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean 0 and variance 1 on them, by the exported folder; a model that is trained on keeps its unit (C21)."""
    seen: list[list[Answer]] = []
    score_answers = normalise.score_answers

    def spy(reward: Any, language: Any, batching: Any, sharing: Any, answers: list[Answer]) -> list[float]:
        seen.append(answers)
        return score_answers(reward, language, batching, sharing, answers)

    monkeypatch.setattr(normalise, "score_answers", spy)
    changes = {"data__split__reward": 0.7, "data__split__ppo": 0.3, "normalise__policy": str(policy)}
    train(reward_config(tmp_path / "first", rows, base=policy, **changes))
    # The second model starts from the first: its raw scores are not the head's output any more.
    train(reward_config(tmp_path / "second", rows, base=tmp_path / "first/model", **changes))
    for name, answers in zip(("first", "second"), seen, strict=True):
        model, (mean, std) = load(tmp_path / name / "model")
        assert std != 1.0 and len(answers) > 5
        scores = [(head_output(model, [*a.prompt_ids, *a.response_ids]) - mean) / std for a in answers]
        assert np.mean(scores) == pytest.approx(0.0, abs=1e-4), name  # fp32 scores, batched against single rows
        assert np.var(scores) == pytest.approx(1.0, abs=1e-3), name
        metrics = result(tmp_path / name)["metrics"]
        assert metrics["score_std"] > 0 and "score_mean" in metrics
    first, second = (metric_lines(tmp_path / name) for name in ("first", "second"))
    assert second[0]["eval/pair_accuracy"] == first[-1]["eval/pair_accuracy"], "the head is kept"


def test_resume_equals_an_uninterrupted_run(
    rows: Path, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F12, F14: killed in step 5, resumed from step 3 of 6, with dropout: metrics and weights equal to the bit."""
    changes = {
        "base": policy,
        "model__dropout": 0.1,
        "max_steps": 6,
        "run__save_every": 3,
        "run__eval_every": 2,
        "deepspeed": ds_json(tmp_path, "cpu_zero0", micro_batch_size=3),
        "normalise__policy": str(policy),
        "data__split__ppo": 0.3,
    }
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(reward_config(whole, rows, **changes))
    with monkeypatch.context() as patch:
        kill_at(patch, Run, step=5)
        with pytest.raises(Killed):
            train(reward_config(parts, rows, **changes))
    assert len(series(parts, "train/loss")) == 4
    train(reward_config(parts, rows, **changes, run__resume=True))
    assert metric_lines(parts) == metric_lines(whole)
    expected, found = weights(whole / "model"), weights(parts / "model")
    assert expected.keys() == found.keys() and all(torch.equal(expected[k], found[k]) for k in expected)
    assert result(parts)["metrics"] == result(whole)["metrics"]
    assert (parts / "model/config.json").read_text() == (whole / "model/config.json").read_text()


def test_an_empty_evaluation_split_is_skipped_with_a_notice(rows: Path, policy: Path, tmp_path: Path) -> None:
    """B8."""
    train(reward_config(tmp_path / "rm", rows, base=policy, max_steps=1, data__split__eval=0.0))
    assert "no evaluation rows for step 2: evaluation is skipped" in (tmp_path / "rm/log.txt").read_text()
    # What step 3 has to know is then taken from training rows.
    assert set(result(tmp_path / "rm")["metrics"]) == {"score_low", "score_high"}


def test_a_loss_that_is_not_finite_stops_the_run(rows: Path, policy: Path, tmp_path: Path) -> None:
    cfg = reward_config(tmp_path / "rm", rows, base=policy, optim__lr=1e30, optim__clip_norm=0.0)
    with pytest.raises(NonFiniteError, match=r"^reward: the loss is not finite at step 1 on rank 0"):
        train(cfg)
    assert not (tmp_path / "rm/model").exists()


def no_models(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> None:
    """Make building a model an error: what is checked has to be checked before."""

    def build(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was built before the check")

    for name in names:
        monkeypatch.setattr(module, name, build)


def test_a_policy_that_does_not_fit_is_an_error_before_models_are_built(
    rows: Path, policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C13, F9: the policy that normalises is a policy, whole, and reads the reward model's tokens."""
    other_rows = write_rows(tmp_path / "other.jsonl", yes_rows(60, seed=5))
    train_sft(sft_config(tmp_path / "other", other_rows, max_steps=1, eval__max_rows=0, eval__generate_rows=0))
    train(reward_config(tmp_path / "rm", rows, base=policy, max_steps=1, eval__max_rows=0))
    cut = tmp_path / "cut"
    shutil.copytree(policy, cut)
    (cut / "model.safetensors").write_bytes((policy / "model.safetensors").read_bytes()[:-8])
    no_models(monkeypatch, reward_program, "build_reward_model")
    cfg = reward_config(tmp_path / "new", rows, base=policy)
    for folder, message in (
        (tmp_path / "rm/model", "is a reward model"),
        (cut, "truncated"),
        (tmp_path / "other/model", "tokenizer"),
        (tmp_path / "nowhere", "does not exist"),
    ):
        with pytest.raises(ArtifactError, match=message):
            train(changed(cfg, normalise__policy=str(folder)))
    with pytest.raises(ArtifactError, match="template"):
        train(changed(cfg, normalise__policy=str(policy), data__template="plain"))
    assert not (tmp_path / "new").exists()
