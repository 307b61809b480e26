"""The plan of each of the three steps: memory by phase, seconds by phase, rates, hours, cost. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlhf.plan import flops, memory
from rlhf.plan.hardware import Device
from rlhf.plan.layout import Layout
from rlhf.plan.memory import Memory
from rlhf.plan.rollout import Work, rollout, score
from rlhf.plan.setting import Policy, Setting, Training, stack_of
from rlhf.plan.shapes import Shape
from rlhf.plan.step import step

CONTEXT = 1.5e9
"""Bytes that CUDA, NCCL and libraries take of a device before the first tensor."""
STEPS = {1: "step 1, SFT", 2: "step 2, reward model", 3: "step 3, PPO"}


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What is foreseen for one of the three steps."""

    number: int
    layout: Layout
    """Of the model that is trained; in step 3 the actor's."""
    memory: Mapping[str, Memory]
    """Phase -> bytes on the fullest rank."""
    seconds: Mapping[str, float]
    """Phase -> seconds of one step."""
    rows: float
    """Sequences, pairs or prompts of one step."""
    tokens: float
    """Real tokens of one step."""
    model_flops: float
    hardware_flops: float
    steps: float
    gpus: int
    peak_flops: float
    capacity: float
    """Bytes of a device."""
    usd_per_hour: float

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return sum(self.seconds.values())

    @property
    def hours(self) -> float:
        """Hours of all steps."""
        return self.steps * self.step_seconds / 3600

    @property
    def cost(self) -> float:
        """Dollars of all devices for all steps."""
        return self.hours * self.gpus * self.usd_per_hour

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens a second of one device."""
        return self.tokens / self.step_seconds / self.gpus

    @property
    def model_utilisation(self) -> float:
        """Share of peak, by what the algorithm needs."""
        return self.model_flops / (self.step_seconds * self.gpus * self.peak_flops)

    @property
    def hardware_utilisation(self) -> float:
        """Share of peak, by what is computed, recomputation included."""
        return self.hardware_flops / (self.step_seconds * self.gpus * self.peak_flops)

    @property
    def peak_memory(self) -> float:
        """Bytes of the fullest phase."""
        return max(part.total for part in self.memory.values())

    @property
    def missing(self) -> float:
        """Bytes that do not fit; 0 or less if all does."""
        return self.peak_memory - self.capacity


def plan_step(setting: Setting, number: int) -> StepPlan:
    """Plan one of the three steps."""
    if number == 1:
        return _training(setting, 1, setting.actor, setting.sft)
    if number == 2:
        return _training(setting, 2, setting.reward, setting.preference)
    return _ppo(setting, setting.ppo)


def _training(setting: Setting, number: int, shape: Shape, training: Training) -> StepPlan:
    layout, device = training.layout, setting.device
    pairs = number == 2
    where = replace(layout, micro_batch=2 * layout.micro_batch) if pairs else layout
    stack = replace(stack_of(layout), logit_bytes=0) if pairs else stack_of(layout)
    if pairs and stack.exchanged_heads:
        # The prompt of a pair goes through the model once; that both responses look at it is left out.
        where = replace(where, length=max(1, round(setting.prompt / 2 + setting.response)))
    found = memory.training(shape, where, stack)
    spent = step(shape, where, device, stack, with_head=not pairs)
    rows = layout.global_batch
    if pairs:
        needed = flops.preference_row(shape, setting.prompt, setting.response, setting.response)
    else:
        needed = flops.sft_row(shape, setting.prompt, setting.response, lora=layout.lora)
    again = _recomputed(shape, layout, layout.length) * (1 + pairs)
    return StepPlan(
        number=number, layout=layout, memory={"update": _with_context(found, device)}, seconds=spent.parts(), rows=rows,
        tokens=rows * layout.length * (1 + pairs), model_flops=rows * needed, hardware_flops=rows * (needed + again),
        steps=training.rows * training.epochs / rows, gpus=setting.gpus, peak_flops=device.peak(layout.dtype),
        capacity=device.memory, usd_per_hour=device.usd_per_hour,
    )  # fmt: skip


def _recomputed(shape: Shape, layout: Layout, length: float) -> float:
    """FLOPs of the second forward of one sequence."""
    return layout.recomputed_share(shape.layers) * flops.recomputed(shape, length, layout.recompute)


def _with_context(found: Memory, device: Device) -> Memory:
    return replace(found, context=max(found.context, context_of(device)))


def context_of(device: Device) -> float:
    """Bytes that a process takes before its first tensor."""
    return CONTEXT if device.measured is None else device.measured.process_gb * 1e9


def _ppo(setting: Setting, ppo: Policy) -> StepPlan:
    layout, device = ppo.actor, setting.device
    rows = -(-ppo.prompts_per_step // layout.data)
    total = rows * layout.data
    updates = ppo.epochs * max(1, round(ppo.prompts_per_step / ppo.minibatch))
    needed = total * flops.ppo_row(
        setting.actor, setting.reward, setting.prompt, setting.response, epochs=ppo.epochs, lora=layout.lora,
        critic=ppo.critic is not None,
    )  # fmt: skip
    again = _recomputed(setting.actor, layout, setting.length)
    if ppo.critic is not None:
        again += _recomputed(setting.reward, ppo.critic, setting.length)
    return StepPlan(
        number=3, layout=layout, memory=ppo_memory(setting), seconds=_ppo_seconds(setting, rows, updates), rows=total,
        tokens=total * setting.length, model_flops=needed, hardware_flops=needed + total * ppo.epochs * again,
        steps=ppo.prompts / total, gpus=setting.gpus, peak_flops=device.peak(layout.dtype), capacity=device.memory,
        usd_per_hour=device.usd_per_hour,
    )  # fmt: skip


def _ppo_seconds(setting: Setting, rows: int, updates: int) -> dict[str, float]:
    """Seconds of an iteration by phase; the critic and the reward model read and train beside the actor."""
    ppo, device = setting.ppo, setting.device
    stack = stack_of(ppo.actor)
    drawing = -(-rows // ppo.actor.context)  # each rank draws its own, whoever shares rows afterwards
    work = Work(
        rows=drawing, batch=ppo.decode_batch, prompt=setting.prompt, response=setting.response, gathered=ppo.hybrid
    )  # fmt: skip
    drawn = rollout(setting.actor, ppo.actor, device, work)
    scoring = score(setting.actor, _reading(ppo.reference, ppo.score_batch), device, rows, stack=stack)
    for layout in (ppo.reward, ppo.critic):
        if layout is not None:
            small = _reading(layout, ppo.score_batch)
            scoring += score(setting.reward, small, device, rows, stack=stack, head=False)
    actor = step(setting.actor, ppo.actor, device, stack).total
    seconds = {
        "gather": drawn.gather, "prefill": drawn.prefill, "decode": drawn.decode, "score": scoring,
        "update actor": updates * actor,
    }  # fmt: skip
    if ppo.critic is not None:
        seconds["update critic"] = updates * step(setting.reward, ppo.critic, device, stack, with_head=False).total
    return seconds


def _reading(layout: Layout, batch: int) -> Layout:
    return replace(layout, micro_batch=batch, accumulation=1)


def ppo_memory(setting: Setting) -> dict[str, Memory]:
    """Bytes by phase: states of all models stay, the rest belongs to the phase."""
    ppo = setting.ppo
    stack = stack_of(ppo.actor)
    actor = memory.training(setting.actor, ppo.actor, stack)
    critic = Memory()
    if ppo.critic is not None:
        critic = memory.training(setting.reward, ppo.critic, replace(stack, logit_bytes=0))
    reference = memory.reading(setting.actor, setting.actor.parameters, ppo.reference, rows=0, length=0)
    scorer = memory.reading(setting.reward, setting.reward.backbone_parameters, ppo.reward, rows=0, length=0)
    # With adapters the reference is the actor without them.
    frozen = scorer.weights + (0.0 if ppo.actor.lora else reference.weights)
    staying = Memory(
        weights=actor.weights + critic.weights + frozen, gradients=0.0,
        optimizer=actor.optimizer + critic.optimizer, context=context_of(setting.device),
    )  # fmt: skip
    width = 4.0 if ppo.actor.dtype == "fp32" else 2.0
    sharded = ppo.actor.sharded
    lent = width * setting.actor.parameters / ppo.actor.tensor
    lent = lent if ppo.hybrid else memory.gathered(setting.actor, ppo.actor, stack)
    rows = min(ppo.decode_batch, -(-ppo.prompts_per_step // ppo.actor.replicas))
    phases = {
        "rollout": Memory(
            gathered=lent if sharded else 0.0,
            cache=memory.cache(setting.actor, ppo.actor, rows=rows, length=setting.length, width=width),
            logits=stack.logit_bytes * rows * setting.actor.vocabulary,
        ),
        "score": memory.reading(setting.actor, 0, ppo.reference, rows=ppo.score_batch, length=setting.length)
        + Memory(logits=memory.logits(setting.actor, _reading(ppo.reference, ppo.score_batch), stack)),
        "update": max(
            (_beside(actor), _beside(critic)), key=lambda part: part.total,
        ),
    }  # fmt: skip
    found = {}
    for name, part in phases.items():
        whole = staying + replace(part, weights=0.0, reserve=0.0)
        found[name] = replace(whole, reserve=memory.RESERVE * (whole.total - whole.context))
    return found


def _beside(trained: Memory) -> Memory:
    """What an update needs beside weights and optimiser."""
    return replace(trained, weights=0.0, optimizer=0.0, reserve=0.0, context=0.0)


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change after which a step fits."""

    change: str
    setting: Setting
    plan: StepPlan


