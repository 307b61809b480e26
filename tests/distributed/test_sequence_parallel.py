"""Ranks that share each row's tokens: the numbers of one process with padded rows, in fp32, at every ZeRO stage."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhf import distributed, ds_config, engine
from rlhf.config import LoRAConfig, ModelConfig
from rlhf.data.collate import TokenBatch, collate_sft
from rlhf.data.dataset import SFTRow
from rlhf.distributed import Group
from rlhf.models.build import build_causal_lm, train_bpe
from rlhf.models.policy import Policy
from step1_sft.loss import sft_loss_sum
from tests.distributed.harness import Ranks
from tests.distributed.tiny import engine_of

HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {**HEADS, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_neox": HEADS,
    "llama": {**HEADS, "num_key_value_heads": 2},
    "qwen2": {**HEADS, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {**HEADS, "num_key_value_heads": 2, "head_dim": 8},
    "mistral": {**HEADS, "num_key_value_heads": 4, "sliding_window": None},
    "phi3": {**HEADS, "num_key_value_heads": 2},
}
# Micro-batches of a step: odd totals, lengths of 1, a sequence over the cut, one shorter than the ranks, an empty one.
STEP = ((7, 1, 9, 4), (5,), (1, 2, 30), ())
CLIP = 0.5
# AdamW divides a gradient by its size: with the usual 1e-8, rounding would choose where a weight without one moves.
EPS = 1e-5


def rows_of(step: int) -> list[list[SFTRow]]:
    """Micro-batches of one step; in each sequence some tokens have no loss."""
    rng = np.random.default_rng(step)

    def row(length: int) -> SFTRow:
        mask = np.arange(length) >= rng.integers(1, 3)
        return SFTRow(token_ids=rng.integers(4, 250, length, dtype=np.int32), loss_mask=mask, source=0, index=0)

    return [[row(length) for length in lengths] for lengths in STEP]


def collate(rows: list[SFTRow], *, packed: bool, group: Group | None = None) -> TokenBatch:
    return collate_sft(rows, pad_id=0, device="cpu", packed=packed, group=group)


def score(model: Any, batch: TokenBatch) -> Any:
    return model(**batch.sequences.inputs, target_mask_BT=batch.loss_mask_BT)


def build(cfg: ModelConfig, ds_name: str) -> Policy:
    with engine.zero3_init(ds_config.load(ds_name)):
        model = build_causal_lm(cfg, train_bpe(["please answer politely"] * 3, vocab_size=300), seed=1)
    return Policy(model, chunk_tokens=6)


def plain_step(model: Policy, optimizer: torch.optim.Optimizer, rows: list[list[SFTRow]]) -> tuple[float, float]:
    """Mean loss and gradient norm by torch alone, from padded rows."""
    batches = [collate(micro, packed=False) for micro in rows]
    count = sum(batch.num_targets for batch in batches)
    loss = sum((sft_loss_sum(score(model, b), b.loss_mask_BT)[0] for b in batches), torch.zeros(())) / count
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    return loss.item(), norm.item()


def split_step(trained: Any, group: Group, rows: list[list[SFTRow]]) -> tuple[float, float]:
    """The same by an engine; each group of ranks takes every `group.count`-th micro-batch."""
    batches = [collate(micro, packed=True, group=group) for micro in rows[group.number :: group.count]]
    count = distributed.all_sum(torch.stack([batch.loss_mask_BT.sum() for batch in batches]).sum())
    assert count.item() == sum(collate(micro, packed=False).num_targets for micro in rows), "each target once"
    for i, batch in enumerate(batches):
        loss, _ = sft_loss_sum(score(trained, batch), batch.loss_mask_BT)
        trained.accumulate(loss, count=count, last=i == len(batches) - 1)
    stats = trained.step()
    return stats.loss, stats.grad_norm


def logprob_gap(split: Any, plain: Policy, group: Group, rows: list[SFTRow]) -> float:
    """Largest difference of a row's log-probs, entropies and greedy tokens, put together from the group's parts."""
    batch, whole = collate(rows, packed=True, group=group), collate(rows, packed=True)
    with torch.no_grad():
        # The mask of the whole row: a rank scores what its columns predict, whatever else is asked.
        parts = split(**batch.sequences.inputs, target_mask_BT=whole.loss_mask_BT)
        expected = score(plain, whole)
    gaps = [(group.sum_(a.float()) - b.float()).abs().max().item() for a, b in zip(parts, expected, strict=True)]
    assert int(group.sum_(batch.loss_mask_BT.sum())) == whole.num_targets
    return max(gaps)


def training_job(
    cases: list[tuple[str, str, dict[str, Any]]], *, sp: int, num_steps: int = 3
) -> list[dict[str, float]]:
    """For each case (family, DeepSpeed JSON, model settings) the largest differences to plain torch."""
    engine.setup(timeout_seconds=60)
    group = distributed.group_of(sp)
    found = []
    for family, ds_name, settings in cases:
        cfg = ModelConfig(config={"model_type": family, **FAMILIES[family]}, dropout=0.0, **settings)
        plain = build(replace(cfg, compile=False), "cpu_zero0").train()
        optimizer = torch.optim.AdamW(
            [p for p in plain.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, eps=EPS
        )
        trained = engine_of(build(cfg, ds_name), ds_name, clip_norm=CLIP, eps=EPS)
        gaps = {"logprob": max(logprob_gap(trained, plain, group, rows) for rows in rows_of(0)), "loss": 0.0, "norm": 0}
        for step in range(num_steps):
            loss, norm = split_step(trained, group, rows_of(step))
            expected_loss, expected_norm = plain_step(plain, optimizer, rows_of(step))
            assert expected_norm > CLIP, "the clip is on"
            gaps["loss"] = max(gaps["loss"], abs(loss - expected_loss))
            gaps["norm"] = max(gaps["norm"], abs(norm - expected_norm))
        gaps["trained_logprob"] = max(logprob_gap(trained, plain, group, rows) for rows in rows_of(0))
        state = trained.full_state_dict()
        gaps["weight"] = 0.0 if state is None else difference(state, plain)
        found.append(gaps)
    return found


def difference(state: dict[str, Tensor], model: Policy) -> float:
    own = model.state_dict()
    assert state.keys() == own.keys()
    return max((state[key] - own[key]).abs().max().item() for key in own)


def assert_equal(gaps_by_rank: list[list[dict[str, float]]], cases: list[Any]) -> None:
    """fp32: sums in another order, through 3 AdamW steps."""
    for gaps in gaps_by_rank:
        for case, found in zip(cases, gaps, strict=True):
            assert max(found.values()) < 1e-5, (case, found)


STAGES = ("cpu_zero0", "cpu_zero2", "cpu_zero3")


@pytest.mark.parametrize("family", ["opt", "llama"])
def test_two_ranks_on_one_row_train_as_plain_torch(ranks: Ranks, family: str) -> None:
    """Log-probs, loss, norm and weights at ZeRO 0, 2 and 3, with the clip on; Llama shares keys between heads."""
    cases = [(family, stage, {}) for stage in STAGES]
    assert_equal(ranks(training_job, cases=cases, sp=2), cases)


def test_adapters_and_recomputed_layers_train_as_plain_torch(ranks: Ranks) -> None:
    """LoRA, and gradient checkpointing, whose backward pass exchanges once more."""
    cases = [
        ("llama", "cpu_zero3", {"lora": LoRAConfig(rank=4)}),
        ("opt", "cpu_zero2", {"lora": LoRAConfig(rank=4), "recompute": "full"}),
        ("llama", "cpu_zero3", {"recompute": "selective"}),
    ]
    assert_equal(ranks(training_job, cases=cases, sp=2), cases)


def test_every_family_that_packs_splits(ranks: Ranks) -> None:
    cases = [(family, "cpu_zero0", {}) for family in FAMILIES if family not in ("opt", "llama")]
    assert_equal(ranks(training_job, cases=cases, sp=2, num_steps=1), cases)


def four_ranks_job() -> list[list[dict[str, float]]]:
    """Two groups of two, and one of four, whose last ranks have nothing but padding of short rows."""
    pairs = training_job([("llama", "cpu_zero2", {}), ("opt", "cpu_zero3", {})], sp=2)
    return [pairs, training_job([("opt", "cpu_zero3", {})], sp=4)]


def test_two_groups_of_two_and_one_of_four_train_as_plain_torch(ranks: Ranks) -> None:
    for pairs, four in ranks(four_ranks_job, world_size=4, timeout=120):
        assert_equal([pairs], ["llama, ZeRO-2, sp 2", "opt, ZeRO-3, sp 2"])
        assert_equal([four], ["opt, ZeRO-3, sp 4"])
