"""Which ways to run a trained model go together: the pairs that are refused, and why. No torch.

`python -m rlhf.combinations docs/parallelism.md` writes the table into that page. A pair that is not refused is run
against plain training by tests/distributed/test_combinations.py.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf import ds_config
from rlhf.config import ModelConfig, OptimConfig, ParallelConfig
from rlhf.sections import markdown_table, write_section

BEGIN = "<!-- python -m rlhf.combinations: begin -->"
END = "<!-- python -m rlhf.combinations: end -->"


@dataclass(frozen=True, kw_only=True)
class Role:
    """All that says how a trained model runs; what is refused cannot be made.

    Raises:
        ValueError: ways that are on do not go together.
    """

    ds: Mapping[str, Any]
    """Content of its DeepSpeed JSON."""
    model: ModelConfig
    optim: OptimConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        on = {way.name: f"{way.setting} ({way.name})" for way in ways_of(self)}
        for names, why in REFUSED.items():
            if on.keys() >= set(names):
                *others, last = (on[name] for name in names)
                raise ValueError(f"{last} does not go with {' and '.join(others)}: {why}")

    @property
    def zero(self) -> Mapping[str, Any]:
        """The JSON's section."""
        section: Mapping[str, Any] = self.ds.get("zero_optimization", {})
        return section

    def offloads(self, section: str) -> bool:
        """Whether the section names a device."""
        return bool((self.zero.get(section) or {}).get("device", "none") != "none")


@dataclass(frozen=True, kw_only=True)
class Way:
    """One value of one knob."""

    name: str
    knob: str
    """Ways of one knob exclude each other."""
    setting: str
    """What switches it on, as in the recipe or the JSON."""
    is_on: Callable[[Role], bool]
    runs_here: bool = True
    """On a CPU too; else no test has run it."""


def _zero(stage: int) -> Way:
    return Way(
        name=f"ZeRO-{stage}", knob="zero", setting=f"zero_optimization.stage={stage}",
        is_on=lambda role: ds_config.zero_stage(role.ds) == stage,
    )  # fmt: skip


def _optimizer(name: str, value: Any) -> Way:
    return Way(name=name, knob="optimizer", setting=f"optim.name={value}", is_on=lambda role: role.optim.name == value)


def _recompute(value: Any) -> Way:
    return Way(
        name=f"recompute {value}", knob="recompute", setting=f"model.recompute={value}",
        is_on=lambda role: role.model.recompute == value,
    )  # fmt: skip


WAYS = (
    *(_zero(stage) for stage in range(4)),
    Way(name="hpZ", knob="hpZ", setting="zero_optimization.zero_hpz_partition_size",
        is_on=lambda role: (role.zero.get("zero_hpz_partition_size") or 1) > 1),
    Way(name="qgZ", knob="qgZ", setting="zero_optimization.zero_quantized_gradients",
        is_on=lambda role: bool(role.zero.get("zero_quantized_gradients"))),
    Way(name="qwZ", knob="qwZ", setting="zero_optimization.zero_quantized_weights", runs_here=False,
        is_on=lambda role: bool(role.zero.get("zero_quantized_weights"))),
    Way(name="optimizer offload", knob="offload_optimizer", setting="zero_optimization.offload_optimizer",
        is_on=lambda role: role.offloads("offload_optimizer")),
    Way(name="weight offload", knob="offload_param", setting="zero_optimization.offload_param",
        is_on=lambda role: role.offloads("offload_param")),
    Way(name="bf16", knob="dtype", setting="bf16.enabled",
        is_on=lambda role: ds_config.dtype_name(role.ds) == "bfloat16"),
    Way(name="fp16", knob="dtype", setting="fp16.enabled", runs_here=False,
        is_on=lambda role: ds_config.dtype_name(role.ds) == "float16"),
    _optimizer("Muon", "muon"),
    _optimizer("8-bit AdamW", "adamw_8bit"),
    _recompute("selective"),
    _recompute("full"),
    Way(name="activation offload", knob="offload_activations", setting="model.offload_activations",
        is_on=lambda role: role.model.offload_activations),
    Way(name="float8", knob="float8", setting="model.float8", is_on=lambda role: role.model.float8 != "none"),
    Way(name="compile", knob="compile", setting="model.compile", is_on=lambda role: role.model.compile),
    Way(name="LoRA", knob="lora", setting="model.lora.rank", is_on=lambda role: role.model.lora.rank > 0),
    Way(name="rows shared", knob="sp", setting="parallel.sp", is_on=lambda role: role.parallel.sp > 1),
    Way(name="layers dealt", knob="pp", setting="parallel.pp", is_on=lambda role: role.parallel.pp > 1),
    Way(name="weights shared", knob="tp", setting="parallel.tp", is_on=lambda role: role.parallel.tp > 1),
)  # fmt: skip
BY_NAME = {way.name: way for way in WAYS}

