"""Engines, rows and timers that `rlhf.bench.probe` measures a machine with."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf import ds_config
from rlhf.bench.assets import make_language
from rlhf.config import ModelConfig, OptimConfig
from rlhf.data.collate import TokenBatch, collate_sft
from rlhf.data.dataset import SFTRow
from rlhf.distributed import all_gather_objects, barrier, device, device_type, synchronise
from rlhf.engine import TrainEngine, zero3_init
from rlhf.models.build import build_causal_lm
from rlhf.models.policy import Policy

VOCABULARY = 512
HEAD_SIZE = 64
WIDE = (1, 3)
"""Layers of the models that compute."""
ATTEMPTS = 5
"""At a measurement that other work on the machine can turn round."""


def zero_json(stage: int) -> str:
    """Name of the DeepSpeed JSON of a ZeRO stage for this device."""
    return f"cpu_zero{stage}" if device_type() == "cpu" else f"zero{stage}"


class Timer:
    """Seconds of pieces of work, on all ranks at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, work: Callable[[], object], *, least: int = 3) -> float:
        """Median over as many calls as fit the time, of the slowest rank. Collective."""
        work()
        synchronise()
        barrier()
        start = time.perf_counter()
        work()
        synchronise()
        calls = max(all_gather_objects(max(least, int(self.seconds / max(time.perf_counter() - start, 1e-7)))))
        times = []
        for _ in range(min(calls, 200)):
            start = time.perf_counter()
            work()
            synchronise()
            times.append(time.perf_counter() - start)
        return max(all_gather_objects(statistics.median(times)))


def make_engine(config: dict[str, Any], json_name: str) -> TrainEngine:
    """An untrained policy to be trained. Collective."""
    ds = ds_config.load(json_name)
    with zero3_init(ds):
        model = build_causal_lm(ModelConfig(config=config), make_language(VOCABULARY).tokenizer, seed=1)
    return TrainEngine(Policy(model), ds=ds, optim=OptimConfig(lr=1e-7), role="policy", num_steps=1_000_000)


def make_batch(lengths: Sequence[int]) -> TokenBatch:
    """One packed row of sequences of these lengths, half of each with a loss."""
    generator = np.random.default_rng(0)
    rows = [
        SFTRow(
            token_ids=generator.integers(10, VOCABULARY, length).astype(np.int32),
            loss_mask=np.arange(length) >= length // 2,
            source=0,
            index=i,
        )  # fmt: skip
        for i, length in enumerate(lengths)
    ]
    return collate_sft(rows, pad_id=1, device=device(), packed=True)


def accumulate(engine: TrainEngine, batch: TokenBatch) -> None:
    """Forward and backward pass of a step's only micro-batch."""
    output = engine(**batch.sequences.inputs, target_mask_BT=batch.loss_mask_BT)
    engine.accumulate(-(output.logprob_BT * batch.loss_mask_BT).sum(), count=float(batch.num_targets), last=True)


def train_step(engine: TrainEngine, batch: TokenBatch) -> None:
    """A whole update."""
    accumulate(engine, batch)
    engine.step()


def step_seconds(engine: TrainEngine, batch: TokenBatch) -> float:
    """Of an update behind its backward pass: clipping and the optimiser; the slowest rank's median. Collective."""
    times = []
    for _ in range(6):
        accumulate(engine, batch)
        synchronise()
        start = time.perf_counter()
        engine.step()
        synchronise()
        times.append(time.perf_counter() - start)
    return max(all_gather_objects(statistics.median(times[1:])))


def disturbed(what: str) -> RuntimeError:
    """The error of a measurement that makes no sense."""
    return RuntimeError(
        f"{what}: other work on this machine hides what is measured. Run it again when the machine is quiet, or with "
        "a longer --seconds."
    )
