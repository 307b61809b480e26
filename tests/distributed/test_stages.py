"""The three stages as whole programs on two ranks: one trajectory, whatever the ranks and the ZeRO stage.

One job trains on one rank with 4 micro-batches a step, the others on two ranks with 2 (ZeRO-0, ZeRO-3). Row counts are
odd, so that in some steps a rank has less to do than the other, or nothing.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import distributed, engine
from rlhf.engine import NonFiniteError
from rlhf.rollout.decode import Response
from step1_sft import evaluate as sft_evaluation
from step1_sft import train as sft_program
from step2_reward import train as reward_program
from step3_ppo import rollout as ppo_rollout
from step3_ppo import train as ppo_program
from tests.distributed.harness import Ranks
from tests.stages import (
    Killed,
    ds_json,
    kill_at,
    metric_lines,
    ppo_config,
    result,
    reward_config,
    series,
    sft_config,
    weights,
    write_rows,
    yes_rows,
)

NUM_ROWS = 36
# AdamW divides a gradient by its size: with the usual 1e-8, weights whose gradient is rounding noise would move by the
# learning rate in a direction that rounding chooses.
EPS = 1e-5
TWO_RANKS = ("cpu_zero0", "cpu_zero3")
# Both ranks on every row.
ONE_GROUP = "cpu_zero3_sp2"
# Half of every model's weights on each.
HALVES = ("cpu_zero0_tp2", "cpu_zero1_tp2", "cpu_zero3_tp2")
# Each with half of the layers.
ONE_PIPELINE = "cpu_zero1_pp2"
# DeepSpeed JSON of the actor, and how its weights come to the decoder; `rows`: all rows shared by both ranks.
ACTORS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("cpu_zero0", {}),
    "gathered": ("cpu_zero3_hybrid", {}),
    "layerwise": ("cpu_zero3", {"rollout__weights": "layerwise"}),
    "shared": ("cpu_zero3", {"rollout__tensor_parallel": 2}),
    "in halves": ("cpu_zero0", {"parallel__tp": 2}),
    "halves in shards": ("cpu_zero3", {"parallel__tp": 2, "rollout__old_logprobs": "rescore"}),
    "rows": ("cpu_zero3", {"parallel__sp": 2}),
}


def sft(folder: Path, name: str, **changes: Any) -> None:
    ds = ds_json(folder, name, micro_batch_size=2)
    cfg = sft_config(
        folder / f"sft_{name}_{distributed.world_size()}",
        folder / "rows.jsonl",
        deepspeed=ds,
        epochs=2.0,
        max_steps=0,
        optim__eps=EPS,
        **changes,
    )
    sft_program.train(cfg)


def reward(folder: Path, name: str, **changes: Any) -> None:
    base = folder / "sft_cpu_zero0_1/model"
    cfg = reward_config(
        folder / f"rm_{name}_{distributed.world_size()}",
        folder / "rows.jsonl",
        base=base,
        deepspeed=ds_json(folder, name, micro_batch_size=2),
        epochs=1.0,
        max_steps=0,
        optim__eps=EPS,
        data__split__ppo=0.4,
        normalise__policy=str(base),
        normalise__deepspeed="cpu_frozen" if name == "cpu_zero0" else "cpu_frozen_zero3",
        **changes,
    )
    reward_program.train(cfg)


def ppo(folder: Path, name: str, **changes: Any) -> list[list[list[int]]]:
    """Train, and return the responses of each step."""
    said = []
    to_experience = ppo_program.to_experience

    def spy(sequences: Any, *arguments: Any, **named: Any) -> Any:
        said.append([s.response_ids for s in sequences])
        return to_experience(sequences, *arguments, **named)

    zero = name.split("_")[1]
    frozen = "cpu_frozen" if zero == "zero0" else "cpu_frozen_zero3"
    cfg = ppo_config(
        folder / f"ppo_{name}_{distributed.world_size()}",
        folder / "rows.jsonl",
        actor=folder / "sft_cpu_zero0_1/model",
        reward=folder / "rm_cpu_zero0_1/model",
        **{
            "max_steps": 2,
            "rollout__prompts_per_step": 5,
            "rollout__batch_size": 2,
            "data__score_micro_batch_tokens": 80,
            "update__minibatch_size": 5,
            "shaping__scale": "running",
            "kl__adaptive": True,
            "kl__target": 0.01,
            "kl__horizon": 50.0,
            "actor_optim__eps": EPS,
            **({} if "critic_optim" in changes else {"critic_optim__eps": EPS}),
            "deepspeed__actor": ds_json(folder, name, micro_batch_size=2),
            "deepspeed__critic": ds_json(folder, f"cpu_{zero}", micro_batch_size=2),
            "deepspeed__reference": frozen,
            "deepspeed__reward": frozen,
            **changes,
        },
    )
    ppo_program.to_experience = spy
    try:
        ppo_program.train(cfg)
    finally:
        ppo_program.to_experience = to_experience
    return said


def one_rank_job(folder: Path) -> list[list[list[int]]]:
    engine.setup(timeout_seconds=60)
    sft(folder, "cpu_zero0")
    reward(folder, "cpu_zero0")
    return ppo(folder, "cpu_zero0")


def supervised_job(folder: Path) -> str:
    engine.setup(timeout_seconds=60)
    for name in TWO_RANKS:
        sft(folder, name)
        reward(folder, name)
    for stage, run in (("sft", sft), ("rm", reward)):
        run(folder, "cpu_zero3", parallel__sp=2, run__out_dir=str(folder / f"{stage}_{ONE_GROUP}_2"))
    for name in HALVES:
        sft(folder, name.removesuffix("_tp2"), parallel__tp=2, run__out_dir=str(folder / f"sft_{name}_2"))
        reward(folder, name.removesuffix("_tp2"), parallel__tp=2, run__out_dir=str(folder / f"rm_{name}_2"))
    sft(folder, "cpu_zero1", parallel__pp=2, run__out_dir=str(folder / f"sft_{ONE_PIPELINE}_2"))
    return broken_on_rank_1(folder)


def broken_on_rank_1(folder: Path) -> str:
    """What a run says whose loss is NaN on rank 1 in the second step."""
    loss_sum, calls = sft_program.sft_loss_sum, []

    def break_it(*arguments: Any) -> Any:
        calls.append(1)
        loss, stats = loss_sum(*arguments)
        return loss * float("nan") if distributed.rank() == 1 and len(calls) == 3 else loss, stats

    sft_program.sft_loss_sum = break_it  # type: ignore[assignment]
    try:
        sft(folder, "cpu_zero2")
    except NonFiniteError as error:
        return str(error)
    finally:
        sft_program.sft_loss_sum = loss_sum
    return "nothing happened"


def ppo_job(folder: Path) -> dict[str, list[list[list[int]]]]:
    engine.setup(timeout_seconds=60)
    return {
        way: ppo(folder, name, **changes, run__out_dir=str(folder / f"ppo_{way}"))
        for way, (name, changes) in ACTORS.items()
    }


class Runs:
    """What the jobs have left behind; each job runs once."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.ranks = ranks
        self.folder = folder
        self.done: dict[str, list[Any]] = {}
        write_rows(folder / "rows.jsonl", yes_rows(NUM_ROWS))

    def after(self, job: Callable[..., Any], world_size: int = 2) -> list[Any]:
        if job.__name__ not in self.done:
            if job is not one_rank_job:
                self.after(one_rank_job, world_size=1)
            self.done[job.__name__] = []
            self.done[job.__name__] = self.ranks(job, world_size=world_size, timeout=200, folder=self.folder)
        assert self.done[job.__name__], f"{job.__name__} failed for an earlier test"
        return self.done[job.__name__]


