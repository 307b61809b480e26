"""What is started for one run of one contestant, and how its measurement is read. No torch."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from rlhf import ds_config, host
from rlhf.bench.process import Finished
from rlhf.bench.readings import Work, model_flops, read_stage
from rlhf.bench.record import Sample, from_steps
from rlhf.bench.workload import MAX_ANSWER, MAX_PROMPT, SEED, Sizes

SOURCE_ROOT = Path(__file__).resolve().parents[2]
NO_HOSTFILE = "/dev/null"
_MODULES = {"sft": "step1_sft.train", "reward": "step2_reward.train", "ppo": "step3_ppo.train"}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all jobs of one benchmark share."""

    work: Path
    """Folder of models, rows, caches and runs; absolute."""
    sizes: Sizes
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreter of a peer, by the package's name; others run in this one."""
    overrides: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Flags for our stages, by stage."""

    @property
    def assets(self) -> Path:
        """Folder of models and rows of this size."""
        return self.work / f"assets_{self.sizes.name}"

    def asset(self, name: str) -> Path:
        """A model folder or a file of rows."""
        return self.assets / name

    def python(self, package: str) -> str:
        """Interpreter that has the package."""
        return self.pythons.get(package, sys.executable)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One process (or launcher of several) and the reader of what it left in its folder."""

    argv: list[str]
    read: Callable[[Finished], Sample]
    environment: Mapping[str, str] = field(default_factory=dict)


