"""Rows that ranks share with compiled blocks, in bfloat16 and with dropout."""

import functools
from typing import Any

import torch
from torch import Tensor

from rlhf import distributed, engine
from rlhf.config import ModelConfig
from rlhf.run_folder import seed_generators
from tests.distributed.harness import Ranks
from tests.distributed.test_sequence_parallel import (
    FAMILIES,
    assert_equal,
    build,
    collate,
    plain_step,
    rows_of,
    score,
    split_step,
    training_job,
)
from tests.distributed.tiny import engine_of

COMPILED = [("llama", "cpu_zero3", {"compile": True}), ("opt", "cpu_zero2", {"compile": True, "recompute": "full"})]
STAGES = ("cpu_zero0", "cpu_zero2", "cpu_zero3")
NUM_DRAWS = 300


def compiled_job() -> Any:
    """Without machine code, which takes minutes: what is traced is the same."""
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    return training_job(COMPILED, sp=2)


def test_compiled_blocks_exchange_between_their_graphs(ranks: Ranks) -> None:
    """Of step 1's policy."""
    assert_equal(ranks(compiled_job, timeout=240), COMPILED)


def bfloat16_job() -> dict[Any, dict[str, float]]:
    """Largest differences of losses and norms (as a share) to plain torch in float32, by stage and sp."""
    engine.setup(timeout_seconds=60)
    found = {}
    for name, sp in ((name, sp) for name in STAGES for sp in (1, 2)):
        cfg = ModelConfig(config={"model_type": "llama", **FAMILIES["llama"]}, dropout=0.0)
        plain, group = build(cfg, "cpu_zero0").train(), distributed.group_of(sp)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, eps=1e-5)
        trained = engine_of(build(cfg, name), name, clip_norm=0.5, eps=1e-5, changes={"bf16": {"enabled": True}})
        gaps = {"loss": 0.0, "norm": 0.0}
        for step in range(4):
            loss, norm = split_step(trained, group, rows_of(step))
            expected_loss, expected_norm = plain_step(plain, optimizer, rows_of(step))
            gaps["loss"] = max(gaps["loss"], abs(loss - expected_loss))
            gaps["norm"] = max(gaps["norm"], abs(norm / expected_norm - 1))
        found[name, sp] = gaps
    return found


def test_bfloat16_is_as_near_to_float32_as_on_rows_of_ones_own(ranks: Ranks) -> None:
    """8 bits of a number: a loss near 5.7 within 0.01 and a norm within 2 % through four steps, whoever has the row."""
    for case, gaps in ranks(bfloat16_job, timeout=120)[0].items():
        assert 0 < gaps["loss"] < 1e-2 and 0 < gaps["norm"] < 2e-2, (case, gaps)


def dropout_job(sp: int) -> dict[str, Any]:
    """Mean and variance of each token's log-prob over many masks; the same masks from the same seed, and no others."""
    engine.setup(timeout_seconds=60)
    cfg = ModelConfig(config={"model_type": "opt", **FAMILIES["opt"]}, dropout=0.2)
    model, group = build(cfg, "cpu_zero0").train(), distributed.group_of(sp)
    batch = collate(rows_of(0)[0], packed=True, group=group)

    @torch.no_grad()
    def draw() -> Tensor:
        return group.sum_(score(model, batch).logprob_BT.clone())[0]  # type: ignore[no-any-return]

    seed_generators(1, share=group.rank)
    first = torch.rand(8)
    draws = torch.stack([draw() for _ in range(NUM_DRAWS)])
    seed_generators(1, share=group.rank)
    torch.rand(8)
    scored = draws[0] != 0
    return {
        "again": torch.equal(draw(), draws[0]), "distinct": len({tuple(d.tolist()) for d in draws}), "first": first,
        "mean": draws[:, scored].mean(dim=0), "variance": draws[:, scored].var(dim=0),
    }  # fmt: skip


def test_dropout_has_the_distribution_of_rows_of_ones_own(ranks: Ranks) -> None:
    """Two samples of the same means and variances. Each rank masks its tokens and heads by a generator of its own."""
    alone, (shared, other) = ranks(dropout_job, world_size=1, sp=1)[0], ranks(dropout_job, sp=2)
    for found in (alone, shared):
        assert found["again"] and found["distinct"] == NUM_DRAWS
    assert torch.equal(shared["mean"], other["mean"]) and not torch.equal(shared["first"], other["first"])
    deviations = (alone["mean"] - shared["mean"]) / ((alone["variance"] + shared["variance"]) / NUM_DRAWS).sqrt()
    # Of 16 means; a few in a hundred thousand lie further out.
    assert len(deviations) > 10 and deviations.abs().max() < 4.2, deviations
    # A variance of 300 draws is known within 8 %, the quotient of two within 12 %.
    ratio = shared["variance"] / alone["variance"]
    assert ratio.min() > 0.6 and ratio.max() < 1.67 and 0.85 < ratio.mean() < 1.18, ratio
