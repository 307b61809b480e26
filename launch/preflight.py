"""Everything that can be checked before a process is started. No torch.

All problems are found at once. A problem of this machine (a file that is not here, no accelerator, a full disk) does
not stop a dry run, which may take place on a login node.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.inputs import free_bytes, is_hub_name, model_folders, model_shape, source_path
from launch.placement import Placement, accelerator_visible, count_devices, port_is_free
from launch.recipe import FOLDERS, Recipe, Stage
from rlhf import artifacts, ds_config
from rlhf.combinations import Role
from rlhf.config import DataConfig, ModelConfig, OptimConfig, RunConfig
from rlhf.models import pipeline_split
from rlhf.models.split import check_heads, check_rollout_split, check_training_split
from rlhf.rules import RULES
from step3_ppo.config import PPOConfig

_BUILTIN_TASKS = ("politeness",)
_SPARE_BYTES = 256 * 2**20
# Programs that deepspeed's launchers call, and Debian's packages with them.
_PROGRAMS = {
    "pdsh": {"pdsh": "pdsh", "ssh": "openssh-client"},
    "openmpi": {"mpirun": "openmpi-bin", "ompi_info": "openmpi-bin", "ssh": "openssh-client"},
    "slurm": {"srun": "slurm-client", "sinfo": "slurm-client"},
}


@dataclass(frozen=True)
class Problem:
    """Something that would make a run fail."""

    text: str
    here: bool = False
    """It depends on this machine; a dry run reports it and goes on."""

    def __str__(self) -> str:
        return self.text


def check(
    recipe: Recipe,
    stages: Sequence[Stage],
    placement: Placement,
    *,
    run_dir: Path,
    environment: Mapping[str, str],
    finished: Sequence[str] = (),
) -> list[Problem]:
    """All problems of a resolved run, in the order of the stages, without duplicates.

    Args:
        recipe: the recipe.
        stages: resolved stages that the run consists of.
        placement: where ranks start.
        run_dir: folder of the run.
        environment: of the ranks.
        finished: stages whose result is kept, so that their inputs are not looked at.
    """
    on_cpu = not placement.is_remote and not accelerator_visible(environment)
    to_run = [stage for stage in stages if stage.name not in finished]
    problems: list[Problem] = []
    for stage in to_run:
        problems += _prefix(stage, _ds_config_problems(stage, placement.world_size, on_cpu=on_cpu))
        problems += _prefix(stage, _source_problems(stage.config.data))
        problems += _prefix(stage, _model_problems(stage, stages, environment))
        problems += _prefix(stage, _compiler_problems(stage, environment, on_cpu=on_cpu))
        problems += _prefix(stage, _float8_problems(stage))
        problems += _prefix(stage, _length_problems(stage, stages))
        problems += _prefix(stage, _rule_problems(stage))
        problems += _prefix(stage, _rollout_problems(stage, stages, placement.world_size))
        problems += _prefix(stage, _parallel_problems(stage, stages, placement.world_size))
    problems += _split_problems(stages)
    problems += _artifact_problems(to_run, stages)
    problems += _machine_problems(recipe, placement, environment, on_cpu=on_cpu)
    problems += _disk_problems(to_run, stages, run_dir)
    return list(dict.fromkeys(problems))


def unreachable_hosts(placement: Placement) -> list[Problem]:
    """Hosts of the placement on which the launcher cannot start anything; DeepSpeed looks at the first one only."""
    lines = {host.name: f"{placement.hostfile}:{host.line}: " if host.line else "" for host in placement.hosts}
    if placement.launcher == "slurm":
        text = (
            "{}host {} is no node that `sinfo` shows as up. Use names of Slurm's nodes, or leave it out with --exclude."
        )
    else:
        text = (
            "{}host {} does not answer `ssh -o BatchMode=yes {} true`. Set up ssh without a password to it, also from "
            "a host to itself, or leave it out with --exclude."
        )
    return [Problem(text.format(lines[name], name, name), here=True) for name in hosts_without_answer(placement)]


def hosts_without_answer(placement: Placement, *, timeout_seconds: int = 8) -> list[str]:
    """Names of hosts that cannot be reached now, through ssh or by what Slurm knows; none for a run on this machine."""
    if not placement.is_remote:
        return []
    names = [host.name for host in placement.hosts]
    if placement.launcher == "slurm":
        return _slurm_nodes_down(names, timeout_seconds)

    def answers(name: str) -> bool:
        argv = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={timeout_seconds}", name, "true"]
        try:
            return subprocess.run(argv, capture_output=True, timeout=timeout_seconds + 5, check=False).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False

    with ThreadPoolExecutor(max_workers=32) as pool:
        reached = list(pool.map(answers, names))
    return [name for name, ok in zip(names, reached, strict=True) if not ok]


def _slurm_nodes_down(names: Sequence[str], timeout_seconds: int) -> list[str]:
    """Nodes that Slurm does not know, that are down, or whose daemon does not respond (a `*` after the state)."""
    argv = ["sinfo", "--noheader", "--Node", "--format=%N %T", f"--nodes={','.join(names)}"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_seconds + 5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return list(names)
    states = {node: state for node, state in (line.split() for line in done.stdout.splitlines())}
    return [name for name in names if re.match(r"(?:down|drained|fail|unknown)\b|\w*\*|$", states.get(name, ""))]


def _prefix(stage: Stage, problems: Iterator[Problem]) -> Iterator[Problem]:
    for problem in problems:
        yield Problem(f"{stage.folder}: {problem.text}", here=problem.here)


def _ds_config_problems(stage: Stage, world_size: int, *, on_cpu: bool) -> Iterator[Problem]:
    optims, models = _optims(stage), stage.models()
    longest = stage.config.data.max_prompt_tokens + stage.config.data.max_response_tokens
    for role, name in stage.ds_configs().items():
        key = {"model": "deepspeed", "normalise": "normalise.deepspeed"}.get(role, f"deepspeed.{role}")
        try:
            raw = ds_config.load(name)
            ds_config.resolve(
                raw,
                optim=optims.get(role),
                world_size=world_size,
                trainable=role in optims,
                lora=role in models and models[role].lora.rank > 0,
                source=name,
            )
            if role in optims:
                Role(ds=raw, model=models[role], optim=optims[role], parallel=stage.config.parallel)
        except (ValueError, OSError) as error:
            yield Problem(f"{key}: {error}")
            continue
        if on_cpu:
            try:
                ds_config.check_on_cpu(raw, source=name)
            except ValueError as error:
                yield Problem(f"{key}: {error}", here=True)
        hybrid = ds_config.hybrid_engine(raw)
        if hybrid.enabled and longest > hybrid.max_out_tokens:
            yield Problem(
                f"{key}={name}: hybrid_engine.max_out_tokens={hybrid.max_out_tokens} is below data.max_prompt_tokens + "
                f"data.max_response_tokens = {longest}. Raise it, or lower the lengths."
            )


def _optims(stage: Stage) -> dict[str, OptimConfig]:
    """Optimiser section of each trainable role."""
    if isinstance(stage.config, PPOConfig):
        critic = stage.config.critic_optim if stage.config.has_critic else None
        return {"actor": stage.config.actor_optim} | ({"critic": critic} if critic else {})
    return {"model": stage.config.optim}


def _source_problems(data: DataConfig) -> Iterator[Problem]:
    for index, source in enumerate(data.sources):
        key = f"data.sources[{index}].path={source.path}"
        task = source.path.removeprefix("builtin:")
        if source.path.startswith("builtin:") and task not in _BUILTIN_TASKS:
            yield Problem(f"{key}: there is no such built-in task. Use builtin:{' or builtin:'.join(_BUILTIN_TASKS)}.")
        path = source_path(source, data.root)
        if path is not None and not path.exists():
            yield Problem(
                f"{key}: {path} does not exist. Correct it, or pass the folder that holds the data with --data.",
                here=True,
            )
    if data.template.endswith((".jinja", ".j2")) and not Path(data.template).is_file():
        yield Problem(f"data.template={data.template}: there is no such file. Correct the path.", here=True)


def _model_problems(stage: Stage, stages: Sequence[Stage], environment: Mapping[str, str]) -> Iterator[Problem]:
    produced = {str(other.model_dir) for other in stages}
    folders = model_folders(stage)
    for key, folder in folders.items():
        if str(folder) in produced or str(folder).startswith(str(stage.out_dir.parent) + "/"):
            continue  # made by this run: see _artifact_problems
        if not folder.is_dir():
            yield Problem(
                f"{key}={folder}: there is no such folder. Correct the path, or give owner/name of the hub.", here=True
            )
        elif key != "tokenizer.path" and not (folder / "config.json").is_file():
            yield Problem(f"{key}={folder}: holds no config.json, so it is no Hugging Face model folder.", here=True)
    offline = environment.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
    paths = {f"{key}.path": model.path for key, model in stage.models().items()}
    for key, path in paths.items():
        if path and is_hub_name(path) and offline and not _in_hub_cache(path, environment):
            yield Problem(
                f"{key}={path}: HF_HUB_OFFLINE is set and the model is not in the cache. Unset it, or download the "
                f"model first: hf download {path}",
                here=True,
            )


def _in_hub_cache(name: str, environment: Mapping[str, str]) -> bool:
    home = Path(environment.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(environment.get("HF_HUB_CACHE") or home / "hub")
    return (cache / f"models--{name.replace('/', '--')}" / "snapshots").is_dir()


def _compiler_problems(stage: Stage, environment: Mapping[str, str], *, on_cpu: bool) -> Iterator[Problem]:
    """For a CPU, torch.compile writes C++; whether Triton serves the accelerator, the stage finds out."""
    keys = [f"{key}.compile" for key, model in stage.models().items() if model.compile]
    compiler = environment.get("CXX", "g++")
    if keys and on_cpu and shutil.which(compiler, path=environment.get("PATH")) is None:
        yield Problem(
            f"{' and '.join(keys)}: there is no C++ compiler ({compiler}), which torch.compile needs on a CPU. Install "
            "g++ (build-essential), name a compiler in the environment variable CXX, or set compile: false.",
            here=True,
        )


def _float8_problems(stage: Stage) -> Iterator[Problem]:
    """Whether the accelerator has such products, the stage finds out."""
    keys = [f"{key}.float8={model.float8}" for key, model in stage.models().items() if model.float8 != "none"]
    if keys and importlib.util.find_spec("torchao") is None:
        yield Problem(
            f"{' and '.join(keys)}: torchao is not installed. Run `pip install 'rlhf-deepspeed[float8]'`, or set "
            "float8: none.",
            here=True,
        )


def _length_problems(stage: Stage, stages: Sequence[Stage]) -> Iterator[Problem]:
    data = stage.config.data
    longest = data.max_prompt_tokens + data.max_response_tokens
    for key in stage.models():
        limit = _origin(stage, key, stages).get("max_position_embeddings")
        if isinstance(limit, int) and longest > limit:
            yield Problem(
                f"data.max_prompt_tokens + data.max_response_tokens = {longest} is above max_position_embeddings="
                f"{limit} of {key}. Lower the lengths, or use a model with more positions."
            )


def _origin(stage: Stage, key: str, stages: Sequence[Stage]) -> Mapping[str, Any]:
    """Shape of a model, followed back through the stages of this run that it comes from."""
    model: ModelConfig = getattr(stage.config, key)
    by_folder = {str(other.model_dir): other for other in stages}
    parent = by_folder.get(model.path or "")
    if parent is not None:
        parent_model: ModelConfig = getattr(parent.config, "model", None) or parent.config.actor  # type: ignore[union-attr]
        return _origin(parent, "model" if hasattr(parent.config, "model") else "actor", stages) or model_shape(
            parent_model
        )
    return model_shape(model)


def _rule_problems(stage: Stage) -> Iterator[Problem]:
    if isinstance(stage.config, PPOConfig):
        for key, name in (("shaping.rule", stage.config.shaping.rule), ("gold_rule", stage.config.gold_rule)):
            if name is not None and name not in RULES:
                yield Problem(f"{key}={name}: there is no such rule. Use one of {', '.join(RULES)}.")


def _rollout_problems(stage: Stage, stages: Sequence[Stage], world_size: int) -> Iterator[Problem]:
    config = stage.config
    if not isinstance(config, PPOConfig):
        return
    try:
        raw = ds_config.load(config.deepspeed.actor)
    except (ValueError, OSError):
        return  # see _ds_config_problems
    num_ranks, shape = config.rollout.tensor_parallel or 1, _origin(stage, "actor", stages)
    try:
        config.check_rollout(
            trained_in=ds_config.dtype_name(raw), zero_stage=ds_config.zero_stage(raw), world_size=world_size
        )
        if num_ranks > 1 and shape:
            check_rollout_split(shape, num_ranks)
    except ValueError as error:
        yield Problem(str(error))


def _parallel_problems(stage: Stage, stages: Sequence[Stage], world_size: int) -> Iterator[Problem]:
    parallel, ds_configs = stage.config.parallel, stage.ds_configs()
    try:
        parallel.check_ranks(world_size)
        for key in stage.models():
            check_heads(_origin(stage, key, stages), parallel.sp, said=f"parallel.sp={parallel.sp}")
        for name in _optims(stage):
            from_reward = name == "critic" and not stage.models()[name].path
            shape = _origin(stage, "reward" if from_reward else name, stages)
            pipeline_split.check(shape, _json_of(ds_configs[name]), parallel.pp)
            if shape:
                check_training_split(shape, parallel.tp, name=name)
    except ValueError as error:
        yield Problem(str(error))


def _json_of(name: str) -> Mapping[str, Any]:
    """A DeepSpeed JSON; empty where it cannot be read, which `_ds_config_problems` says."""
    try:
        return ds_config.load(name)
    except (ValueError, OSError):
        return {}


def _split_problems(stages: Sequence[Stage]) -> Iterator[Problem]:
    """Two stages that cut one source differently would share prompts; templates must agree from stage to stage."""
    seen: dict[str, Stage] = {}
    for stage in stages:
        for source in stage.config.data.sources:
            first = seen.setdefault(source.path, stage)
            if first.config.data.split != stage.config.data.split:
                yield Problem(
                    f"{stage.folder}: data.split={stage.config.data.split} divides {source.path} otherwise than "
                    f"{first.folder} does ({first.config.data.split}), so a prompt could stand in both. Make them "
                    "equal."
                )
    for first, second in zip(stages, stages[1:], strict=False):
        if first.config.data.template != second.config.data.template:
            yield Problem(
                f"{second.folder}: data.template={second.config.data.template}, but {first.folder} uses "
                f"{first.config.data.template}. The stages' models must see the same text; make them equal."
            )


def _artifact_problems(to_run: Sequence[Stage], stages: Sequence[Stage]) -> Iterator[Problem]:
    """Models of this run's folder that a stage reads and no stage of this call writes."""
    written = {stage.name for stage in to_run}
    kept = {stage.name for stage in stages} - written
    for stage in to_run:
        manifests: dict[str, artifacts.Manifest] = {}
        for parent in stage.parents:
            if parent in written:
                continue
            folder = stage.out_dir.parent / FOLDERS[parent] / "model"
            try:
                manifests[parent] = artifacts.verify(folder, contents=parent not in kept)
            except artifacts.ArtifactError as error:
                yield Problem(f"{stage.folder} reads the model of {FOLDERS[parent]}: {error}", here=True)
        if stage.name == "ppo" and {"sft", "reward"} <= manifests.keys():
            try:
                artifacts.check_contract(manifests["sft"], manifests["reward"])
            except artifacts.ArtifactError as error:
                yield Problem(f"{stage.folder}: {error}", here=True)