_NO_SHARDS = "there are no shards of weights below ZeRO-3. Use a JSON of stage 3, or leave it out."
_NEIGHBOURS = "ZeRO++ has neighbouring ranks hold the same weights, and here they have different shares. Leave it out."
_UNTRIED = "it has not been tried. Set one of the two off."
_CLIP = "DeepSpeed's clip at stage 0 counts the first rank's shares alone. Use a JSON of stage 1 or above."
REFUSED: Mapping[tuple[str, ...], str] = {
    **{(f"ZeRO-{stage}", way): _NO_SHARDS for stage in range(3) for way in ("hpZ", "qgZ", "qwZ", "weight offload")},
    **{(way, "weights shared"): _NEIGHBOURS for way in ("hpZ", "qgZ", "qwZ")},
    **{("ZeRO-0", dtype, "weights shared"): _CLIP for dtype in ("bf16", "fp16")},
    **{(name, "weights shared"): "it would take a rank's share of a weight for the whole. Use optim.name=adamw."
       for name in ("Muon", "8-bit AdamW")},
    **{(way, "layers dealt"): "it is ZeRO-3's, and a pipeline takes a JSON of stage 1 or 0. Set one of the two off."
       for way in ("hpZ", "qgZ", "qwZ", "weight offload")},
    **{(f"ZeRO-{stage}", "layers dealt"):
       "gradients or weights would be exchanged in every micro-batch. Use a JSON of stage 1 or 0." for stage in (2, 3)},
    ("fp16", "layers dealt"): "an overflow on one stage is not known to the others. Use bf16.",
    ("ZeRO-0", "bf16", "layers dealt"):
        "at stage 0 gradients become fp32 inside DeepSpeed's step only, where no norm over all layers is taken. Use "
        "a JSON of stage 1.",
    ("LoRA", "layers dealt"): "adapters are not dealt. Set one of the two off; a frozen base fits by ZeRO-3.",
    **{(way, "layers dealt"): _UNTRIED
       for way in ("optimizer offload", "Muon", "8-bit AdamW", "compile", "rows shared")},
    ("layers dealt", "weights shared"): _UNTRIED,
    ("LoRA", "weights shared"): "adapters are not shared. Set one of the two off.",
    ("float8", "weights shared"): _UNTRIED,
    ("compile", "weights shared"): _UNTRIED,
    ("rows shared", "weights shared"): _UNTRIED,
    ("ZeRO-0", "optimizer offload"): "DeepSpeed offloads shards of moments, and ZeRO-0 has none. Use stage 1, 2 or 3.",
    ("optimizer offload", "8-bit AdamW"):
        "the kernel works on the accelerator's memory. Use optim.name=adamw, or a JSON without offload.",
    ("recompute selective", "activation offload"):
        "its products are kept where they cannot be taken away. Set recompute to full or none.",
}  # fmt: skip
"""Two ways or three, in the order of WAYS -> why they do not go together, and what to do."""


def ways_of(role: Role) -> list[Way]:
    """All that are on."""
    return [way for way in WAYS if way.is_on(role)]


def pairs() -> Iterator[tuple[Way, Way]]:
    """All pairs of ways of two knobs, refused ones among them."""
    return ((one, other) for one, other in itertools.combinations(WAYS, 2) if one.knob != other.knob)


def markdown() -> str:
    """The table: a cell is `yes`, `not run` here, or `no` with the number of the reason below."""
    reasons = list(dict.fromkeys(REFUSED.values()))
    head = ["", *(way.name for way in WAYS[:-1])]
    rows = [
        [way.name, *(_cell(other, way, reasons) if column < line else "" for column, other in enumerate(WAYS[:-1]))]
        for line, way in enumerate(WAYS[1:], start=1)
    ]
    listed = [f"{number}. {reason[0].upper()}{reason[1:]}" for number, reason in enumerate(reasons, start=1)]
    for names, reason in REFUSED.items():
        if len(names) > 2:
            listed[reasons.index(reason)] += f" ({', '.join(names)} together.)"
    return f"{markdown_table([head, *rows])}\n\n" + "\n".join(listed)


def _cell(one: Way, other: Way, reasons: Sequence[str]) -> str:
    if one.knob == other.knob:
        return ""
    if why := REFUSED.get((one.name, other.name)):
        return f"no ({reasons.index(why) + 1})"
    return "yes" if one.runs_here and other.runs_here else "not run"


if __name__ == "__main__":
    write_section(Path(sys.argv[1]), markdown(), begin=BEGIN, end=END)
