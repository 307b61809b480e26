"""From a published figure's configuration to the same figure by the plan. No torch.

Conventions of the sources: Megatron, BigScience, SC21 and DeepSpeed count 24 c B s L h^2 (1 + s / 6h + V / 16 L h)
FLOPs with c = 4 when all is computed twice, 3 when not; MosaicML, torchtitan and Megatron-Bridge count 6 P + 12 L h s a
token, without recomputation; both with all pairs of a sequence.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhf.plan import memory
from rlhf.plan.hardware import Device
from rlhf.plan.layout import Layout, Stack
from rlhf.plan.published import Record
from rlhf.plan.rollout import Work, rollout, score
from rlhf.plan.shapes import MODELS, Shape
from rlhf.plan.step import step
from rlhf.plan.systems import CHAT, Case, find_case

QUERIES = 264_292
"""Prompts of DeepSpeed-Chat's benchmark setting, 256 tokens each and as many drawn."""
STEP1_ROWS, STEP2_ROWS = 58_880 * 2, 117_760
"""Rows of Lambda's step 1 (two passes) and pairs of step 2, as many as the hours of its reference stand for."""
A100_HOURS = {"step1": 2.5, "step2": 0.25, "step3": 10.8}
"""DeepSpeed-Chat's hours on 8x A100-40 for OPT-13B: what Lambda's ratios were measured against."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One figure: published, and the plan's."""

    record: Record
    group: str
    kind: str
    """time, memory or scaling: how its error is judged."""
    fitted: bool
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.published - 1


def predict(record: Record, devices: Mapping[str, Device]) -> Prediction:
    """The plan's value of a figure.

    Raises:
        ValueError: the reason why there is none.
    """
    if record.number is None or record.number <= 0:
        raise ValueError("not a number")
    case = find_case(record, devices)
    kind, value = _value(record, case, devices)
    if value <= 0:
        raise ValueError("it takes no time in this layout")
    system = case[0]
    return Prediction(
        record=record, group=system.group, kind=kind, fitted=kind in system.fitted,
        published=record.number * _memory_unit(record, kind), predicted=value,
    )  # fmt: skip


def _memory_unit(record: Record, kind: str) -> float:
    return 1.0737 if kind == "memory" and record.unit == "GiB" else 1.0


def _value(record: Record, case: Case, devices: Mapping[str, Device]) -> tuple[str, float]:
    system, shape, layout, device, stack = case
    metric = record.metric.lower()
    if "memory" in metric and "step3" not in record.system:
        return "memory", _memory(record, case) / 1e9
    if "scale-up" in metric:
        return "scaling", _scale_up(case)
    if "scaling efficiency" in metric:
        return "scaling", _efficiency(metric, case)
    if "h100/a100 speedup" in metric:
        return "time", _ratio(metric, devices)
    if system.group.startswith("DeepSpeed-Chat") or system.group == "Lambda step 3":
        return _chat(record, case)
    if system.group == "Lambda step 2":
        return "time", layout.global_batch / _reward(shape, layout, device, stack)
    seconds = step(shape, layout, device, stack).total
    return "time", _throughput(record, metric, case, seconds)


def _throughput(record: Record, metric: str, case: Case, seconds: float) -> float:
    _system, shape, layout, device, stack = case
    tokens = layout.global_batch * layout.length / layout.gpus / seconds
    if "iteration time" in metric:
        return seconds
    if record.unit == "tokens/s/GPU" or "tps" in metric:
        return tokens
    if "samples/s" in record.unit:
        return layout.global_batch / seconds
    if record.unit == "days":
        return 300e9 / (tokens * layout.gpus) / 86400
    rate = tokens * _flops_per_token(record, shape, layout)
    if "range" in metric:
        raise ValueError("a range")
    if record.unit == "TFLOPS":
        return rate / 1e12
    if record.unit == "%" and ("mfu" in metric or "hfu" in metric or "peak" in metric):
        again = 4 / 3 if "hfu" in metric and layout.recompute == "full" and _model_flops(record) else 1
        return 100 * rate * again / device.peak(layout.dtype)
    raise ValueError("the metric is not known")


def _model_flops(record: Record) -> bool:
    return bool(re.search("MosaicML|torchtitan|Megatron-Bridge|Megatron-Core|Megatron SP", record.system))


