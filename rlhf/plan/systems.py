"""What each published system ran: its program, device, network and what its tables leave unsaid. No torch.

Everything here is a property of a system, said in its source or by its kind of program; nothing is set for one row.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlhf.plan.hardware import Device, with_network
from rlhf.plan.layout import FP32, FP32_GRADIENTS, MIXED, Layout, Stack, StateBytes
from rlhf.plan.published import Record
from rlhf.plan.shapes import MODELS, Shape, gpt

CHAT = Stack(
    attention="eager", pointwise="eager", gathers=3, gather_messages=18, logit_bytes=4, dropout=True, host=3.4,
    overlap=0.58, serial_overflow_check=True,
)  # fmt: skip
"""DeepSpeed-Chat of 2023 through transformers: eager attention; LoRA's factors and the matrices they adapt are gathered
one by one, forward, for the recomputation and backward."""
ZERO3 = Stack(
    attention="fused", pointwise="fused", gathers=3, gather_messages=4, logit_bytes=8, dropout=True, overlap=0.6
)
"""Megatron's model under DeepSpeed's ZeRO-3."""
MEGATRON = Stack(
    attention="fused", pointwise="fused", gradient_overlap=False, scattered_pipeline=True, gradients_kept=True,
    dropout=True, host=0.7, context_bytes=7e9,
)  # fmt: skip
"""Megatron-LM of 2021 and Megatron-DeepSpeed: fused softmax, dropout, gradients in a buffer, reduced at the end."""
MEGATRON_CORE = Stack(
    attention="flash", pointwise="compiled", tensor_overlap=0.5, gather_overlap=True, scattered_pipeline=True,
    states=FP32_GRADIENTS, gradients_kept=True, host=0.5, live_layers=2, overlap=0.9,
)  # fmt: skip
"""Megatron-Core of 2024 and later: fused kernels, tensor collectives in pieces under products, reduction overlapped."""
FSDP = Stack(states=FP32, live_layers=2, logit_bytes=14, overlap=0.85)
MOSAIC = replace(FSDP, attention="flash1")
"""PyTorch's FSDP: sharded fp32 states, weights gathered in two bytes, a layer ahead."""
INTERN = Stack(
    attention="flash1", pointwise="fused", states=StateBytes(weights=2, gradients=2, optimizer=22), gradients_kept=True,
    live_layers=2,
)  # fmt: skip
"""InternEvo: its optimiser makes fp32 copies of gradients and updates (fitted: its own table of memory)."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A published system."""

    group: str
    """Rows that are judged together."""
    pattern: str
    """Regular expression of `Record.system`."""
    stack: Stack
    device: str = ""
    """Default; "" where the record's hardware says it."""
    fitted: frozenset[str] = frozenset()
    """Of "time" and "memory", what constants were set on."""
    recompute: str = "none"
    micro_batch: int = 1
    virtual: Mapping[int, int] = field(default_factory=dict)
    """Pieces a stage by number of stages, where the source does not say."""
    network: tuple[int, float] | None = None
    """Cards of a machine and Gbit/s of one, where they differ from the device's usual machine."""
    sequence_parallel: bool = False
    zero: int = 0
    """ZeRO stage where the record does not say one."""


_FIT_TIME = frozenset({"time"})
_FIT_MEMORY = frozenset({"memory"})