@pytest.fixture(scope="module")
def runs(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, tmp_path_factory.mktemp("stages"))


def assert_same_run(one: Path, two: Path, *, rel: float, weight: float) -> None:
    """The same metrics.jsonl but for clocks and padding, and the same weights."""
    lines = [metric_lines(folder) for folder in (one, two)]
    assert len(lines[0]) == len(lines[1]) > 3
    for first, second in zip(*lines, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            if name == "data/padding_frac":  # of micro-batches, which are others
                continue
            expected = value if isinstance(value, str) else pytest.approx(value, rel=rel, abs=rel)
            assert second[name] == expected, (first["split"], first["step"], name)
    assert_same_weights(one / "model", two / "model", weight=weight)


def assert_same_weights(one: Path, two: Path, *, weight: float) -> None:
    """Largest and mean difference, bounded apart: an error moves all weights, rounding a few."""
    first, second = weights(one), weights(two)
    assert first.keys() == second.keys()
    gaps = torch.cat([(first[key] - second[key]).abs().flatten() for key in first])
    assert gaps.max().item() < weight and gaps.mean().item() < weight / 20, (gaps.max(), gaps.mean())


@pytest.mark.parametrize("name", [*TWO_RANKS, ONE_GROUP, *HALVES, ONE_PIPELINE])
def test_step1_is_one_trajectory(runs: Runs, name: str) -> None:
    """1 rank x 4 micro-batches = 2 ranks x 2, ZeRO-0 and ZeRO-3 = 2 ranks on each of 4, by tokens, weights or layers.

    Sums in another order, through 8 AdamW steps.
    """
    runs.after(supervised_job)
    one, two = runs.folder / "sft_cpu_zero0_1", runs.folder / f"sft_{name}_2"
    assert_same_run(one, two, rel=2e-5, weight=2e-5)
    assert result(one)["num_tokens"] == result(two)["num_tokens"]
    assert result(one)["model_flops"] == pytest.approx(result(two)["model_flops"])
    assert result(two)["world_size"] == 2
    assert (one / "samples.jsonl").read_text() == (two / "samples.jsonl").read_text()


@pytest.mark.parametrize("name", [*TWO_RANKS, ONE_GROUP, *HALVES])
def test_step2_is_one_trajectory(runs: Runs, name: str) -> None:
    """K ranked answers; the normalising answers are the same, and so its two constants."""
    runs.after(supervised_job)
    one, two = runs.folder / "rm_cpu_zero0_1", runs.folder / f"rm_{name}_2"
    assert_same_run(one, two, rel=2e-5, weight=2e-5)
    first, second = (json.loads((folder / "model/config.json").read_text()) for folder in (one, two))
    assert first["rlhf_score_std"] != 1.0
    assert result(one)["num_tokens"] == result(two)["num_tokens"]
    assert result(one)["model_flops"] == pytest.approx(result(two)["model_flops"])
    for key in ("rlhf_score_mean", "rlhf_score_std"):
        assert second[key] == pytest.approx(first[key], rel=1e-4)
    assert one.joinpath("data.json").read_text() == two.joinpath("data.json").read_text()


@pytest.mark.parametrize("way", ACTORS)
def test_step3_is_one_trajectory(runs: Runs, way: str) -> None:
    """Responses token for token, rewards, whitening, minibatches, both updates, however the decoder gets weights."""
    (alone,) = runs.after(one_rank_job, world_size=1)
    on_ranks = runs.after(ppo_job)
    assert on_ranks[0] == on_ranks[1], "every rank holds all sequences"
    assert on_ranks[0][way] == alone
    assert len(alone) == 2 and len({tuple(ids) for step in alone for ids in step}) > 5
    one, two = runs.folder / "ppo_cpu_zero0_1", runs.folder / f"ppo_{way}"
    assert_same_run(one, two, rel=1e-4, weight=2e-5)
    assert_same_weights(one / "critic", two / "critic", weight=2e-5)
    log = (two / "log.txt").read_text()
    halves = "in the shares of 2 ranks that they are trained in"
    ways = {
        "layerwise": "layer by layer",
        "shared": "shared by 2 ranks",
        "in halves": halves,
        "halves in shards": halves,
    }
    assert (
        f"rollout: weights {ways.get(way, 'whole on each rank')}".replace("weights layer", "weights gathered layer")
        in log
    )
    assert (two / "critic/manifest.json").is_file()
    assert result(one)["num_tokens"] == result(two)["num_tokens"]


ALGORITHMS: dict[str, dict[str, Any]] = {
    "rloo": {"algorithm": "rloo"},
    "reinforce_pp": {"algorithm": "reinforce_pp"},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "gspo": {"algorithm": "gspo", "update__clip_ratio": 0.01, "update__dual_clip": 1.02},
    # A prompt's two responses score alike where both are cut, or are not: refilled steps.
    "dapo": {"algorithm": "grpo", "update__loss_mean": "token", "update__clip_high": 0.28, "kl__place": "reward",
             "rollout__flat_groups": "refill", "shaping__clip": 1e-5, "shaping__missing_stop_penalty": 1.0},
}  # fmt: skip


def train_algorithms(folder: Path, name: str) -> dict[str, list[list[list[int]]]]:
    """Groups of two responses that may lie on two ranks; an odd number of prompts."""
    engine.setup(timeout_seconds=60)
    ranks = distributed.world_size()
    return {
        way: ppo(
            folder, name, run__out_dir=str(folder / f"{way}_{ranks}"), rollout__samples_per_prompt=2,
            critic_optim=None, deepspeed__critic=None, **changes,
        )
        for way, changes in ALGORITHMS.items()
    }  # fmt: skip


def algorithms_alone_job(folder: Path) -> dict[str, list[list[list[int]]]]:
    return train_algorithms(folder, "cpu_zero0")


def algorithms_job(folder: Path) -> dict[str, list[list[list[int]]]]:
    return train_algorithms(folder, "cpu_zero3")


@pytest.mark.parametrize("way", ALGORITHMS)
def test_every_algorithm_is_one_trajectory(runs: Runs, way: str) -> None:
    """1 rank = 2 ranks under ZeRO-3: responses token for token, groups, what is made up for, metrics and weights."""
    (alone,) = runs.after(algorithms_alone_job, world_size=1)
    first, second = runs.after(algorithms_job)
    assert first[way] == second[way] == alone[way], "every rank trains on the same groups"
    one, two = runs.folder / f"{way}_1", runs.folder / f"{way}_2"
    assert_same_run(one, two, rel=1e-4, weight=2e-5)
    assert not (two / "critic").exists() and not series(two, "value/loss")
    if way == "dapo":
        assert max(series(two, "ppo/draws")) > 1 and max(series(two, "ppo/flat_groups_frac")) > 0


def bfloat16_job(folder: Path) -> list[list[list[int]]]:
    """A float32 actor, sharded, that decodes in bfloat16 on weights shared by the ranks."""
    engine.setup(timeout_seconds=60)
    return ppo(
        folder, "cpu_zero3", run__out_dir=str(folder / "ppo_bfloat16"), rollout__dtype="bfloat16",
        rollout__tensor_parallel=2, rollout__old_logprobs="rescore", update__importance_cap=2.0,
    )  # fmt: skip


def test_step3_decodes_in_another_type(runs: Runs) -> None:
    """The update stays a float32 one, on ratios of its own forwards; the gap to the decoder is bfloat16's."""
    first, second = runs.after(bfloat16_job)
    assert first == second and len(first) == 2
    folder = runs.folder / "ppo_bfloat16"
    assert all(1e-5 < gap < 2e-2 for gap in series(folder, "ppo/logprob_gap"))
    assert series(folder, "ppo/kl_ref")[0] == pytest.approx(0.0, abs=1e-4)
    log = (folder / "log.txt").read_text()
    assert "weights shared by 2 ranks in bfloat16; planned for each rank:" in log
    assert "more than rounding" not in log and "nothing weighs the difference" not in log


def test_a_loss_that_is_not_finite_on_one_rank_stops_both(runs: Runs) -> None:
    """Named by step, rank and role, on both ranks, with no model left behind."""
    messages = runs.after(supervised_job)
    assert messages[0] == messages[1]
    assert messages[0].startswith("policy: the loss is not finite at step 1 on rank 1")
    assert not (runs.folder / "sft_cpu_zero2_2/model").exists()


def resume_job(folder: Path) -> None:
    """PPO on the hybrid engine: whole, and killed in step 3 with a saved state of step 2."""
    engine.setup(timeout_seconds=60)
    name = "cpu_zero3_hybrid"
    ppo(folder, name, max_steps=3, run__out_dir=str(folder / "whole"), run__save_every=2)
    parts = {"max_steps": 3, "run__out_dir": str(folder / "parts"), "run__save_every": 2}
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, ppo_program.Run, step=3)
        with pytest.raises(Killed):
            ppo(folder, name, **parts)
    ppo(folder, name, **parts, run__resume=True)


