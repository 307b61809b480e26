"""Weights on a disk under ZeRO-3: as in memory, to the bit. It takes libaio and, at first, minutes of compiling."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf import distributed, ds_config, engine
from rlhf.config import ModelConfig
from rlhf.engine import FrozenEngine, TrainEngine
from rlhf.models.build import build_causal_lm
from rlhf.models.policy import Policy
from rlhf.rollout.weights import Lending, lend_weights
from rlhf.state_writer import StateWriter
from tests.distributed.harness import Ranks
from tests.distributed.test_models import COUNT, LLAMA, loss_sum, tokenizer
from tests.distributed.tiny import engine_of

# A rank's half of the larger matrices has 1 MiB: DeepSpeed leaves smaller ones in memory.
WIDE = {**LLAMA, "hidden_size": 512, "intermediate_size": 1024}
AIO = {"block_size": 131072, "queue_depth": 4}


def json_of(folder: str | None) -> dict[str, Any]:
    """Changes of the JSON; buffers of the size of the largest shard, five of which DeepSpeed's default is 2 GB for."""
    disk = {"device": "nvme", "nvme_path": folder, "buffer_count": 8, "buffer_size": 300_000}
    return {"zero_optimization": {"offload_param": disk}, "aio": AIO} if folder else {}


def policy(folder: str | None) -> Policy:
    ds = ds_config.load("cpu_zero3")
    changes = json_of(folder)
    ds["zero_optimization"] = {**ds["zero_optimization"], **changes.get("zero_optimization", {})}
    with engine.zero3_init({**ds, **({"aio": AIO} if folder else {})}):
        return Policy(build_causal_lm(ModelConfig(config=WIDE), tokenizer(), seed=1))


def trained(folder: str | None) -> TrainEngine:
    return engine_of(policy(folder), "cpu_zero3", changes=json_of(folder), clip_norm=0.5)


def step(actor: TrainEngine) -> tuple[float, float]:
    actor.accumulate(loss_sum(actor, "policy", distributed.rank()), count=COUNT, last=True)
    stats = actor.step()
    return stats.loss, stats.grad_norm


def disk_job(folder: str) -> dict[str, bool]:
    """What is equal to the bit between weights on the disk and in memory."""
    engine.setup(timeout_seconds=120)
    found, states, seen = {}, [], []
    for place in (None, f"{folder}/swap"):
        actor = trained(place)
        numbers = [step(actor), step(actor)]
        if place:
            other = trained(place)  # a second role, whose weights lie beside the first one's
            swapped = list(Path(place).rglob("*.swp"))
            found["on the disk"] = len({file.relative_to(place).parts[0] for file in swapped}) == 2
            step(other)
            writer = StateWriter(Path(folder) / "state", beside=False)
            actor.save_state(Path(folder) / "state", "actor", writer)
            writer.wait()
            with lend_weights(actor, Lending()) as lent:
                whole = {name: weight.clone() for name, weight in lent.model.named_parameters()}
            exported = actor.full_state_dict()
            found["lent"] = exported is None or all(
                torch.equal(whole[name], exported[f"model.{name}"]) for name in whole
            )
            numbers.append(step(actor))
            other.load_state(Path(folder) / "state", "actor")
            found["resumed"] = step(other) == numbers[-1]
            states.append(other.full_state_dict() or {})
        else:
            numbers.append(step(actor))
        states.append(actor.full_state_dict() or {})
        seen.append(numbers)
    found["losses and norms"] = seen[0] == seen[1]
    found["weights"] = all(torch.equal(other[key], value) for key, value in states[0].items() for other in states[1:])
    ds = {**ds_config.load("cpu_frozen_zero3"), "aio": AIO}
    plain = FrozenEngine(policy(None), ds=ds_config.load("cpu_frozen_zero3"), role="reference")
    ds["zero_optimization"] = {**ds["zero_optimization"], **json_of(f"{folder}/swap")["zero_optimization"]}
    frozen = FrozenEngine(policy(f"{folder}/swap"), ds=ds, role="reference")
    results: list[Tensor] = [loss_sum(each, "policy", distributed.rank()) for each in (plain, frozen)]
    found["frozen"] = torch.equal(*results)
    return found


@pytest.mark.slow
def test_weights_on_a_disk_are_those_in_memory(ranks: Ranks, tmp_path: Path) -> None:
    if not engine.AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio's headers are not installed, which DeepSpeed's async_io is built with")
    for found in ranks(disk_job, timeout=500, folder=str(tmp_path)):
        assert found == dict.fromkeys(found, True) and len(found) == 6, found


def refusal_job(folder: str) -> None:
    engine.setup(timeout_seconds=60)
    engine.AsyncIOBuilder.is_compatible = lambda *_, **__: False
    with pytest.raises(ValueError, match="offload_param.device` is nvme, but.*Install libaio-dev.*or use cpu"):
        policy(folder)


def test_a_machine_without_libaio_says_so(ranks: Ranks, tmp_path: Path) -> None:
    ranks(refusal_job, world_size=1, folder=str(tmp_path))
