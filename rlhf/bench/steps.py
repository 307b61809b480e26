"""`rlhf bench step1|step2|step3`: a stage, started as `rlhf run` starts it, measured beside its plan. No torch."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.bench.process import exit_code, run_child
from rlhf.bench.result import NAMES, Foreseen, Result, check_target, write_result
from rlhf.bench.show import show_result
from rlhf.plan.hardware import Device, find_device, load_devices
from rlhf.plan.setting import Setting, dtype_of, from_recipe, sharers, with_lengths
from rlhf.plan.steps import StepPlan, plan_step

STAGES = {1: "sft", 2: "reward", 3: "ppo"}
_WHERE = ("num_gpus", "hostfile", "include", "exclude", "master_addr", "master_port", "launcher", "launcher_args")
_MARK = ".rlhf_bench"
_MANY_EPOCHS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What the launcher knows of a recipe."""

    name: str
    stages: Mapping[str, Mapping[str, Any]]
    """Resolved config of each stage, what the command line changes included."""
    feeds: Mapping[str, Mapping[str, str]]
    """Stage -> key of its config -> the stage whose model it reads."""
    folders: Mapping[str, str]
    """Stage -> its folder in a run."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What lies above this package."""

    read_recipe: Callable[[str, Sequence[str]], Recipe]
    """Name and overrides -> the recipe."""
    load: Callable[[str], Mapping[str, Any]]
    """Reads a DeepSpeed JSON by name."""


def main(arguments: argparse.Namespace, overrides: Sequence[str], sources: Sources) -> int:
    """Measure one step; 0, 1 if a stage failed, 2 if something cannot be used."""
    return exit_code(lambda: _run(arguments, overrides, sources))


def _run(arguments: argparse.Namespace, overrides: Sequence[str], sources: Sources) -> None:
    result = measure(arguments, overrides, sources)
    show_result(result)
    if arguments.json is not None:
        write_result(arguments.json, result)


def prepare(
    arguments: argparse.Namespace, number: int, overrides: Sequence[str], sources: Sources
) -> tuple[Recipe, Device | None]:
    """The recipe, and the device to plan for.

    Raises:
        ValueError: a flag or the recipe cannot be used; nothing was started or written.
    """
    stage = STAGES[number]
    for flag, value in (("--steps", arguments.steps), ("--warmup", arguments.warmup), ("--profile", arguments.profile)):
        least = 1 if flag == "--steps" else 0
        if value < least:
            raise ValueError(f"{flag}={value} must be >= {least}.")
    recipe = sources.read_recipe(arguments.recipe, overrides)
    if stage not in recipe.stages:
        raise ValueError(f"recipe {recipe.name} has no {NAMES[number]}.")
    device = _device(arguments)
    if device is not None:  # what cannot be planned is said before it is measured
        ranks = arguments.num_gpus or max(max(sharers(config).values()) for config in recipe.stages.values())
        from_recipe(recipe.name, recipe.stages, device, ranks, load=sources.load)
    return recipe, device


def measure(arguments: argparse.Namespace, overrides: Sequence[str], sources: Sources) -> Result:
    """Run the stage and read what it left.

    Raises:
        ValueError: a flag, the recipe or the folder cannot be used; nothing was started or removed.
        ChildError: a stage failed.
    """
    number = int(arguments.bench_command.removeprefix("step"))
    stage = STAGES[number]
    recipe, device = prepare(arguments, number, overrides, sources)
    if arguments.json is not None:
        check_target(arguments.json, recipe.name)
    work = arguments.work.resolve()
    run = work / "run"
    if run.exists() and not (work / _MARK).is_file():
        raise ValueError(f"--work {work} holds a `run` that this command did not make. Name another folder.")
    argv = command(arguments, recipe, stage, overrides, run)
    work.mkdir(parents=True, exist_ok=True)
    (work / _MARK).write_text("made by rlhf bench\n", encoding="utf-8")
    shutil.rmtree(run, ignore_errors=True)
    sys.stdout.write(f"{NAMES[number]} of {recipe.name}; log in {work / 'log.txt'}\n")
    sys.stdout.flush()
    run_child(argv, environment={**os.environ, "WANDB_MODE": "disabled"}, log=work / "log.txt",
              timeout=arguments.timeout)  # fmt: skip
    kept = slice(arguments.warmup, arguments.warmup + arguments.steps)
    folder = run / recipe.folders[stage]
    return read(folder, recipe, number, kept, settings=overrides, device=device, load=sources.load)


def _device(arguments: argparse.Namespace) -> Device | None:
    if arguments.gpu is None and arguments.hardware is None:
        return None
    devices = load_devices(arguments.hardware)
    if arguments.gpu is not None:
        return find_device(arguments.gpu, devices)
    own = sorted(set(devices) - set(load_devices()))
    if len(own) != 1:
        raise ValueError(
            f"--hardware {arguments.hardware} adds {', '.join(own) or 'no new device'}: say which by --gpu."
        )
    return devices[own[0]]


