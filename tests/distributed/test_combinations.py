"""Every pair of ways to run a model: refused by the table, or the numbers of the plain way on two ranks."""

import functools
import importlib.util
import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf import distributed, ds_config, engine
from rlhf.combinations import BEGIN, BY_NAME, END, REFUSED, Role, Way, markdown, pairs, ways_of
from rlhf.config import LoRAConfig, ModelConfig, OptimConfig, ParallelConfig
from rlhf.data.dataset import SFTRow
from rlhf.engine import TrainEngine
from rlhf.models.build import build_causal_lm, train_bpe
from rlhf.models.policy import Policy
from rlhf.pipeline_engine import train_engine
from rlhf.sharing import Sharing, join_groups
from step1_sft.train import loss_of
from tests.distributed.harness import ROOT, Ranks
from tests.distributed.test_sequence_parallel import FAMILIES, collate, rows_of

NUM_STEPS = 2
OFFLOAD = {"device": "cpu"}
# Where each way is set: in the JSON's `zero_optimization`, its other sections, the model, the optimiser, `parallel`.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"ZeRO-{stage}": ("zero", {"stage": stage}) for stage in range(4)},
    "hpZ": ("zero", {"zero_hpz_partition_size": 2}),
    "qgZ": ("zero", {"zero_quantized_gradients": True}),
    "qwZ": ("zero", {"zero_quantized_weights": True}),
    "optimizer offload": ("zero", {"offload_optimizer": OFFLOAD}),
    "weight offload": ("zero", {"offload_param": OFFLOAD}),
    "bf16": ("json", {"bf16": {"enabled": True}}),
    "fp16": ("json", {"fp16": {"enabled": True}}),
    "Muon": ("optim", {"name": "muon"}),
    "8-bit AdamW": ("optim", {"name": "adamw_8bit"}),
    "recompute selective": ("model", {"recompute": "selective"}),
    "recompute full": ("model", {"recompute": "full"}),
    "activation offload": ("model", {"offload_activations": True}),
    "float8": ("model", {"float8": "rowwise"}),
    "compile": ("model", {"compile": True}),
    "LoRA": ("model", {"lora": LoRAConfig(rank=4)}),
    "rows shared": ("parallel", {"sp": 2}),
    "layers dealt": ("parallel", {"pp": 2}),
    "weights shared": ("parallel", {"tp": 2}),
}
NUMERIC = ("bf16", "Muon", "8-bit AdamW", "float8", "LoRA")
"""Those that train otherwise; what they are combined with must not."""
STAGE = {"hpZ": 3, "qgZ": 3, "qwZ": 3, "weight offload": 3, "optimizer offload": 1}
"""The ZeRO stage that a way is tried at where its partner names none."""
QUICK = ("rows shared", "layers dealt", "weights shared", "hpZ", "optimizer offload")
"""Pairs within these and ZeRO are run every time, the others with --all."""


def role_of(names: Sequence[str]) -> Role:
    """A role with these ways on, and nothing else, at the lowest ZeRO stage that they go with.

    Raises:
        ValueError: there is none; of the lowest stage that each of them could be tried at.
    """
    if any(BY_NAME[name].knob == "zero" for name in names):
        return _role_of(names)
    stages = range(max(STAGE.get(name, 0) for name in names), 4)
    errors = []
    for stage in stages:
        try:
            return _role_of([f"ZeRO-{stage}", *names])
        except ValueError as error:
            errors.append(error)
    raise errors[0]


def _role_of(names: Sequence[str]) -> Role:
    found: dict[str, dict[str, Any]] = {part: {} for part in ("zero", "json", "model", "optim", "parallel")}
    for name in names:
        part, values = SETTINGS[name]
        found[part].update(values)
    thresholds = ds_config.load("cpu_zero3")["zero_optimization"] if found["zero"]["stage"] == 3 else {}
    ds = {
        "train_micro_batch_size_per_gpu": 4,
        **found["json"],
        "zero_optimization": {**thresholds, **found["zero"]},
    }
    optim = {"lr": 1e-3, "schedule": "constant", "warmup_frac": 0.0, "clip_norm": 0.5, "eps": 1e-3, **found["optim"]}
    return Role(
        ds=ds,
        model=ModelConfig(config={"model_type": "opt", **FAMILIES["opt"]}, dropout=0.0, **found["model"]),
        optim=OptimConfig(**optim),
        parallel=ParallelConfig(**found["parallel"]),
    )


