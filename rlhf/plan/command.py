"""`rlhf plan`, `rlhf plan compare`, `rlhf plan scale` and `rlhf plan validate`. No torch."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhf import terminal
from rlhf.artifacts import write_json
from rlhf.plan import compare, published, scale
from rlhf.plan.emit import LoadJson, Template, as_lines, emit, hub_name, make_fit
from rlhf.plan.hardware import find_device, load_devices
from rlhf.plan.scale_plot import write_plot
from rlhf.plan.search import decide, search
from rlhf.plan.setting import Choices, Configs, Setting, from_models, from_recipe
from rlhf.plan.show import (
    as_json,
    said_run,
    show_comparison,
    show_plan,
    show_remedies,
    show_scaling,
    show_search,
    show_validation,
)
from rlhf.plan.steps import plan_step, remedies
from rlhf.plan.validate import Validation, validate
from rlhf.sections import markdown_table, write_section

BEGIN = "<!-- rlhf plan validate: begin -->"
END = "<!-- rlhf plan validate: end -->"
FOR_MODELS = "opt_13b_350m_single_node"
"""Recipe that gives `--emit` what two models do not say."""
ReadRecipe = Callable[[str], tuple[str, Configs, int]]
"""Name of a recipe -> its name, its stages' configs, its devices."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where recipes and DeepSpeed JSON come from; what reads them lies above this package."""

    read_recipe: ReadRecipe
    recipe_folder: Callable[[str], Path]
    load: LoadJson


def main(arguments: argparse.Namespace, sources: Sources) -> int:
    """Print what was asked for; 0, or 2 if something cannot be used."""
    console = terminal.console()
    try:
        if arguments.plan_command == "validate":
            return _validate(arguments, console)
        setting = _setting(arguments, sources)
        numbers = _numbers(arguments.steps, setting)
        if arguments.plan_command == "compare":
            return _compare(arguments, console, setting, numbers)
        if arguments.plan_command == "scale":
            return _scale(arguments, console, setting, numbers)
        return _plan(arguments, console, setting, numbers, sources)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"rlhf plan: {error}\n")
        return 2


def _plan(
    arguments: argparse.Namespace, console: Console, setting: Setting, numbers: Sequence[int], sources: Sources
) -> int:
    plans = [plan_step(setting, number) for number in numbers]
    show_plan(console, setting, plans)
    for plan in plans:
        if plan.missing > 0:
            show_remedies(console, plan, remedies(setting, plan.number))
    if arguments.search:
        _search(setting, console)
    if arguments.json is not None:
        write_json(arguments.json, as_json(setting, plans))
    if arguments.emit is not None:
        _emit(arguments, console, setting, sources)
    return 0


def _emit(arguments: argparse.Namespace, console: Console, setting: Setting, sources: Sources) -> None:
    if setting.steps != (1, 2, 3):
        raise ValueError(f"--emit writes three stages, and {setting.name} has not all of them. Take another recipe.")
    if arguments.recipe is not None:
        template = Template(folder=sources.recipe_folder(arguments.recipe))
    else:
        if setting.actor.vocabulary != setting.reward.vocabulary:
            raise ValueError(
                f"--emit: --actor {arguments.actor} has {setting.actor.vocabulary:,} tokens and --reward "
                f"{arguments.reward} {setting.reward.vocabulary:,}; the stages need both to read the same ones. Name "
                "two models of one tokenizer."
            )
        folder = sources.recipe_folder(FOR_MODELS)
        template = Template(folder=folder, actor=hub_name(arguments.actor), reward=hub_name(arguments.reward))
    setting, changes = make_fit(setting, (1, 2, 3))
    command = emit(setting, arguments.emit, template=template, load=sources.load)
    plans = [plan_step(setting, number) for number in (1, 2, 3)]
    console.print("\n".join(as_lines(plans, changes, command)))


def _compare(arguments: argparse.Namespace, console: Console, setting: Setting, numbers: Sequence[int]) -> int:
    second = find_device(arguments.second, load_devices(arguments.hardware))
    found = compare.compare(setting, second, numbers)
    show_comparison(console, setting, second, found)
    if arguments.json is not None:
        write_json(arguments.json, compare.as_json(setting, second, found))
    return 0


def _scale(arguments: argparse.Namespace, console: Console, setting: Setting, numbers: Sequence[int]) -> int:
    counts = scale.counts_up_to(arguments.largest, smallest=arguments.smallest)
    found = scale.curves(setting, numbers, counts, jitter=arguments.jitter)
    show_scaling(console, setting, found)
    if arguments.plot is not None:
        write_plot(arguments.plot, f"{setting.name} on {setting.device.name}", found)
    if arguments.json is not None:
        write_json(arguments.json, scale.as_json(setting, found))
    return 0


def _numbers(text: str | None, setting: Setting) -> list[int]:
    if text is None:
        return list(setting.steps)
    words = text.split(",")
    if not set(words) <= {"1", "2", "3"}:
        raise ValueError(f"--steps {text!r} is not made of 1, 2 and 3 with commas between.")
    numbers = sorted({int(word) for word in words})
    missing = [number for number in numbers if number not in setting.steps]
    if missing:
        raise ValueError(f"--steps {text}: {setting.name} has no step {', '.join(map(str, missing))}. Leave it out.")
    return numbers


def _setting(arguments: argparse.Namespace, sources: Sources) -> Setting:
    if (arguments.recipe is None) == (arguments.actor is None):
        raise ValueError("give either --recipe NAME or --actor MODEL.")
    devices = load_devices(arguments.hardware)
    if arguments.gpu is None:
        raise ValueError(f"--gpu is missing. There are {', '.join(devices)}.")
    device = find_device(arguments.gpu, devices)
    choices = _choices(arguments)
    if arguments.recipe is not None:
        name, stages, gpus = sources.read_recipe(arguments.recipe)
        gpus = gpus if arguments.gpus is None else arguments.gpus
        return from_recipe(name, stages, device, _positive(gpus), load=sources.load, choices=choices)
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
    if arguments.offload_activations and arguments.recompute == "selective":
        raise ValueError("--offload-activations does not go with --recompute selective. Use full or none.")
    if not 0 <= arguments.recompute_budget < 1:
        raise ValueError(f"--recompute-budget must be in [0, 1), got {arguments.recompute_budget:g}.")
    return Choices(
        recompute_budget=arguments.recompute_budget, offload_activations=arguments.offload_activations,
        prompt=arguments.prompt, response=arguments.response, zero=arguments.zero, micro_batch=arguments.micro_batch,
        global_batch=arguments.global_batch, recompute=arguments.recompute, dtype=arguments.dtype, lora=arguments.lora,
        tensor=arguments.tensor, pipeline=arguments.pipeline, virtual=arguments.virtual, sp=arguments.sp,
        offload=arguments.offload,
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
