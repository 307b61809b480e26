"""An engine's saved files in a form that any number of ranks and any ZeRO stage can load.

DeepSpeed's universal checkpoint: one folder a weight, with the whole float32 weight and the two moments of Adam. Its
converter reads ZeRO 1 to 3; what it leaves in `optimizer_state.pt` depends on the stage, and its loader for stage 3
would give every group the weight decay of the first. So that file is written here, without hyper-parameters, which the
run has anyway, and ZeRO-0 is converted here.

Muon's momentum, which is an exponential average of gradients as Adam's first moment is, goes by that name between the
two layouts, beside a second moment of zeros that nobody reads.
"""

import contextlib
import io
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import zero_to_fp32
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
MOMENTUM = "momentum_buffer"
_MODEL_FILE = "mp_rank_00_model_states.pt"


def convert(saved: Path, layout: Mapping[str, Any], folder: Path) -> None:
    """Write the universal form of weights and optimiser. On one rank; single-threaded.

    Args:
        saved: an engine's folder of a state.
        layout: the engine's entry of the state's record.
        folder: made already; gets `zero/<weight>/{fp32,exp_avg,exp_avg_sq}.pt` and `zero/optimizer_state.pt`.
    """
    scaler = None
    if layout["zero_stage"] == 0:
        _convert_stage0(saved, layout, folder)
    else:
        source = saved
        if layout.get("optimizer") == "muon":
            source = folder / "as_adam"
            _write_as_adam(saved, source)
        arguments = Namespace(
            input_folder=str(source),
            output_folder=str(folder),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
        with _quiet():
            ds_to_universal.main(arguments)
        former = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=False)
        scaler = former.get("loss_scaler")
        if layout["zero_stage"] == 3:
            _shape(folder, layout)
        if source != saved:
            shutil.rmtree(source)
    _write_optimizer_state(folder, layout, adam_step=layout["step_count"], scaler=scaler)


def convert_weights(saved: Path, layout: Mapping[str, Any], folder: Path) -> None:
    """As `convert`, with moments of 0 and an Adam that has made no step: the weights alone."""
    weights = weights_of(saved, layout)
    for name in _names(layout):
        _write(folder, name, {"fp32": weights[name], **{moment: torch.zeros_like(weights[name]) for moment in MOMENTS}})
    _write_optimizer_state(folder, layout, adam_step=0, scaler=None)


def weights_of(saved: Path, layout: Mapping[str, Any]) -> dict[str, Tensor]:
    """Whole trained weights of an engine's folder by name, in float32 where the optimiser keeps them so. No ranks.

    Args:
        saved: an engine's folder of a state.
        layout: the engine's entry of the state's record.
    """
    if layout["zero_stage"] > 0:
        with _quiet():
            found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
                str(saved.parent), tag=saved.name, exclude_frozen_parameters=True
            )
        return {name: found[name] for name in _names(layout)}
    content = torch.load(saved / _MODEL_FILE, map_location="cpu", weights_only=False)
    masters = _masters(content)
    return dict(zip(_names(layout), masters, strict=True)) if masters else {
        name: content["module"][name] for name in _names(layout)
    }  # fmt: skip


def load(engine: Any, zero_stage: int, folder: Path, groups: list[list[str]], *, moments: bool = True) -> None:
    """Give DeepSpeed's engine, of any number of ranks and ZeRO stage, what `convert` wrote. Collective.

    Args:
        engine: as DeepSpeed made it.
        zero_stage: its stage.
        folder: holds `zero/`.
        groups: names of the trained weights in the order of the optimiser's groups.
        moments: take Adam's, or Muon's, too; without, the optimiser begins anew, as one of another kind has to.
    """
    optimizer_state = torch.load(folder / "zero" / "optimizer_state.pt", weights_only=False)
    if zero_stage == 0:
        _load_stage0(engine, folder, groups)
    else:
        optimizer = engine.optimizer
        if zero_stage == 3:
            optimizer.checkpoint_event_prologue()
        optimizer.load_state_dict(state_dict_list=None, checkpoint_folder=str(folder))
        if zero_stage == 3:
            optimizer.checkpoint_event_epilogue()
        else:
            optimizer.update_lp_params()
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    if not moments:
        inner.state.clear()
    matrices = getattr(inner, "shards", {})
    for weight, state in inner.state.items():
        if weight in matrices:
            inner.state[weight] = {MOMENTUM: state["exp_avg"]}
        elif MOMENTUM not in state:
            state["step"] = torch.tensor(float(optimizer_state["adam_step"]), device=weight.device)