def resume_with_another_sp_job(folder: Path) -> set[int]:
    """Step 1, killed after 4 of its steps with rows shared by both ranks, and finished with rows of each rank's own.

    Returns:
        How many ranks shared a micro-batch of the evaluation before the first step.
    """
    engine.setup(timeout_seconds=60)
    parts = {"run__out_dir": str(folder / "sft_sp_2_to_1"), "run__save_every": 4}
    collate, sharers = sft_evaluation.collate_sft, set()

    def spy(*arguments: Any, **named: Any) -> Any:
        batch = collate(*arguments, **named)
        sharers.add(batch.sequences.num_sharers)
        return batch

    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, sft_program.Run, step=5)
        patch.setattr(sft_evaluation, "collate_sft", spy)
        with pytest.raises(Killed):
            sft(folder, "cpu_zero2", parallel__sp=2, **parts)
    sft(folder, "cpu_zero2", run__resume=True, **parts)
    return sharers


def test_step1_resumes_with_another_sp(runs: Runs) -> None:
    """Rows, metrics and weights of the run that one rank made."""
    assert runs.after(resume_with_another_sp_job) == [{2}, {2}], "the evaluation's rows are shared too"
    one, two = runs.folder / "sft_cpu_zero0_1", runs.folder / "sft_sp_2_to_1"
    assert_same_run(one, two, rel=2e-5, weight=2e-5)
    assert result(one)["num_tokens"] == result(two)["num_tokens"]


