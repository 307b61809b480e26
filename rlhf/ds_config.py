"""A DeepSpeed JSON: read it, check it, and resolve it to what deepspeed.initialize gets. No torch.

Each file in ds_configs/ is plain JSON that DeepSpeed accepts as it stands. It says how a step runs (ZeRO stage,
offload, precision, micro-batch); what is optimised is the stage's YAML. DeepSpeed ignores top-level keys it does not
know and then trains at ZeRO 0, so an unknown key is an error here.
"""

import copy
import dataclasses
import difflib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from rlhf import strict
from rlhf.config import OptimConfig

MICRO_BATCH_KEY = "train_micro_batch_size_per_gpu"
OBJECTS = ("muon", "adamw_8bit")
"""Optimisers that DeepSpeed is handed as objects."""

_OWNED_BY_YAML = {
    "optimizer": "the optimiser is the YAML's `optim` section",
    "scheduler": "the schedule is the YAML's `optim` section (DeepSpeed's warm-up would run two steps at rate 0)",
    "gradient_clipping": "the limit is `optim.clip_norm`",
    "gradient_accumulation_steps": "it follows from the YAML's batch size, the ranks and the micro-batch",
    "train_batch_size": "the YAML's `global_batch_size` (PPO: `update.minibatch_size`) says it",
    "tensor_parallel": "the ranks that share the weights are `parallel.tp`",
    "sequence_parallel_size": "the ranks that share the rows are `parallel.sp`",
    "pipeline": "the ranks that share the layers are `parallel.pp`",
}

# The names of types that `data_types` knows, and torch's.
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

# With these values of DeepSpeed's own, a JSON was written by `resolve`, for the record of a run.
_RESOLVED = {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}

_NOT_SUPPORTED = {
    "gradient_allreduce_op": "the engine normalises losses for a mean over ranks",
    "managed_gradient_accumulation": "the engine sets the boundary of an optimiser step itself",
    "amp": "use bf16 or fp16",
    "torch_autocast": "use bf16 or fp16",
    "expert_parallel": "experts are not dealt to ranks here",
    "data_efficiency": "data is the YAML's `data` section",
    "curriculum_learning": "data is the YAML's `data` section",
    "dataloader_drop_last": "data is the YAML's `data` section",
    "autotuning": "it restarts the program with other settings",
}

_KNOWN = {
    MICRO_BATCH_KEY,
    "activation_checkpointing",
    "aio",
    "bf16",
    "checkpoint",
    "comms_logger",
    "communication_data_type",
    "data_types",
    "disable_python_gc",
    "dump_state",
    "flops_profiler",
    "fp16",
    "gradient_predivide_factor",
    "hybrid_engine",
    "log_level",
    "memory_breakdown",
    "prescale_gradients",
    "steps_per_print",
    "timers",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
}


@dataclass(frozen=True, kw_only=True)
class HybridEngineConfig:
    """The `hybrid_engine` section of an actor's JSON, in DeepSpeed's own words."""

    enabled: bool = False
    """Whether this section holds; how weights come to the decoder is the YAML's `rollout.weights`."""
    max_out_tokens: int = 512
    """Longest prompt and response together that generation is asked for."""
    inference_tp_size: int = 1
    """Only 1: ranks that share a copy are the YAML's `rollout.tensor_parallel`."""
    release_inference_cache: bool = False
    """Return the accelerator's cached memory after each rollout."""
    pin_parameters: bool = True
    """Accepted, no effect: generation runs on the accelerator's own copy."""
    tp_gather_partition_size: int = 8
    """Accepted, no effect without inference_tp_size."""
    enable_cuda_graph: bool = False
    """Only false."""


def names() -> list[str]:
    """Names of the packaged JSON files."""
    return sorted(
        f.name.removesuffix(".json") for f in resources.files("ds_configs").iterdir() if f.name.endswith(".json")
    )


