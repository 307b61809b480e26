"""A saved state -> a model folder, on one process without a group, whatever the ranks and the ZeRO stage it has."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf import artifacts, states
from rlhf.artifacts import Contract, Kind
from rlhf.config import ModelConfig
from rlhf.model_folder import save_model_folder
from rlhf.models.backbone import base_of
from rlhf.models.build import build_causal_lm, build_reward_model, load_tokenizer
from rlhf.models.policy import Policy
from rlhf.models.scalar_head import ScalarModel
from rlhf.states import StateError
from rlhf.universal import weights_of

KINDS: dict[str, Kind] = {"policy": "policy", "actor": "policy", "reward": "reward", "critic": "critic"}
"""Engine -> what its model is."""
_Build = Callable[..., PreTrainedModel]


@dataclass(frozen=True)
class Converted:
    """What was written."""

    folder: Path
    lines: list[str]
    """It in words."""


def choose_state(source: Path) -> Path:
    """The state that a path means: itself, or the newest intact one of a stage's folder.

    Raises:
        StateError: there is none, or the one that was named is damaged.
    """
    if (source / states.RECORD).is_file():
        if faults := _faults(source):
            raise StateError(f"{'; '.join(faults)}. Take another state, or copy it again from where it is intact.")
        return source
    damaged: list[str] = []
    for state in reversed(states.complete(states.states_of(source))):
        if not (faults := _faults(state)):
            return state
        damaged += faults
    said = f" ({'; '.join(damaged)})" if damaged else ""
    raise StateError(
        f"{source} holds no intact state{said}. Name the folder of a stage that has saved states (run.save_every), or "
        "one state in its folder `state`."
    )


def convert_state(state: Path, model: ModelConfig, out_dir: Path, *, engine: str, seed: int) -> Converted:
    """Write one model of a state as a Hugging Face folder with tokenizer and manifest; adapters are merged.

    Args:
        state: whole, as `choose_state` gives it.
        model: the engine's, as in the config of its stage; its folder is read for its shape, with adapters for weights.
        out_dir: must not exist.
        engine: name in the state.
        seed: run.seed of the stage.

    Raises:
        FileExistsError: out_dir exists.
        StateError: the state holds no such model, or other weights than the config describes.
    """
    if out_dir.exists():
        raise FileExistsError(f"{out_dir} exists. Remove it, or write to another folder.")
    record = states.read_record(state)
    if engine not in record["engines"]:
        raise StateError(f"{state} holds {', '.join(sorted(record['engines']))}, not {engine}. Name one of them.")
    layout, kind = record["engines"][engine], KINDS[engine]
    if (shares := layout.get("tensor_parallel", 1)) > 1:
        raise StateError(
            f"{state} holds {engine} in shares of {shares} ranks (parallel.tp), which are not put together here. "
            "Resume the run on its own ranks to its end: the model folder that it writes is whole."
        )
    if "pipeline" in layout:
        raise StateError(
            f"{state} was saved by a pipeline of {layout['pipeline']} stages, whose files are not converted. Resume "
            "the run: its end writes the model folder."
        )
    tokenizer = load_tokenizer(str(state.parent / states.TOKENIZER))
    build: _Build = build_causal_lm if kind == "policy" else build_reward_model
    built = build(model, tokenizer, seed=seed)
    if not model.lora.rank:  # with adapters the base keeps its own type
        cast(nn.Module, built).to(getattr(torch, record["fits"][f"{engine}.dtype"]))
    wrapped: nn.Module = Policy(built) if kind == "policy" else ScalarModel(built)
    num_weights = _fill(wrapped, state, engine, layout)
    contract = Contract(**record["contract"])
    _save(built, tokenizer, out_dir, kind=kind, record=record, contract=contract, parent=model.path, seed=seed)
    base = cast(PreTrainedModel, base_of(built))
    lines = [
        f"{out_dir}: {kind} model {type(base).__name__}, {base.num_parameters():,} parameters, {base.dtype}",
        f"from {state}, model {engine}: step {record['step']}, {record['world_size']} ranks, "
        f"ZeRO-{layout['zero_stage']}, {num_weights} trained weights",
    ]
    if model.lora.rank:
        lines.append(f"adapters of rank {model.lora.rank} merged into the weights of {model.path}")
    if kind == "reward":
        lines.append("scores are not normalised: step 2 measures mean and deviation at its end (normalise.policy)")
    return Converted(out_dir, lines)


def _fill(wrapped: nn.Module, state: Path, engine: str, layout: dict[str, Any]) -> int:
    """Copy the trained weights into the model; returns how many."""
    parameters = dict(wrapped.named_parameters())
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    if faults := states.differences(layout["shapes"], shapes):
        raise StateError(
            f"{state} does not fit the config of its run: {'; '.join(faults[:5])}. Was config.yaml edited?"
        )
    trained = weights_of(state / engine, layout)
    with torch.no_grad():
        for name, weight in trained.items():
            parameters[name].copy_(weight)
    return len(trained)


def _save(
    built: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    out_dir: Path,
    *,
    kind: Kind,
    record: dict[str, Any],
    contract: Contract,
    parent: str | None,
    seed: int,
) -> None:
    def finish(part: Path) -> None:
        artifacts.write_manifest(
            part, kind=kind, stage=record["fits"]["stage"], contract=contract, parents=[parent] if parent else [],
            seed=seed, metrics={},
        )  # fmt: skip

    save_model_folder(
        built, built.state_dict(), tokenizer, out_dir, stop_token_id=contract.stop_token_id, finish=finish
    )


def _faults(state: Path) -> list[str]:
    try:
        files = states.files_of(states.read_record(state))
    except StateError as error:
        return [str(error).rstrip(".")]
    return [fault for name, entry in files.items() if (fault := states.fault_of(state, name, entry))]
