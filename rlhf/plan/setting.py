"""What is planned: models, machine, lengths, batches and how each role is spread. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlhf.plan.hardware import Device
from rlhf.plan.layout import OURS, Layout, Stack
from rlhf.plan.shapes import Shape, shape_of
from rlhf.plan.shapes import find_shape as find_named_shape
from rlhf.plan.systems import MEGATRON_CORE

SCORE_ROWS = 16
"""Rows of a scoring forward where the stage finds the number by itself."""
WHOLE = 0.6
"""Share of a device's memory up to which gathered weights are taken to be meant."""
LARGE = 3e9
"""Parameters from which activations are recomputed unless the user says."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """An optimisation of one model in steps 1 and 2."""

    layout: Layout
    rows: float
    """Sequences, or pairs, of one pass."""
    epochs: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Step 3."""

    actor: Layout
    critic: Layout | None
    """None with an algorithm that has no critic."""
    reference: Layout
    reward: Layout
    prompts: float
    """Prompts in all."""
    prompts_per_step: int
    decode_batch: int
    """Rows that a rank decodes side by side."""
    score_batch: int
    minibatch: int
    """Rows of an update, over all ranks."""
    epochs: int = 1
    hybrid: bool = True
    """The actor's weights are gathered once for a rollout (`rollout.weights`)."""

    def map(self, change: Callable[[Layout], Layout]) -> "Policy":
        """The same with every role's layout changed."""
        return replace(
            self, actor=change(self.actor), critic=None if self.critic is None else change(self.critic),
            reference=change(self.reference), reward=change(self.reward),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Everything a plan is made from."""

    name: str
    actor: Shape
    reward: Shape
    device: Device
    gpus: int
    prompt: int
    """Tokens of a prompt: all rows are taken to be as long as they may be."""
    response: int
    sft: Training
    preference: Training
    ppo: Policy
    steps: tuple[int, ...] = (1, 2, 3)
    """Those there are; what stands for another is not planned."""

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.response


def stack_of(layout: Layout) -> Stack:
    """This code, or for what it has not (interleaving, two ways at a time), a program like Megatron-Core."""
    ways = sum(size > 1 for size in (layout.tensor, layout.pipeline, layout.context))
    return OURS if ways <= 1 and layout.virtual == 1 and not layout.sequence_parallel else MEGATRON_CORE


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a user says beside the models; None: by size and number of devices."""

    prompt: int = 256
    response: int = 256
    zero: int | None = None
    micro_batch: int = 4
    global_batch: int = 64
    recompute: str | None = None
    recompute_budget: float = 0.0
    dtype: str = "bf16"
    lora: int = 0
    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    sp: int = 1
    """Ranks that share each row's tokens, in all steps."""
    offload: bool = False
    offload_activations: bool = False
    demonstrations: float = 58_880
    pairs: float = 117_760
    prompts: float = 264_292
    epochs: float = 1.0


def from_models(actor: str, reward: str, device: Device, gpus: int, choices: Choices) -> Setting:
    """A setting from two models and a machine, shaped like the recipes.

    Raises:
        ValueError: a model is not known, or a value cannot be used.
    """
    policy, scorer = find_named_shape(actor), find_named_shape(reward)
    device.peak(choices.dtype)
    for shape in (policy, scorer):
        if shape.heads % choices.sp or shape.kv_heads % choices.sp:
            raise ValueError(
                f"--sp {choices.sp}: {shape.heads} attention heads and {shape.kv_heads} key and value heads do not "
                "both divide over so many ranks. Use a divisor of both."
            )
    length = choices.prompt + choices.response
    recompute = choices.recompute or ("full" if policy.parameters > LARGE else "none")
    zero = choices.zero if choices.zero is not None else (3 if gpus > 1 and choices.pipeline == 1 else min(1, gpus - 1))
    main = Layout(
        gpus=gpus, length=length, micro_batch=choices.micro_batch, zero=zero, recompute=recompute,  # type: ignore[arg-type]
        recompute_budget=choices.recompute_budget if recompute != "none" else 0.0,
        dtype=choices.dtype, lora=choices.lora, tensor=choices.tensor, pipeline=choices.pipeline,
        virtual=choices.virtual, sequence_parallel=choices.tensor > 1 and choices.pipeline > 1, context=choices.sp,
        offload_optimizer=choices.offload,
        offload_weights=choices.offload and zero == 3, offload_activations=choices.offload_activations,
    )  # fmt: skip
    main = with_batch(main, choices.global_batch)
    small = Layout(
        gpus=gpus, length=length, micro_batch=choices.micro_batch, dtype=choices.dtype, context=choices.sp
    )  # fmt: skip
    small = with_batch(small, choices.global_batch)
    # Actor and critic are shared alike; frozen roles are whole on a rank, or spread by ZeRO-3.
    ours = stack_of(main) is OURS
    critic = with_batch(replace(small, tensor=main.tensor), choices.global_batch) if ours else small
    reference = replace(main, lora=0, offload_optimizer=False)
    if ours:
        reference = with_batch(replace(reference, tensor=1), choices.global_batch)
    prompts_per_step = max(512, gpus)
    return Setting(
        name=f"{actor}, {reward}", actor=policy, reward=scorer, device=device, gpus=gpus, prompt=choices.prompt,
        response=choices.response, sft=Training(layout=main, rows=choices.demonstrations, epochs=choices.epochs),
        preference=Training(layout=small, rows=choices.pairs, epochs=choices.epochs),
        ppo=Policy(
            actor=main, critic=critic, reference=reference, reward=replace(small, dtype=small.stored),
            prompts=choices.prompts, prompts_per_step=prompts_per_step, decode_batch=64, score_batch=SCORE_ROWS,
            minibatch=main.global_batch, hybrid=2 * policy.parameters / main.tensor < WHOLE * device.memory,
        ),
    )  # fmt: skip


def with_batch(layout: Layout, sequences: int) -> Layout:
    """The layout with about `sequences` an update: smaller micro-batches where ranks have fewer, one at least."""
    micro = min(layout.micro_batch, max(1, sequences // layout.data))
    return replace(layout, micro_batch=micro, accumulation=max(1, round(sequences / (layout.data * micro))))


FED = "fed"
"""In place of a model folder that an earlier stage writes."""
Configs = Mapping[str, Mapping[str, Any]]


def from_recipe(
    name: str, stages: Configs, device: Device, gpus: int, *, load: Callable[[str], Mapping[str, Any]],
    choices: Choices | None = None,
) -> Setting:  # fmt: skip
    """A setting from the resolved configs of a recipe's stages, as mappings.

    Args:
        name: of the recipe.
        stages: "sft", "reward", "ppo" -> config; the last two may be missing.
        device: where it runs.
        gpus: devices in all.
        load: reads a DeepSpeed JSON by name.
        choices: rows, which a recipe does not hold.

    Raises:
        ValueError: step 1 is missing, or a stage's model is not known.
    """
    if "sft" not in stages:
        raise ValueError(f"recipe {name} has no sft: step 1 says which model a plan is made for.")
    steps = tuple(number for number, stage in enumerate(("sft", "reward", "ppo"), start=1) if stage in stages)
    stages = {**_stand_ins(stages["sft"]), **stages}
    rows = choices or Choices()
    sft, preference, ppo = stages["sft"], stages["reward"], stages["ppo"]
    actor = _model(sft)
    reward = actor if preference["model"]["path"] == FED else _model(preference)
    prompt, response = int(ppo["data"]["max_prompt_tokens"]), int(ppo["data"]["max_response_tokens"])

    def layout(
        config: Mapping[str, Any], model: Mapping[str, Any], json_name: str, batch: int, optim: Mapping[str, Any],
        *, trained: bool = True,
    ) -> Layout:  # fmt: skip
        raw = load(json_name)
        zero = raw.get("zero_optimization", {})
        dtype = _computes_in(raw, model, device)
        device.peak(dtype)
        tokens = config["data"]["max_prompt_tokens"] + config["data"]["max_response_tokens"]
        sharing = sharers(config)
        budget = int(config["data"].get("micro_batch_tokens", 0)) // tokens
        made = Layout(
            gpus=gpus, length=tokens, micro_batch=budget or int(raw.get("train_micro_batch_size_per_gpu", 1)),
            zero=int(zero.get("stage", 0)), recompute=model.get("recompute", "none"),
            recompute_every=int(model.get("recompute_every", 1)),
            recompute_budget=float(model.get("recompute_budget", 0.0)), dtype=dtype,
            optimizer=optim.get("name", "adamw"),
            lora=int(model.get("lora", {}).get("rank", 0)), context=sharing["sp"],
            tensor=sharing["tp"] if trained else 1, pipeline=sharing["pp"],
            offload_optimizer="offload_optimizer" in zero, offload_weights="offload_param" in zero,
            offload_activations=bool(model.get("offload_activations")),
        )  # fmt: skip
        return with_batch(made, batch)

    jsons, rollout, update = ppo["deepspeed"], ppo["rollout"], ppo["update"]
    minibatch = int(update["minibatch_size"])
    as_actor = {key: value for key, value in ppo["actor"].items() if "float8" in key}  # where it is the actor's start
    if not ppo["reference"].get("path"):
        ppo = {**ppo, "reference": {**ppo["reference"], **as_actor}}
    roles = {
        role: layout(
            ppo, ppo[role], jsons[role], minibatch, ppo.get(f"{role}_optim", {}), trained=role in ("actor", "critic")
        )  # fmt: skip
        for role in ("actor", "critic", "reference", "reward")
        if role != "critic" or has_critic(ppo)
    }
    per_step = int(rollout["prompts_per_step"]) * int(rollout["samples_per_prompt"])
    return Setting(
        name=name, actor=actor, reward=reward, device=device, gpus=gpus, prompt=prompt, response=response, steps=steps,
        sft=Training(layout=layout(sft, sft["model"], sft["deepspeed"], int(sft["global_batch_size"]), sft["optim"]),
                     rows=rows.demonstrations, epochs=float(sft["epochs"])),
        preference=Training(layout=layout(preference, preference["model"], preference["deepspeed"],
                                          int(preference["global_batch_size"]), preference["optim"]),
                            rows=rows.pairs, epochs=float(preference["epochs"])),
        ppo=Policy(
            actor=roles["actor"], critic=roles.get("critic"), reference=roles["reference"], reward=roles["reward"],
            prompts=float(ppo["max_steps"]) * per_step, prompts_per_step=per_step,
            decode_batch=int(rollout["batch_size"]), score_batch=_score_rows(ppo["data"], prompt + response),
            minibatch=minibatch, epochs=int(update["epochs"]),
            hybrid=_gathered_whole(rollout, actor, device),
        ),
    )  # fmt: skip


def _stand_ins(sft: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Configs for stages that a recipe has not: step 1's, in the form of steps 2 and 3."""
    roles, batch = ("actor", "critic", "reference", "reward"), sft["global_batch_size"]
    ppo = {
        "data": sft["data"], "deepspeed": dict.fromkeys(roles, sft["deepspeed"]), **dict.fromkeys(roles, sft["model"]),
        "rollout": {"prompts_per_step": batch, "samples_per_prompt": 1, "batch_size": 1},
        "update": {"minibatch_size": batch, "epochs": 1}, "max_steps": 1,
    }  # fmt: skip
    return {"reward": {**sft, "model": {**sft["model"], "path": FED}}, "ppo": ppo}


def has_critic(ppo: Mapping[str, Any]) -> bool:
    """Whether a resolved config of step 3 trains a critic; of its algorithms PPO alone does."""
    return bool(ppo.get("algorithm", "ppo") == "ppo")


def dtype_of(ds: Mapping[str, Any]) -> str:
    """Type that a DeepSpeed JSON computes in."""
    return next((short for short in ("bf16", "fp16") if ds.get(short, {}).get("enabled")), "fp32")


def _computes_in(ds: Mapping[str, Any], model: Mapping[str, Any], device: Device) -> str:
    """Type of the products of a model: fp8 where bf16's are kernels in float8, which emulation is not."""
    dtype, is_emulated = dtype_of(ds), model.get("float8_emulate") or device.is_serial
    return "fp8" if model.get("float8", "none") != "none" and dtype == "bf16" and not is_emulated else dtype


def with_lengths(setting: Setting, *, prompt: float, response: float, micro_batch_rows: float | None = None) -> Setting:
    """The same work on rows of another length.

    Args:
        setting: the work.
        prompt: mean tokens.
        response: mean tokens.
        micro_batch_rows: of an update, on one rank; None: a micro-batch holds as many tokens as before, or all rows.
    """
    prompt_tokens, response_tokens = max(1, round(prompt)), max(1, round(response))
    length = prompt_tokens + response_tokens

    def change(layout: Layout) -> Layout:
        rows = layout.micro_batch * layout.accumulation
        accumulation = -(-rows // max(1, layout.micro_batch * layout.length // length))
        if micro_batch_rows is not None:
            accumulation = min(rows, max(1, round(rows / (micro_batch_rows * layout.context))))
        return replace(layout, length=length, micro_batch=-(-rows // accumulation), accumulation=accumulation)

    ppo = setting.ppo
    return replace(
        setting, prompt=prompt_tokens, response=response_tokens,
        sft=replace(setting.sft, layout=change(setting.sft.layout)),
        preference=replace(setting.preference, layout=change(setting.preference.layout)),
        ppo=replace(
            ppo.map(change), score_batch=max(1, ppo.score_batch * setting.length // length),
        ),
    )  # fmt: skip


def _gathered_whole(rollout: Mapping[str, Any], actor: Shape, device: Device) -> bool:
    """Whether a rollout's weights are gathered once, as `rollout.weights` says."""
    if rollout.get("weights", "auto") == "auto":
        return 2 * actor.parameters < WHOLE * device.memory
    return bool(rollout["weights"] == "gathered")


def _score_rows(data: Mapping[str, Any], length: int) -> int:
    """Rows of full length in a scoring forward."""
    tokens = data.get("score_micro_batch_tokens")
    return max(1, int(tokens) // length) if tokens else SCORE_ROWS


def sharers(stage: Mapping[str, Any]) -> dict[str, int]:
    """How many ranks share each row's tokens (`sp`), a trained model's weights (`tp`), or its layers (`pp`)."""
    return {name: int(stage.get("parallel", {}).get(name, 1)) for name in ("sp", "tp", "pp")}


def _model(stage: Mapping[str, Any]) -> Shape:
    """Shape of a stage's model; one that is built for the recipe has the vocabulary of the tokenizer built for it."""
    config = stage["model"].get("config")
    if not config:
        return find_named_shape(str(stage["model"]["path"]))
    trained = int(stage.get("tokenizer", {}).get("train_vocab_size", 0))
    if not trained and "vocab_size" not in config:
        raise ValueError(
            "the recipe's model takes its vocabulary from a tokenizer that is not read here. Write its config, with a "
            "vocab_size, into a JSON file and pass it as --actor."
        )
    return shape_of({"vocab_size": trained, **config} if trained else config)