def load(path_or_name: str | Path) -> dict[str, Any]:
    """Read and check a DeepSpeed JSON.

    Args:
        path_or_name: a file (anything with a slash or ending in .json), or the name of a packaged one, such as `zero3`.

    Raises:
        FileNotFoundError: no such file or name.
        ValueError: not JSON, or a key that `check` refuses.
    """
    text = str(path_or_name)
    if "/" in text or text.endswith(".json"):
        path = Path(text)
        if not path.is_file():
            raise FileNotFoundError(f"DeepSpeed JSON {text} does not exist. Packaged names: {', '.join(names())}.")
    else:
        path = Path(str(resources.files("ds_configs") / f"{text}.json"))
        if not path.is_file():
            raise FileNotFoundError(
                f"no DeepSpeed JSON is called {text!r}.{_did_you_mean(text, names())} Packaged names: "
                f"{', '.join(names())}; or give a path that ends in .json."
            )
    raw = strict.read_json(path)
    if not isinstance(raw, dict):
        raise ValueError(f"{text}: the JSON is a {type(raw).__name__}, not an object.")
    check(raw, source=text)
    return raw


def check(raw: Mapping[str, Any], *, source: str = "DeepSpeed JSON") -> None:
    """Check what can be known from the JSON alone.

    Args:
        raw: the JSON's content.
        source: file or name for messages.

    Raises:
        ValueError: "auto", unknown or refused keys, a missing micro-batch, values that contradict each other.
    """
    resolved = _is_resolved(raw)
    for key in raw:
        if key in _OWNED_BY_YAML and not resolved:
            _fail(source, f"`{key}` does not belong here: {_OWNED_BY_YAML[key]}. Remove it.")
        if key in _NOT_SUPPORTED:
            _fail(source, f"`{key}` is not supported: {_NOT_SUPPORTED[key]}. Remove it.")
        if key not in _KNOWN and not (resolved and key in _OWNED_BY_YAML):
            hint = _did_you_mean(key, [*_KNOWN, *_OWNED_BY_YAML])
            _fail(source, f"unknown key `{key}`, which DeepSpeed would silently ignore.{hint} Correct or remove it.")
    for path, value in _leaves(raw):
        if value == "auto":
            _fail(
                source,
                f'`{path}` is "auto", a word of the Hugging Face Trainer that DeepSpeed does not know. Give a value.',
            )
    micro = raw.get(MICRO_BATCH_KEY)
    if not isinstance(micro, int) or isinstance(micro, bool) or micro < 1:
        _fail(source, f"`{MICRO_BATCH_KEY}` must be an integer >= 1, got {micro!r}.")
    if raw.get("bf16", {}).get("enabled") and raw.get("fp16", {}).get("enabled"):
        _fail(source, "bf16 and fp16 are both enabled. Keep one.")
    stage = raw.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        _fail(source, f"`zero_optimization.stage` must be 0, 1, 2 or 3, got {stage!r}.")
    _check_zero(raw, stage, source)
    _hybrid_engine(raw, source)


def _is_resolved(raw: Mapping[str, Any]) -> bool:
    return "train_batch_size" in raw and all(raw.get(key) == value for key, value in _RESOLVED.items())


def _check_zero(raw: Mapping[str, Any], stage: int, source: str) -> None:
    zero = raw.get("zero_optimization", {})
    device = _offload_device(zero, "offload_optimizer")
    if device == "nvme":
        _fail(
            source,
            "`zero_optimization.offload_optimizer.device` is nvme: DeepSpeed does not restore what it saves of such an "
            "optimizer, so that the run could not be resumed. Use cpu; `offload_param` may be nvme.",
        )
    if device and stage == 0:
        _fail(source, "`zero_optimization.offload_optimizer` needs a stage of 1, 2 or 3, got 0.")
    if _offload_device(zero, "offload_param") and stage != 3:
        _fail(source, f"`zero_optimization.offload_param` needs stage 3, got {stage}.")
    if _offload_device(zero, "offload_param") == "nvme" and not zero["offload_param"].get("nvme_path"):
        _fail(
            source,
            "`zero_optimization.offload_param.device` is nvme without `nvme_path`. Name a folder on a disk of the "
            "machine, one that no other run uses.",
        )
    accumulation = raw.get("data_types", {}).get("grad_accum_dtype")
    if accumulation is not None and accumulation not in _DTYPES:
        _fail(source, f"`data_types.grad_accum_dtype` must be one of {', '.join(_DTYPES)}, got {accumulation!r}.")
    if stage == 1 and raw.get("bf16", {}).get("enabled") and accumulation == "fp32" and not device:
        _fail(
            source,
            "bf16 with `data_types.grad_accum_dtype` fp32 at stage 1 makes DeepSpeed use another optimizer class, "
            "whose gradients the engine cannot clip. Use stage 2.",
        )
    if stage == 0 and accumulation is not None and _DTYPES[accumulation] != dtype_name(raw):
        _fail(
            source,
            f"`data_types.grad_accum_dtype` {accumulation} at stage 0 must be the weights' dtype, "
            f"{dtype_name(raw)}: DeepSpeed accumulates in their own gradients there. Remove it, or use stage 2.",
        )


