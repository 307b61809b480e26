"""Training in float8 under every ZeRO stage on two ranks, against plain torch with torchao's own layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf import distributed, ds_config, engine
from rlhf.config import LoRAConfig, ModelConfig
from rlhf.models.build import build_causal_lm
from rlhf.models.float8 import float8_layers
from rlhf.models.policy import Policy
from rlhf.state_writer import StateWriter
from tests.distributed.harness import Ranks
from tests.distributed.test_models import COUNT, FAMILIES, difference, loss_sum, tokenizer
from tests.distributed.tiny import engine_of

pytest.importorskip("torchao")
# Where a gradient is near 0, Adam's usual 1e-8 would turn its rounding into a whole step.
OPTIM = {"eps": 1e-4, "clip_norm": 1.0}
NUM_STEPS = 4


def policy(name: str, *, zero: int, **options: Any) -> Policy:
    with engine.zero3_init(ds_config.load(f"cpu_zero{zero}")):
        cfg = ModelConfig(config=FAMILIES[name], dropout=0.0, **options)
        return Policy(build_causal_lm(cfg, tokenizer(), seed=1))


def trained(name: str, *, zero: int, **options: Any) -> engine.TrainEngine:
    return engine_of(policy(name, zero=zero, **options), f"cpu_zero{zero}", **OPTIM)


def step(actor: engine.TrainEngine) -> tuple[float, float]:
    """Mean loss and norm; as between rollouts, a forward without gradients comes first."""
    actor.eval()
    with torch.no_grad():
        loss_sum(actor, "policy", distributed.rank())
    actor.train()
    actor.accumulate(loss_sum(actor, "policy", distributed.rank()), count=COUNT, last=True)
    stats = actor.step()
    return stats.loss, stats.grad_norm


def oracle(name: str, recipe: str) -> tuple[Policy, list[tuple[float, float]]]:
    """torchao's `convert_to_float8_training` and torch's AdamW on this process, with each rank's micro-batch apart."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = policy(name, zero=0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(model.model, config=config, module_filter_fn=lambda _, path: "layers." in path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0, fused=True)
    seen = []
    for _ in range(NUM_STEPS):
        loss = torch.stack([loss_sum(model, "policy", rank) for rank in range(2)]).sum() / COUNT
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    return model, seen


def training_job(cases: list[tuple[str, str]]) -> dict[Any, tuple[float, float]]:
    """For each family, recipe and stage the largest difference of losses and norms, and of weights."""
    engine.setup(timeout_seconds=60)
    found = {}
    for name, recipe in cases:
        expected, seen = oracle(name, recipe)
        for zero in range(4):
            actor = trained(name, zero=zero, float8=recipe)
            assert len(float8_layers(actor.module)) == {"llama": 14, "opt": 12}[name]
            own = [step(actor) for _ in range(NUM_STEPS)]
            off = max(abs(a - b) for one, other in zip(own, seen, strict=True) for a, b in zip(one, other, strict=True))
            found[name, recipe, zero] = (off, difference(actor.full_state_dict(), expected))
    return found


def test_every_stage_trains_as_torchao_does(ranks: Ranks) -> None:
    cases = [("llama", "tensorwise"), ("llama", "rowwise"), ("opt", "rowwise")]
    found = ranks(training_job, timeout=120, cases=cases)[0]
    assert len(found) == 12
    for case, (seen, weights) in found.items():
        assert seen < 1e-5 and weights < 1e-5, (case, seen, weights)


def equal_job(folder: str) -> dict[str, bool]:
    """What has to be equal to the bit under ZeRO-3: recomputed and kept, resumed and not; LoRA and bf16 run."""
    engine.setup(timeout_seconds=60)
    found = {}
    weights: list[dict[str, Tensor]] = []
    for options in ({}, {"recompute": "full"}, {"recompute": "selective"}):
        actor = trained("llama", zero=3, float8="tensorwise", **options)
        for _ in range(NUM_STEPS):
            step(actor)
        weights.append(actor.full_state_dict() or {})
    found["recompute"] = all(
        torch.equal(other[key], value) for key, value in weights[0].items() for other in weights[1:]
    )
    actor = trained("llama", zero=3, float8="tensorwise")
    for number in range(NUM_STEPS):
        if number == 2:
            checkpoint_of(actor, folder)
            actor = trained("llama", zero=3, float8="tensorwise")
            actor.load_state(folder, "actor")
        step(actor)
    found["resumed"] = all(torch.equal(a, weights[0][key]) for key, a in (actor.full_state_dict() or {}).items())
    plain = trained("llama", zero=3)
    plain.load_state(folder, "actor")
    step(plain)
    found["resumed without float8"] = plain.step_count == 3 and not float8_layers(plain.module)
    adapted = trained("llama", zero=3, float8="rowwise", lora=LoRAConfig(rank=2), recompute="full")
    losses = [step(adapted)[0] for _ in range(NUM_STEPS)]
    found["lora"] = losses[-1] < losses[0] and len(float8_layers(adapted.module)) == 14
    return found


def checkpoint_of(actor: engine.TrainEngine, folder: str) -> None:
    writer = StateWriter(Path(folder), beside=False)
    actor.save_state(folder, "actor", writer)
    writer.wait()
    distributed.barrier()


def test_recomputation_resumes_and_adapters(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(equal_job, timeout=120, folder=str(tmp_path)):
        assert found == dict.fromkeys(found, True) and len(found) == 4
