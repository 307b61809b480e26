"""Which ways to run a trained model go together: the pairs that are refused, and why. No torch.

`python -m rlhf.combinations docs/parallelism.md` writes the table into that page. A pair that is not refused is run
against plain training by tests/distributed/test_combinations.py.
"""

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
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
    """All that says how a trained model runs."""

    ds: Mapping[str, Any]
    """Content of its DeepSpeed JSON."""
    model: ModelConfig
    optim: OptimConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

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
        is_on=lambda role: role.zero.get("zero_hpz_partition_size", 1) > 1),
    Way(name="optimizer offload", knob="offload_optimizer", setting="zero_optimization.offload_optimizer",
        is_on=lambda role: role.offloads("offload_optimizer")),
    Way(name="weight offload", knob="offload_param", setting="zero_optimization.offload_param",
        is_on=lambda role: role.offloads("offload_param")),
    Way(name="bf16", knob="dtype", setting="bf16.enabled",
        is_on=lambda role: ds_config.dtype_name(role.ds) == "bfloat16"),
    _optimizer("Muon", "muon"),
    _optimizer("8-bit AdamW", "adamw_8bit"),
    _recompute("selective"),
    _recompute("full"),
    Way(name="activation offload", knob="offload_activations", setting="model.offload_activations",
        is_on=lambda role: role.model.offload_activations),
    Way(name="float8", knob="float8", setting="model.float8", is_on=lambda role: role.model.float8 != "off"),
    Way(name="compile", knob="compile", setting="model.compile", is_on=lambda role: role.model.compile),
    Way(name="LoRA", knob="lora", setting="model.lora.rank", is_on=lambda role: role.model.lora.rank > 0),
    Way(name="rows shared", knob="sp", setting="parallel.sp", is_on=lambda role: role.parallel.sp > 1),
)  # fmt: skip
BY_NAME = {way.name: way for way in WAYS}

_NO_SHARDS = "there are no shards of weights below ZeRO-3. Use a JSON of stage 3, or leave it out."
REFUSED: Mapping[tuple[str, str], str] = {
    **{(f"ZeRO-{stage}", "hpZ"): _NO_SHARDS for stage in range(3)},
    **{(f"ZeRO-{stage}", "weight offload"): _NO_SHARDS for stage in range(3)},
    ("ZeRO-0", "optimizer offload"): "DeepSpeed offloads shards of moments, and ZeRO-0 has none. Use stage 1, 2 or 3.",
    ("optimizer offload", "8-bit AdamW"):
        "the kernel works on the accelerator's memory. Use optim.name=adamw, or a JSON without offload.",
    ("recompute selective", "activation offload"):
        "its products are kept where they cannot be taken away. Set recompute to full or none.",
    ("compile", "rows shared"): "it has not been tried. Set one of the two off.",
}  # fmt: skip
"""Two ways, in the order of WAYS -> why they do not go together, and what to do."""


def ways_of(role: Role) -> list[Way]:
    """All that are on."""
    return [way for way in WAYS if way.is_on(role)]


def check(role: Role) -> None:
    """Check that how a model runs is nothing that is refused.

    Raises:
        ValueError: it is.
    """
    for one, other in itertools.combinations(ways_of(role), 2):
        why = REFUSED.get((one.name, other.name))
        if why:
            raise ValueError(f"{other.setting} ({other.name}) does not go with {one.setting} ({one.name}): {why}")


def pairs() -> Iterator[tuple[Way, Way]]:
    """All pairs of ways that do not exclude each other by name, refused ones among them."""
    for one, other in itertools.combinations(WAYS, 2):
        if one.knob != other.knob:
            yield one, other


def markdown() -> str:
    """The table: a cell is `yes`, or the number of the reason below."""
    reasons = list(dict.fromkeys(REFUSED.values()))
    head = ["", *(way.name for way in WAYS[:-1])]
    rows = []
    for line, way in enumerate(WAYS[1:], start=1):
        cells = []
        for column, other in enumerate(WAYS[:-1]):
            why = REFUSED.get((other.name, way.name))
            is_pair = column < line and way.knob != other.knob
            cells.append("" if not is_pair else f"no ({reasons.index(why) + 1})" if why else "yes")
        rows.append([way.name, *cells])
    listed = "\n".join(f"{number}. {reason[0].upper()}{reason[1:]}" for number, reason in enumerate(reasons, start=1))
    return f"{markdown_table([head, *rows])}\n\n{listed}"


if __name__ == "__main__":
    write_section(Path(sys.argv[1]), markdown(), begin=BEGIN, end=END)