def remedies(setting: Setting, number: int) -> list[Remedy]:
    """Single changes that make a step fit, the fastest first; pairs of changes where no single one does."""
    fitting = [r for r in _changed(setting, number) if r.plan.missing <= 0]
    if not fitting:
        for first in _changed(setting, number):
            for second in _changed(first.setting, number):
                both = f"{first.change} and {second.change}"
                if second.plan.missing <= 0 and first.change != second.change:
                    fitting.append(replace(second, change=both))
    unique = {tuple(sorted(r.change.split(" and "))): r for r in fitting}
    return sorted(unique.values(), key=lambda r: r.plan.cost / max(r.plan.rows * r.plan.steps, 1))


def _changed(setting: Setting, number: int) -> list[Remedy]:
    """The setting with one thing changed, each."""
    found = []
    for change, layout in _layouts(_layout_of(setting, number)):
        found.append((change, _with_layout(setting, number, layout)))
    if number == 3:
        ppo = setting.ppo
        if ppo.decode_batch > 1:
            fewer = replace(ppo, decode_batch=max(1, ppo.decode_batch // 4))
            found.append((f"rollout.batch_size {fewer.decode_batch}", replace(setting, ppo=fewer)))
        if ppo.hybrid and ppo.actor.zero == 3:
            found.append(("rollout.weights layerwise", replace(setting, ppo=replace(ppo, hybrid=False))))
        if ppo.reference.zero < 3 and setting.gpus > 1:
            sharded = replace(ppo, reference=replace(ppo.reference, zero=3))
            found.append(("reference under ZeRO-3", replace(setting, ppo=sharded)))
    found.append((f"{2 * setting.gpus} devices", _doubled(setting)))
    return [Remedy(change=change, setting=new, plan=plan_step(new, number)) for change, new in found]


def _layouts(layout: Layout) -> list[tuple[str, Layout]]:
    found = []
    whole = replace(layout, recompute="full", recompute_every=1, recompute_budget=0.0)
    if layout != whole:
        found.append(("recompute activations", whole))
    if layout.micro_batch > 1:
        micro = layout.micro_batch // 2
        found.append((f"micro-batch {micro}", replace(layout, micro_batch=micro, accumulation=2 * layout.accumulation)))
        found.append(("micro-batch 1", replace(
            layout, micro_batch=1, accumulation=layout.micro_batch * layout.accumulation)))  # fmt: skip
    for zero in (1, 2, 3):
        if zero > layout.zero and layout.data > 1 and layout.pipeline == 1:
            found.append((f"ZeRO-{zero}", replace(layout, zero=zero)))
    if not layout.offload_optimizer:
        found.append(("offload the optimiser", replace(layout, zero=max(layout.zero, 2), offload_optimizer=True)))
    if not layout.lora:
        found.append(("LoRA of rank 128", replace(layout, lora=128)))
    return found


def _layout_of(setting: Setting, number: int) -> Layout:
    return {1: setting.sft.layout, 2: setting.preference.layout, 3: setting.ppo.actor}[number]


def _with_layout(setting: Setting, number: int, layout: Layout) -> Setting:
    if number == 1:
        return replace(setting, sft=replace(setting.sft, layout=layout))
    if number == 2:
        return replace(setting, preference=replace(setting.preference, layout=layout))
    return replace(setting, ppo=replace(setting.ppo, actor=layout))


def _doubled(setting: Setting) -> Setting:
    def twice(layout: Layout) -> Layout:
        return replace(layout, gpus=2 * layout.gpus, accumulation=max(1, layout.accumulation // 2))

    ppo = setting.ppo
    return replace(
        setting, gpus=2 * setting.gpus, sft=replace(setting.sft, layout=twice(setting.sft.layout)),
        preference=replace(setting.preference, layout=twice(setting.preference.layout)),
        ppo=ppo.map(twice),
    )  # fmt: skip