SYSTEMS: tuple[System, ...] = (
    System(group="Lambda step 1", pattern="Lambda DeepChat step1", stack=CHAT, fitted=_FIT_TIME | _FIT_MEMORY,
           recompute="full"),
    System(group="Lambda step 2", pattern="Lambda DeepChat step2", stack=CHAT),
    System(group="Lambda step 3", pattern="Lambda DeepChat step3", stack=CHAT, recompute="full", fitted=_FIT_TIME),
    System(group="Lambda ratios", pattern="Lambda DeepChat$", stack=CHAT, recompute="full"),
    System(group="DeepSpeed-Chat step 3", pattern="DeepSpeed-Chat (step3|e2e)", stack=CHAT, recompute="full"),
    System(group="DeepSpeed-Chat logs", pattern="DeepSpeed-Chat step[123] log|DeepSpeed-Chat step2 DPO", stack=CHAT,
           device="v100-32", fitted=_FIT_TIME),
    System(group="DeepSpeed-Chat generation", pattern="DeepSpeed-Chat$", stack=CHAT),
    System(group="MosaicML MPT", pattern="MosaicML", stack=MOSAIC, fitted=_FIT_TIME),
    System(group="torchtitan", pattern="torchtitan", stack=FSDP, device="h100-96", network=(8, 400)),
    System(group="Megatron SC21, weak scaling", pattern="Megatron-LM SC21", stack=MEGATRON, recompute="full",
           network=(8, 200)),
    System(group="Megatron SC21, table 2", pattern="SC21 Table2 PTD-P", stack=MEGATRON, recompute="full",
           virtual={12: 4, 35: 3}, network=(8, 200)),
    System(group="ZeRO-3 of SC21, table 2", pattern="SC21 Table2 ZeRO-3",
           stack=replace(ZERO3, single_card=True), recompute="full",
           network=(8, 200)),
    # A gathering of weights that runs under the forward pass, as this program's does, is that of its distributed
    # optimiser: ZeRO-1.
    System(group="Megatron-Core r0.8", pattern="Megatron-Core", stack=MEGATRON_CORE, virtual={4: 4, 8: 4, 16: 4},
           sequence_parallel=True, zero=1),
    System(group="Megatron, selective", pattern="Megatron SP", stack=replace(MEGATRON, dropout=True),
           sequence_parallel=True, virtual={8: 3, 35: 3, 64: 2}, network=(8, 200)),
    System(group="Megatron-Bridge", pattern="Megatron-Bridge", stack=MEGATRON_CORE, sequence_parallel=True),
    System(group="BigScience tr11", pattern="BigScience", stack=MEGATRON, device="a100-80",
           fitted=_FIT_TIME | _FIT_MEMORY, recompute="full", network=(4, 100)),
    System(group="InternEvo", pattern="InternEvo 7B", stack=INTERN, network=(4, 100)),
    System(group="InternEvo memory", pattern="InternEvo memory", stack=INTERN, fitted=_FIT_MEMORY,
           network=(4, 100)),
    System(group="DeepSpeed ZeRO-3, Azure", pattern="DeepSpeed ZeRO-3",
           stack=ZERO3, network=(8, 200),
           recompute="full"),
    System(group="ZeRO-3 and ZeRO++ on V100", pattern="ZeRO-3$|ZeRO\\+\\+$",
           stack=ZERO3, device="v100-32",
           recompute="full"),
    System(group="Frontier", pattern="Frontier", stack=replace(MEGATRON, attention="flash", dropout=False),
           device="mi250x-gcd", recompute="full", fitted=_FIT_TIME),
)  # fmt: skip

LEFT_OUT = {
    "OpenRLHF": "its rollout is another engine's (Ray, vLLM), whose settings are not said",
    "DeepSpeed-Chat w/": "generation without the hybrid engine",
    "DeepSpeed-Chat (no HE": "generation without the hybrid engine",
    "DeepSpeed-Chat user": "lengths and batches are not said",
    "DeepSpeed-Chat e2e (user": "settings are not said",
    "optimised DeepSpeed-Chat": "batches are not said",
    "NeMo-RL": "lengths are not said",
    "HF-DDP": "generation without caches",
    "Colossal-AI": "generation without caches",
    "DS-Chat ZeRO": "batches are not said",
    "Megatron-LM 530B": "the layout is not said",
}
"""System -> why nothing is predicted for it."""


def find_system(record: Record) -> System | str:
    """The system of a record, or the reason why it is left out."""
    for name, reason in LEFT_OUT.items():
        if record.system.startswith(name):
            return reason
    for system in SYSTEMS:
        if re.search(system.pattern, record.system):
            return system
    return "the system is not known"


_HARDWARE: tuple[tuple[str, str], ...] = (
    (r"GB300", "gb300"), (r"GB200", "gb200"), (r"B200", "b200"), (r"H200", "h200"), (r"96\s?GB", "h100-96"),
    (r"(?i)h100", "h100-sxm"), (r"A800", "a800-80"), (r"(?i)a100.?(sxm4.?)?40|a100_40", "a100-40"),
    (r"(?i)a100", "a100-80"), (r"A6000", "a6000"), (r"V100", "v100-32"), (r"MI250X", "mi250x-gcd"),
    (r"MI300", "mi300x"),
)  # fmt: skip


def device_name(text: str) -> str | None:
    """Key of the device that a text such as `NVIDIA H100 80GB HBM3` means; None if none of them."""
    return next((name for pattern, name in _HARDWARE if re.search(pattern, text)), None)


