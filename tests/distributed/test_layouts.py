"""A state goes on in another layout: each of four, with other ranks, ZeRO stage or sharing of rows, from each of them.

The numbers are those of one process that was never stopped: log-probs after the resume, then losses, norms and weights.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf import distributed, engine
from rlhf.config import ModelConfig
from rlhf.engine import TrainEngine
from tests.distributed.harness import Ranks
from tests.distributed.test_sequence_parallel import FAMILIES, build, collate, rows_of, score, split_step
from tests.distributed.tiny import engine_of
from tests.saving import resume, save

# Ranks, DeepSpeed JSON, ranks that share rows.
LAYOUTS: dict[str, tuple[int, str, int]] = {
    "one rank, ZeRO-0": (1, "cpu_zero0", 1),
    "two, ZeRO-1": (2, "cpu_zero1", 1),
    "two, ZeRO-3": (2, "cpu_zero3", 1),
    "two on each row, ZeRO-2": (2, "cpu_zero2", 2),
}
NUM_STEPS, SAVED = 4, 2
OPTIM: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "eps": 1e-5},
    # Orthogonalising brings what is near 0 to 1: rates and eps as in test_optimizers.
    "muon": {"name": "muon", "eps": 1e-2, "lr": 1e-2},
}


def make(layout: str, optimizer: str) -> tuple[TrainEngine, distributed.Group]:
    """Llama on two parameter groups, decayed and not, with a schedule and the clip on."""
    _, ds_name, sp = LAYOUTS[layout]
    model = build(ModelConfig(config={"model_type": "llama", **FAMILIES["llama"]}, dropout=0.0), ds_name)
    made = engine_of(
        model, ds_name, num_steps=NUM_STEPS, clip_norm=0.5, weight_decay=0.1, schedule="cosine", **OPTIM[optimizer]
    )
    return made, distributed.group_of(sp)


def logprobs(trained: Any) -> Tensor:
    """Of rows that nobody trains on; the same on all ranks, whatever they share."""
    batch = collate([row for rows in rows_of(99) for row in rows], packed=True)
    with torch.no_grad():
        return score(trained, batch).logprob_BT  # type: ignore[no-any-return]


def steps_of(trained: TrainEngine, group: distributed.Group, steps: range) -> list[tuple[float, float]]:
    return [split_step(trained, group, rows_of(step)) for step in steps]


def save_job(folder: str, layouts: list[str], optimizer: str) -> dict[str, Any]:
    """Two steps and a save; of the layout on one rank, what comes after, too."""
    engine.setup(timeout_seconds=60)
    expected = {}
    for layout in layouts:
        trained, group = make(layout, optimizer)
        steps_of(trained, group, range(SAVED))
        save(f"{folder}/{layout}", {"policy": trained}, step=SAVED)
        after = logprobs(trained)
        expected[layout] = after, steps_of(trained, group, range(SAVED, NUM_STEPS)), trained.full_state_dict()
    return expected


def load_job(folder: str, pairs: list[tuple[str, str]], optimizer: str, expected: Any) -> dict[Any, dict[str, float]]:
    """Largest differences to the run that went on."""
    engine.setup(timeout_seconds=60)
    found = {}
    for saved, layout in pairs:
        trained, group = make(layout, optimizer)
        resume(f"{folder}/{saved}", {"policy": trained})
        logprob_BT, steps, weights = expected
        gaps = {"logprob": (logprobs(trained) - logprob_BT).abs().max().item()}
        after = steps_of(trained, group, range(SAVED, NUM_STEPS))
        gaps["steps"] = (torch.tensor(after) - torch.tensor(steps)).abs().max().item()
        state = trained.full_state_dict()
        if state is not None:
            assert state.keys() == weights.keys()
            gaps["weight"] = max((state[key] - weights[key]).abs().max().item() for key in state)
        found[saved, layout] = gaps
    return found


def by_ranks(layouts: Any) -> dict[int, list[Any]]:
    """Layouts, or pairs by their second, of one rank and of two."""
    return {size: [x for x in layouts if LAYOUTS[x if isinstance(x, str) else x[1]][0] == size] for size in (1, 2)}


@pytest.mark.parametrize("optimizer", OPTIM)
def test_every_layout_goes_on_from_every_other(ranks: Ranks, tmp_path: Any, optimizer: str) -> None:
    """Twelve ordered pairs and the four layouts themselves, in fp32: sums in another order, through two more steps."""
    folder, expected = str(tmp_path), {}
    for size, layouts in by_ranks(list(LAYOUTS)).items():
        expected.update(ranks(save_job, world_size=size, folder=folder, layouts=layouts, optimizer=optimizer)[0])
    alone = expected["one rank, ZeRO-0"]
    pairs = list(itertools.product(LAYOUTS, LAYOUTS))
    found: dict[Any, dict[str, float]] = {}
    for size, some in by_ranks(pairs).items():
        found |= ranks(
            load_job, world_size=size, timeout=180, folder=folder, pairs=some, optimizer=optimizer, expected=alone
        )[0]
    assert len(found) == len(LAYOUTS) ** 2
    for pair, gaps in found.items():
        assert max(gaps.values()) < 2e-5, (optimizer, pair, gaps)


def converted_job(folder: str) -> dict[str, Any]:
    """What a state of Muon's holds, and the momentum that an engine of another stage has after the resume."""
    engine.setup(timeout_seconds=60)
    trained, group = make("two, ZeRO-3", "muon")
    steps_of(trained, group, range(SAVED))
    save(folder, {"policy": trained}, step=SAVED)
    other, _ = make("two, ZeRO-1", "muon")
    resume(folder, {"policy": other})
    inner: Any = other._engine.optimizer
    keys = [sorted(state) for state in inner.optimizer.state.values()]
    momentum = [state["momentum_buffer"] for state in inner.optimizer.state.values() if "momentum_buffer" in state]
    return {"keys": keys, "square": sum(float(m.square().sum()) for m in momentum)}


def test_muon_keeps_one_moment_of_its_matrices(ranks: Ranks, tmp_path: Any) -> None:
    """Nothing of the form between the layouts stays behind."""
    for found in ranks(converted_job, folder=str(tmp_path)):
        assert found["keys"].count(["momentum_buffer"]) == 1
        assert all(keys in (["momentum_buffer"], ["exp_avg", "exp_avg_sq", "step"]) for keys in found["keys"])
        assert found["square"] > 0
