"""Program: what this machine computes, by the very layers and engines that training uses.

python -m rlhf.bench.probe --out FILE [--seconds S] [--disk DIR], one process a rank, by the deepspeed launcher

All ranks work at the same time, so what they share counts as each gets it. Times that do not depend on the size of a
model are slopes and intercepts over models of one and of five tiny layers.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf import artifacts, ds_config, host
from rlhf.bench.assets import make_language
from rlhf.bench.peak import copy_bytes_per_second
from rlhf.bench.sharded import measure_sharded
from rlhf.bench.trial import (
    ATTEMPTS,
    HEAD_SIZE,
    VOCABULARY,
    WIDE,
    Timer,
    accumulate,
    disturbed,
    make_batch,
    make_engine,
    step_seconds,
    train_step,
    zero_json,
)
from rlhf.bench.workload import opt
from rlhf.config import ModelConfig, SamplingConfig
from rlhf.data.dataset import PromptRow
from rlhf.data.packing import PackedLayout
from rlhf.distributed import (
    accelerator_name,
    all_gather_objects,
    barrier,
    device,
    device_type,
    is_main,
    shutdown,
    world_size,
)
from rlhf.engine import FrozenEngine, setup
from rlhf.models.build import build_causal_lm
from rlhf.models.linear import multiply, onednn_multiplies, product, reorder
from rlhf.models.policy import Policy
from rlhf.plan.layer import BACKWARD_BYTES, optimizer_bytes, pointwise_bytes, products
from rlhf.plan.layout import OURS, Layout
from rlhf.plan.measured import Measured
from rlhf.plan.shapes import Shape, shape_of
from rlhf.rollout.answers import Voice, draw_responses
from rlhf.rollout.sampling import TokenChooser

TINY = (1, 5)
"""Layers of the tiny models."""
_TINY_TOKENS = 16
_DECODE_ROWS, _NEW_TOKENS = 8, 24
_PACKED_BELOW = 128
"""Rows of a product below which the decoder makes it, on weights in oneDNN's order."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write JSON from rank 0; a collective."""
    parser = argparse.ArgumentParser(prog="rlhf.bench.probe", allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--disk", type=Path)
    parser.add_argument("--gather", action="store_true", help="only what ZeRO-3 adds to a layer")
    arguments = parser.parse_args(argv)
    setup()
    process_gb = _process_bytes() / 1e9
    timer, ranks = Timer(arguments.seconds), str(world_size())
    layer = TinyTimes(timer).gather_seconds()
    found: dict[str, Any] = {"gather_layer": {ranks: layer}}
    found |= {name: {ranks: rate} for name, rate in measure_sharded(layer).items()}
    if not arguments.gather:
        found |= {**measure(arguments.seconds), "process_gb": process_gb}
    if is_main():
        found["disk"] = measure_disk(arguments.disk) if arguments.disk is not None else {}
        artifacts.write_json(arguments.out, found)
    barrier()
    shutdown()
    return 0


def measure(seconds: float) -> dict[str, Any]:
    """Everything but collectives and disk; the slowest rank's. Collective."""
    timer = Timer(seconds)
    on_cpu = device_type() == "cpu"
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, **({} if on_cpu else {"fp16": torch.float16})}
    linear = {name: measure_products(dtype, timer) for name, dtype in dtypes.items()}
    attention = {name: measure_attention(dtype, timer) for name, dtype in dtypes.items()}
    tiny = TinyTimes(timer)
    found: dict[str, Any] = {
        "on_cpu": on_cpu,
        "hardware": accelerator_name() or host.cpu_name(),
        "peak_tflops": {name: max(max(row[3:]) for row in rows) for name, rows in linear.items()},
        "memory_gb": _memory_bytes() / 1e9,
        "bandwidth_gb_s": copy_gb_s(),
        "products": linear,
        "attention": attention,
        **tiny.measure(),
        "draw_logit": draw_seconds(timer),
    }
    found.update(measure_wide("fp32" if on_cpu else "bf16", found, timer))
    return found


def measure_products(dtype: torch.dtype, timer: Timer) -> list[list[float]]:
    """Rows of `Measured.products`: linear layers as training and, for few rows, decoding multiply them."""
    on_cpu = device_type() == "cpu"
    widths = ((128, 128), (512, 128), (128, 512), (512, 512), (2048, 512), (512, 2048), (1024, 1024), (4096, 1024),
              (1024, 4096), (16384, 512)) if on_cpu else (
        (512, 512), (2048, 512), (1024, 1024), (4096, 1024), (1024, 4096), (4096, 4096), (16384, 4096), (4096, 16384),
        (32768, 4096))  # fmt: skip
    rows = []
    for m in (8, 32, 256, 2048) if on_cpu else (32, 512, 4096, 16384):
        for n, k in widths:
            x, weight = (torch.randn(shape, device=device()).to(dtype) for shape in ((m, k), (n, k)))
            grad = torch.randn((m, n), device=device()).to(dtype)
            rows.append([m, n, k, *_linear_tflops(x, weight, grad, timer)])
    return rows


