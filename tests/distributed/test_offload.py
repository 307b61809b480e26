"""Activations in host memory on two ranks: weights after four steps equal to the bit, under ZeRO-0 and ZeRO-3."""

from typing import Any

import torch

from rlhf import distributed, engine
from rlhf.config import LoRAConfig
from rlhf.models import offload
from tests.distributed.harness import Ranks
from tests.distributed.test_float8 import NUM_STEPS, step, trained
from tests.distributed.test_models import FAMILIES


def offloading_job(cases: list[tuple[int, dict[str, Any]]]) -> list[bool]:
    """For each stage and setting, whether weights equal those of activations that stay; ZeRO-3 releases all weights."""
    engine.setup(timeout_seconds=60)
    FAMILIES["llama"]["num_hidden_layers"] = 3
    equal, sent = [], 0
    made = offload._Entry.__init__

    def count(self: Any, *arguments: Any) -> None:
        nonlocal sent
        sent += 1
        made(self, *arguments)

    offload._Entry.__init__ = count  # type: ignore[method-assign]
    for zero, options in cases:
        states, numbers = [], []
        for away in (False, True):
            sent = 0
            lora = LoRAConfig(rank=options.get("rank", 0))
            others = {key: value for key, value in options.items() if key != "rank"}
            actor = trained("llama", zero=zero, offload_activations=away, lora=lora, **others)
            for _ in range(NUM_STEPS):
                step(actor)
            states.append(actor.full_state_dict() or {})
            numbers.append(sent)
        # Rank 1 has two rows of one token: less than is worth a copy.
        assert numbers[0] == 0 and (numbers[1] > 0) == (distributed.rank() == 0)
        equal.append(all(torch.equal(states[1][key], value) for key, value in states[0].items()))
    return equal


def test_activations_that_were_away_change_nothing(ranks: Ranks) -> None:
    cases: list[tuple[int, dict[str, Any]]] = [
        (0, {}),
        (3, {}),
        (3, {"recompute": "full"}),
        (3, {"recompute": "full", "recompute_budget": 0.34}),
        (3, {"rank": 2}),
    ]
    assert ranks(offloading_job, timeout=200, cases=cases) == [[True] * len(cases)] * 2