def dropout_job(folder: Path) -> int:
    """Step 1 with dropout on shared rows: whole, and killed in its fifth step with a saved state of the fourth.

    Returns:
        The seed that masks were drawn from.
    """
    engine.setup(timeout_seconds=60)
    settings = {"parallel__sp": 2, "model__dropout": 0.2, "run__save_every": 4}
    sft(folder, "cpu_zero2", run__out_dir=str(folder / "dropout_whole"), **settings)
    seed = torch.initial_seed()
    settings["run__out_dir"] = str(folder / "dropout_parts")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, sft_program.Run, step=5)
        with pytest.raises(Killed):
            sft(folder, "cpu_zero2", **settings)
    sft(folder, "cpu_zero2", run__resume=True, **settings)
    return seed


def test_dropout_on_shared_rows_resumes_bit_for_bit(runs: Runs) -> None:
    """Each rank goes on with the masks of its own generator."""
    seeds = runs.after(dropout_job)
    assert seeds[0] != seeds[1]
    whole, parts = runs.folder / "dropout_whole", runs.folder / "dropout_parts"
    assert metric_lines(parts) == metric_lines(whole)
    assert series(whole, "train/loss") != series(runs.folder / "sft_cpu_zero0_1", "train/loss"), "dropout is on"
    first, second = weights(whole / "model"), weights(parts / "model")
    assert all(first[key].equal(second[key]) for key in first)


