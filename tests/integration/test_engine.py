"""The engine in one process: what does not need a second rank."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rlhf import ds_config, engine
from rlhf.config import OptimConfig
from rlhf.engine import FrozenEngine, NonFiniteError, TrainEngine
from rlhf.states import StateError
from tests.distributed.tiny import PlainTorch, engine_of, loss_sum, num_targets, steps_of_rows, tiny_opt, train_step
from tests.saving import Counter, TinyRun, checkpoints

pytestmark = pytest.mark.usefixtures("one_rank")


def test_first_step_learns_and_the_schedule_counts_real_updates() -> None:
    """DeepSpeed's own warm-up runs two steps at rate 0; here the first of four warm-up steps has a quarter of it."""
    trained = engine_of(tiny_opt(), "cpu_zero1", num_steps=8, schedule="linear", warmup_frac=0.5, lr=4e-3)
    before = trained.module.lm_head.weight.detach().clone()
    rates = [train_step(trained, rows)[1].lr for rows in steps_of_rows(6)]
    assert rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3, 4e-3 * 4 / 5, 4e-3 * 3 / 5])
    assert not torch.equal(before, trained.module.lm_head.weight) and trained.step_count == 6


@pytest.mark.parametrize("name", ["cpu_zero0", "cpu_zero3"])
def test_weight_decay_leaves_vectors_alone(name: str) -> None:
    """Matrices shrink by lr x decay and nothing else where there is no gradient; biases and norms stay as they are."""
    trained = engine_of(tiny_opt(), name, weight_decay=0.5, lr=1e-2, eps=1e12)
    train_step(trained, steps_of_rows(1)[0])
    start, after = tiny_opt().state_dict(), trained.full_state_dict()
    assert after is not None
    for key, value in start.items():
        factor = 1 - 1e-2 * 0.5 if value.ndim > 1 else 1.0
        torch.testing.assert_close(after[key], value * factor, rtol=1e-6, atol=1e-7, msg=key)


@pytest.mark.parametrize("name", ["cpu_zero0", "cpu_zero1", "cpu_zero2", "cpu_zero3"])
def test_gradient_norm_exists_at_every_stage(name: str) -> None:
    rows = steps_of_rows(1)[0]
    _, norm = PlainTorch(tiny_opt()).step(rows)
    assert train_step(engine_of(tiny_opt(), name), rows)[1].grad_norm == pytest.approx(norm, rel=1e-6)


def test_fp16_overflow_skips_the_step_and_the_schedule_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """F18, D20: two forced overflows (loss scale 2^40) change neither weights, rate nor step count.

    DeepSpeed refuses fp16 on CPUs by a capability check; torch itself can do it here.
    """
    from deepspeed.accelerator import get_accelerator  # noqa: TID251

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    fp16 = {"fp16": {"enabled": True, "hysteresis": 1}}
    for name in ("cpu_zero0", "cpu_zero2"):
        trained = engine_of(tiny_opt(), name, changes=fp16, num_steps=10, schedule="linear", lr=1e-2, clip_norm=1.0)
        trained._engine.optimizer.loss_scale = 2.0**40
        before = trained.module.lm_head.weight.detach().clone()
        seen = [train_step(trained, rows)[1] for rows in steps_of_rows(2)]
        assert [stats.skipped for stats in seen] == [True, True], name
        assert trained.step_count == 0 and seen[0].lr == seen[1].lr
        assert torch.equal(before, trained.module.lm_head.weight)
        for rows in steps_of_rows(40):
            stats = train_step(trained, rows)[1]
            if not stats.skipped:
                break
        assert trained.step_count == 1 and stats.lr == seen[0].lr
        _, norm = PlainTorch(tiny_opt()).step(rows)
        assert stats.grad_norm == pytest.approx(norm, rel=2e-2), "the norm is that of the unscaled gradient"


def test_a_loss_that_is_not_finite_stops_fp16_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """D20: lowering the loss scale cannot mend a forward pass, so it is not tried for ever."""
    from deepspeed.accelerator import get_accelerator  # noqa: TID251

    monkeypatch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
    trained = engine_of(tiny_opt(), "cpu_zero2", changes={"fp16": {"enabled": True}})
    rows = steps_of_rows(1)[0]
    trained.accumulate(loss_sum(trained, rows) * float("nan"), count=num_targets(rows), last=True)
    with pytest.raises(NonFiniteError, match="policy: the loss is not finite at step 0 on rank 0"):
        trained.step()


def test_loss_and_count_are_checked() -> None:
    trained = engine_of(tiny_opt(), "cpu_zero0")
    loss = loss_sum(trained, steps_of_rows(1)[0])
    with pytest.raises(ValueError, match="count must be > 0, got 0"):
        trained.accumulate(loss, count=0, last=True)
    with pytest.raises(ValueError, match="one number that depends on the weights.*requires_grad False.*0 times"):
        trained.accumulate(loss.detach(), count=1, last=True)
    with pytest.raises(AssertionError, match="follows accumulate"):
        trained.step()


def test_a_model_without_trained_weights_is_refused() -> None:
    model = tiny_opt()
    model.requires_grad_(requires_grad=False)
    with pytest.raises(ValueError, match="belongs in a FrozenEngine"):
        engine_of(model, "cpu_zero0")