def _machine_problems(
    recipe: Recipe, placement: Placement, environment: Mapping[str, str], *, on_cpu: bool
) -> Iterator[Problem]:
    if placement.is_remote:
        for program, package in _PROGRAMS[placement.launcher].items():
            if shutil.which(program) is None:
                yield Problem(
                    f"{program} is not installed, and deepspeed starts ranks on other machines with it. Install it "
                    f"(Debian: apt-get install {package}).",
                    here=True,
                )
        yield from _root_problems(placement, environment)
    elif recipe.needs_accelerator and on_cpu:
        yield Problem(
            f"recipe {recipe.name} needs accelerators, but none is visible on this machine (no device file, or "
            "DS_ACCELERATOR=cpu, or CUDA_VISIBLE_DEVICES is empty). Run it where there are some, or take a CPU recipe.",
            here=True,
        )
    elif not on_cpu and 0 < (count := count_devices(environment)) < placement.world_size and placement.num_gpus:
        yield Problem(
            f"{placement.world_size} ranks are wanted, but this machine has {count} accelerators. Pass "
            f"--num_gpus {count}.",
            here=True,
        )
    port = placement.master_port
    if port is not None and not placement.is_remote and not port_is_free(port):
        yield Problem(
            f"--master_port {port} is in use on this machine. Leave the flag out, or choose another.", here=True
        )