PROGRAMS = {"sft": (sft, sft_program, 5), "rm": (reward, reward_program, 3), "ppo": (ppo, ppo_program, 2)}
"""What runs a stage, its module, and the step in which it is killed; the state is that of the step before."""


def begin_job(folder: Path, where: str, name: str) -> None:
    """All three stages until they are killed."""
    engine.setup(timeout_seconds=60)
    for stage, (run, program, step) in PROGRAMS.items():
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, program.Run, step=step)
            with pytest.raises(Killed):
                run(folder, name, run__out_dir=str(folder / f"{stage}_{where}"), run__save_every=step - 1)


def go_on_job(folder: Path, where: str, name: str) -> list[int]:
    """The same runs resumed, on other ranks and another ZeRO stage; how many steps each makes."""
    engine.setup(timeout_seconds=60)
    made = []
    for stage, (run, program, _) in PROGRAMS.items():
        log, steps = program.Run.log, []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program.Run, "log", lambda self, n, log=log, steps=steps: (steps.append(n), log(self, n)))
            run(folder, name, run__out_dir=str(folder / f"{stage}_{where}"), run__save_every=99, run__resume=True)
        made.append(steps[0])
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [((2, "cpu_zero3"), (1, "cpu_zero0")), ((1, "cpu_zero2"), (2, "cpu_zero3"))]
)
def test_e20_all_stages_go_on_with_other_ranks_and_zero_stages(
    runs: Runs, first: tuple[int, str], second: tuple[int, str]
) -> None:
    """E20: begun on 2 ranks and finished on one, and the reverse: the run that one rank made, rows and all."""
    runs.after(one_rank_job, world_size=1)
    where = f"{first[0]}_to_{second[0]}"
    runs.ranks(begin_job, world_size=first[0], timeout=200, folder=runs.folder, where=where, name=first[1])
    made = runs.ranks(go_on_job, world_size=second[0], timeout=200, folder=runs.folder, where=where, name=second[1])
    assert made[0] == [5, 3, 2], "no step is made twice"
    for stage in ("sft", "rm", "ppo"):
        one, two = runs.folder / f"{stage}_cpu_zero0_1", runs.folder / f"{stage}_{where}"
        assert_same_run(one, two, rel=1e-4, weight=2e-5)
        if stage != "ppo":
            assert result(one)["num_tokens"] == result(two)["num_tokens"]