def command(
    arguments: argparse.Namespace, recipe: Recipe, stage: str, overrides: Sequence[str], run: Path
) -> list[str]:
    """`rlhf run` of the stage, after the stages that it needs, each cut to one step, unless their models are given."""
    chosen, changes = [stage], measured_settings(recipe, stage, arguments)
    feeds = recipe.feeds[stage]
    if arguments.models is not None:
        if arguments.models.resolve().is_relative_to(run):
            raise ValueError(
                f"--models {arguments.models} is the run that this measurement replaces. Use another --work."
            )
        for key, source in feeds.items():
            folder = arguments.models.resolve() / recipe.folders[source] / "model"
            if not folder.is_dir():
                raise ValueError(
                    f"--models {arguments.models}: {folder} is not there. Name a folder that `rlhf run` wrote."
                )
            changes.append(f"--{stage}.{key}={folder}")
    else:
        chosen = [*_needed(recipe, stage), stage]
        for other in chosen[:-1]:
            changes += [f"--{other}.max_steps=1", *_quiet(recipe, other)]
    for name in (word.removeprefix("--").partition(".")[0] for word in overrides if word.startswith("--")):
        if name not in chosen:
            raise ValueError(f"--{name}.KEY: stage {name} is not part of this measurement, only {', '.join(chosen)}.")
    argv = [sys.executable, "-m", "rlhf.cli", "run", "--recipe", arguments.recipe, "--out", str(run)]
    for flag in _WHERE:
        value = getattr(arguments, flag)
        if value not in (None, "") and not (flag == "launcher" and value == "pdsh"):
            argv += [f"--{flag}", str(value)]
    argv += ["--data", arguments.data] if arguments.data is not None else []
    argv += ["--no-check"] * arguments.no_check
    return [*argv, "--stages", *chosen, *changes, *overrides]


def _needed(recipe: Recipe, stage: str) -> list[str]:
    found: list[str] = []
    for source in recipe.feeds[stage].values():
        found += [*_needed(recipe, source), source]
    return [stage for stage in STAGES.values() if stage in found]


def measured_settings(recipe: Recipe, stage: str, arguments: argparse.Namespace) -> list[str]:
    """Flags of the stage that is measured: so many steps, a line for each, nothing beside them."""
    num_steps = arguments.warmup + arguments.steps + arguments.profile
    flags = [f"--{stage}.max_steps={num_steps}", f"--{stage}.run.log_every=1",
             f"--{stage}.run.profile_steps={arguments.profile}", *_quiet(recipe, stage)]  # fmt: skip
    if stage != "ppo":  # as many passes as it takes
        flags.append(f"--{stage}.epochs={_MANY_EPOCHS}")
    return flags


def _quiet(recipe: Recipe, stage: str) -> list[str]:
    """No evaluation, no states, no detectors that act."""
    flags = [f"--{stage}.eval.max_rows=0", f"--{stage}.run.eval_every=0", f"--{stage}.run.save_every=0",
             f"--{stage}.run.save_minutes=0", f"--{stage}.run.keep_best=null"]  # fmt: skip
    config = recipe.stages[stage]
    flags += [f"--{stage}.eval.generate_rows=0"] * ("generate_rows" in config["eval"])
    if config.get("normalise", {}).get("policy"):
        flags.append(f"--{stage}.normalise.rows={min(16, config['normalise']['rows'])}")
    for name, detector in config["run"]["health"].items():
        if isinstance(detector, Mapping) and detector.get("action") in ("stop", "rollback"):
            # Numbers that are not finite end a run in any case; the others say nothing about speed.
            flags.append(f"--{stage}.run.health.{name}.action={'stop' if name == 'non_finite' else 'warn'}")
    return flags


