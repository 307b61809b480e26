"""The optimisers beside AdamW: against the formulas in float64, at every stage, saved and resumed, and their bytes."""

import importlib.util
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlhf import ds_config, engine
from rlhf.config import OptimConfig
from rlhf.engine import TrainEngine
from rlhf.states import StateError
from tests.distributed.harness import Ranks
from tests.distributed.tiny import loss_sum, max_difference, num_targets, steps_of_rows, tiny_opt, train_step
from tests.saving import resume, save

STAGES = ["cpu_zero0", "cpu_zero1", "cpu_zero2", "cpu_zero3"]
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
NUM_STEPS = 4
FIELDS: dict[str, Any] = {
    "lr": 1e-2, "schedule": "linear", "warmup_frac": 0.25, "min_lr_frac": 0.1, "clip_norm": 0.5, "weight_decay": 0.1,
}  # fmt: skip
EPS = 1e-2  # so large that AdamW does not turn the rounding of a gradient near 0 into a step

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
OBJECTS = ["muon", pytest.param("adamw_8bit", marks=needs_bitsandbytes)]


def engine_with(optimizer: str, stage: str, *, bf16: bool = False, zero: dict[str, Any] | None = None) -> TrainEngine:
    ds = ds_config.load(stage)
    ds["bf16"] = {"enabled": bf16}
    ds["zero_optimization"] = {**ds.get("zero_optimization", {}), **(zero or {})}
    config = OptimConfig(**{"name": optimizer, "eps": EPS, **FIELDS})
    return TrainEngine(tiny_opt(), ds=ds, optim=config, role="policy", num_steps=NUM_STEPS)


def rate(step: int) -> float:
    """One step of warm-up, then linear to a tenth: 1, 0.775, 0.55, 0.325 of the peak."""
    return 1e-2 * (1.0 - 0.225 * step)


def newton_schulz(matrix: Tensor) -> Tensor:
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    return x.T if tall else x


class ByHand:
    """Muon on the matrices of the layers, AdamW on all else, in float64 on one process."""

    def __init__(self, *, muon: bool) -> None:
        self.model = tiny_opt().double()
        self.muon = muon
        self.state: dict[str, list[Tensor]] = {}
        self.step_count = 0

    def step(self, rows: list[Tensor]) -> float:
        loss = loss_sum(self.model, rows) / num_targets(rows)
        self.model.zero_grad()
        loss.backward()
        grads = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        norm = math.sqrt(sum(float(grad.square().sum()) for grad in grads.values()))
        factor, lr = min(1.0, 0.5 / (norm + 1e-6)), rate(self.step_count)
        assert factor < 1, "the clip is tested"
        self.step_count += 1
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self._update(name, p, grads[name] * factor, lr)
        return loss.item()

    def _update(self, name: str, p: Tensor, grad: Tensor, lr: float) -> None:
        decay = 0.1 if p.ndim == 2 else 0.0
        m, v = self.state.setdefault(name, [torch.zeros_like(p), torch.zeros_like(p)])
        p *= 1 - lr * decay
        if self.muon and p.ndim == 2 and ".layers." in name:
            m.mul_(0.95).add_(0.05 * grad)
            p -= lr * 0.2 * math.sqrt(max(p.shape)) * newton_schulz(0.05 * grad + 0.95 * m)
            return
        m.mul_(0.9).add_(0.1 * grad)
        v.mul_(0.95).add_(0.05 * grad**2)
        t = self.step_count
        p -= lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + EPS)


def trajectory_job(optimizer: str, zeros: list[tuple[str, dict[str, Any]]]) -> dict[Any, Any]:
    """Largest differences of losses and weights to the ones by hand."""
    engine.setup(timeout_seconds=60)
    steps = steps_of_rows(NUM_STEPS)
    oracle = ByHand(muon=optimizer == "muon")
    expected = [oracle.step(rows) for rows in steps]
    differences = {}
    for stage, zero in zeros:
        trained = engine_with(optimizer, stage, zero=zero)
        found = [train_step(trained, rows, num_micro=2) for rows in steps]
        assert [stats.lr for _, stats in found] == pytest.approx([rate(step) for step in range(NUM_STEPS)])
        case = stage, "offload_optimizer" in zero
        differences[case] = (
            max(abs(loss - other) for (loss, _), other in zip(found, expected, strict=True)),
            max_difference(trained.full_state_dict(), oracle.model.float()),
        )
        oracle.model.double()
    return differences


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_muon_is_the_formula_at_every_stage(ranks: Ranks, world_size: int) -> None:
    """Rates, clip, decay, momentum, Newton-Schulz and AdamW beside it.

    Stage 3 divides every matrix; stages 1 and 2 do on 3 ranks, whose shares do not end between two of them.
    """
    zeros = [*((stage, {}) for stage in STAGES), *((stage, OFFLOAD) for stage in STAGES[1:])]
    differences = ranks(trajectory_job, world_size=world_size, optimizer="muon", zeros=zeros, timeout=120)[0]
    for case, (loss, weights) in differences.items():
        assert loss < 5e-6 and weights < 1e-5, (case, loss, weights)


@needs_bitsandbytes
@pytest.mark.parametrize("world_size", [1, 2])
def test_adamw_8bit_follows_adamw(ranks: Ranks, world_size: int) -> None:
    """Moments of 8 bits: near AdamW by hand, as near at every stage, and not equal to it."""
    zeros = [(stage, {}) for stage in STAGES]
    differences = ranks(trajectory_job, world_size=world_size, optimizer="adamw_8bit", zeros=zeros, timeout=120)[0]
    for case, (loss, weights) in differences.items():
        # At stage 0 each weight is below the 4096 numbers from which bitsandbytes quantises.
        low, high = (0, 1e-6) if case[0] == "cpu_zero0" else (1e-5, 1e-3)
        assert loss < 1e-4 and low < weights < high, (case, loss, weights)