def test_a_resolved_json_and_a_hybrid_section_reach_the_engine() -> None:
    """E19: the section is ours; no private attribute of DeepSpeed's hybrid engine is in use."""
    optim = OptimConfig(lr=1e-3, clip_norm=0.5)
    ds = ds_config.resolve(ds_config.load("cpu_zero3_hybrid"), optim=optim, world_size=1, trainable=True)
    trained = TrainEngine(tiny_opt(), ds=ds, optim=optim, role="actor", num_steps=3)
    assert (
        trained.hybrid_engine.enabled
        and trained.is_sharded
        and trained.micro_batch_size == ds["train_micro_batch_size_per_gpu"]
    )
    assert type(trained._engine).__name__ == "DeepSpeedEngine", "DeepSpeed's own hybrid engine would replace it"


def test_frozen_engine_gives_the_model_s_numbers_without_a_graph() -> None:
    rows = steps_of_rows(1)[0]
    expected = loss_sum(tiny_opt(dropout=0.5).eval(), rows)
    for name in ("cpu_frozen", "cpu_frozen_zero3"):
        frozen = FrozenEngine(tiny_opt(dropout=0.5), ds=ds_config.load(name), role="reference")
        found = loss_sum(frozen, rows)
        assert not found.requires_grad and not frozen.module.training
        torch.testing.assert_close(found, expected)
        state = frozen.full_state_dict()
        assert state is not None and all(value.numel() for value in state.values())


def test_a_plain_process_trains_in_silence() -> None:
    """F24, C11: no launcher, no accelerator, no compiler; nothing on stdout, nothing on stderr."""
    code = """
from rlhf import engine
engine.setup(timeout_seconds=60)
from tests.distributed.tiny import engine_of, steps_of_rows, tiny_opt, train_step
for name in ("cpu_zero0", "cpu_zero2", "cpu_zero3"):
    stats = train_step(engine_of(tiny_opt(), name, clip_norm=0.5), steps_of_rows(1)[0])[1]
    assert stats.grad_norm > 0 and not stats.skipped
"""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
    environment = {key: value for key, value in os.environ.items() if key not in names}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**environment, "PATH": "/nonexistent", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).resolve().parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""


def test_save_rotate_and_resume_a_run(tmp_path: Path) -> None:
    trained = engine_of(tiny_opt(), "cpu_zero2")
    checkpoints(TinyRun(tmp_path), {"policy": trained}).resume()  # nothing to do
    for rows in steps_of_rows(3):
        train_step(trained, rows)
        step = trained.step_count
        checkpoints(TinyRun(tmp_path), {"policy": trained}, part=Counter(10 * step)).save(step)
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names == ["step_00000002", "step_00000003", "tokenizer"], "keep_states 2, nothing half-written"

    run, part = TinyRun(tmp_path, resume=True), Counter()
    second = engine_of(tiny_opt(seed=4), "cpu_zero2")
    checkpoints(run, {"policy": second}, part=part).resume()
    assert (run.first_step, part.value, second.step_count) == (3, 30, 3)
    first_state, second_state = trained.full_state_dict(), second.full_state_dict()
    assert first_state is not None and second_state is not None
    assert all(torch.equal(first_state[key], second_state[key]) for key in first_state)
    with pytest.raises(StateError, match=r"was saved with \['part'\], this run has \['loader'\]"):
        checkpoints(run, {"policy": second}, loader=part).resume()


def test_head_weights_initialised_under_zero3_are_sane() -> None:
    """C19: a new scalar head built sharded has weights, finite and of the size asked for."""
    from transformers import AutoModelForSequenceClassification

    from tests.distributed.tiny import opt_config

    with engine.zero3_init(ds_config.load("cpu_zero3")):
        model = AutoModelForSequenceClassification.from_config(opt_config(num_labels=1))
    trained = engine_of(model, "cpu_zero3")
    state = trained.full_state_dict()
    assert state is not None
    head = state["score.weight"]
    assert head.shape == (1, 32) and torch.isfinite(head).all() and 0.005 < head.std().item() < 0.05
    assert isinstance(trained.module, nn.Module)


def test_logging_level_of_deepspeed() -> None:
    assert logging.getLogger("DeepSpeed").level >= logging.WARNING


@pytest.mark.parametrize(("name", "kept"), [("cpu_zero0", 8), ("cpu_zero1", 12), ("cpu_zero2", 12), ("cpu_zero3", 12)])
def test_bytes_of_states_are_those_of_adam(name: str, kept: int) -> None:
    """4 a weight, 4 its gradient, two moments of 4, and from ZeRO-1 on a copy of 4; flat buffers are padded a little.

    A moment's step counter is a number for each weight tensor, or for each flat buffer.
    """
    trained = engine_of(tiny_opt(), name)
    train_step(trained, steps_of_rows(1)[0])
    weights = sum(p.numel() for p in tiny_opt().parameters())
    found = trained.state_bytes()
    assert found["weights"] == 4 * weights
    assert found["gradients"] == pytest.approx(4 * weights, rel=0.02)
    assert found["optimizer"] == pytest.approx(kept * weights, rel=0.03)


def test_a_frozen_model_has_weights_alone() -> None:
    weights = sum(p.numel() for p in tiny_opt().parameters())
    assert FrozenEngine(tiny_opt(), ds=ds_config.load("cpu_frozen_bf16"), role="x").state_bytes() == {
        "weights": 2 * weights
    }
