"""Step 3's algorithms as whole programs, in one process on the real engine."""

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlhf.run import Run
from step3_ppo.experience import Experience
from step3_ppo.train import train
from tests.stages import (
    NO_EVAL,
    Killed,
    Models,
    digit_rows,
    kill_at,
    metric_lines,
    result,
    same_weights,
    series,
    weights,
    write_rows,
    yes_rows,
)

pytestmark = pytest.mark.usefixtures("one_rank")

# The paper's recipe on top of GRPO.
DAPO: dict[str, Any] = {
    "algorithm": "grpo",
    "update__loss_mean": "token",
    "update__clip_high": 0.28,
    "kl__coef": 0.0,
    "rollout__flat_groups": "refill",
    "shaping__overlong_tokens": 2,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": name} for name in ("rloo", "reinforce_pp", "grpo", "dr_grpo", "gspo")},
    "dapo": DAPO,
}

Make = Callable[..., Any]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Make:
    """A config for a policy that answers any prompt with any digit."""
    folder = tmp_path_factory.mktemp("digits")
    rows = write_rows(folder / "rows.jsonl", digit_rows(60))
    models = Models(folder, rows, max_steps=40, optim__lr=1e-2, global_batch_size=16)

    def config(out: Path, **changes: Any) -> Any:
        values = {
            "rollout__samples_per_prompt": 4,
            "rollout__batch_size": 32,
            "shaping__rule": "final_number",
            "shaping__model_weight": 0.0,
            "critic_optim": None,
            "deepspeed__critic": None,
            "data__max_response_tokens": 4,
            **changes,
        }
        return models.config(out, **values)

    return config


