"""Do the stages fit the accelerators that were found? `rlhf plan`'s forecast, with real sizes. No torch."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from launch.cluster.devices import gpus_of
from launch.cluster.finding import EVERYWHERE, Finding
from launch.hostfile import Host
from launch.recipe import Stage
from rlhf import ds_config
from rlhf.config import to_dict
from rlhf.plan.hardware import load_devices
from rlhf.plan.setting import FED, from_recipe
from rlhf.plan.steps import STEPS, plan_step
from rlhf.plan.systems import device_name

_NUMBERS = {"sft": 1, "reward": 2, "ppo": 3}


def room_findings(
    name: str, stages: Sequence[Stage], hosts: Sequence[Host], facts_by_host: Mapping[str, Mapping[str, Any]]
) -> Iterator[Finding]:
    """Compare each stage's forecast with the least free accelerator among the slots.

    Args:
        name: of the recipe.
        stages: resolved; a forecast is made from all three.
        hosts: with the slots that are used.
        facts_by_host: answers of the probe.
    """
    free: dict[str, float] = {}
    models = []
    for host in hosts:
        used = [gpu for gpu in gpus_of(facts_by_host[host.name]).gpus if gpu.index in host.slots]
        models += [gpu.name for gpu in used]
        free |= {f"GPU {gpu.index} of {host.name}": gpu.free_bytes for gpu in used if gpu.free_bytes is not None}
    if not free:
        yield Finding(check="memory plan", host=EVERYWHERE, status="none", found="none: no accelerator")
        return
    where = min(free, key=lambda key: free[key])
    key = device_name(models[0])
    try:
        if key is None:
            raise ValueError(f"{models[0]} is not among the devices of rlhf plan")
        device = replace(load_devices()[key], memory_gb=free[where] / 1e9)
        world_size = sum(len(host.slots) for host in hosts)
        setting = from_recipe(name, configs_of(stages), device, world_size, load=ds_config.load)
        plans = {stage.folder: plan_step(setting, _NUMBERS[stage.name]) for stage in stages}
    except ValueError as error:
        yield Finding(check="memory plan", host=EVERYWHERE, status="not checked", found=str(error).rstrip("."))
        return
    for folder, plan in plans.items():
        phase = max(plan.memory, key=lambda name: plan.memory[name].total)
        found = f"{folder}: {plan.peak_memory / 1e9:.1f} GB foreseen in {phase}"
        if plan.missing > 0:
            yield Finding(
                check="memory plan", host=EVERYWHERE, status="failed", found=found,
                expected=f"at most the {free[where] / 1e9:.1f} GB free on {where}",
                repair=f"`rlhf plan --recipe {name} --gpu {key} --gpus {world_size} --steps {plan.number}` says what "
                f"would make {STEPS[plan.number]} fit.",
            )  # fmt: skip
        else:
            yield Finding(check="memory plan", host=EVERYWHERE, status="ok",
                          found=f"{found}, {free[where] / 1e9:.1f} GB free")  # fmt: skip


def configs_of(stages: Sequence[Stage]) -> dict[str, dict[str, Any]]:
    """Stage -> config as a mapping, with a mark in place of what another stage feeds."""
    configs = {}
    for stage in stages:
        config = copy.deepcopy(to_dict(stage.config))
        for key in stage.fed_keys:
            *sections, last = key.split(".")
            place = config
            for section in sections:
                place = place[section]
            place[last] = FED
        configs[stage.name] = config
    return configs