def environment(extra: Mapping[str, str], *, work: Path) -> dict[str, str]:
    """Environment of every child: CPU, one thread a rank, nothing fetched, this checkout's code."""
    values = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(work / "datasets"),
        "TOKENIZERS_PARALLELISM": "false",
        "WANDB_MODE": "disabled",
        "PYTHONUNBUFFERED": "1",
    }
    paths = [str(SOURCE_ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    values["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return {**values, **extra}


def launch(python: str, module: str, *, ranks: int, launcher: Literal["deepspeed", "torchrun"]) -> list[str]:
    """Arguments that start a module on some ranks of this machine; the module's own follow."""
    if ranks == 1:
        return [python, "-m", module]
    port = str(host.free_port())
    if launcher == "torchrun":
        return [
            python,
            "-m",
            "torch.distributed.run",
            f"--nproc_per_node={ranks}",
            f"--master_port={port}",
            "-m",
            module,
        ]
    argv = [python, "-m", "deepspeed.launcher.runner", "-q", "--hostfile", NO_HOSTFILE, "--num_gpus", str(ranks)]
    return [*argv, "--master_port", port, "--no_local_rank", "--module", module]


# Ours


def ours(bench: Bench, work: Work, folder: Path) -> Job:
    """Our stage, or our rollout."""
    if work.kind == "rollout":
        return _rollout("rlhf.bench.rollout", sys.executable, bench, work, folder)
    stage = {"sft": "sft", "long": "sft", "pairs": "reward", "ppo": "ppo"}[work.kind]
    config = {"sft": _sft, "reward": _reward, "ppo": _ppo}[stage](bench, work, folder)
    path = folder / f"{stage}.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    argv = launch(sys.executable, _MODULES[stage], ranks=work.ranks, launcher="deepspeed")
    warmup, _ = work.steps(bench.sizes)

    def read(finished: Finished) -> Sample:
        sample = read_stage(folder / "stage", rows=work.rows * work.ranks, warmup=warmup, finished=finished)
        return replace(sample, ranks=work.ranks, flops=model_flops(bench.sizes, work, sample))

    return Job(argv=[*argv, "--config", str(path), *bench.overrides.get(stage, ())], read=read)


def _data(bench: Bench, rows: str, share: str, *, prompt: int, response: int) -> dict[str, Any]:
    shares = {"sft": 0.0, "reward": 0.0, "ppo": 0.0, "eval": 0.0, share: 1.0}
    return {
        "sources": [{"path": str(bench.asset(f"{rows}.jsonl"))}],
        "max_prompt_tokens": prompt,
        "max_response_tokens": response,
        "split": shares,
        "cache_dir": str(bench.work / "cache"),
    }


def _optim() -> dict[str, Any]:
    # So small that the weights stay what they are: all steps then cost the same.
    return {"lr": 1e-7, "schedule": "constant", "warmup_frac": 0.0}


def _deepspeed(name: str, work: Work, folder: Path) -> str:
    """A packaged DeepSpeed JSON with the benchmark's micro-batch size, the same for all types and for the peers."""
    path = folder / f"{name}.json"
    raw = {**ds_config.load(name), "train_micro_batch_size_per_gpu": work.micro_batch}
    path.write_text(json.dumps(raw, indent=2), encoding="utf-8")
    return str(path)


def _trained_name(work: Work) -> str:
    return "cpu_zero3" if work.zero3 else {"fp32": "cpu_zero0", "bf16": "cpu_bf16"}[work.dtype]


def _frozen_name(work: Work) -> str:
    return "cpu_frozen_zero3" if work.zero3 else {"fp32": "cpu_frozen", "bf16": "cpu_frozen_bf16"}[work.dtype]


def _sft(bench: Bench, work: Work, folder: Path) -> dict[str, Any]:
    is_long = work.kind == "long"
    prompt, response = (100, 900) if is_long else (MAX_PROMPT, MAX_ANSWER)
    sizes = bench.sizes
    return {
        "model": {"path": str(bench.asset(work.actor))},
        "data": _data(bench, work.kind, "sft", prompt=sizes.length(prompt), response=sizes.length(response)),
        "optim": _optim(),
        "eval": {"max_rows": 0, "generate_rows": 0},
        "run": {"out_dir": str(folder / "stage"), "seed": SEED},
        "deepspeed": _deepspeed(_trained_name(work), work, folder),
        "global_batch_size": work.rows * work.ranks,
        "epochs": 1000.0,
        "max_steps": sum(work.steps(sizes)),
    }


def _reward(bench: Bench, work: Work, folder: Path) -> dict[str, Any]:
    config = _sft(bench, work, folder)
    sizes = bench.sizes
    config["model"] = {"path": str(bench.asset(work.reward))}
    config["data"] = _data(bench, "pairs", "reward", prompt=sizes.length(MAX_PROMPT), response=sizes.length(MAX_ANSWER))
    return config


def _ppo(bench: Bench, work: Work, folder: Path) -> dict[str, Any]:
    sizes = bench.sizes
    rows = work.rows * work.ranks
    new_tokens = sizes.length(work.answer or MAX_ANSWER)
    return {
        "actor": {"path": str(bench.asset(work.actor))},
        "reward": {"path": str(bench.asset(work.reward))},
        "data": _data(bench, "prompts", "ppo", prompt=sizes.length(MAX_PROMPT), response=new_tokens),
        "actor_optim": _optim(),
        "critic_optim": _optim(),
        "eval": {"max_rows": 0, "generate_rows": 0},
        "run": {"out_dir": str(folder / "stage"), "seed": SEED},
        "rollout": {"prompts_per_step": rows},
        "sampling": {"min_new_tokens": new_tokens if work.answer else 0},
        "update": {"minibatch_size": rows},
        "deepspeed": {
            "actor": _deepspeed("cpu_zero3_hybrid" if work.zero3 else _trained_name(work), work, folder),
            "critic": _deepspeed(_trained_name(work), work, folder),
            "reference": _deepspeed(_frozen_name(work), work, folder),
            "reward": _deepspeed(_frozen_name(work), work, folder),
        },
        "max_steps": sum(work.steps(sizes)),
    }


# Peers


def trl(bench: Bench, work: Work, folder: Path, *, packing: bool = False) -> Job:
    """TRL's trainer of the same step: as one process, under DDP (torchrun), or under DeepSpeed's ZeRO-3."""
    module = {"sft": "trl_sft", "pairs": "trl_reward", "ppo": "trl_ppo"}[work.kind]
    sizes, (warmup, steps) = bench.sizes, work.steps(bench.sizes)
    rows_file = "prompts" if work.kind == "ppo" else work.kind
    arguments = {
        "data": bench.asset(f"{rows_file}.jsonl"),
        "out": folder,
        "actor": bench.asset(work.actor),
        "reward": bench.asset(work.reward),
        "rows": work.rows,
        "micro-batch": work.micro_batch,
        "steps": warmup + steps,
        "dtype": work.dtype,
        "seed": SEED,
        "new-tokens": sizes.length(work.answer or MAX_ANSWER),
    }
    flags = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    if packing:
        flags += ["--packing", str(sizes.positions)]
    if work.kind == "ppo" and not work.answer:
        flags.append("--stop")
    if work.zero3:
        path = folder / "deepspeed.json"
        path.write_text(json.dumps(_peer_deepspeed(work), indent=2), encoding="utf-8")
        flags += ["--deepspeed", str(path)]
    argv = launch(
        bench.python("trl"),
        f"rlhf.bench.peers.{module}",
        ranks=work.ranks,
        launcher="deepspeed" if work.zero3 else "torchrun",
    )
    return Job(argv=[*argv, *flags], read=_recorded(bench, work, folder))


def _peer_deepspeed(work: Work) -> dict[str, Any]:
    """The same ZeRO-3 settings as ours, with what Hugging Face's integration wants beside them."""
    return {
        "train_micro_batch_size_per_gpu": work.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": ds_config.load("cpu_zero3")["zero_optimization"],
    }


def hugging_face(bench: Bench, work: Work, folder: Path) -> Job:
    """Plain `generate` of transformers."""
    return _rollout("rlhf.bench.peers.hf_generate", bench.python("transformers"), bench, work, folder)


def vllm(bench: Bench, work: Work, folder: Path) -> Job:
    """VLLM on the CPU."""
    job = _rollout("rlhf.bench.peers.vllm_generate", bench.python("vllm"), bench, work, folder)
    return replace(job, environment={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})


def _rollout(module: str, python: str, bench: Bench, work: Work, folder: Path) -> Job:
    """A program that answers `rows` prompts of the file in each step."""
    sizes, (warmup, steps) = bench.sizes, work.steps(bench.sizes)
    arguments = {
        "model": bench.asset(work.actor),
        "data": bench.asset("prompts.jsonl"),
        "out": folder,
        "rows": work.rows,
        "steps": warmup + steps,
        "dtype": work.dtype,
        "new-tokens": sizes.length(work.answer or MAX_ANSWER),
    }
    flags = [word for name, value in arguments.items() for word in (f"--{name}", str(value))]
    if not work.answer:
        flags.append("--stop")
    return Job(argv=[python, "-m", module, *flags], read=_recorded(bench, work, folder))


def _recorded(bench: Bench, work: Work, folder: Path) -> Callable[[Finished], Sample]:
    """Reader of the files that peers/recorder.py wrote."""
    warmup, _ = work.steps(bench.sizes)

    def read(finished: Finished) -> Sample:
        records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("steps_rank*.json"))]
        if len(records) != work.ranks:
            raise ValueError(f"{folder} holds the record of {len(records)} ranks, but {work.ranks} were started.")
        sample = from_steps([record["steps"] for record in records], warmup=warmup)
        return replace(
            sample,
            flops=model_flops(bench.sizes, work, sample),
            peak_rss_bytes=finished.peak_rss_bytes,
            startup_seconds=max(record["first_step_time"] for record in records) - finished.started,
            process_seconds=finished.wall_seconds,
        )

    return read


def command(argv: Sequence[str]) -> Job:
    """A command of which only the wall time counts."""

    def read(finished: Finished) -> Sample:
        return Sample(wall_seconds=finished.wall_seconds, cpu_seconds=finished.cpu_seconds, steps=1, rows=1)

    return Job(argv=list(argv), read=read)