def find_device(record: Record, system: System, devices: Mapping[str, Device]) -> Device:
    """Device of a record in its system's machines.

    Raises:
        ValueError: neither the record nor the system says which it is.
    """
    name = device_name(record.hardware) or system.device
    if not name:
        raise ValueError("the hardware is not said")
    name = "h100-96" if system.device == "h100-96" else name
    device = devices[name]
    if "MosaicML" in record.system and name.startswith("a100"):
        return with_network(device, nics=8, nic_gbit_s=200)
    if name == "v100-32":
        cards = {"1 IB": (1, 100), "4 IB": (4, 100), "200Gb": (2, 100), "800Gb": (8, 100)}
        for said, (nics, rate) in cards.items():
            if said in record.hardware:
                return with_network(device, nics=nics, nic_gbit_s=rate)
    if system.network is not None:
        return with_network(device, nics=system.network[0], nic_gbit_s=system.network[1])
    return device


UNSAID: dict[str, tuple[int, int, int]] = {
    "18B": (40, 6144, 48), "49B": (50, 9216, 72), "91B": (57, 11520, 90), "138B": (86, 11520, 90),
}  # fmt: skip
"""(layers, hidden, heads) of models that their source names by size alone: the usual ratio of depth to width."""


def find_shape(record: Record) -> Shape:
    """Shape of a record's model.

    Raises:
        ValueError: neither its name nor its sizes say it.
    """
    name = (record.model or "").lower().split("+")[0].replace("llama3.1-", "llama3-").replace("llama3.3-", "llama3-")
    if name in MODELS:
        return MODELS[name]
    if record.system.startswith("Frontier") and f"gpt-{name}" in MODELS:
        return MODELS[f"gpt-{name}"]
    if record.model in UNSAID and record.hidden is None:
        layers, hidden, heads = UNSAID[record.model]
        return gpt(layers, hidden, heads)
    if name == "internlm-20b":
        return _gated(60, 5120, 40, 13824, 103168)
    if name.startswith("internlm"):
        return _gated(32, 4096, 32, 11008, 103168)
    if record.hidden is None:
        raise ValueError("the model's shape is not said")
    hidden, vocabulary = round(record.hidden), record.whole("vocab", 51200)
    heads, length = record.whole("heads", max(1, hidden // 128)), record.whole("seq", 2048)
    layers = record.whole("layers", 0)
    if not layers and record.params:
        layers = round((record.params - (vocabulary + length) * hidden) / (12 * hidden * hidden))
    shape = gpt(layers, hidden, heads, vocabulary=vocabulary, positions=length)
    if "mpt" in name:
        shape = replace(shape, qkv_bias=False, out_bias=False, mlp_bias=False, norm_vectors=1)
    if record.ffn:
        shape = replace(shape, intermediate=round(record.ffn), mlp_matrices=3)
    return shape


def _gated(layers: int, hidden: int, heads: int, intermediate: int, vocabulary: int) -> Shape:
    return replace(
        MODELS["llama2-7b"], layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_size=hidden // heads,
        intermediate=intermediate, vocabulary=vocabulary, embedding=hidden,
    )  # fmt: skip


FRONTIER: dict[str, dict[str, int]] = {
    "22B": {"n_gpus": 16, "tp": 1, "pp": 8, "mbs": 1, "gbs": 640, "seq": 2048, "zero_stage": 0},
    "175B": {"n_gpus": 128, "tp": 4, "pp": 16, "mbs": 1, "gbs": 640, "seq": 2048, "zero_stage": 1},
    "1T": {"n_gpus": 512, "tp": 8, "pp": 64, "mbs": 1, "gbs": 1600, "seq": 2048, "zero_stage": 1},
}
"""Layouts behind Frontier's percentages: the author's launch scripts and the paper's tuned settings."""


def find_layout(record: Record, system: System, device: Device) -> Layout:
    """Layout of a record.

    Raises:
        ValueError: too little of it is said.
    """
    if system.group == "Frontier" and record.tp is None:
        if record.model not in FRONTIER:
            raise ValueError("the layout is not said")
        said: dict[str, float] = {**FRONTIER[record.model]}
        said["n_gpus"] = record.n_gpus or said["n_gpus"]
        record = replace(record, **said)  # type: ignore[arg-type]
    if "PTD-P" in record.system:
        size = int(re.sub(r"\D", "", record.note) or 8)
        record = replace(record, tp=8, pp=size // 8)
    if record.n_gpus is None:
        raise ValueError("the number of devices is not said")
    gpus, tensor, pipeline = record.whole("n_gpus"), record.whole("tp"), record.whole("pp")
    context, micro = record.whole("cp"), record.whole("mbs", system.micro_batch)
    length = record.whole("seq", 2048)
    match = re.search(r"(\d+)K tokens/GPU", record.note)
    if match:
        length, micro = 1024, int(match.group(1))
    virtual = record.whole("vpp", system.virtual.get(pipeline, 1))
    if record.vpp is None and "interleaved" in record.note.lower():
        virtual = 2
    data = max(1, gpus // (tensor * pipeline * context))  # Layout refuses what does not divide
    if system.group == "torchtitan" and pipeline > 1:  # it cuts its local batch into as many micro-batches as stages
        accumulation, micro = pipeline, max(1, micro // pipeline)
    elif record.gas is not None:
        accumulation = round(record.gas)
    else:
        accumulation = max(1, round(record.gbs / (data * micro))) if record.gbs else 1
    recompute = _recompute(record, system)
    zero = record.whole("zero_stage", system.zero)
    return Layout(
        gpus=gpus, length=length, micro_batch=micro, accumulation=accumulation,
        zero=min(zero, 1) if pipeline > 1 else zero, tensor=tensor, pipeline=pipeline,
        virtual=virtual if pipeline > 1 else 1, context=context,
        sequence_parallel=tensor > 1 and (system.sequence_parallel and recompute != "full" or zero == 3),
        recompute=recompute,  # type: ignore[arg-type]
        dtype=_dtype(record, device), lora=_lora(record),
        embeddings_trained="Bridge" not in record.system, zero_group=_zero_group(record),
        offload_optimizer="offload" in record.system and "Azure" in record.system,
        offload_activations="cpu" in (record.act_ckpt or ""),
    )  # fmt: skip


def _lora(record: Record) -> int:
    """Rank of adapters; Megatron-Bridge's tables say only that there are some, its default is 32."""
    rank = record.whole("lora", 0)
    return 32 if rank and "Bridge" in record.system else rank


def _zero_group(record: Record) -> int:
    match = re.search(r"zero1=(\d+)", record.system)
    return int(match.group(1)) if match else 0


def _recompute(record: Record, system: System) -> str:
    said = (record.act_ckpt or system.recompute).lower()
    return next((name for name in ("none", "selective", "full") if said.startswith(name)), "none")


def _dtype(record: Record, device: Device) -> str:
    """Type of the products: what the record says first, else the device's 16-bit type."""
    said = (record.precision or "").lower().split("(")[0].split(" ")[0]
    order = ("fp4", "fp8", "bf16", "fp16", "fp32")
    usual = "bf16" if "bf16" in device.peak_tflops else "fp16"
    return next((name for name in order if name in said), usual)


def find_stack(record: Record, system: System, layout: Layout) -> Stack:
    """Program of a record: its system's, with what the record says of it."""
    stack = system.stack
    if "compile" in record.note.lower() or (system.group == "torchtitan" and layout.dtype == "fp8"):
        stack = replace(stack, pointwise="compiled", host=0.5)
    if "asynctp" in record.note.lower():
        stack = replace(stack, tensor_overlap=0.5)
    if "ZeRO++" in record.system:
        stack = replace(stack, quantised_gather=True)
    if layout.dtype == "bf16" and "fp32 grad" in (record.precision or ""):
        stack = replace(stack, states=FP32_GRADIENTS)
    if system.stack is CHAT and not layout.lora:
        stack = replace(stack, gather_messages=6, states=MIXED)
    return stack


COUNTS = (
    "n_gpus", "params", "layers", "hidden", "heads", "kv_heads", "ffn", "seq", "vocab", "tp", "pp", "vpp", "cp", "mbs",
    "gas", "gbs",
)  # fmt: skip
"""Fields of a record that are at least 1 where they are said."""
Case = tuple[System, Shape, Layout, Device, Stack]


def find_case(record: Record, devices: Mapping[str, Device]) -> Case:
    """Everything a prediction needs.

    Raises:
        ValueError: the reason why there is none.
    """
    system = find_system(record)
    if isinstance(system, str):
        raise ValueError(system)
    for name in COUNTS:
        value = getattr(record, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} is not a count")
    device = find_device(record, system, devices)
    layout = find_layout(record, system, device)
    return system, find_shape(record), layout, device, find_stack(record, system, layout)
