"""A plan as a recipe: pipeline.yaml, the stages' YAML, their DeepSpeed JSON. No torch."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rlhf.plan.layout import Layout
from rlhf.plan.setting import Setting, Training
from rlhf.plan.steps import StepPlan, plan_step, remedies

LoadJson = Callable[[str], Mapping[str, Any]]
HUB = {
    **{f"opt-{size}": f"facebook/opt-{size}" for size in ("125m", "350m", "1.3b", "2.7b", "6.7b", "13b", "30b", "66b")},
    **{f"llama2-{size}": f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "13b", "70b")},
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama3-405b": "meta-llama/Llama-3.1-405B",
}
"""Where the named models are that have weights."""


@dataclass(frozen=True, kw_only=True)
class Template:
    """The recipe whose data, optimisers and other settings are kept."""

    folder: Path
    actor: str = ""
    """Model in place of the recipe's policy; empty: the recipe's own."""
    reward: str = ""


def make_fit(setting: Setting, numbers: Sequence[int]) -> tuple[Setting, list[str]]:
    """The setting with the cheapest changes, devices apart, that let each step fit; and the changes.

    Raises:
        ValueError: a step does not fit whatever is changed.
    """
    changes = []
    for number in numbers:
        plan = plan_step(setting, number)
        if plan.missing <= 0:
            continue
        found = [r for r in remedies(setting, number) if r.setting.gpus == setting.gpus]
        if not found:
            raise ValueError(
                f"step {number} needs {plan.peak_memory / 1e9:,.1f} of {plan.capacity / 1e9:,.1f} GB on "
                f"{setting.gpus} devices, and no change of settings makes it fit. Take more devices."
            )
        setting = found[0].setting
        changes.append(f"step {number}: {found[0].change}")
    return setting, changes


def emit(setting: Setting, folder: Path, *, template: Template, load: LoadJson) -> list[str]:
    """Write a recipe that runs the setting, all of it or nothing.

    Args:
        setting: what is run; its layouts split data and weights, or data and rows, or data and step 1's layers.
        folder: new.
        template: whose other settings are kept.
        load: reads a DeepSpeed JSON by name or path.

    Returns:
        The command that starts it.

    Raises:
        ValueError: this code cannot run the setting.
        FileExistsError: there is something in the folder.
    """
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise FileExistsError(f"--emit {folder} is not empty. Name a new folder.")
    sft, ppo = setting.sft.layout, setting.ppo
    _check(replace(sft, pipeline=1) if sft.virtual == sft.tensor == sft.context == 1 else sft)
    for trained in (setting.preference.layout, ppo.actor, ppo.critic):
        if trained is not None:
            _check(trained)
    if ppo.critic is not None and (ppo.actor.tensor, ppo.actor.context) != (ppo.critic.tensor, ppo.critic.context):
        raise ValueError(
            f"--emit cannot write tensor {ppo.actor.tensor} for the actor and {ppo.critic.tensor} for the critic: this "
            "code shares weights and rows of both alike. Plan the same for both."
        )
    texts = _texts(setting, folder, template, load)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, text in texts.items():
            (part / name).write_text(text, encoding="utf-8")
        part.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        os.replace(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    command = ["rlhf", "run", "--recipe", str(folder)]
    return command if setting.gpus <= setting.device.node else [*command, "--hostfile", "HOSTFILE"]


def _check(layout: Layout) -> None:
    if layout.pipeline > 1 or layout.sequence_parallel or (layout.context > 1 and layout.tensor > 1):
        split = " with norms split" if layout.sequence_parallel else ""
        raise ValueError(
            f"--emit cannot write tensor {layout.tensor}{split} x pipeline {layout.pipeline} x context "
            f"{layout.context}: this code divides data, and weights (tensor) or rows (context), or in step 1 layers "
            "without interleaving, one of them at a time. Plan without the others."
        )
    if layout.dtype not in ("bf16", "fp16", "fp32", "fp8"):
        raise ValueError(f"--emit cannot write {layout.dtype}: this code trains in bf16, fp16, fp32 or fp8.")


def _texts(setting: Setting, folder: Path, template: Template, load: LoadJson) -> dict[str, str]:
    """File name -> content."""
    names = ("pipeline", "sft", "reward", "ppo")
    read = {name: (template.folder / f"{name}.yaml").read_text(encoding="utf-8") for name in names}
    old = yaml.safe_load(read["pipeline"])["name"]
    name = "".join(c if c.isalnum() or c in "_-." else "_" for c in folder.name)
    docs = {key: yaml.safe_load(text.replace(old, name)) for key, text in read.items()}
    jsons: dict[str, Mapping[str, Any]] = {}

    def put_json(key: str, source: str, layout: Layout, data: dict[str, Any]) -> str:
        jsons[key] = _ds_config(load, source, layout)
        if data.get("micro_batch_tokens"):
            data["micro_batch_tokens"] = layout.micro_batch * layout.length
        return str(folder / f"{key}.json")

    _fill_pipeline(docs["pipeline"], setting, name)
    for key, training in (("sft", setting.sft), ("reward", setting.preference)):
        doc = docs[key]
        doc["deepspeed"] = put_json(key, doc["deepspeed"], training.layout, doc["data"])
        _fill_training(doc, training)
    _fill_lengths(docs, setting)
    if template.actor:
        docs["sft"]["model"] = {**_without_source(docs["sft"]["model"]), "path": template.actor}
    if template.reward:
        docs["reward"]["model"] = {**_without_source(docs["reward"]["model"]), "path": template.reward}
        docs["pipeline"]["stages"]["reward"].get("feeds", {}).pop("model.path", None)
    ppo, roles = docs["ppo"], setting.ppo
    sources = {"reference": "frozen", "reward": "frozen", **ppo["deepspeed"]}
    if roles.critic is None:
        sources.pop("critic", None)
    ppo["deepspeed"] = {
        role: put_json("reward_model" if role == "reward" else role, sources[role], getattr(roles, role), ppo["data"])
        for role in ("actor", "critic", "reference", "reward")
        if role in sources
    }
    _fill_ppo(ppo, setting)
    head = f"# Written by `rlhf plan --emit` from {old} for {setting.gpus} x {setting.device.name}.\n"
    texts = {f"{key}.yaml": head + yaml.safe_dump(doc, sort_keys=False, width=110) for key, doc in docs.items()}
    return {**texts, **{f"{key}.json": json.dumps(value, indent=2) + "\n" for key, value in jsons.items()}}


def _without_source(model: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in model.items() if key not in ("path", "config")}


def _fill_pipeline(doc: dict[str, Any], setting: Setting, name: str) -> None:
    node = setting.device.node
    if setting.gpus > node and setting.gpus % node:
        raise ValueError(f"{setting.gpus} devices are not whole machines of {node}. Use a multiple, or fewer.")
    machines = -(-setting.gpus // node)
    doc["name"] = name
    doc["description"] = f"{setting.name} on {setting.gpus} x {setting.device.name}, planned by rlhf plan."
    doc["num_gpus"] = setting.gpus // machines
    doc.pop("num_nodes", None)
    if machines > 1:
        doc.update(deployment="multi_node", num_nodes=machines)
    elif doc["deployment"] == "multi_node":
        doc["deployment"] = "single_node"


def _fill_training(doc: dict[str, Any], training: Training) -> None:
    layout = training.layout
    doc["global_batch_size"] = layout.global_batch
    doc["epochs"] = training.epochs
    _fill_model(doc["model"], layout)
    _fill_parallel(doc, layout)


def _fill_parallel(doc: dict[str, Any], layout: Layout) -> None:
    sizes = {"sp": layout.context, "tp": layout.tensor, "pp": layout.pipeline}
    doc.pop("parallel", None)
    if any(size > 1 for size in sizes.values()):
        doc["parallel"] = {name: size for name, size in sizes.items() if size > 1}


def _fill_model(model: dict[str, Any], layout: Layout) -> None:
    model.update(
        recompute=layout.recompute, recompute_budget=layout.recompute_budget, recompute_every=layout.recompute_every
    )
    if layout.offload_activations or "offload_activations" in model:
        model["offload_activations"] = layout.offload_activations
    _fill_float8(model, layout)
    if layout.lora or "lora" in model:
        model["lora"] = {**model.get("lora", {}), "rank": layout.lora}


def _fill_float8(model: dict[str, Any], layout: Layout) -> None:
    """The recipe's own float8 for fp8, else `tensorwise`, the fastest; for other types none."""
    if layout.dtype != "fp8":
        for key in [key for key in model if key.startswith("float8")]:
            del model[key]
    elif model.get("float8", "none") == "none":
        model["float8"] = "tensorwise"