def check_on_cpu(raw: Mapping[str, Any], *, has_fp16: bool = False, source: str = "DeepSpeed JSON") -> None:
    """Check that DeepSpeed can do on a CPU what the JSON asks for.

    Args:
        raw: the JSON.
        has_fp16: what DeepSpeed's accelerator says of this CPU.
        source: name of the JSON for messages.

    Raises:
        ValueError: fp16, or quantised gathers.
    """
    if dtype_name(raw) == "float16" and not has_fp16:
        _fail(source, "fp16 does not train on a CPU. Use a JSON with bf16 or without either.")
    if raw.get("zero_optimization", {}).get("zero_quantized_weights"):
        _fail(
            source,
            "`zero_optimization.zero_quantized_weights` (ZeRO++ qwZ) does not run on a CPU: DeepSpeed has its "
            "quantiser for accelerators only. Remove it.",
        )


def _offload_device(zero: Mapping[str, Any], section: str) -> str | None:
    device = (zero.get(section) or {}).get("device", "none")
    return None if device == "none" else str(device)


def resolve(
    raw: Mapping[str, Any],
    *,
    optim: OptimConfig | None,
    world_size: int,
    trainable: bool,
    lora: bool = False,
    source: str = "DeepSpeed JSON",
) -> dict[str, Any]:
    """The whole of a run's DeepSpeed settings: the JSON plus what the YAML and the ranks decide.

    Accumulation is 1 and clipping 0 for DeepSpeed, because the engine sets the boundary and clips by itself. Resolving
    what is resolved already, by the same values, changes nothing: a run can be repeated from the JSON in its folder.

    Args:
        raw: content of the JSON.
        optim: the optimiser's section of the YAML; None for a frozen model.
        world_size: number of ranks.
        trainable: whether the model is trained.
        lora: whether only adapters (or otherwise only some of the weights) are trained.
        source: file or name for messages.

    Raises:
        ValueError: as `check`; or the JSON does not fit the use.
    """
    check(raw, source=source)
    assert trainable == (optim is not None), "a trainable model needs optim, a frozen one has none"
    ds: dict[str, Any] = copy.deepcopy(dict(raw))
    stage = ds.setdefault("zero_optimization", {}).setdefault("stage", 0)
    offload = _offload_device(ds["zero_optimization"], "offload_optimizer")
    _check_use(ds, stage=stage, offload=offload, trainable=trainable, lora=lora, source=source)
    derived: dict[str, Any] = {"train_batch_size": ds[MICRO_BATCH_KEY] * world_size, **_RESOLVED}
    if optim is not None:
        _check_optimizer(ds, optim, offload=offload, source=source)
        cpu_adam = bool(offload and ds.get("zero_force_ds_cpu_optimizer"))
        if optim.name not in OBJECTS:
            derived["optimizer"] = _optimizer(optim, deepspeed_cpu_adam=cpu_adam)
        else:  # an object of the engine's, which DeepSpeed refuses to offload else
            ds["zero_force_ds_cpu_optimizer"] = False
    for key in [key for key in _OWNED_BY_YAML if key in ds]:
        if ds[key] != derived.get(key):
            _fail(
                source,
                f"`{key}` was resolved to {ds[key]!r} by an earlier run, this one needs {derived.get(key)!r}. Use the "
                "same YAML and number of ranks, or name the JSON that the earlier run started from.",
            )
    ds.update(derived)
    ds.setdefault("steps_per_print", None)
    if trainable and stage in (1, 2) and not offload and not ds.get("fp16", {}).get("enabled"):
        # The engine has the norm already; fp16 needs DeepSpeed's own to find overflows.
        ds["zero_optimization"].setdefault("compute_grad_norm", False)
    return ds


