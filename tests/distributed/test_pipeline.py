"""Layers dealt to the ranks of a pipeline: the numbers of one process with the whole model, at ZeRO 0 and 1."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf import distributed, ds_config, engine
from rlhf.config import ModelConfig, OptimConfig
from rlhf.data.collate import TokenBatch, collate_sft
from rlhf.data.dataset import SFTRow
from rlhf.distributed import Group
from rlhf.engine import NonFiniteError, StepStats
from rlhf.models.build import build_causal_lm, train_bpe
from rlhf.models.policy import Policy
from rlhf.pipeline_engine import PipelineTrainEngine
from rlhf.run import Run
from rlhf.states import StateError
from step1_sft.train import loss_of, train
from tests.distributed.harness import Ranks
from tests.stages import Killed, ds_json, kill_at, metric_lines, sft_config, weights, write_rows, yes_rows

SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
TIED = {"tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 4},
    "gpt_neox": {**SIZES, "tie_word_embeddings": False},
    "llama": {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False},
    "qwen2": {**SIZES, **TIED, "num_key_value_heads": 2},
    "qwen3": {**SIZES, **TIED, "num_key_value_heads": 2, "head_dim": 8},
    "mistral": {**SIZES, "num_key_value_heads": 4, "sliding_window": None},
    "phi3": {**SIZES, "num_key_value_heads": 2},
}
NARROW_OPT = {**FAMILIES["opt"], "word_embed_proj_dim": 16}
# Micro-batches of two steps: other numbers and lengths in each, lengths of 1, an empty one, one alone.
STEPS = (((7, 1, 9, 4), (5,), (1, 2, 30), (), (3, 3), (6,)), ((4, 8), ()), ((2, 11), (5,), (9, 1), (1,)))
CLIP = 0.1
# AdamW divides a gradient by its size: with the usual 1e-8, rounding would choose where a weight without one moves.
EPS = 1e-5
OPTIM = {"lr": 1e-3, "schedule": "constant", "warmup_frac": 0.0, "clip_norm": CLIP, "eps": EPS, "weight_decay": 0.1}


def rows_of(step: int) -> list[list[SFTRow]]:
    """Micro-batches of one step; in each sequence some tokens have no loss."""
    rng = np.random.default_rng(step)

    def row(length: int) -> SFTRow:
        mask = np.arange(length) >= rng.integers(1, 3)
        return SFTRow(token_ids=rng.integers(4, 250, length, dtype=np.int32), loss_mask=mask, source=0, index=0)

    return [[row(length) for length in lengths] for lengths in STEPS[step]]


def collate(rows: list[SFTRow], *, packed: bool, group: Group | None = None) -> TokenBatch:
    return collate_sft(rows, pad_id=0, device="cpu", packed=packed, group=group)


def build(cfg: ModelConfig) -> Policy:
    model = build_causal_lm(cfg, train_bpe(["please answer politely"] * 3, vocab_size=300), seed=1)
    return Policy(model, chunk_tokens=6)


def config_of(family: str, **settings: Any) -> ModelConfig:
    fields = NARROW_OPT if family == "narrow opt" else FAMILIES[family]
    return ModelConfig(config={"model_type": family.split()[-1], **fields}, dropout=0.0, **settings)


def plain_optimizer(plain: Policy) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in plain.parameters() if (p.ndim > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=EPS)


def plain_step(model: Policy, optimizer: torch.optim.Optimizer, rows: list[list[SFTRow]]) -> tuple[float, float]:
    """Mean loss and gradient norm by torch alone, from padded rows."""
    batches = [collate(micro, packed=False) for micro in rows]
    loss = sum((loss_of(model, b)[0] for b in batches), torch.zeros(())) / sum(b.num_targets for b in batches)
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.item(), norm.item()


def pipeline_step(
    trained: PipelineTrainEngine, rows: list[list[SFTRow]], *, packed: bool = True
) -> tuple[StepStats, dict[str, float]]:
    """The same by an engine; each pipeline takes every `group.count`-th micro-batch. And the sums of its metrics."""
    group = trained.group
    batches = [collate(micro, packed=packed, group=group) for micro in rows[group.number :: group.count]]
    count = distributed.all_sum(torch.stack([batch.loss_mask_BT.sum() for batch in batches]).sum())
    assert count.item() == sum(collate(micro, packed=False).num_targets for micro in rows), "each target once"
    sums = torch.zeros(3, dtype=torch.float64)
    for batch, stats in trained.accumulate_all(batches, loss_of, count=count):
        sums += torch.tensor([*stats["train/loss"], batch.sequences.num_tokens], dtype=torch.float64)
    sums = distributed.all_sum(sums)
    update = trained.step()
    return update, {"loss": sums[0].item() / sums[1].item(), "count": sums[1].item(), "tokens": sums[2].item()}


def logprob_gap(trained: PipelineTrainEngine, plain: Policy, rows: list[list[SFTRow]], *, packed: bool) -> float:
    """Largest difference of log-probs, entropies and greedy tokens, called micro-batch by micro-batch."""
    gap = 0.0
    with torch.no_grad():
        for micro in rows:
            batch, whole = collate(micro, packed=packed, group=trained.group), collate(micro, packed=packed)
            found = trained(**batch.sequences.inputs, target_mask_BT=batch.loss_mask_BT)
            expected = plain(**whole.sequences.inputs, target_mask_BT=whole.loss_mask_BT)
            for a, b in zip(found, expected, strict=True):
                total = distributed.all_sum(a.double()) / trained.group.count
                gap = max(gap, (total - b.double()).abs().max().item())
    return gap


def engine_of(cfg: ModelConfig, ds_name: str, *, pp: int, **optim: Any) -> PipelineTrainEngine:
    return PipelineTrainEngine(
        build(cfg), group=distributed.pipeline_of(pp), ds=ds_config.load(ds_name),
        optim=OptimConfig(**{**OPTIM, **optim}), role="policy", num_steps=20,
    )  # fmt: skip


def training_job(cases: list[tuple[str, str, dict[str, Any]]], *, pp: int) -> list[dict[str, float]]:
    """For each case (family, DeepSpeed JSON, model settings) the largest differences to plain torch."""
    engine.setup(timeout_seconds=60)
    found = []
    for family, ds_name, settings in cases:
        packed = settings.pop("packed", True)
        cfg = config_of(family, **settings)
        plain = build(cfg).train()
        optimizer = plain_optimizer(plain)
        trained = engine_of(cfg, ds_name, pp=pp)
        gaps = {"logprob": logprob_gap(trained, plain, rows_of(0), packed=packed), "loss": 0.0, "norm": 0.0}
        for step in range(len(STEPS)):
            rows = rows_of(step)
            update, sums = pipeline_step(trained, rows, packed=packed)
            loss, norm = plain_step(plain, optimizer, rows)
            assert norm > CLIP, "the clip is on"
            assert sums["tokens"] == max(1, sum(len(row.token_ids) for micro in rows for row in micro))
            gaps["loss"] = max(gaps["loss"], abs(update.loss - loss), abs(sums["loss"] - loss))
            gaps["norm"] = max(gaps["norm"], abs(update.grad_norm - norm))
            idle, seconds = distributed.all_sum(torch.tensor(update.stats["speed/bubble_frac"])).tolist()
            assert 0 < idle < seconds
        gaps["trained_logprob"] = logprob_gap(trained, plain, rows_of(0), packed=packed)
        state = trained.full_state_dict()
        gaps["weight"] = 0.0 if state is None else difference(state, plain)
        with trained.generation_module() as lent:
            gaps["lent"] = difference(lent.state_dict(), plain)
        found.append(gaps)
    return found


def difference(state: dict[str, Tensor], model: Policy) -> float:
    own = model.state_dict()
    assert list(state) == list(own)
    return max((state[key] - own[key]).abs().max().item() for key in own)


def assert_equal(gaps_by_rank: list[list[dict[str, float]]], cases: list[Any]) -> None:
    """fp32: sums in another order, through 3 AdamW steps."""
    for gaps in gaps_by_rank:
        for case, found in zip(cases, gaps, strict=True):
            assert max(found.values()) < 1e-5, (case, found)


STAGES = ("cpu_zero0", "cpu_zero1")


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_two_stages_train_as_plain_torch(ranks: Ranks, family: str) -> None:
    """Log-probs, loss, norm and weights with the clip on; OPT's embedding is tied, Llama's is not."""
    cases = [(family, stage, {}) for stage in STAGES]
    assert_equal(ranks(training_job, cases=cases, pp=2), cases)


def test_padded_rows_and_recomputed_layers_train_as_plain_torch(ranks: Ranks) -> None:
    """Padded rows have masks of their own; OPT with embeddings narrower than its layers projects at both ends."""
    cases = [
        ("opt", "cpu_zero1", {"packed": False, "recompute": "full"}),
        ("gpt2", "cpu_zero0", {"packed": False}),
        ("narrow opt", "cpu_zero1", {"recompute": "selective", "recompute_every": 2}),
        ("llama", "cpu_zero0", {"recompute": "full", "recompute_every": 3}),
    ]
    assert_equal(ranks(training_job, cases=cases, pp=2), cases)


def test_every_family_is_cut(ranks: Ranks) -> None:
    cases = [(family, "cpu_zero1", {}) for family in FAMILIES if family not in ("opt", "llama")]
    assert_equal(ranks(training_job, cases=cases, pp=2, timeout=120), cases)


@pytest.mark.parametrize("pp", [2, 4])
def test_four_ranks_train_as_plain_torch(ranks: Ranks, pp: int) -> None:
    """Two pipelines of two, whose last micro-batches are empty in turn, and one of four, a layer on each stage."""
    cases = [("opt", "cpu_zero1", {}), ("opt", "cpu_zero0", {}), ("llama", "cpu_zero1", {"recompute": "full"})]
    assert_equal(ranks(training_job, cases=cases, pp=pp, world_size=4, timeout=150), cases)


def parts_job() -> dict[str, Any]:
    """What each rank holds."""
    engine.setup(timeout_seconds=60)
    trained = engine_of(config_of("opt"), "cpu_zero1", pp=2)
    weights = {name for name, _ in trained.module.named_parameters()}
    in_optimizer = {id(p) for group in trained._engine.optimizer.bit16_groups for p in group}
    head = [p for name, p in trained.module.named_parameters() if "lm_head" in name]
    return {
        "layers": list(trained.layers),
        "weights": weights,
        "tied head is optimised": [id(p) in in_optimizer for p in head],
        "rows": trained.group.number,
    }


def test_a_stage_holds_its_layers_alone(ranks: Ranks) -> None:
    first, last = ranks(parts_job)
    assert (first["layers"], last["layers"]) == ([0, 1, 2], [3]), "a head of 300 x 32 counts for more than a layer"
    assert first["rows"] == last["rows"] == 0
    assert {name.split(".")[4] for name in first["weights"] if ".layers." in name} == {"0", "1", "2"}
    assert {name.split(".")[4] for name in last["weights"] if ".layers." in name} == {"3"}
    assert first["weights"] & last["weights"] == set()
    assert {n for n in first["weights"] if ".layers." not in n} == {
        "model.model.decoder.embed_tokens.weight", "model.model.decoder.embed_positions.weight",
    }  # fmt: skip
    assert {n for n in last["weights"] if ".layers." not in n} == {
        "model.lm_head.weight", "model.model.decoder.final_layer_norm.weight",
        "model.model.decoder.final_layer_norm.bias",
    }  # fmt: skip
    assert last["tied head is optimised"] == [False], "its owner's moments and decay are the only ones"


def non_finite_job(where: str) -> list[Any]:
    """A weight of the first stage becomes NaN, or a gradient of it inf, in the second step."""
    engine.setup(timeout_seconds=60)
    trained = engine_of(config_of("opt"), "cpu_zero1", pp=2)
    pipeline_step(trained, rows_of(0))
    before = {name: p.detach().clone() for name, p in trained.module.named_parameters()}
    if where == "first" and trained.is_first:
        victim = next(p for p in trained.module.parameters() if p.ndim > 1)
        kept = victim.detach().clone()
        victim.data.fill_(float("nan"))
    hooks = []
    if where == "gradient" and trained.is_first:
        weight = next(p for name, p in trained.module.named_parameters() if "fc1.weight" in name)
        hooks.append(weight.register_hook(lambda grad: grad * float("inf")))
    try:
        pipeline_step(trained, rows_of(1))
        error = ""
    except NonFiniteError as found:
        error = str(found)
    if where == "first" and trained.is_first:
        victim.data.copy_(kept)
    same = all(torch.equal(before[name], p) for name, p in trained.module.named_parameters())
    for hook in hooks:
        hook.remove()
    return [error, same, trained.step_count]


@pytest.mark.parametrize(("where", "says"), [("first", "the loss is not finite"), ("gradient", "averaged gradient of")])
def test_what_is_not_finite_is_found_on_all_stages_before_the_update(ranks: Ranks, where: str, says: str) -> None:
    (error, same, steps), (other_error, other_same, _) = ranks(non_finite_job, where=where)
    assert error == other_error and says in error and "at step 1" in error
    assert same and other_same and steps == 1


def refused_job() -> list[str]:
    """What is said to a step without a target, on each stage, and to a call that would train."""
    engine.setup(timeout_seconds=60)
    trained = engine_of(config_of("opt"), "cpu_zero1", pp=2)
    batch = collate(rows_of(0)[0], packed=True, group=trained.group)
    said = []
    for call in (
        lambda: list(trained.accumulate_all([batch], loss_of, count=0)),
        lambda: trained(**batch.sequences.inputs, target_mask_BT=batch.loss_mask_BT),
    ):
        with pytest.raises(ValueError) as error:
            call()
        said.append(str(error.value))
    return said


def test_what_one_stage_alone_would_find_is_said_by_all(ranks: Ranks) -> None:
    for no_target, trains in ranks(refused_job):
        assert "count must be > 0, got 0.0" in no_target
        assert "is called under torch.no_grad(); it trains by accumulate_all" in trains


def bf16_job() -> list[float]:
    engine.setup(timeout_seconds=60)
    ds = {**ds_config.load("cpu_zero1"), "bf16": {"enabled": True}}
    cfg = config_of("opt", dtype="bfloat16")
    trained = PipelineTrainEngine(
        build(cfg), group=distributed.pipeline_of(2), ds=ds, optim=OptimConfig(**OPTIM), role="policy", num_steps=20
    )
    plain = build(config_of("opt")).train()
    optimizer = plain_optimizer(plain)
    gaps = []
    for step in range(len(STEPS)):
        update, _ = pipeline_step(trained, rows_of(step))
        loss, norm = plain_step(plain, optimizer, rows_of(step))
        gaps += [abs(update.loss - loss) / loss, abs(update.grad_norm - norm) / norm]
    return gaps


def test_bf16_follows_fp32(ranks: Ranks) -> None:
    """Three digits of a bfloat16 are two and a half decimal ones."""
    for gaps in ranks(bf16_job):
        assert max(gaps) < 0.03, gaps


def run_step1(folder: Path, name: str, **changes: Any) -> None:
    values = {
        "deepspeed": ds_json(folder, "cpu_zero1", micro_batch_size=2), "parallel__pp": 2, "model__dropout": 0.1,
        "run__save_every": 2, "run__log_every": 1, "max_steps": 5,
    }  # fmt: skip
    train(sft_config(folder / name, folder / "rows.jsonl", **{**values, **changes}))


def interrupted_job(folder: Path) -> list[str]:
    """A run; one that is killed in its fourth step and resumed; and what is said to resumes on other layouts."""
    engine.setup(timeout_seconds=60)
    run_step1(folder, "whole")
    with pytest.MonkeyPatch.context() as monkeypatch:
        kill_at(monkeypatch, Run, step=4)
        for name in ("resumed", "others"):
            try:
                run_step1(folder, name)
            except Killed:
                torch.manual_seed(distributed.rank())  # the generators come from the state
    run_step1(folder, "resumed", run__resume=True)
    said = []
    for changes in (
        {"parallel__pp": 1},
        {"parallel__pp": 1, "run__resume_weights_only": True},
        {"deepspeed": ds_json(folder, "cpu_zero0", micro_batch_size=2)},
    ):
        try:
            run_step1(folder, "others", run__resume=True, **changes)
            said.append("nothing")
        except StateError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_run_resumes_to_the_bit_and_on_its_own_layout_alone(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """Weights, moments, schedule, dropout's generators and metrics of both stages, of one pipeline and of two."""
    write_rows(tmp_path / "rows.jsonl", yes_rows(36))
    other, weights_alone, other_zero = ranks(interrupted_job, folder=tmp_path, world_size=world_size, timeout=240)[0]
    lines = [metric_lines(tmp_path / name) for name in ("whole", "resumed")]
    assert lines[0] == lines[1] and len(lines[0]) > 5
    whole, resumed = (weights(tmp_path / name / "model") for name in ("whole", "resumed"))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert "policy.pipeline stages" in other
    for said in (weights_alone, other_zero):
        assert "was saved by a pipeline of 2 stages" in said and "is not converted" in said


