"""Compiled blocks under DeepSpeed on two ranks: the trajectory of uncompiled ones at every ZeRO stage."""

import functools
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from rlhf import ds_config, engine
from rlhf.engine import FrozenEngine, TrainEngine
from rlhf.models.compiled import compile_blocks, compiled_blocks, uncompiled
from tests.distributed.harness import Ranks
from tests.distributed.tiny import engine_of, loss_sum, steps_of_rows, tiny_opt, train_step

STAGES = ("cpu_zero0", "cpu_zero2", "cpu_zero3")


def prepare(backend: str) -> None:
    """Without machine code (`aot_eager`) a job takes seconds and not minutes."""
    torch.compile = functools.partial(torch.compile, backend=backend)
    engine.setup(timeout_seconds=60)


def built(name: str, *, compile: bool) -> Any:  # noqa: A002  the setting's name
    with engine.zero3_init(ds_config.load(name)):
        model = tiny_opt()
    if compile:
        compile_blocks(model)
    return model


def gathered(trained: TrainEngine | FrozenEngine) -> int:
    """Number of weights that this rank holds whole."""
    return sum(p.ds_status.name == "AVAILABLE" for p in trained.module.parameters())


def trajectory_job(num_steps: int, backend: str) -> dict[str, tuple[float, float, float]]:
    """Largest difference of losses, of gradient norms, and of the weights at the end."""
    prepare(backend)
    steps, differences = steps_of_rows(num_steps), {}
    for name in STAGES:
        runs = []
        for compile in (False, True):  # noqa: A001
            trained = engine_of(built(name, compile=compile), name, clip_norm=0.5)
            assert len(compiled_blocks(trained.module)) == (2 if compile else 0)
            runs.append(([train_step(trained, rows, 2) for rows in steps], trained.full_state_dict()))
        (plain, plain_weights), (compiled, compiled_weights) = runs
        differences[name] = (
            max(abs(one - two) / one for (one, _), (two, _) in zip(plain, compiled, strict=True)),
            max(abs(one.grad_norm - two.grad_norm) for (_, one), (_, two) in zip(plain, compiled, strict=True)),
            0.0 if plain_weights is None or compiled_weights is None else
            max(float((plain_weights[key] - compiled_weights[key]).abs().max()) for key in plain_weights),
        )  # fmt: skip
        assert plain_weights is None or compiled_weights is None or plain_weights.keys() == compiled_weights.keys()
    assert not counters["graph_break"], "ZeRO-3's hooks stand around the graphs"
    # One graph for all layers, lengths and micro-batches, which stages 0 and 2 share.
    assert counters["stats"]["unique_graphs"] == 2, counters["stats"]
    return differences


def check(differences: dict[str, tuple[float, float, float]]) -> None:
    """As test_engine's trajectories: Adam makes a step of the rounding of a gradient near 0."""
    assert set(differences) == set(STAGES)
    for name, (loss, norm, weights) in differences.items():
        assert loss < 1e-5 and norm < 5e-6 and weights < 1e-4, (name, loss, norm, weights)


def test_twenty_steps_follow_those_of_uncompiled_blocks(ranks: Ranks) -> None:
    check(ranks(trajectory_job, timeout=240, num_steps=20, backend="aot_eager")[0])


@pytest.mark.slow
def test_twenty_steps_of_machine_code_do_too(ranks: Ranks) -> None:
    check(ranks(trajectory_job, timeout=900, num_steps=20, backend="inductor")[0])


def sharded_job() -> dict[str, Any]:
    """What ZeRO-3 holds of compiled blocks, in training, in a frozen model and in a rollout layer by layer."""
    prepare("aot_eager")
    rows = steps_of_rows(2)
    trained = engine_of(built("cpu_zero3", compile=True), "cpu_zero3")
    found = {"start": gathered(trained)}
    loss = loss_sum(trained, rows[0])
    found["between"] = gathered(trained)
    trained.accumulate(loss, count=1, last=True)
    trained.step()
    found["after"] = gathered(trained)
    with trained.generation_module() as module, uncompiled(module), torch.no_grad():
        found["lent"] = gathered(trained)
        lent = loss_sum(module, rows[1])
    found["given_back"] = gathered(trained)
    train_step(trained, rows[1])
    found["end"] = gathered(trained)
    with torch.no_grad():
        frozen = FrozenEngine(built("cpu_frozen_zero3", compile=True), ds=ds_config.load("cpu_frozen_zero3"), role="r")
        found["frozen"] = float(loss_sum(frozen, rows[0]) - loss_sum(tiny_opt(), rows[0]))
        found["frozen_gathered"] = gathered(frozen)
    found["lent_loss"] = float(lent)
    return found


def test_zero3_gathers_a_compiled_block_and_lets_it_go(ranks: Ranks) -> None:
    """The packaged JSON keeps nothing gathered between layers: thresholds 0."""
    for found in ranks(sharded_job, timeout=120):
        assert found["lent_loss"] > 0
        for when in ("start", "between", "after", "lent", "given_back", "end", "frozen_gathered"):
            assert found[when] == 0, (when, found)
        assert abs(found["frozen"]) < 1e-4
