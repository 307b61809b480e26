"""Ranks that share a model's weights: the numbers of one process with the whole model, in fp32, at every ZeRO stage."""

from typing import Any

import pytest
import torch

from rlhf import distributed, engine
from rlhf.config import ModelConfig, SamplingConfig
from rlhf.data.dataset import SFTRow
from rlhf.distributed import Group
from rlhf.engine import TrainEngine
from rlhf.models.tensor_parallel import is_share, share_model
from step1_sft.loss import sft_loss_sum
from tests.distributed.harness import Ranks
from tests.distributed.test_sequence_parallel import (
    CLIP,
    EPS,
    FAMILIES,
    assert_equal,
    build,
    collate,
    difference,
    plain_step,
    rows_of,
    score,
)
from tests.distributed.tiny import engine_of

# Tokens from which log-probs are taken through all logits, and not in closed form.
TOP_P = SamplingConfig(top_p=0.9, temperature=0.8, min_new_tokens=1)


def config_of(family: str, **settings: Any) -> ModelConfig:
    return ModelConfig(config={"model_type": family, **FAMILIES[family]}, **{"dropout": 0.0, **settings})


def shared(cfg: ModelConfig, ds_name: str, group: Group, **optim: Any) -> TrainEngine:
    """An engine whose ranks have a share of each weight; the vocabulary does not divide."""
    policy = build(cfg, "cpu_zero0")
    share_model(policy.model, group)
    fields = {"clip_norm": CLIP, "eps": EPS, **optim}
    return engine_of(policy, ds_name, tensor=group, **fields)


def shared_step(trained: TrainEngine, group: Group, rows: list[list[SFTRow]], *, packed: bool) -> tuple[float, float]:
    """Each group takes every `group.count`-th micro-batch."""
    batches = [collate(micro, packed=packed) for micro in rows[group.number :: group.count]]
    count = distributed.all_sum(torch.stack([batch.loss_mask_BT.sum() for batch in batches]).sum())
    for i, batch in enumerate(batches):
        loss, _ = sft_loss_sum(score(trained, batch), batch.loss_mask_BT)
        trained.accumulate(loss, count=count, last=i == len(batches) - 1)
    stats = trained.step()
    return stats.loss, stats.grad_norm


def output_gap(trained: Any, plain: Any, rows: list[SFTRow], *, packed: bool, **sampled: Any) -> float:
    """Largest difference of log-probs, entropies and greedy tokens."""
    batch = collate(rows, packed=packed)
    if sampled:
        sampled["response_position_BT"] = batch.sequences.position_ids_BT
    inputs = {**batch.sequences.inputs, "target_mask_BT": batch.loss_mask_BT, **sampled}
    with torch.no_grad():
        parts = zip(trained(**inputs), plain(**inputs), strict=True)
        return max((a.float() - b.float()).abs().max().item() for a, b in parts)


def replica_gap(trained: TrainEngine, group: Group) -> float:
    """Largest difference, over the group, of weights that each rank has whole."""
    gap = 0.0
    for weight in trained.module.parameters():
        with trained.gathered([weight]):
            if not is_share(weight):
                first, *others = group.gather(weight.detach())
                gap = max([gap, *((other - first).abs().max().item() for other in others)])
    return gap