def _fill_lengths(docs: Mapping[str, dict[str, Any]], setting: Setting) -> None:
    for key in ("sft", "reward", "ppo"):
        docs[key]["data"].update(max_prompt_tokens=setting.prompt, max_response_tokens=setting.response)


def _fill_ppo(doc: dict[str, Any], setting: Setting) -> None:
    ppo = setting.ppo
    samples = int(doc["rollout"].get("samples_per_prompt", 1))
    prompts = -(-ppo.prompts_per_step // samples)
    while prompts * samples % ppo.minibatch:
        prompts += 1
    doc["rollout"].update(prompts_per_step=prompts, batch_size=ppo.decode_batch)
    _fill_parallel(doc, ppo.actor)
    if not ppo.hybrid and ppo.actor.sharded and ppo.actor.tensor == 1:
        doc["rollout"]["weights"] = "layerwise"
    doc["update"].update(minibatch_size=ppo.minibatch, epochs=ppo.epochs)
    doc["max_steps"] = max(1, round(ppo.prompts / (prompts * samples)))
    _fill_model(doc["actor"], ppo.actor)
    if ppo.critic is not None:
        _fill_float8(doc.setdefault("critic", {}), ppo.critic)
    if ppo.actor.dtype == "fp8":  # the decoder computes in another type
        doc["rollout"]["old_logprobs"] = "rescore"


def _ds_config(load: LoadJson, source: str, layout: Layout) -> dict[str, Any]:
    """The recipe's JSON, or where the layout is another, the packaged one of its stage with the recipe's type."""
    raw = dict(load(source))
    zero = raw.get("zero_optimization", {})
    same = (zero.get("stage", 0), "offload_optimizer" in zero, "offload_param" in zero) == (
        layout.zero, layout.offload_optimizer, layout.offload_weights,
    )  # fmt: skip
    if not same:
        device = "" if raw.get("bf16") or raw.get("fp16") else "cpu_"
        made = dict(load(f"{device}zero{layout.zero}"))
        section = dict(made.get("zero_optimization", {}))
        for key, wanted in (("offload_optimizer", layout.offload_optimizer), ("offload_param", layout.offload_weights)):
            if wanted:
                section[key] = {"device": "cpu", "pin_memory": True}
        made["zero_optimization"] = section
        raw = {**made, **{key: raw[key] for key in ("hybrid_engine",) if key in raw and layout.zero == 3}}
    for key in ("bf16", "fp16"):
        raw.pop(key, None)
    if layout.stored != "fp32":
        raw[layout.stored] = {"enabled": True}
    raw["train_micro_batch_size_per_gpu"] = layout.micro_batch
    return raw


def hub_name(model: str) -> str:
    """What a stage loads for a model that was named to `rlhf plan`.

    Raises:
        ValueError: it has a shape and no weights.
    """
    if Path(model).is_dir() or "/" in model:
        return model
    if model not in HUB:
        raise ValueError(f"--emit: no weights of {model!r} are known. Pass a model folder or a name on the hub.")
    return HUB[model]


def as_lines(plans: Sequence[StepPlan], changes: Sequence[str], command: Sequence[str]) -> list[str]:
    """What is said of a recipe that was written."""
    hours, cost = sum(plan.hours for plan in plans), sum(plan.cost for plan in plans)
    lines = [f"changed so that it fits: {change}" for change in changes]
    return [*lines, f"planned: {hours:,.2f} h, ${cost:,.0f}", f"start it with: {' '.join(command)}"]
