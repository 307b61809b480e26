"""Ranks that share a model's weights: the numbers of one process with the whole model, in fp32, at every ZeRO stage."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import distributed, engine
from rlhf.config import ModelConfig, SamplingConfig
from rlhf.data.dataset import SFTRow
from rlhf.distributed import Group
from rlhf.engine import TrainEngine
from rlhf.from_state import convert_state
from rlhf.models import attention
from rlhf.models.tensor_parallel import is_share, share_model
from rlhf.states import StateError
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
from tests.saving import TinyRun, checkpoints, save

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


def trained_losses(trained: TrainEngine, group: Group, steps: range) -> list[tuple[float, float]]:
    return [shared_step(trained, group, rows_of(step), packed=True) for step in steps]


def own_weights(trained: TrainEngine) -> list[torch.Tensor]:
    """This rank's part of every weight."""
    return [getattr(p, "ds_tensor", p).detach().clone() for p in trained.module.parameters()]


def resume_job(folder: str) -> dict[str, tuple[bool, bool, float]]:
    """With dropout: two steps, a save, two others; a load into a new engine, and the two again."""
    engine.setup(timeout_seconds=60)
    group, seen = distributed.group_of(2), {}
    for name, bf16 in itertools.product(STAGES, (False, True)):
        case, changes = f"{name} {'bf16' if bf16 else 'fp32'}", {"bf16": {"enabled": bf16}}
        if (name, bf16) == ("cpu_zero0", True):
            continue  # refused
        cfg = config_of("opt", dropout=0.1)
        torch.manual_seed(5)
        first = shared(cfg, name, group, changes=changes)
        trained_losses(first, group, range(2))
        written = checkpoints(TinyRun(Path(folder) / case, save_async=bf16), {"policy": first})
        written.save(2)
        written.wait()
        expected, expected_weights = trained_losses(first, group, range(2, 4)), own_weights(first)
        torch.manual_seed(99)
        second = shared(cfg, name, group, changes=changes)
        checkpoints(TinyRun(Path(folder) / case, resume=True), {"policy": second}).resume()
        assert second.step_count == 2
        same_losses = trained_losses(second, group, range(2, 4)) == expected
        same_weights = all(map(torch.equal, own_weights(second), expected_weights))
        seen[case] = (same_losses, same_weights, replica_gap(second, group))
    return seen


@pytest.mark.parametrize("world_size", [2, 4])
def test_resume_on_the_same_ranks_is_bit_exact(ranks: Ranks, tmp_path: Path, world_size: int) -> None:
    """Each rank's own shares; what all ranks have whole stays the same on all, dropout and all."""
    for found in ranks(resume_job, world_size=world_size, folder=str(tmp_path), timeout=180):
        assert found == {case: (True, True, 0.0) for case in found} and len(found) == 7


def other_layout_job(folder: str) -> dict[str, str]:
    """What a resume with other shares, ranks, ZeRO stage, or for the weights alone says of a state."""
    engine.setup(timeout_seconds=60)
    cfg = config_of("llama")
    for where, size in (("of halves", 2), ("of wholes", 1)):
        trained = shared(cfg, "cpu_zero1", distributed.group_of(size))
        save(Path(folder) / where, {"policy": trained}, step=2)
    said = {}
    for case, where, size, stage, config in (
        ("whole again", "of halves", 1, "cpu_zero1", {}),
        ("halved now", "of wholes", 2, "cpu_zero1", {}),
        ("other stage", "of halves", 2, "cpu_zero2", {}),
        ("weights alone", "of halves", 2, "cpu_zero1", {"resume_weights_only": True}),
    ):
        trained = shared(cfg, stage, distributed.group_of(size))
        with pytest.raises(StateError) as caught:
            checkpoints(TinyRun(Path(folder) / where, resume=True, **config), {"policy": trained}).resume()
        said[case] = str(caught.value)
    return said