def _flops_per_token(record: Record, shape: Shape, layout: Layout) -> float:
    """As the source counts them."""
    if _model_flops(record) and "Megatron-Core" not in record.system and "Megatron SP" not in record.system:
        whole = 6 * shape.parameters + 12 * shape.layers * shape.heads * shape.head_size * layout.length
        return whole * (2 / 3 if layout.lora else 1)  # frozen weights have no gradient of their own
    factor = 4 if layout.recompute == "full" and not _model_flops(record) else 3
    weights = shape.linear_per_token + shape.layers * 4 * shape.hidden * layout.length
    # The logits are counted once more than c says they are made: V / 16 L h is exact for c = 4.
    return factor * weights + 3 * shape.head_per_token


def _memory(record: Record, case: Case) -> float:
    _system, shape, layout, _device, stack = case
    if "log" in record.system:
        if layout.gpus < 16 or "DPO" in record.system:
            raise ValueError("settings are not said")
        layout = replace(layout, micro_batch=8 if "step1" in record.system else 4, length=512, recompute="none")
    if "step2" in record.system:
        layout = _pairs(layout)
        stack = replace(stack, logit_bytes=0)
    found = memory.training(shape, layout, stack)
    # PyTorch's own counter has no fragments in it; a reading of the device or of what is reserved has.
    return found.total - found.reserve * ("max GPU memory" in record.metric)


def _pairs(layout: Layout) -> Layout:
    return replace(layout, micro_batch=2 * layout.micro_batch)


def _reward(shape: Shape, layout: Layout, device: Device, stack: Stack) -> float:
    return step(shape, _pairs(layout), device, stack, with_head=False).total


def _scale_up(case: Case) -> float:
    _system, shape, layout, device, stack = case
    if shape is MODELS["opt-13b"]:  # the scripts of that run: ZeRO-0 and adapters
        layout = replace(layout, zero=0, lora=128, recompute="full")
    one = replace(layout, gpus=8)

    def rate(where: Layout) -> float:
        return where.global_batch / step(shape, where, device, stack).total

    return rate(layout) / rate(one)