def training_job(
    cases: list[tuple[str, str, dict[str, Any]]], *, tp: int, num_steps: int = 3
) -> list[dict[str, float]]:
    """For each case (family, DeepSpeed JSON, model settings) the largest differences to plain torch."""
    engine.setup(timeout_seconds=60)
    group = distributed.group_of(tp)
    found = []
    for family, ds_name, settings in cases:
        packed, zero = settings.pop("packed", True), settings.pop("zero", {})
        cfg = config_of(family, **settings)
        plain = build(cfg, "cpu_zero0").train()
        whole = sum(p.numel() for p in plain.parameters())
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, eps=EPS)
        trained = shared(cfg, ds_name, group, changes={"zero_optimization": zero})
        own = {True: 0, False: 0}
        for name, weight in trained.module.named_parameters():
            own[is_share(weight)] += torch.Size(trained.layout()["shapes"][name]).numel()
        surplus = tp * own[True] + own[False] - whole
        assert 0 <= surplus < 2 * 32 * tp, "shares are parts; behind embedding and head stand fewer than tp rows more"
        assert tp * own[True] > 20_000
        gaps = {"logprob": max(output_gap(trained, plain, rows, packed=packed) for rows in rows_of(0))}
        gaps["top_p"] = max(
            output_gap(trained, plain, rows, packed=packed, sampling=TOP_P, stop_token_ids=(7,)) for rows in rows_of(0)
        )
        gaps.update(loss=0.0, norm=0.0)
        for step in range(num_steps):
            loss, norm = shared_step(trained, group, rows_of(step), packed=packed)
            expected_loss, expected_norm = plain_step(plain, optimizer, rows_of(step))
            assert expected_norm > CLIP, "the clip is on"
            gaps["loss"] = max(gaps["loss"], abs(loss - expected_loss))
            gaps["norm"] = max(gaps["norm"], abs(norm - expected_norm))
        gaps["trained_logprob"] = max(output_gap(trained, plain, rows, packed=packed) for rows in rows_of(0))
        state = trained.full_state_dict()
        gaps["weight"] = 0.0 if state is None else difference(state, plain)
        assert replica_gap(trained, group) == 0
        found.append(gaps)
    return found


STAGES = ("cpu_zero0", "cpu_zero1", "cpu_zero2", "cpu_zero3")


@pytest.mark.parametrize("family", ["opt", "llama", "gpt_neox"])
def test_two_ranks_with_half_a_model_each_train_as_plain_torch(ranks: Ranks, family: str) -> None:
    cases = [(family, stage, {}) for stage in STAGES]
    assert_equal(ranks(training_job, cases=cases, tp=2), cases)


def test_other_families_padded_rows_and_recomputed_layers(ranks: Ranks) -> None:
    """GPT-2's fused thirds, Qwen2's tied head; the collectives of a layer that is computed again run again."""
    cases = [
        ("gpt2", "cpu_zero2", {}),
        ("gpt2", "cpu_zero3", {"recompute": "selective"}),
        ("qwen2", "cpu_zero1", {"packed": False}),
        ("opt", "cpu_zero0", {"recompute": "full", "packed": False}),
        ("llama", "cpu_zero2", {"recompute": "selective"}),
        ("llama", "cpu_zero3", {"recompute": "full"}),
        ("gpt_neox", "cpu_zero2", {"zero": {"offload_optimizer": {"device": "cpu"}}}),
        ("opt", "cpu_zero3", {"zero": {"offload_optimizer": {"device": "cpu"}}}),
    ]
    assert_equal(ranks(training_job, cases=cases, tp=2, timeout=120), cases)


def four_ranks_job() -> list[list[dict[str, float]]]:
    """Two models of two ranks at each stage, and one of four, whose last rank has fewest tokens of the vocabulary."""
    pairs = training_job([("llama", stage, {}) for stage in STAGES], tp=2)
    return [pairs]


def one_of_four_job() -> list[dict[str, float]]:
    return training_job([("opt", "cpu_zero1", {}), ("gpt2", "cpu_zero0", {})], tp=4)


def test_two_models_of_two_ranks_train_as_plain_torch(ranks: Ranks) -> None:
    for (pairs,) in ranks(four_ranks_job, world_size=4, timeout=180):
        assert_equal([pairs], [f"llama, {stage}, tp 2" for stage in STAGES])


def test_one_model_of_four_ranks_trains_as_plain_torch(ranks: Ranks) -> None:
    for four in ranks(one_of_four_job, world_size=4, timeout=120):
        assert_equal([four], ["opt, ZeRO-1, tp 4", "gpt2, ZeRO-0, tp 4"])