def trajectory(names: Sequence[str]) -> tuple[list[float], dict[str, Tensor] | None]:
    """Losses of a few steps and the weights after them."""
    role = role_of(names)
    language = train_bpe(["please answer politely"] * 3, vocab_size=300)
    sharing = join_groups({"model": role}, language)
    with engine.zero3_init(role.ds, shares=role.parallel.tp > 1):
        whole = build_causal_lm(role.model, language, seed=1)
    model = Policy(sharing.share(whole), chunk_tokens=6)
    trained = train_engine(model, sharing=sharing, ds=role.ds, optim=role.optim, role="policy", num_steps=NUM_STEPS)
    losses = [train_step(trained, sharing, rows_of(step)) for step in range(NUM_STEPS)]
    return losses, trained.full_state_dict()


def train_step(trained: TrainEngine, sharing: Sharing, rows: list[list[SFTRow]]) -> float:
    """Each group of ranks takes every `count`-th micro-batch; the mean loss."""
    group = sharing.rows
    batches = [collate(micro, packed=True, group=sharing.divided) for micro in rows[group.number :: group.count]]
    count = distributed.all_sum(torch.stack([batch.loss_mask_BT.sum() for batch in batches]).sum())
    for _ in trained.accumulate_all(batches, loss_of, count=count):
        pass
    return trained.step().loss


def pairs_job(cases: list[tuple[str, str]]) -> dict[tuple[str, str], tuple[float, float]]:
    """For each pair the largest differences of losses and weights to the plain way."""
    engine.setup(timeout_seconds=120)
    logging.getLogger("torch.__trace").disabled = True
    torch.compile = functools.partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    plain, found = functools.cache(trajectory), {}
    for case in cases:
        torch._dynamo.reset()
        expected, own = plain(tuple(name for name in case if name in NUMERIC) or ("ZeRO-0",))
        losses, weights = trajectory(case)
        gap = 0.0
        if own is not None and weights is not None:
            assert own.keys() == weights.keys()
            gap = max((own[key].float() - weights[key].float()).abs().max().item() for key in own)
        found[case] = max(abs(a - b) for a, b in zip(expected, losses, strict=True)), gap
    return found


def band(case: tuple[str, str]) -> float:
    """How far rounding takes a pair from the plain way."""
    if "bf16" in case or "float8" in case:
        return 2e-2
    return 1e-3 if "8-bit AdamW" in case else 1e-5


def is_quick(pair: tuple[Way, Way]) -> bool:
    return all(way.name in QUICK or way.knob == "zero" for way in pair)


def run_all(ranks: Ranks, chosen: Sequence[tuple[Way, Way]]) -> None:
    has_8bit = importlib.util.find_spec("bitsandbytes") is not None
    names = [(one.name, other.name) for one, other in chosen if one.runs_here and other.runs_here]
    cases = [case for case in names if case not in REFUSED and (has_8bit or "8-bit AdamW" not in case)]
    found = ranks(pairs_job, cases=cases, timeout=900)[0]
    assert len(found) == len(cases) > 0
    bad = {case: gaps for case, gaps in found.items() if not max(gaps) < band(case)}
    assert not bad, bad


def test_quick_pairs_change_nothing(ranks: Ranks) -> None:
    run_all(ranks, [pair for pair in pairs() if is_quick(pair)])


@pytest.mark.slow
def test_all_other_pairs_change_nothing(ranks: Ranks) -> None:
    run_all(ranks, [pair for pair in pairs() if not is_quick(pair)])


@pytest.mark.parametrize("pair", REFUSED, ids=" + ".join)
def test_refused_pairs_are_named(pair: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="does not go with") as error:
        role_of(pair)
    for name in pair:
        assert BY_NAME[name].setting in str(error.value) and f"({name})" in str(error.value)
    assert REFUSED[pair] in str(error.value)


def test_the_page_shows_the_table() -> None:
    page = (ROOT / "docs/parallelism.md").read_text()
    assert page.partition(BEGIN)[2].partition(END)[0].strip() == markdown()
    refused = sum(len(names) == 2 for names in REFUSED)
    assert markdown().count("no (") == refused
    assert markdown().count(" yes ") + markdown().count(" not run ") == len(list(pairs())) - refused


def test_each_way_is_seen_alone() -> None:
    """The settings of this file switch on what the table thinks they do."""
    assert SETTINGS.keys() == BY_NAME.keys()
    for name, way in BY_NAME.items():
        found = [other.name for other in ways_of(role_of([name]))]
        assert name in found and all(other == name or BY_NAME[other].knob == "zero" for other in found), found
        assert way.is_on(role_of([name]))
