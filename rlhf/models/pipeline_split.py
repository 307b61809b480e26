"""How the layers of a model are dealt to the stages of a pipeline, and what can be trained in one. No torch."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf import ds_config


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names of a decoder's parts, as transformers gives them; what is not named is on every stage."""

    layers: str
    first: tuple[str, ...]
    """On the first stage alone; elsewhere they give back what they are given."""
    positions: str = ""
    """On the first stage alone; elsewhere its result, which is added to the embeddings, is 0."""
    last: tuple[str, ...]
    """On the last stage alone."""


_LLAMA = Family(layers="layers", first=("embed_tokens",), last=("norm",))
FAMILIES = {
    "opt": Family(
        layers="layers", first=("embed_tokens", "project_in"), positions="embed_positions",
        last=("final_layer_norm", "project_out"),
    ),
    "gpt2": Family(layers="h", first=("wte", "drop"), positions="wpe", last=("ln_f",)),
    "gpt_neox": Family(layers="layers", first=("embed_in", "emb_dropout"), last=("final_layer_norm",)),
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "phi3"), _LLAMA),
}  # fmt: skip

_LAYERS = ("num_hidden_layers", "n_layer")


def check(shape: Mapping[str, Any], ds: Mapping[str, Any], num_stages: int) -> None:
    """Check that a model can be trained in a pipeline of so many stages.

    Args:
        shape: what its config.json holds; empty where it is not known yet.
        ds: content of its DeepSpeed JSON.
        num_stages: parallel.pp.

    Raises:
        ValueError: the family is not known, there are fewer layers than stages, or the JSON asks for what a pipeline
            does not do.
    """
    if num_stages == 1:
        return
    said = f"parallel.pp={num_stages}"
    family = shape.get("model_type")
    if shape and family not in FAMILIES:
        raise ValueError(
            f"{said}: models of model_type {family} are not cut by layers, only {', '.join(FAMILIES)}. Use "
            "parallel.pp=1."
        )
    num_layers = next((shape[name] for name in _LAYERS if isinstance(shape.get(name), int)), None)
    if num_layers is not None and num_layers < num_stages:
        raise ValueError(
            f"{said}: the model has {num_layers} layers, and each stage needs one. Use parallel.pp={num_layers} or "
            "less."
        )
    _check_json(ds, said)


def _check_json(ds: Mapping[str, Any], said: str) -> None:
    if ds_config.dtype_name(ds) == "bfloat16" and ds.get("data_types", {}).get("grad_accum_dtype"):
        raise ValueError(
            f"{said}: `data_types.grad_accum_dtype` makes DeepSpeed use another optimizer class, whose gradients the "
            "engine cannot clip. Remove it."
        )
    for section, wanted in (("wall_clock_breakdown", ds.get("wall_clock_breakdown")),
                            ("flops_profiler", ds.get("flops_profiler", {}).get("enabled"))):  # fmt: skip
        if wanted:
            raise ValueError(f"{said} does not go with `{section}` of the DeepSpeed JSON. Remove it.")


def deal(costs: Sequence[float], num_stages: int) -> list[range]:
    """Layers of each stage: consecutive, at least one, the largest total as small as it can be.

    Among equals, the stages in front have more: their micro-batches are then under way while others wait.

    Args:
        costs: of each layer; what the last stage does beside it belongs to the last layer's.
        num_stages: at most as many as there are layers.

    Raises:
        ValueError: fewer layers than stages.
    """
    num_layers = len(costs)
    if num_layers < num_stages:
        raise ValueError(f"{num_layers} layers do not fill {num_stages} stages. Use as many stages as layers or fewer.")
    before = [0.0, *itertools.accumulate(costs)]
    # By number of layers: the largest total of a deal of them to as many stages as rounds were made, and its last cut.
    largest = {end: (before[end], 0) for end in range(1, num_layers + 1)}
    rounds = [largest]
    for stage in range(2, num_stages + 1):
        largest = {
            end: min(
                (max(rounds[-1][cut][0], before[end] - before[cut]), -cut) for cut in range(stage - 1, end)
            )
            for end in range(stage, num_layers + 1)
        }  # fmt: skip
        rounds.append({end: (value, -cut) for end, (value, cut) in largest.items()})
    found: list[range] = []
    end = num_layers
    for table in reversed(rounds):
        cut = table[end][1]
        found.append(range(cut, end))
        end = cut
    return found[::-1]