def _root_problems(placement: Placement, environment: Mapping[str, str]) -> Iterator[Problem]:
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    allowed = "--allow-run-as-root" in placement.launcher_args or all(environment.get(name) == "1" for name in names)
    if placement.launcher == "openmpi" and os.geteuid() == 0 and not allowed:
        yield Problem(
            f"mpirun does not start as root. Be another user, set {' and '.join(names)} to 1, or pass "
            "--launcher_args=--allow-run-as-root.",
            here=True,
        )


def wanted_bytes(to_run: Sequence[Stage], stages: Sequence[Stage]) -> int:
    """About what the stages write: models, and the states that lie on the disk at once."""
    wanted = _SPARE_BYTES
    for stage in to_run:
        parameters = sum(_num_parameters(_origin(stage, key, stages)) for key in stage.models() if key != "reward")
        # A model folder in fp32 is 4 bytes a parameter; a state holds fp32 weights and both AdamW moments.
        wanted += parameters * (4 + 12 * _num_states(stage.config.run))
    return wanted


def _disk_problems(to_run: Sequence[Stage], stages: Sequence[Stage], run_dir: Path) -> Iterator[Problem]:
    wanted, free = wanted_bytes(to_run, stages), free_bytes(run_dir)
    if free < wanted:
        yield Problem(
            f"{run_dir}: the run writes about {wanted / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free there. Make "
            "room, pass another --out, or lower run.keep_states.",
            here=True,
        )


def _num_states(run: RunConfig) -> int:
    """States that lie on the disk at once: those that are kept, and one that is being written."""
    regular = run.save_every > 0 or run.save_minutes > 0
    return run.keep_states + (run.keep_best is not None) + 1 if regular else 0


def _num_parameters(shape: Mapping[str, Any]) -> int:
    """Rough number of weights of a decoder; 0 if the shape is not known."""

    def first(*names: str) -> int:
        return next((int(shape[name]) for name in names if isinstance(shape.get(name), int)), 0)

    width, layers = first("hidden_size", "n_embd", "d_model"), first("num_hidden_layers", "n_layer", "num_layers")
    inner = first("ffn_dim", "intermediate_size", "n_inner") or 4 * width
    return layers * (4 * width * width + 3 * width * inner) + first("vocab_size") * width