def read(
    folder: Path, recipe: Recipe, number: int, measured: slice, *, settings: Sequence[str], device: Device | None,
    load: Callable[[str], Mapping[str, Any]],
) -> Result:  # fmt: skip
    """The result of a stage's folder, of the train lines that are measured.

    Raises:
        ValueError: there are fewer.
    """
    config = recipe.stages[STAGES[number]]
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    train = [line for line in lines if line["split"] == "train"]
    kept = train[measured]
    if len(kept) < measured.stop - measured.start:
        raise ValueError(
            f"{folder}/metrics.jsonl holds {len(train)} train lines, fewer than {measured.stop}. Its log says why."
        )
    environment = json.loads((folder / "environment.json").read_text(encoding="utf-8"))
    hardware, ranks = environment["hardware"], int(environment["world_size"])
    seconds = [line["time/step_seconds"] for line in kept]
    rows = rows_of_step(number, config)
    tokens = sum(line["speed/tokens_per_second"] * line["time/step_seconds"] for line in kept) / len(kept)
    work = [line.get("speed/model_flops_per_second", 0.0) * line["time/step_seconds"] for line in kept]
    dtype = dtype_of(load(config["deepspeed"]["actor"] if number == 3 else config["deepspeed"]))
    plan = None
    if device is not None:
        setting = from_recipe(recipe.name, recipe.stages, device, ranks, load=load)
        plan = plan_step(_as_measured(setting, number, kept, tokens / rows), number)
    profile = folder / "profile" / "profile.json"
    profiled = json.loads(profile.read_text(encoding="utf-8"))["ranks"] if profile.is_file() else []
    return Result(
        number=number,
        recipe=recipe.name,
        settings=list(settings),
        hardware=hardware["cpu"] if hardware["accelerator"].startswith("none") else hardware["accelerator"],
        ranks=ranks,
        dtype=dtype,
        date=environment["started"][:10],
        git_commit=environment["git_commit"],
        versions=environment["versions"],
        rows=rows,
        step_seconds=seconds,
        tokens=tokens,
        phases=_phases(kept),
        flops_per_second=sum(work) / sum(seconds) if all(work) else None,
        hardware_factor=1.0 if plan is None else plan.hardware_flops / plan.model_flops,
        peak_flops=None if device is None else device.peak(dtype),
        padding_frac=_mean(kept, "data/padding_frac"),
        memory=_memory(kept[-1]),
        communication_frac=max((rank["communication_frac"] for rank in profiled), default=None),
        exposed_frac=max((rank["exposed_frac"] for rank in profiled), default=None),
        foreseen=None if plan is None or device is None else Foreseen(
            device=device.name, step_seconds=plan.step_seconds, phases=dict(plan.seconds),
            peak_bytes=_peak_bytes(plan, device),
        ),
    )  # fmt: skip


def _as_measured(setting: Setting, number: int, lines: Sequence[Mapping[str, float]], tokens: float) -> Setting:
    """The setting with the rows' mean lengths and the micro-batches that were measured; `tokens` of a row."""
    prompt, response = lengths_of(lines, number, tokens)
    micro_batch_tokens = _mean(lines, "speed/micro_batch_tokens")
    return with_lengths(
        setting, prompt=prompt, response=response,
        micro_batch_rows=None if micro_batch_tokens is None else micro_batch_tokens / tokens,
    )  # fmt: skip


def lengths_of(lines: Sequence[Mapping[str, float]], number: int, tokens: float) -> tuple[float, float]:
    """Mean tokens of prompt and response of a row of so many tokens.

    A row of step 2 may hold any number of responses, which share their prompt; it stands for a pair that takes as many
    columns of the model. Where nothing tells, half of the tokens are the response's.
    """
    if number == 2:
        columns = tokens * min(1.0, _mean(lines, "speed/columns_per_token") or 1.0)
        prompt = min(tokens - columns, columns)
        return (prompt, (columns - prompt) / 2) if prompt else (tokens / 4, tokens / 4)
    response = _mean(lines, "ppo/response_length") or tokens * (_mean(lines, "speed/target_frac") or 0.5)
    return tokens - response, response


def _peak_bytes(plan: StepPlan, device: Device) -> float:
    """What the measured peak counts: all of a process on a CPU, PyTorch's allocations on an accelerator."""
    if device.is_serial:
        return plan.peak_memory
    return max(phase.total - phase.context - phase.reserve for phase in plan.memory.values())


def rows_of_step(number: int, config: Mapping[str, Any]) -> float:
    """Sequences, pairs or responses of one step of a stage's config, over all ranks."""
    if number < 3:
        return float(config["global_batch_size"])
    return float(config["rollout"]["prompts_per_step"] * config["rollout"]["samples_per_prompt"])


def _mean(lines: Sequence[Mapping[str, float]], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return sum(values) / len(values) if values else None


def _phases(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for line in lines for name in line if name.startswith("time/") and name.endswith("_seconds")}
    names -= {"time/step_seconds", "time/cpu_seconds"}
    totals = {name: sum(line.get(name, 0.0) for line in lines) / len(lines) for name in sorted(names)}
    return {name.removeprefix("time/").removesuffix("_seconds"): total for name, total in totals.items()}


def _memory(line: Mapping[str, float]) -> dict[str, float]:
    """Bytes by what holds them; what is not a state is activations, caches, buffers, and the process itself."""
    found = {name: line.get(f"memory/{name}_bytes", 0.0) for name in ("weights", "gradients", "optimizer")}
    peak = line["memory/peak_bytes"]
    return {**found, "other": max(0.0, peak - sum(found.values())), "peak": peak}