def test_a_state_of_shares_is_not_taken_for_another(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(other_layout_job, folder=str(tmp_path), timeout=120)
    assert first == second
    halves, wholes = (
        "saved with parallel.tp=2 on 2 ranks with ZeRO-1",
        "saved with parallel.tp=1 on 2 ranks with ZeRO-1",
    )
    assert f"{halves}, this run has parallel.tp=1 on 2 with ZeRO-1: shares" in first["whole again"]
    assert f"{wholes}, this run has parallel.tp=2 on 2 with ZeRO-1: shares" in first["halved now"]
    assert f"{halves}, this run has parallel.tp=2 on 2 with ZeRO-2: shares" in first["other stage"]
    assert "parallel.tp=2, whose shares cannot be taken without moments" in first["weights alone"]
    assert all(text.count("\n  - ") == 1 for text in first.values()), "one fault, not one for each weight"
    state = tmp_path / "of halves" / "state" / "step_00000002"
    with pytest.raises(StateError, match=r"holds policy in shares of 2 ranks \(parallel.tp\)"):
        convert_state(state, config_of("llama"), tmp_path / "out", engine="policy", seed=1)


def bfloat16_job() -> dict[str, tuple[float, float, float]]:
    """Largest differences of loss and norm to the same engine with whole weights, and of weights kept whole."""
    engine.setup(timeout_seconds=60)
    group, found, changes = distributed.group_of(2), {}, {"bf16": {"enabled": True}}
    for name in STAGES[1:]:
        cfg = config_of("llama")
        whole = engine_of(build(cfg, name), name, changes=changes, clip_norm=CLIP, eps=EPS)
        halves = shared(cfg, name, group, changes=changes)
        alone, steps = distributed.group_of(1), range(3)
        pairs = list(zip(trained_losses(halves, group, steps), trained_losses(whole, alone, steps), strict=True))
        assert min(norm for (_, norm), _ in pairs) > CLIP
        gaps = [max(abs(one[i] - other[i]) / other[i] for one, other in pairs) for i in range(2)]
        found[name] = (*gaps, replica_gap(halves, group))
    return found


def test_bfloat16_differs_by_its_rounding(ranks: Ranks) -> None:
    for found in ranks(bfloat16_job, timeout=120):
        for name, (loss, norm, replicas) in found.items():
            assert loss < 2e-3 and norm < 2e-2 and replicas == 0, (name, loss, norm)


def dropout_job(recompute: str) -> dict[str, Any]:
    """A step with dropout: what a rank says of it, and the masks that its heads drew, also when computed again."""
    engine.setup(timeout_seconds=60)
    group = distributed.group_of(2)
    drawn: list[torch.Tensor] = []
    sdpa = attention.sdpa_attention_forward

    def spy(*arguments: Any, **named: Any) -> Any:
        drawn.append(torch.dropout(torch.ones(64), named["dropout"], train=True))
        return sdpa(*arguments, **named)

    attention.sdpa_attention_forward = spy
    torch.manual_seed(3)
    trained = shared(config_of("opt", dropout=0.3, recompute=recompute), "cpu_zero1", group)
    trained.module.train()
    losses = [shared_step(trained, group, rows_of(step), packed=False) for step in range(2)]
    return {"losses": losses, "masks": [mask.tolist() for mask in drawn], "replicas": replica_gap(trained, group)}


def test_heads_of_different_ranks_drop_by_different_masks(ranks: Ranks) -> None:
    """And all else by equal ones: the ranks have one loss, and their whole weights stay equal."""
    plain, again = ranks(dropout_job, recompute="none"), ranks(dropout_job, recompute="full")
    for first, second in (plain, again):
        assert first["losses"] == second["losses"] and first["replicas"] == second["replicas"] == 0
        assert len(first["masks"]) == len(second["masks"]) >= 16
        assert all(one != other for one, other in zip(first["masks"], second["masks"], strict=True))
        assert len({tuple(mask) for mask in first["masks"]}) >= 16, "no two calls of the forward passes drop the same"
    assert plain[0]["losses"] == again[0]["losses"], "a layer that is computed again drops the same"