@pytest.fixture(scope="module")
def make_ragged(tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Make:
    """A config for a policy whose answers are of different length, against a reward model that tells them apart."""
    folder = tmp_path_factory.mktemp("ragged")
    rows = write_rows(folder / "rows.jsonl", yes_rows(40))
    models = Models(folder, rows, max_steps=12)

    def config(out: Path, **changes: Any) -> Any:
        sizes = {"rollout__samples_per_prompt": 4, "rollout__batch_size": 32, "data__max_response_tokens": 20}
        values = {**sizes, "critic_optim": None, "deepspeed__critic": None, **changes}
        return models.config(out, **values)

    return config


@pytest.mark.parametrize("name", ALGORITHMS)
def test_raises_a_programmable_reward(make: Make, tmp_path: Path, name: str) -> None:
    """From any digit to the one that the rule pays for; without a critic in memory, in states and in folders."""
    cfg = make(
        tmp_path / "ppo", max_steps=20, rollout__prompts_per_step=8, update__minibatch_size=16, actor_optim__lr=3e-3,
        run__save_every=10, **{**ALGORITHMS[name], "gold_rule": "final_number"},
    )  # fmt: skip
    train(cfg)
    score = series(tmp_path / "ppo", "ppo/score")
    assert score[0] < 0.4 and sum(score[-3:]) / 3 > 0.8
    lines = metric_lines(tmp_path / "ppo")
    assert not [key for line in lines for key in line if key.startswith(("critic/", "value/"))]
    metrics = result(tmp_path / "ppo")["metrics"]
    assert metrics["gold_ppo"] > metrics["gold_sft"] + 0.3
    assert not (tmp_path / "ppo/critic").exists() and not (tmp_path / "ppo/ds_config_critic.json").exists()
    (state,) = (tmp_path / "ppo/state").glob("*20")
    assert set(json.loads((state / "state.json").read_text())["engines"]) == {"actor"}
    assert "has no critic: critic, critic_optim, deepspeed.critic" in (tmp_path / "ppo/log.txt").read_text()


def naive_advantages(experience: Experience, cfg: Any) -> list[list[float]]:
    """From the papers' formulas, one response after the other, in Python's floats."""
    most, last = cfg.data.max_response_tokens, cfg.shaping.overlong_tokens
    in_reward = cfg.algorithm in ("rloo", "reinforce_pp")
    to_go = []
    for s in experience.sequences:
        score = s.score - (max(0.0, len(s.response_ids) - (most - last)) / last if last else 0.0)
        k1_R = (s.old_logprob_R.double() - s.ref_logprob_R.double()).tolist()
        to_go.append([score - (cfg.kl.coef * sum(k1_R[t:]) if in_reward else 0.0) for t in range(len(k1_R))])
    if cfg.algorithm == "reinforce_pp":
        tokens = [x for row in to_go for x in row]
        return [[(x - statistics.fmean(tokens)) / statistics.pstdev(tokens) for x in row] for row in to_go]
    found = []
    for row, s in zip(to_go, experience.sequences, strict=True):
        group = [other[0] for other, o in zip(to_go, experience.sequences, strict=True) if o.key[0] == s.key[0]]
        mean = statistics.fmean(group)
        advantage = {
            "rloo": row[0] - (sum(group) - row[0]) / (len(group) - 1),
            "dr_grpo": row[0] - mean,
        }.get(cfg.algorithm, (row[0] - mean) / (statistics.pstdev(group) + 1e-4))
        found.append([advantage] * len(row))
    return found


def naive_terms(new: list[Tensor], old: list[float], advantage: list[float], cfg: Any) -> list[Tensor]:
    """What each token of a response adds to the objective."""
    log_ratio = [x - y for x, y in zip(new, old, strict=True)]
    if cfg.algorithm == "gspo":
        log_ratio = [torch.stack(log_ratio).mean()] * len(new)
    terms = []
    for x, a in zip(log_ratio, advantage, strict=True):
        ratio, high = x.exp(), cfg.update.clip_high or cfg.update.clip_ratio
        term = torch.minimum(ratio * a, ratio.clamp(1 - cfg.update.clip_ratio, 1 + high) * a)
        if a < 0:
            term = torch.maximum(term, torch.tensor(cfg.update.dual_clip * a, dtype=torch.float64))
        terms.append(term)
    return terms


def naive_loss(model: Any, experience: Experience, cfg: Any) -> Tensor:
    """The loss of a whole step: one response after the other, one token after the other."""
    means = {"rloo": "token", "reinforce_pp": "token", "dr_grpo": "constant"}
    how = cfg.update.loss_mean or means.get(cfg.algorithm, "sequence")
    total, divisor = torch.zeros((), dtype=torch.float64), 0.0
    for s, advantage in zip(experience.sequences, naive_advantages(experience, cfg), strict=True):
        logprobs = model(torch.tensor([[*s.prompt_ids, *s.response_ids]])).logits[0].double().log_softmax(-1)
        new = [logprobs[len(s.prompt_ids) + t - 1, token] for t, token in enumerate(s.response_ids)]
        terms = torch.stack(naive_terms(new, s.old_logprob_R.tolist(), advantage, cfg))
        if cfg.algorithm in ("grpo", "dr_grpo", "gspo"):
            gap_R = s.ref_logprob_R.double() - torch.stack(new)
            terms = terms - cfg.kl.coef * (gap_R.exp() - gap_R - 1)
        total = total - (terms.mean() if how == "sequence" else terms.sum())
        divisor += {"token": len(new), "sequence": 1, "constant": cfg.data.max_response_tokens}[how]
    return total / divisor


@pytest.mark.parametrize("packing", ["on", "off"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_update_is_that_of_plain_torch(
    make_ragged: Make, tmp_path: Path, experiences: list[Experience], name: str, packing: str
) -> None:
    """Three steps of two epochs, six AdamW steps with clipping, in several micro-batches: the weights of a plain loop.

    Clips that bite: the rate is high and the intervals are narrow.
    """
    changes = {"update__clip_ratio": 0.02, "update__dual_clip": 1.05, "kl__coef": 0.5, **ALGORITHMS[name]}
    cfg = make_ragged(
        tmp_path / "ppo", max_steps=3, rollout__prompts_per_step=4, update__minibatch_size=16, data__packing=packing,
        actor_optim__lr=3e-3, actor_optim__eps=1e-5, actor_optim__clip_norm=0.05, data__micro_batch_tokens=60,
        **NO_EVAL, **changes,
    )  # fmt: skip
    train(cfg)
    model = AutoModelForCausalLM.from_pretrained(cfg.actor.path, torch_dtype=torch.float32, attn_implementation="eager")
    model.eval()
    model.get_input_embeddings().padding_idx = None  # the stop token, whose id is the pad's, is read like any other
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=cfg.actor_optim.betas, eps=1e-5, weight_decay=0.0)
    assert len(experiences) == 3
    for experience in experiences:
        assert len({len(s.response_ids) for s in experience.sequences}) > 1
        for _ in range(2):
            optimizer.zero_grad()
            naive_loss(model, experience, cfg).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
    trained, start, plain = weights(tmp_path / "ppo/model"), weights(Path(cfg.actor.path)), model.state_dict()
    gap = max(float((plain[key] - value).abs().max()) for key, value in trained.items() if key in plain)
    moved = max(float((start[key] - value).abs().max()) for key, value in trained.items())
    assert gap < 3e-5 and moved > 3e-3, (gap, moved)
    assert max(series(tmp_path / "ppo", "policy/clip_frac")) > 0
    logged = any("policy/kl_ref" in line for line in metric_lines(tmp_path / "ppo"))
    assert logged == (name in ("grpo", "dr_grpo", "gspo"))


def test_resume_with_groups_that_are_made_up_for(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the bit: further prompts are a function of step and number of the rollout, and no state is needed."""
    changes = {
        **DAPO, "kl__coef": 0.05, "kl__adaptive": True, "kl__target": 0.01, "kl__horizon": 50.0, "max_steps": 4,
        "rollout__samples_per_prompt": 2, "rollout__prompts_per_step": 6, "update__minibatch_size": 4,
        "shaping__scale": "running", "run__save_every": 2, "shaping__overlong_tokens": 0, **NO_EVAL,
    }  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(make(whole, **changes))
    draws, flat = series(whole, "ppo/draws"), series(whole, "ppo/flat_groups_frac")
    assert max(draws[2:]) > 1 and max(flat) > 0.2, "after the state there is something to make up for"
    assert max(series(whole, "ppo/trained_groups")) <= 6
    with monkeypatch.context() as patch:
        kill_at(patch, Run, step=4)
        with pytest.raises(Killed):
            train(make(parts, **changes))
    train(make(parts, **changes, run__resume=True))
    assert metric_lines(parts) == metric_lines(whole)
    assert same_weights(whole / "model", parts / "model")


def test_prompts_that_make_up_for_others_are_new(make: Make, tmp_path: Path, experiences: list[Experience]) -> None:
    """No response is trained on twice, and those of a prompt drawn again are others."""
    train(make(tmp_path / "ppo", **{**DAPO, "rollout__samples_per_prompt": 2}, max_steps=3,
               rollout__prompts_per_step=30, update__minibatch_size=20, **NO_EVAL))  # fmt: skip
    assert max(series(tmp_path / "ppo", "ppo/draws")) > 1
    for experience in experiences:
        keys = [s.key for s in experience.sequences]
        assert len(set(keys)) == len(keys) and keys == sorted(keys)
        assert max(number for _, number in keys) > 1, "45 rows in all: a prompt comes again in the step"
        groups = experience.advantage_BR[:, 0].reshape(-1, 2)
        assert groups.abs().min() > 0.9 and groups.sum(dim=1).abs().max() < 1e-5


def test_a_step_without_anything_to_teach(make: Make, tmp_path: Path) -> None:
    """All scores are 0: no update is made, the weights stay, and the log says so."""
    cfg = make(
        tmp_path / "ppo", **{**DAPO, "rollout__flat_groups": "drop", "shaping__overlong_tokens": 0}, max_steps=2,
        shaping__rule=None, rollout__prompts_per_step=4, update__minibatch_size=16, **NO_EVAL,
    )  # fmt: skip
    train(cfg)
    assert series(tmp_path / "ppo", "ppo/trained_groups") == [0.0, 0.0]
    assert series(tmp_path / "ppo", "policy/loss") == [] and series(tmp_path / "ppo", "ppo/score") == [0.0, 0.0]
    assert "nothing is trained on" in (tmp_path / "ppo/log.txt").read_text()
    first, second = weights(Path(cfg.actor.path)), weights(tmp_path / "ppo/model")
    assert all(torch.equal(first[key], second[key]) for key in second)
