"""Packed rows change no stage: the trajectories of padded ones, in fp32."""

import math
from pathlib import Path
from typing import Any

import pytest

from step1_sft.train import train as train_sft
from step2_reward.train import train as train_reward
from step3_ppo.train import train as train_ppo
from tests.stages import ppo_config, reward_config, series, sft_config, weights, write_rows, yes_rows

pytestmark = pytest.mark.usefixtures("one_rank")


def same(one: Path, two: Path, names: tuple[str, ...]) -> None:
    """Both runs logged the same numbers and left the same weights. Adam's eps is 1: it blows up no rounding."""
    for name in names:
        first, second = series(one, name), series(two, name)
        assert len(first) >= 2 and first == pytest.approx(second, rel=1e-4, abs=1e-6), name
    for key, weight in weights(one / "model").items():
        assert float((weight - weights(two / "model")[key]).abs().max()) < 1e-6, key


def test_a_trajectory_is_the_same_packed_and_padded(tmp_path: Path) -> None:
    """Each stage alone, from the same folders; two micro-batches a step in one and one in the other."""
    rows = write_rows(tmp_path / "rows.jsonl", yes_rows(40))

    def folders(stage: str) -> dict[str, Path]:
        return {packing: tmp_path / packing / stage for packing in ("on", "off")}

    no_eval = {"eval__max_rows": 0, "eval__generate_rows": 0}
    for packing, folder in folders("sft").items():
        train_sft(
            sft_config(folder, rows, max_steps=4, data__packing=packing, optim__eps=1.0, optim__lr=0.1, **no_eval)
        )
    sft = folders("sft")
    same(sft["on"], sft["off"], ("train/loss", "train/token_accuracy", "train/grad_norm"))
    base = sft["on"] / "model"
    for packing, folder in folders("rm").items():
        train_reward(
            reward_config(folder, rows, base=base, data__packing=packing, optim__eps=1.0, optim__lr=0.1, **no_eval)
        )
    rm = folders("rm")
    same(rm["on"], rm["off"], ("train/loss", "train/margin", "train/grad_norm"))
    for packing, folder in folders("ppo").items():
        reward = rm["on"] / "model"
        eps = {"actor_optim__eps": 1.0, "critic_optim__eps": 1.0, "actor_optim__lr": 0.1, "critic_optim__lr": 0.1}
        train_ppo(ppo_config(folder, rows, actor=base, reward=reward, data__packing=packing, **eps, **no_eval))
    ppo = folders("ppo")
    same(ppo["on"], ppo["off"], ("ppo/score", "policy/loss", "value/loss", "train/grad_norm", "critic/grad_norm"))
    assert max(series(ppo["on"], "data/padding_frac")) == 0 < max(series(ppo["off"], "data/padding_frac"))


def test_importance_weights_scale_the_policys_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that calls each token e^0.5 times less likely than the actor: weight 1.65, or the cap of 1.2."""
    from step3_ppo import rollout

    rows = write_rows(tmp_path / "rows.jsonl", yes_rows(40))
    no_eval = {"eval__max_rows": 0, "eval__generate_rows": 0}
    train_sft(sft_config(tmp_path / "sft", rows, max_steps=4, **no_eval))
    base = tmp_path / "sft/model"
    train_reward(reward_config(tmp_path / "rm", rows, base=base, **no_eval))
    draw_responses = rollout.draw_responses

    def off_by_half(*arguments: Any, **named: Any) -> Any:
        responses = draw_responses(*arguments, **named)
        for response in responses:
            response.logprobs[:] = [logprob - 0.5 for logprob in response.logprobs]
        return responses

    monkeypatch.setattr(rollout, "draw_responses", off_by_half)
    norms = {}
    for cap in (0.0, 1.2, 5.0):
        cfg = ppo_config(
            tmp_path / f"cap{cap}", rows, actor=base, reward=tmp_path / "rm/model", max_steps=2, update__epochs=1,
            update__minibatch_size=8, update__importance_cap=cap, rollout__old_logprobs="rescore", **no_eval,
        )  # fmt: skip
        train_ppo(cfg)
        norms[cap] = series(tmp_path / f"cap{cap}", "train/grad_norm")[0]
        assert series(tmp_path / f"cap{cap}", "ppo/logprob_gap")[0] == pytest.approx(0.5, abs=1e-4)
    assert norms[1.2] / norms[0.0] == pytest.approx(1.2, rel=1e-3)
    assert norms[5.0] / norms[0.0] == pytest.approx(math.exp(0.5), rel=1e-3)