def resume_job(folder: str, optimizer: str) -> list[tuple[Any, bool, bool]]:
    """Four steps, against two, a save, a load into a new engine, and the last two again."""
    engine.setup(timeout_seconds=60)
    steps, seen = steps_of_rows(4), []
    for stage, bf16 in itertools.product(STAGES, (False, True)):
        where = f"{folder}/{stage}_{bf16}"
        first = engine_with(optimizer, stage, bf16=bf16)
        for rows in steps[:2]:
            train_step(first, rows)
        save(where, {"policy": first}, step=2)
        expected = [train_step(first, rows)[0] for rows in steps[2:]]
        second = engine_with(optimizer, stage, bf16=bf16)
        resume(where, {"policy": second})
        found = [train_step(second, rows)[0] for rows in steps[2:]]
        one, two = first.full_state_dict(), second.full_state_dict()
        same = one is None or two is None or all(torch.equal(one[key], two[key]) for key in one)
        seen.append(((stage, bf16), found == expected, same))
    return seen


@pytest.mark.parametrize("optimizer", OBJECTS)
def test_resume_is_bit_exact(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    for case, losses, weights in ranks(resume_job, folder=str(tmp_path), optimizer=optimizer, timeout=120)[0]:
        assert losses and weights, case


def saved_job(folder: str, optimizer: str) -> None:
    engine.setup(timeout_seconds=60)
    trained = engine_with(optimizer, "cpu_zero2")
    for rows in steps_of_rows(2):
        train_step(trained, rows)
    save(folder, {"policy": trained}, step=2)


def other_stage_job(folder: str, optimizer: str, *, weights_only: bool) -> tuple[str, float]:
    """At another stage; the message, or how far the weights are from those saved."""
    engine.setup(timeout_seconds=60)
    steps = steps_of_rows(3)
    first = engine_with(optimizer, "cpu_zero2")
    for rows in steps[:2]:
        train_step(first, rows)
    expected = first.full_state_dict()
    trained = engine_with(optimizer, "cpu_zero3")
    try:
        resume(folder, {"policy": trained}, **({"resume_weights_only": True} if weights_only else {}))
    except StateError as error:
        return str(error), 0.0
    found = trained.full_state_dict()
    difference = 0.0
    if found is not None and expected is not None:
        difference = max((found[key] - expected[key]).abs().max().item() for key in found)
    fresh = train_step(trained, steps[2])[0]
    assert math.isfinite(fresh)
    return "", difference


@pytest.mark.parametrize("optimizer", OBJECTS)
def test_another_stage_takes_the_weights_alone(ranks: Ranks, tmp_path: Path, optimizer: str) -> None:
    """Muon's momentum goes along, without that option, in test_layouts."""
    ranks(saved_job, folder=str(tmp_path), optimizer=optimizer)
    message, _ = ranks(other_stage_job, folder=str(tmp_path), optimizer=optimizer, weights_only=False)[0]
    if optimizer == "adamw_8bit":
        assert "optim.name=adamw_8bit keeps moments in 8 bits" in message and "run.resume_weights_only" in message
    else:
        assert not message
    message, difference = ranks(other_stage_job, folder=str(tmp_path), optimizer=optimizer, weights_only=True)[0]
    assert not message and difference < 1e-6


def bytes_job(optimizer: str) -> dict[str, int]:
    engine.setup(timeout_seconds=60)
    found = {}
    for stage in STAGES:
        trained = engine_with(optimizer, stage, bf16=True)
        train_step(trained, steps_of_rows(1)[0])
        found[stage] = trained.state_bytes()["optimizer"]
    return found


def matrices(model: nn.Module) -> int:
    return sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name)


def test_bytes_of_muon_are_counted(ranks: Ranks) -> None:
    """float32 master weights everywhere; one moment of a matrix, two of all else."""
    model = tiny_opt()
    total = sum(p.numel() for p in model.parameters())
    expected = 12 * total - 4 * matrices(model)
    for stage, found in ranks(bytes_job, world_size=1, optimizer="muon")[0].items():
        assert found == pytest.approx(expected, rel=0.01), stage
    for stage, found in ranks(bytes_job, world_size=2, optimizer="muon")[0].items():
        assert found == pytest.approx(expected if stage == "cpu_zero0" else expected / 2, rel=0.05), stage


@needs_bitsandbytes
def test_bytes_of_8_bit_moments_are_counted(ranks: Ranks) -> None:
    """Master weights and two moments of a byte each, with a scale for 256; below 4096 numbers moments stay float32.

    At stage 0 that is each weight, at the others the flat vector of biases and norms. Two tables of 256 numbers.
    """
    sizes = [(p.ndim, p.numel()) for p in tiny_opt().parameters()]
    matrix, vector = (sum(size for ndim, size in sizes if (ndim == 2) == wanted) for wanted in (True, False))
    assert vector < 4096 and max(size for _, size in sizes) < 4096
    for stage, found in ranks(bytes_job, world_size=1, optimizer="adamw_8bit")[0].items():
        expected = (
            12 * (matrix + vector) if stage == "cpu_zero0" else 4 * matrix + (2 + 8 / 256) * matrix + 12 * vector + 2048
        )
        assert found == pytest.approx(expected, abs=128), stage