def _load_stage0(engine: Any, folder: Path, groups: list[list[str]]) -> None:
    """Whole weights on every rank; for 16-bit ones the optimiser's float32 copies too."""
    inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
    parameters = dict(engine.module.named_parameters())
    with torch.no_grad():
        for names, group in zip(groups, inner.param_groups, strict=True):
            for name, master in zip(names, group["params"], strict=True):
                tensors = {key: _read(folder, name, key) for key in ("fp32", *MOMENTS)}
                for weight in {id(w): w for w in (parameters[name], master)}.values():
                    weight.copy_(tensors["fp32"].view(weight.shape))
                moments = {moment: tensors[moment].view(master.shape).to(master) for moment in MOMENTS}
                inner.state[master] = {MOMENTUM: moments["exp_avg"]} if group.get("matrices") else moments


def _convert_stage0(saved: Path, layout: Mapping[str, Any], folder: Path) -> None:
    content = torch.load(saved / _MODEL_FILE, map_location="cpu", weights_only=False)
    weights = weights_of(saved, layout)
    optimizer = content["optimizer"]
    adam = optimizer.get("optimizer_state_dict", optimizer)["state"]
    for number, name in enumerate(_names(layout)):
        moments = _as_adam(adam.get(number, {}))  # empty before the first step
        zero = torch.zeros_like(weights[name], dtype=torch.float32)
        _write(folder, name, {"fp32": weights[name].float(), **{key: moments.get(key, zero) for key in MOMENTS}})


def _write_as_adam(saved: Path, folder: Path) -> None:
    """An engine's files with Muon's states in the form that DeepSpeed's converter reads; all other files by links."""
    folder.mkdir()
    for path in saved.iterdir():
        if not path.name.endswith("_optim_states.pt"):
            (folder / path.name).symlink_to(path.resolve())
            continue
        content = torch.load(path, map_location="cpu", weights_only=False)
        zero = content["optimizer_state_dict"]
        states = zero.get("optimizer_state_dict", zero.get("base_optimizer_state"))["state"]
        for number, state in states.items():
            states[number] = _as_adam(state)
        torch.save(content, folder / path.name)


def _as_adam(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A weight's state with Muon's momentum as Adam's first moment; one zero stands for all of the second."""
    if MOMENTUM not in state:
        return state
    momentum = state[MOMENTUM]
    return {"exp_avg": momentum, "exp_avg_sq": torch.zeros((), dtype=momentum.dtype).expand(momentum.shape)}


def _shape(folder: Path, layout: Mapping[str, Any]) -> None:
    """Bring stage 3's files, flat tensors alone, into the form of the other stages', which only stage 3 reads else."""
    for name in _names(layout):
        shape = layout["shapes"][name]
        paths = {key: folder / "zero" / name / f"{key}.pt" for key in ("fp32", *MOMENTS)}
        _write(folder, name, {k: torch.load(p, weights_only=False).view(shape) for k, p in paths.items()})


def _masters(content: Mapping[str, Any]) -> list[Tensor]:
    """float32 copies that DeepSpeed keeps at stage 0 for 16-bit weights, in the order of the groups; else empty."""
    groups = content["optimizer"].get("fp32_groups", [])
    return [weight for group in groups for weight in group]


def _names(layout: Mapping[str, Any]) -> list[str]:
    return [name for group in layout["groups"] for name in group]


def _write(folder: Path, name: str, tensors: Mapping[str, Tensor]) -> None:
    target = folder / "zero" / name
    target.mkdir(parents=True, exist_ok=True)
    for key, tensor in tensors.items():
        torch.save({"param": tensor.clone()}, target / f"{key}.pt")


def _read(folder: Path, name: str, key: str) -> Tensor:
    return torch.load(folder / "zero" / name / f"{key}.pt", weights_only=False)["param"]  # type: ignore[no-any-return]


def _write_optimizer_state(folder: Path, layout: Mapping[str, Any], *, adam_step: int, scaler: Any) -> None:
    step = torch.tensor(float(adam_step))
    content: dict[str, Any] = {
        "adam_step": adam_step,
        "ds_version": deepspeed.__version__,
        # Groups without values: each keeps its own.
        "param_groups": [{} for _ in layout["groups"]],
        "optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": [{}]},
    }
    if scaler is not None:
        content["loss_scaler"] = scaler
    torch.save(content, folder / "zero" / "optimizer_state.pt")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the prints and progress bars of DeepSpeed's scripts off the log."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