def _efficiency(metric: str, case: Case) -> float:
    """Frontier's curves: weak keeps the accumulation, strong the batch of about 8000 sequences."""
    _system, shape, layout, device, stack = case
    small = replace(layout, gpus=layout.model_ranks)
    if "strong" in metric:
        batch = 8000 // layout.micro_batch
        layout = replace(layout, accumulation=max(1, batch // layout.data))
        start = 2 * small.data  # the smallest run of the curve, as far as the source shows it
        small = replace(small, gpus=layout.model_ranks * start, accumulation=max(1, batch // start))

    def rate(where: Layout) -> float:
        return where.global_batch / where.gpus / step(shape, where, device, stack).total

    return 100 * rate(layout) / rate(small)


def _ratio(metric: str, devices: Mapping[str, Device]) -> float:
    """H100 hours of Lambda's scripts against the published hours of DeepSpeed-Chat."""
    which = metric.split()[0]
    stack, device = CHAT, devices["h100-sxm"]
    if which == "step1":
        layout = Layout(gpus=8, length=512, micro_batch=4, zero=3, lora=128, embeddings_trained=True,
                        recompute="full", dtype="fp16")  # fmt: skip
        rows = STEP1_ROWS * step(MODELS["opt-13b"], layout, device, stack).total / layout.global_batch
        return A100_HOURS[which] / (rows / 3600)
    if which == "step2":
        layout = Layout(gpus=8, length=512, micro_batch=4, dtype="fp16")
        return A100_HOURS[which] / (STEP2_ROWS * _reward(MODELS["opt-350m"], layout, device, stack) / 32 / 3600)
    layout = Layout(gpus=8, length=512, micro_batch=16, zero=3, lora=128, embeddings_trained=True, recompute="full",
                    dtype="fp16")  # fmt: skip
    parts = ppo(MODELS["opt-13b"], layout, device, stack)
    return A100_HOURS[which] / (117_760 * sum(parts.values()) / layout.global_batch / 3600)


def ppo(shape: Shape, layout: Layout, device: Device, stack: Stack) -> dict[str, float]:
    """Seconds of one iteration of DeepSpeed-Chat, one update for each row, critic and reward model OPT-350M."""
    reward = MODELS["opt-350m"]
    rows = layout.micro_batch * layout.accumulation
    half = layout.length // 2
    drawn = rollout(shape, layout, device, Work(rows=rows, batch=layout.micro_batch, prompt=half, response=half))
    scoring = 2 * score(shape, layout, device, rows, stack=stack)
    scoring += 2 * score(reward, replace(layout, lora=0), device, rows, stack=stack, head=False)
    trained = step(shape, layout, device, stack).total
    critic = step(reward, replace(layout, lora=0), device, replace(stack, gather_messages=16), with_head=False).total
    return {
        "gather": drawn.gather, "generation": drawn.prefill + drawn.decode, "train": trained + critic,
        "others": scoring,
    }  # fmt: skip


def _chat(record: Record, case: Case) -> tuple[str, float]:
    """Figures of DeepSpeed-Chat's three steps."""
    _system, shape, layout, device, stack = case
    metric = record.metric
    if "step1" in record.system:
        layout = replace(layout, micro_batch=8, length=512, recompute="none")
        return "time", layout.global_batch / step(shape, layout, device, stack).total
    if "step2" in record.system:
        if "DPO" in record.system:
            raise ValueError("the hardware is not said")
        layout = replace(layout, micro_batch=4, accumulation=1, length=512)
        return "time", layout.global_batch / _reward(shape, layout, device, stack)
    if record.hidden is None or re.search("e2e (step1|step2|total)", metric):
        raise ValueError("epochs are not said")
    layout = _chat_layout(record, layout)
    if "memory" in metric:
        return "memory", _ppo_memory(shape, layout, stack) / 1e9
    return "time", _iteration(metric, shape, layout, device, ppo(shape, layout, device, stack))


def _iteration(metric: str, shape: Shape, layout: Layout, device: Device, parts: Mapping[str, float]) -> float:
    """A figure of step 3 from the seconds of an iteration's phases."""
    total, rows = sum(parts.values()), layout.global_batch
    for name, seconds in parts.items():
        if f"{name} latency" in metric:
            return seconds
        if f"time/seq {name.removesuffix('s')}" in metric:
            return seconds / rows * layout.gpus
    hours = QUERIES / rows * total / 3600
    if metric in ("step3 time", "e2e step3 time"):
        return hours
    if metric == "step3 cost":
        return hours * layout.gpus * device.usd_per_hour
    if "e2e latency" in metric:
        return total
    if "seq/s" in metric or "throughput" in metric.lower():
        return rows / total
    return _chat_tflops(metric, shape, layout, parts)


def _chat_layout(record: Record, layout: Layout) -> Layout:
    """The published setting: a global batch of at most 1024 rows, ZeRO by size, adapters from 6.7B on."""
    big = (record.params or 0) > 5e9
    if "Lambda" in record.system:
        return replace(layout, accumulation=1)
    if "log" in record.system:
        return replace(layout, micro_batch=4, accumulation=1, length=512, recompute="none")
    rows = min(1024 // layout.gpus, 16 if big else 32)
    return replace(
        layout, length=512, micro_batch=max(1, rows), accumulation=1, dtype="fp16", zero=3 if big else 2,
        lora=128 if big else 0, embeddings_trained=True, recompute="full" if big else "none",
    )  # fmt: skip


def _chat_tflops(metric: str, shape: Shape, layout: Layout, parts: Mapping[str, float]) -> float:
    """As DeepSpeed-Chat's perf.py counts: 24 c B s L h^2 (1 + s / 6h + V / 16 L h), c 1, 3 or 4."""
    one = shape.linear_per_token + shape.layers * 4 * shape.hidden * layout.length + 0.75 * shape.head_per_token
    rows = layout.micro_batch * layout.length
    factor = 4 if layout.recompute == "full" else 3
    if "generation" in metric:
        return one * rows / (parts["generation"] + parts["gather"]) / 1e12
    if "train" in metric:
        return factor * one * rows / parts["train"] / 1e12
    if "effective" in metric:
        return (factor + 1) * one * rows / sum(parts.values()) / 1e12
    raise ValueError("the metric is not known")


def _ppo_memory(shape: Shape, layout: Layout, stack: Stack) -> float:
    """Peak of PyTorch's own counter over an iteration, four models on every rank.

    The hybrid engine's kernels of that time took the memory of their caches past that counter.
    """
    reward = MODELS["opt-350m"]
    critic = replace(layout, lora=0)
    actor = memory.training(shape, layout, stack)
    critic_memory = memory.training(reward, critic, stack)
    frozen = memory.reading(shape, shape.parameters, layout, rows=0, length=0)
    scoring = memory.reading(reward, reward.backbone_parameters, critic, rows=0, length=0)
    staying = actor.states + critic_memory.states + frozen.weights + scoring.weights
    update = max(actor.total - actor.reserve - actor.states, critic_memory.total - critic_memory.states)
    whole = 2.0 * shape.parameters if layout.sharded else 0.0
    return staying + max(update, whole)