def _linear_tflops(x: Tensor, weight: Tensor, grad: Tensor, timer: Timer) -> tuple[float, float]:
    operations = 2 * grad.numel() * x.shape[1]
    if x.device.type == "cpu" and len(x) < _PACKED_BELOW and onednn_multiplies(x.dtype):
        packed = reorder(weight, num_rows=len(x))
        forward = timer(lambda: product(x, packed))
    else:
        forward = timer(lambda: multiply(x, weight))
    x.requires_grad_()
    weight.requires_grad_()

    def both() -> None:
        x.grad = weight.grad = None
        torch.autograd.backward(multiply(x, weight), grad)

    whole = timer(both)
    plain = timer(lambda: multiply(x, weight).detach())
    # Of a product of next to nothing the difference is noise.
    return operations / forward / 1e12, 2 * operations / max(whole - plain, whole / 3) / 1e12


def measure_attention(dtype: torch.dtype, timer: Timer) -> list[list[float]]:
    """Rows of `Measured.attention`: packed rows of one length, the lower triangle counted."""
    on_cpu = device_type() == "cpu"
    rows = []
    for length in (32, 128, 512) if on_cpu else (128, 512, 2048):
        tokens, heads = (1024, 4) if on_cpu else (8192, 16)
        layout = PackedLayout([length] * (tokens // length), device=device())
        parts = [torch.randn((1, heads, tokens, HEAD_SIZE), device=device()).to(dtype) for _ in range(3)]
        forward = timer(partial(layout.attend, *parts, scaling=None, dropout=0.0))
        grad = torch.randn((1, tokens, heads, HEAD_SIZE), device=device()).to(dtype)
        leaves = [part.requires_grad_() for part in parts]

        def both(leaves: list[Tensor] = leaves, layout: PackedLayout = layout, grad: Tensor = grad) -> None:
            torch.autograd.grad(layout.attend(*leaves, scaling=None, dropout=0.0), leaves, grad)

        whole = timer(both)
        operations = 2 * tokens * length * heads * HEAD_SIZE  # half of 4 for each pair
        rows.append([length, operations / forward / 1e12, 2.5 * operations / max(whole - forward, whole / 3) / 1e12])
    return rows


def copy_gb_s() -> float:
    """10^9 bytes read and written a second by a copy that no cache holds, while all ranks copy; the slowest rank's."""
    barrier()
    return min(all_gather_objects(copy_bytes_per_second(device()))) / 1e9


class TinyTimes:
    """Seconds that a layer, and what is around the layers, take when there is nothing to compute."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer

    def measure(self) -> dict[str, float]:
        """The fields of `Measured` that are seconds. Collective."""
        update_layer, update_step = self._line(lambda layers: self._update_seconds(layers, [_TINY_TOKENS], zero=0))
        score_layer, score_pass = self._line(self._score_seconds)
        decode_layer, decode_token = self._line(self._decode_seconds)
        return {
            "update_layer": update_layer, "update_step": update_step,
            "score_layer": score_layer, "score_pass": score_pass,
            "decode_layer": decode_layer, "decode_token": decode_token,
        }  # fmt: skip

    def gather_seconds(self) -> float:
        """What ZeRO-3 adds to a layer's update, whose tokens pass through its hooks. Collective."""
        whole, _ = self._line(lambda layers: self._update_seconds(layers, [64] * 16, zero=0))
        sharded, _ = self._line(lambda layers: self._update_seconds(layers, [64] * 16, zero=3))
        return max(1e-6, sharded - whole)

    def _line(self, seconds_of: Callable[[int], float]) -> tuple[float, float]:
        """(slope, intercept) over the layers, neither below a microsecond."""
        few, many = (seconds_of(layers) for layers in TINY)
        slope = max(1e-6, (many - few) / (TINY[1] - TINY[0]))
        return slope, max(1e-6, few - TINY[0] * slope)

    def _update_seconds(self, layers: int, lengths: Sequence[int], *, zero: int) -> float:
        engine = make_engine(opt(HEAD_SIZE, layers, 1, VOCABULARY, 128), zero_json(zero))
        batch = make_batch(lengths)
        return self.timer(lambda: train_step(engine, batch))

    def _frozen(self, layers: int) -> FrozenEngine:
        language = make_language(VOCABULARY)
        config = ModelConfig(config=opt(HEAD_SIZE, layers, 1, VOCABULARY, 128))
        name = "cpu_frozen" if device_type() == "cpu" else "frozen"
        return FrozenEngine(
            Policy(build_causal_lm(config, language.tokenizer, seed=1)), ds=ds_config.load(name), role="policy"
        )

    def _score_seconds(self, layers: int) -> float:
        engine, batch = self._frozen(layers), make_batch([_TINY_TOKENS])
        return self.timer(lambda: engine(**batch.sequences.inputs, target_mask_BT=batch.loss_mask_BT))

    def _decode_seconds(self, layers: int) -> float:
        """Of one token of all rows."""
        language, engine = make_language(VOCABULARY), self._frozen(layers)
        voice = Voice(
            tokenizer=language.tokenizer, template=language.template,
            sampling=SamplingConfig(min_new_tokens=_NEW_TOKENS), max_new_tokens=_NEW_TOKENS, batch_size=_DECODE_ROWS,
        )  # fmt: skip
        ids = np.arange(10, 14, dtype=np.int32)
        rows = [PromptRow(prompt_ids=ids, meta={}, text="", source=0, index=i, uid=i) for i in range(_DECODE_ROWS)]
        whole = self.timer(lambda: draw_responses(engine, voice, rows, sample_ids=[0] * len(rows), seed=1, step=1))
        return whole / _NEW_TOKENS


def draw_seconds(timer: Timer) -> float:
    """Of the draw, for each row and entry of the vocabulary."""
    rows, vocabulary = 32, 8192
    choose = TokenChooser(SamplingConfig(), (2,))
    logits, u = torch.randn(rows, vocabulary, device=device()), torch.rand(rows, dtype=torch.float64, device=device())
    position = torch.zeros(rows, dtype=torch.int64, device=device())
    return timer(partial(choose, logits, position, u)) / (rows * vocabulary)


def measure_wide(dtype: str, found: dict[str, Any], timer: Timer) -> dict[str, Any]:
    """Rates of pointwise operations and of the optimiser: what is left of a real step when the rest is known."""
    on_cpu = device_type() == "cpu"
    measured = Measured(**{key: found[key] for key in (
        "products", "attention", "update_layer", "update_step", "score_layer", "score_pass", "decode_layer",
        "decode_token", "draw_logit")}, gather_layer={}, gather_gb_s={},
        sharded_optimizer_gb_s={}, process_gb=1.0, pointwise=[], optimizer_gb_s=1.0)  # fmt: skip
    pointwise = []
    # (hidden, mean length, sequences)
    for hidden, length, sequences in ((128, 48, 24), (512, 128, 8)) if on_cpu else ((1024, 512, 16), (4096, 512, 8)):
        lengths = [round(length * (0.5 + i / (sequences - 1))) for i in range(sequences)]  # as ragged as rows are
        for _ in range(ATTEMPTS):
            times, updates, weights = [], [], []
            for layers in WIDE:
                config = opt(hidden, layers, hidden // HEAD_SIZE, VOCABULARY, 1024)
                engine, batch = make_engine(config, zero_json(0)), make_batch(lengths)
                times.append(timer(partial(accumulate, engine, batch)))
                updates.append(step_seconds(engine, batch))
                weights.append(shape_of(config).parameters)
            layer = (times[1] - times[0]) / (WIDE[1] - WIDE[0])
            if layer > 0 and updates[1] > updates[0]:
                break
        else:
            raise disturbed(f"{WIDE[1]} layers of width {hidden} took less time than {WIDE[0]}")
        shape = replace(shape_of(config), layers=1)
        layout = Layout(gpus=1, length=length, micro_batch=sequences, dtype=dtype)
        # Where pointwise operations cost next to nothing, noise could take it all.
        left = max(layer - _known_seconds(measured, shape, layout), 0.02 * layer)
        pointwise.append([hidden, pointwise_bytes(shape, layout, OURS) * (1 + BACKWARD_BYTES) / left / 1e9])
        update = (updates[1] - updates[0]) / (weights[1] - weights[0])
    return {"pointwise": pointwise, "optimizer_gb_s": optimizer_bytes(1, OURS) / update / 1e9}


def _known_seconds(measured: Measured, shape: Shape, layout: Layout) -> float:
    """Of a layer's update without its pointwise operations."""
    known = measured.update_layer
    for n, k in products(shape, 1):
        known += measured.product(layout.dtype, layout.tokens, n, k)
        known += measured.product(layout.dtype, layout.tokens, n, k, backward=True)
    operations = layout.micro_batch * shape.attention_per_pair * layout.length * layout.length / 2
    known += measured.attention_seconds(layout.dtype, operations, layout.length)
    return known + measured.attention_seconds(layout.dtype, operations, layout.length, backward=True)


def measure_disk(folder: Path) -> dict[str, float]:
    """10^9 bytes a second written to a file, to the disk itself, and read again, from wherever the system holds it."""
    path, block = folder / ".rlhf_bench_disk", os.urandom(1 << 24)
    count = 16
    try:
        start = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(count):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        written = time.perf_counter() - start
        start = time.perf_counter()
        with path.open("rb") as file:
            while file.read(len(block)):
                pass
        read = time.perf_counter() - start
    finally:
        path.unlink(missing_ok=True)
    return {"write_gb_s": count * len(block) / written / 1e9, "read_gb_s": count * len(block) / read / 1e9}


def _process_bytes() -> float:
    """Of this process so far: resident, or of the device's memory that it does not leave to others."""
    if device_type() == "cpu":
        return float(host.resident_bytes())
    torch.zeros(1, device=device())
    free, total = torch.accelerator.memory.get_memory_info(device())
    return float(total - free)


def _memory_bytes() -> float:
    """Of one rank: the device's, or its part of the machine's."""
    if device_type() == "cpu":
        return host.memory_bytes() / world_size()
    _, total = torch.accelerator.memory.get_memory_info(device())
    return float(total)


if __name__ == "__main__":
    sys.exit(main())