def _check_use(
    ds: Mapping[str, Any], *, stage: int, offload: str | None, trainable: bool, lora: bool, source: str
) -> None:
    if _hybrid_engine(ds, source).enabled and stage == 2 and offload and not lora:
        _fail(
            source,
            "ZeRO-2 with the hybrid engine and optimizer offload, all weights trained: refused, because this "
            "combination was unstable in DeepSpeed-Chat and the cause never found. Use ZeRO-3, or LoRA, or no offload.",
        )
    if not trainable and stage in (1, 2):
        _fail(source, f"stage {stage} shards optimizer state, and a frozen model has none. Use 0 or 3.")
    if not trainable and offload:
        _fail(source, "`zero_optimization.offload_optimizer` is set, and a frozen model has none. Remove it.")


def _check_optimizer(ds: Mapping[str, Any], optim: OptimConfig, *, offload: str | None, source: str) -> None:
    if optim.name not in OBJECTS:
        return
    name = f"optim.name={optim.name}"
    if offload and ds.get("zero_force_ds_cpu_optimizer"):
        _fail(
            source,
            f"{name} does not go with `zero_force_ds_cpu_optimizer`, which is DeepSpeed's CPU Adam. Remove one.",
        )
    if offload and optim.name == "adamw_8bit":
        _fail(
            source,
            f"{name} does not go with `zero_optimization.offload_optimizer`: its kernel works on the accelerator's "
            "memory. Use optim.name=adamw, or a JSON without offload.",
        )
    if optim.name == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        _fail(
            source,
            f"{name} needs bitsandbytes, which is not installed. Run `pip install 'rlhf-deepspeed[bitsandbytes]'`, "
            "or use optim.name=adamw.",
        )


def _optimizer(optim: OptimConfig, *, deepspeed_cpu_adam: bool) -> dict[str, Any]:
    params: dict[str, Any] = {
        "lr": optim.lr,
        "betas": list(optim.betas),
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
    }
    if not deepspeed_cpu_adam:
        # torch.optim.AdamW: DeepSpeed's own Adams are compiled at first use, which takes a compiler and minutes.
        # `fused` is torch's one-pass kernel, on CPUs too: 54 ms instead of 550 for 25 M weights on one core.
        params.update(torch_adam=True, fused=True)
    return {"type": "AdamW", "params": params}


def micro_batch_size(raw: Mapping[str, Any]) -> int:
    """Sequences of one forward on one rank."""
    return int(raw[MICRO_BATCH_KEY])


def zero_stage(raw: Mapping[str, Any]) -> int:
    """ZeRO stage, 0 to 3."""
    return int(raw.get("zero_optimization", {}).get("stage", 0))


def dtype_name(raw: Mapping[str, Any]) -> str:
    """Type that the model computes in: `bfloat16`, `float16` or `float32`."""
    if raw.get("bf16", {}).get("enabled"):
        return "bfloat16"
    return "float16" if raw.get("fp16", {}).get("enabled") else "float32"


def hybrid_engine(raw: Mapping[str, Any]) -> HybridEngineConfig:
    """The `hybrid_engine` section; not enabled where there is none.

    Raises:
        ValueError: an unknown key or a value that cannot be honoured.
    """
    return _hybrid_engine(raw, "DeepSpeed JSON")


def _hybrid_engine(raw: Mapping[str, Any], source: str) -> HybridEngineConfig:
    section = raw.get("hybrid_engine", {})
    known = [f.name for f in dataclasses.fields(HybridEngineConfig)]
    for key in section:
        if key not in known:
            _fail(source, f"unknown key `hybrid_engine.{key}`.{_did_you_mean(key, known)} Known: {', '.join(known)}.")
    hybrid = HybridEngineConfig(**section)
    if hybrid.inference_tp_size != 1:
        _fail(
            source,
            f"`hybrid_engine.inference_tp_size` must be 1, got {hybrid.inference_tp_size}: the YAML's "
            "rollout.tensor_parallel says how many ranks share a copy of the weights. Set 1 here.",
        )
    if hybrid.enable_cuda_graph:
        _fail(source, "`hybrid_engine.enable_cuda_graph` must be false: the YAML's rollout.graphs says it. Remove it.")
    if hybrid.max_out_tokens < 1:
        _fail(source, f"`hybrid_engine.max_out_tokens` must be >= 1, got {hybrid.max_out_tokens}.")
    return hybrid


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in _leaves(item, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list):
        return [leaf for number, item in enumerate(value) for leaf in _leaves(item, f"{path}[{number}]")]
    return [(path, value)]


def _did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" Did you mean `{close[0]}`?" if close else ""


def _fail(source: str, message: str) -> NoReturn:
    raise ValueError(f"{source}: {message}")
