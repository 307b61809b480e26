"""Model folders in Hugging Face's format: written under another name, read back, then renamed."""

import copy
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf import artifacts, distributed
from rlhf.engine import FrozenEngine, TrainEngine
from rlhf.models.backbone import base_of
from rlhf.models.lora import merged_state_dict

logger = logging.getLogger(__name__)


def save_model_folder(
    model: nn.Module,
    weights: TrainEngine | FrozenEngine | Mapping[str, Tensor] | None,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    stop_token_id: int,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Write a model in Hugging Face's format, read it back, and only then give it its name. Collective.

    Adapters are merged into the weights. A former folder of that name is replaced in one rename and stays as it is if
    anything fails.

    Args:
        model: the Hugging Face model (adapters included), as inside the engine's wrapper.
        weights: the engine that holds it, or on rank 0 its whole state dict (None on the other ranks).
        tokenizer: saved beside it, with its chat template.
        folder: the model folder.
        stop_token_id: ends a response; eos_token_id of the generation config.
        finish: called on rank 0 with the folder under its temporary name, files complete: write the manifest there.

    Raises:
        RuntimeError: on all ranks if the write failed on rank 0, which raises the cause (ValueError: keys or shapes are
            not those of the model's config, or what was read back differs).
    """
    state = weights.full_state_dict(model) if isinstance(weights, TrainEngine | FrozenEngine) else weights
    with distributed.together(f"saving the model folder {folder}"):
        if distributed.is_main():
            assert state is not None, "rank 0 needs the weights"
            state = merged_state_dict(state, model)
            with artifacts.staged_folder(folder) as part:
                _write_model(cast(PreTrainedModel, base_of(model)), state, tokenizer, part, stop_token_id=stop_token_id)
                if finish is not None:
                    finish(part)
    logger.info("saved model folder %s", folder)


def _write_model(
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    stop_token_id: int,
) -> None:
    skeleton = _skeleton(model)
    _check_keys(skeleton, state)
    dtype = next(value.dtype for value in state.values() if value.is_floating_point())
    cast(nn.Module, skeleton).to(dtype)  # config.json says the type of the weights
    if skeleton.can_generate():
        skeleton.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
            bos_token_id=tokenizer.bos_token_id, eos_token_id=stop_token_id, pad_token_id=tokenizer.pad_token_id
        )
    skeleton.save_pretrained(folder, state_dict=dict(state))
    tokenizer.save_pretrained(folder)
    _read_back(type(model), state, folder)


def _skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """The model that the config describes, without weights: its keys and shapes are what a strict load looks for."""
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


def _check_keys(skeleton: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    missing, unexpected = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    wrong = [f"{n} {found[n]} for {expected[n]}" for n in expected if n in found and found[n] != expected[n]]
    if missing or unexpected or wrong:
        raise ValueError(
            f"weights do not fit the config of {type(skeleton).__name__}: missing {missing[:5]}, unexpected "
            f"{unexpected[:5]}, wrong shapes {wrong[:5]}. The model was changed without its config, or they are not "
            "its weights."
        )


def _read_back(model_class: type[PreTrainedModel], state: Mapping[str, Tensor], folder: Path) -> None:
    """Load the folder as the next stage will, strictly, and compare every weight bit by bit.

    transformers maps the files into memory and copies nothing, so this costs the reading, not a second model.
    """
    loaded, info = cast(Any, model_class).from_pretrained(folder, output_loading_info=True)
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            raise ValueError(f"{folder}: {what} after loading what was written: {sorted(info[what])[:5]}.")
    for name, value in loaded.state_dict().items():
        if value.dtype != state[name].dtype or not torch.equal(value, state[name].cpu()):
            raise ValueError(f"{folder}: {name} differs from the weights after writing. Check the disk.")