def stop_at_once_job(folder: Path) -> list[list[int]]:
    """PPO in which rank 1 answers with the stop token alone and rank 0 as ever."""
    engine.setup(timeout_seconds=40)
    draw_responses = ppo_rollout.draw_responses

    def speechless(roles: Any, voice: Any, *arguments: Any, **named: Any) -> Any:
        responses = draw_responses(roles, voice, *arguments, **named)
        if distributed.rank() == 1:
            stop = voice.template.stop_token_id
            responses = [Response(token_ids=[stop], logprobs=[-1.0], stopped=True) for _ in responses]
        return responses

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo_rollout, "draw_responses", speechless)
        # The answers are not the decoder's, so neither are their log-probs.
        named = {"run__out_dir": str(folder / "stop_at_once"), "rollout__old_logprobs": "rescore"}
        said = ppo(folder, "cpu_zero3", **named)
    return [sorted(len(ids) for ids in step) for step in said]


def test_a_rank_whose_answers_all_stop_at_once_holds_nobody_up(runs: Runs) -> None:
    """D12, D13: under ZeRO-3, where unequal calls hang; the short answers are trained on like the others."""
    lengths, on_the_other = runs.after(stop_at_once_job)
    assert lengths == on_the_other and len(lengths) == 2
    for step in lengths:
        assert len(step) == 5 and step.count(1) >= 2 and step[-1] > 1, step
    for name in ("policy/loss", "value/loss", "train/grad_norm", "critic/grad_norm", "ppo/kl_ref"):
        values = series(runs.folder / "stop_at_once", name)
        assert len(values) == 2 and all(map(math.isfinite, values)), (name, values)


@pytest.mark.slow
def test_step3_resumes_on_two_ranks_bit_for_bit(runs: Runs) -> None:
    """F12, F13 under ZeRO-3."""
    runs.after(resume_job)
    whole, parts = runs.folder / "whole", runs.folder / "parts"
    assert metric_lines(parts) == metric_lines(whole)
    for name in ("model", "critic"):
        first, second = weights(whole / name), weights(parts / name)
        assert all(first[key].equal(second[key]) for key in first), name
