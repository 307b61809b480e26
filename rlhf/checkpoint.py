"""Model folders and resumable state: written under another name, verified, then renamed. Rank 0's errors reach all.

A model folder is Hugging Face's format and holds whole weights. A state holds what a run needs to go on as if it had
never stopped: sharded weights and optimiser, the loader's position and other small values, random generators.

    state/latest                     name of the newest complete state, written last
    state/step_00000120/state.json   values of the run and its parts, ranks, steps
    state/step_00000120/<engine>/    DeepSpeed's files
    state/step_00000120/rng/         generators of each rank
"""

import base64
import copy
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf import artifacts, distributed
from rlhf.config import RunConfig
from rlhf.engine import FrozenEngine, TrainEngine
from rlhf.models.backbone import base_of
from rlhf.models.lora import merged_state_dict

logger = logging.getLogger(__name__)

STATE = "state"
LATEST = "latest"
_STATE_JSON = "state.json"


class Stateful(Protocol):
    """Something whose state is a few JSON-able values."""

    def state_dict(self) -> dict[str, Any]:
        """The values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""


class ResumableRun(Protocol):
    """What `save` and `resume` need of a run."""

    folder: Path
    config: RunConfig

    def state_dict(self) -> dict[str, Any]:
        """Values, among them `step`."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the saved step."""


def save(run: ResumableRun, engines: Mapping[str, TrainEngine], parts: Mapping[str, Stateful]) -> None:
    """Save a run's state under run.folder/state and keep the newest run.config.keep_states. Collective.

    Args:
        run: of the stage.
        engines: trained models by name.
        parts: everything else that has a position or a value: loader, KL coefficient, running scale.
    """
    own = run.state_dict()
    state = {"run": own, "parts": {name: part.state_dict() for name, part in parts.items()}}
    save_state(run.folder / STATE, step=int(own["step"]), engines=engines, state=state, keep=run.config.keep_states)


def resume(run: ResumableRun, engines: Mapping[str, TrainEngine], parts: Mapping[str, Stateful]) -> None:
    """Take back what the newest `save` wrote if run.config.resume, else nothing. Collective.

    Raises:
        FileNotFoundError, ValueError: as `load_state`.
    """
    if not run.config.resume:
        return
    state = load_state(run.folder / STATE, engines=engines)
    if state["parts"].keys() != parts.keys():
        raise ValueError(
            f"{run.folder / STATE} was saved with {sorted(state['parts'])}, this run has {sorted(parts)}. Resume with "
            "the config that the run began with."
        )
    for name, part in parts.items():
        part.load_state_dict(state["parts"][name])
    run.load_state_dict(state["run"])


def save_state(
    folder: str | Path, *, step: int, engines: Mapping[str, TrainEngine], state: Mapping[str, Any], keep: int
) -> Path:
    """Write one state and drop the oldest ones. Collective; all ranks see one file system.

    Args:
        folder: holds the states.
        step: names the state.
        engines: trained models by name.
        state: JSON-able values, equal on all ranks.
        keep: number of states to keep, this one included.

    Returns:
        The state's folder.
    """
    folder = Path(folder)
    target = folder / f"step_{step:08d}"
    part = folder / f".{target.name}.part"
    with distributed.together(f"saving state {target}"):
        if distributed.is_main():
            shutil.rmtree(part, ignore_errors=True)
            (part / "rng").mkdir(parents=True)
    for name, engine in engines.items():
        engine.save_state(part, tag=name)
    with distributed.together(f"saving state {target}"):
        artifacts.write_json(part / "rng" / f"rank_{distributed.rank()}.json", _rng_state())
    with distributed.together(f"saving state {target}"):
        if distributed.is_main():
            record = {
                "step": step,
                "world_size": distributed.world_size(),
                "zero_stages": {name: engine.zero_stage for name, engine in engines.items()},
                "state": state,
            }
            artifacts.write_json(part / _STATE_JSON, record)
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
            _write_text(folder / LATEST, target.name)
            for old in _states(folder)[:-keep]:
                shutil.rmtree(old)
    logger.info("saved state %s", target)
    return target


def load_state(folder: str | Path, *, engines: Mapping[str, TrainEngine]) -> dict[str, Any]:
    """Restore engines and random generators from the newest state. Collective.

    Args:
        folder: holds the states.
        engines: trained models by name, as when it was saved.

    Returns:
        The values given to `save_state`.

    Raises:
        FileNotFoundError: there is no state; nothing is started over in silence.
        ValueError: it was saved by other engines, or on another number of ranks by an engine that shards (ZeRO 1 to 3).
    """
    folder = Path(folder)
    target, record = _read_latest(folder)
    stages = {name: engine.zero_stage for name, engine in engines.items()}
    if record["zero_stages"] != stages:
        raise ValueError(
            f"{target} holds engines with ZeRO stages {record['zero_stages']}, this run has {stages}. Resume with the "
            "DeepSpeed JSON that the run began with."
        )
    saved_size, size = int(record["world_size"]), distributed.world_size()
    sharded = [name for name, stage in stages.items() if stage > 0]
    if saved_size != size and sharded:
        raise ValueError(
            f"{target} was saved on {saved_size} ranks, this run has {size}, and {', '.join(sharded)} is sharded over "
            f"the ranks (ZeRO {stages[sharded[0]]}). Resume on {saved_size} ranks."
        )
    for name, engine in engines.items():
        engine.load_state(target, tag=name)
    rng = target / "rng" / f"rank_{distributed.rank()}.json"
    if rng.is_file():  # absent for ranks that the saved run did not have
        _set_rng_state(json.loads(rng.read_text(encoding="utf-8")))
    logger.info("resumed from %s", target)
    return cast(dict[str, Any], record["state"])


def _read_latest(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Rank 0 reads, so that all ranks go on from one state or fail together."""
    found: tuple[str, dict[str, Any]] | None = None
    problem = ""
    if distributed.is_main():
        pointer = folder / LATEST
        name = pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else ""
        target = folder / name
        if not name:
            problem = f"nothing to resume: {pointer} does not exist."
        elif not (target / _STATE_JSON).is_file():
            problem = f"nothing to resume: {pointer} names {name}, and {target / _STATE_JSON} does not exist."
        else:
            found = (name, json.loads((target / _STATE_JSON).read_text(encoding="utf-8")))
    found, problem = distributed.broadcast_object((found, problem))
    if found is None:
        raise FileNotFoundError(
            f"{problem} Set run.resume=false to start over, or point run.out_dir at a run with a saved state "
            "(run.save_every > 0)."
        )
    return folder / found[0], found[1]


def _states(folder: Path) -> list[Path]:
    """Complete states, oldest first."""
    return sorted(path for path in folder.glob("step_*") if (path / _STATE_JSON).is_file())


def _write_text(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _rng_state() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators on this rank, as JSON."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  the global one is saved
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    device = distributed.device()
    if device.type != "cpu":
        state["accelerator"] = _encode(torch.get_device_module(device).get_rng_state())
    return state


def _set_rng_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(_decode(state["torch"]))
    device = distributed.device()
    if device.type != "cpu" and "accelerator" in state:
        torch.get_device_module(device).set_rng_state(_decode(state["accelerator"]))


def _encode(values: Tensor) -> str:
    return base64.b64encode(values.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


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
