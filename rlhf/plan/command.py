"""`rlhf plan` and `rlhf plan validate`. No torch."""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from rlhf.artifacts import write_json
from rlhf.plan import published
from rlhf.plan.hardware import find_device, load_devices
from rlhf.plan.search import decide, search
from rlhf.plan.setting import Choices, Configs, Setting, from_models, from_recipe
from rlhf.plan.show import as_json, said_run, show_plan, show_remedies, show_search, show_validation
from rlhf.plan.steps import plan_step, remedies
from rlhf.plan.validate import Validation, validate
from rlhf.sections import markdown_table, write_section

BEGIN = "<!-- rlhf plan validate: begin -->"
END = "<!-- rlhf plan validate: end -->"
WIDTH = 120
"""Columns where there is no terminal."""
ReadRecipe = Callable[[str], tuple[str, Configs, int]]
"""Name of a recipe -> its name, its stages' configs, its devices."""


def main(arguments: argparse.Namespace, *, read_recipe: ReadRecipe, load: Callable[[str], Mapping[str, Any]]) -> int:
    """Print a plan, or the validation; 0, or 2 if something asked for cannot be used."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    try:
        if arguments.plan_command == "validate":
            return _validate(arguments, console)
        return _plan(arguments, console, read_recipe=read_recipe, load=load)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"rlhf plan: {error}\n")
        return 2


def _plan(
    arguments: argparse.Namespace, console: Console, *, read_recipe: ReadRecipe,
    load: Callable[[str], Mapping[str, Any]],
) -> int:  # fmt: skip
    numbers = _numbers(arguments.steps)
    setting = _setting(arguments, read_recipe=read_recipe, load=load)
    plans = [plan_step(setting, number) for number in numbers]
    show_plan(console, setting, plans)
    for plan in plans:
        if plan.missing > 0:
            show_remedies(console, plan, remedies(setting, plan.number))
    if arguments.search:
        _search(setting, console)
    if arguments.json is not None:
        write_json(arguments.json, as_json(setting, plans))
    return 0


def _numbers(text: str) -> list[int]:
    words = text.split(",")
    if not set(words) <= {"1", "2", "3"}:
        raise ValueError(f"--steps {text!r} is not made of 1, 2 and 3 with commas between.")
    return sorted({int(word) for word in words})


def _setting(
    arguments: argparse.Namespace, *, read_recipe: ReadRecipe, load: Callable[[str], Mapping[str, Any]]
) -> Setting:
    if (arguments.recipe is None) == (arguments.actor is None):
        raise ValueError("give either --recipe NAME or --actor MODEL.")
    devices = load_devices(arguments.hardware)
    if arguments.gpu is None:
        raise ValueError(f"--gpu is missing. There are {', '.join(devices)}.")
    device = find_device(arguments.gpu, devices)
    choices = _choices(arguments)
    if arguments.recipe is not None:
        name, stages, gpus = read_recipe(arguments.recipe)
        gpus = gpus if arguments.gpus is None else arguments.gpus
        return from_recipe(name, stages, device, _positive(gpus), load=load, choices=choices)
    if arguments.gpus is None:
        raise ValueError("--gpus is missing: the number of devices in all.")
    return from_models(arguments.actor, arguments.reward, device, _positive(arguments.gpus), choices)


def _positive(gpus: int) -> int:
    if gpus < 1:
        raise ValueError(f"--gpus must be >= 1, got {gpus}.")
    return gpus


def _choices(arguments: argparse.Namespace) -> Choices:
    for name in ("prompt", "response", "micro_batch", "global_batch", "demonstrations", "pairs", "prompts"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(arguments, name):g}.")
    if arguments.lora < 0:
        raise ValueError(f"--lora must be >= 0, got {arguments.lora}.")
    return Choices(
        prompt=arguments.prompt, response=arguments.response, zero=arguments.zero, micro_batch=arguments.micro_batch,
        global_batch=arguments.global_batch, recompute=arguments.recompute, dtype=arguments.dtype, lora=arguments.lora,
        tensor=arguments.tensor, pipeline=arguments.pipeline, virtual=arguments.virtual, offload=arguments.offload,
        demonstrations=arguments.demonstrations, pairs=arguments.pairs, prompts=arguments.prompts,
    )  # fmt: skip


def _search(setting: Setting, console: Console) -> None:
    layout = setting.sft.layout
    found = search(
        setting.actor, setting.device, setting.gpus, length=layout.length, global_batch=layout.global_batch,
        dtype=layout.dtype,
    )  # fmt: skip
    decision = decide(setting.actor.parameters, setting.device, setting.gpus)
    show_search(console, setting, found, decision=decision)


def _validate(arguments: argparse.Namespace, console: Console) -> int:
    found = validate(published.load(arguments.tables), load_devices(arguments.hardware))
    show_validation(console, found, every=not arguments.groups)
    if arguments.json is not None:
        write_json(arguments.json, _validation_json(found))
    if arguments.write is not None:
        write_section(arguments.write, validation_markdown(found), begin=BEGIN, end=END)
    return 0


def _validation_json(found: Validation) -> dict[str, Any]:
    return {
        "figures": [
            {
                "system": p.record.system, "run": said_run(p.record), "metric": p.record.metric, "unit": p.record.unit,
                "source": p.record.source, "group": p.group, "kind": p.kind, "fitted": p.fitted,
                "published": p.published, "predicted": p.predicted, "error": p.error,
            }
            for p in found.predictions
        ],
        "groups": [vars(group) | {"reached": group.reached} for group in found.groups],
        "sweeps": [vars(sweep) for sweep in found.sweeps],
        "left_out": found.reasons(),
    }  # fmt: skip


def validation_markdown(found: Validation) -> str:
    """Tables of groups, sweeps and what is left out, for a page."""
    groups = [["Group", "Of", "Constants", "Figures", "Median error", "90th percentile", "Bias", "Within goal"]]
    for g in found.groups:
        groups.append([g.name, g.kind, "fitted" if g.fitted else "judged", str(g.count), f"{g.median:.1%}",
                       f"{g.p90:.1%}", f"{g.bias:+.1%}", "yes" if g.reached else "no"])  # fmt: skip
    sweeps = [["Sweep", "Layouts", "Rank correlation", "Place of the published best"]]
    sweeps += [[s.name, str(s.count), f"{s.correlation:.2f}", str(s.best)] for s in found.sweeps]
    left = [["Left out", "Figures"], *[[reason, str(count)] for reason, count in found.reasons().items()]]
    return "\n\n".join(markdown_table(rows) for rows in (groups, sweeps, left))