def bubble_job(num_micro: int) -> list[float]:
    """Idle share of the ranks in steps whose forward and backward passes take 30 and 60 ms.

    They sleep, so that the number of processors does not matter.
    """
    engine.setup(timeout_seconds=60)
    trained = engine_of(config_of("llama"), "cpu_zero0", pp=distributed.world_size())
    forward = trained._stage.forward

    def slow(x: Tensor) -> Tensor:
        time.sleep(0.03)
        y = forward(x)
        y.register_hook(lambda grad: time.sleep(0.06))
        return y

    trained._stage.forward = slow  # type: ignore[method-assign]
    batches = [collate(rows_of(0)[0], packed=True, group=trained.group)] * num_micro
    shares = []
    for _ in range(5):
        list(trained.accumulate_all(batches, loss_of, count=100))
        stats = trained.step().stats
        idle, seconds = distributed.all_sum(torch.tensor(stats["speed/bubble_frac"])).tolist()
        shares.append(idle / seconds)
    return shares[1:]  # in the first, libraries prepare


@pytest.mark.parametrize(("num_stages", "num_micro"), [(2, 4), (2, 12), (4, 8)])
def test_the_bubble_is_the_plan_s(ranks: Ranks, num_stages: int, num_micro: int) -> None:
    """(p - 1) / (m + p - 1) of the time (Narayanan et al. 2021, arXiv:2104.04473, sec. 2.2).

    Of four steps the one with least, as others may be at work on the machine.
    """
    planned = (num_stages - 1) / (num_micro + num_stages - 1)
    shares = ranks(bubble_job, world_size=num_stages, num_micro=num_micro)[0]
    in_turn = 1 - 1 / num_stages  # if one stage alone were at work at any time
    assert planned - 0.03 < min(shares) < (planned + in_turn) / 2, (shares, planned)
