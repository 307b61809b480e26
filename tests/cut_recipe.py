"""A packaged recipe made small enough for CPU processes: tiny models and data, few steps; all else as it stands."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from launch.recipe import RECIPES
from rlhf import ds_config

MODELS: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 128,
    },
    "opt": {
        "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_hidden_layers": 4,
        "num_attention_heads": 8, "max_position_embeddings": 128,
    },
}  # fmt: skip
PROMPT, RESPONSE = 64, 48
"""Tokens that the built-in task fits in."""
THRESHOLDS = (
    "stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_prefetch_bucket_size",
)  # fmt: skip


def cut(name: str, folder: Path, *, ranks: int) -> Path:
    """Write the recipe for so many processes on one machine.

    What goes: models, tokenizer, sources, lengths, batches, numbers of steps and rows, the network's variables; groups
    of ranks shrink to two, and ZeRO-3's thresholds to 0, below which a tiny model would stay whole.

    Args:
        name: of the packaged recipe.
        folder: new.
        ranks: processes.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True)
    docs = {path.stem: yaml.safe_load(path.read_text()) for path in (RECIPES / name).glob("*.yaml")}
    _cut_pipeline(docs["pipeline"], ranks)
    family = "llama" if "llama" in str(docs["sft"]["model"].get("path", "")).lower() else "opt"
    for stage, doc in docs.items():
        if stage == "pipeline":
            continue
        _cut_data(doc)
        _cut_json(doc, folder)
        doc["eval"] = {"max_rows": 16, "generate_rows": min(8, doc.get("eval", {}).get("generate_rows", 8))}
        doc["run"] = {"out_dir": str(folder / "alone" / stage)}
        doc["max_steps"] = 2
        doc.pop("epochs", None)
        if "global_batch_size" in doc:
            doc["global_batch_size"] = 4 * ranks
        for key, size in doc.get("parallel", {}).items():
            doc["parallel"][key] = min(size, 2)
    docs["sft"]["model"].pop("path", None)
    docs["sft"]["model"]["config"] = dict(MODELS[family])
    docs["sft"]["tokenizer"] = {"train_vocab_size": 512}
    if "reward" in docs:
        docs["reward"]["normalise"]["rows"] = 16
        docs["pipeline"]["stages"]["reward"]["feeds"]["model.path"] = "{sft}"
    if "ppo" in docs:
        _cut_rollout(docs["ppo"], ranks)
    for stage, doc in docs.items():
        (folder / f"{stage}.yaml").write_text(yaml.safe_dump(doc, sort_keys=False))
    return folder


def _cut_pipeline(doc: dict[str, Any], ranks: int) -> None:
    doc.pop("num_nodes", None)
    doc.update(deployment="single_node", num_gpus=ranks, needs_accelerator=False)
    doc["environment_files"] = [name for name in doc.get("environment_files", []) if name != "slingshot"]
    doc.setdefault("environment", {})["OMP_NUM_THREADS"] = "1"


def _cut_data(doc: dict[str, Any]) -> None:
    data = doc["data"]
    data["sources"] = [{"path": "builtin:politeness", "options": {"rows": 600, "seed": 0}}]
    for key in ("micro_batch_tokens", "score_micro_batch_tokens"):
        if key in data:  # as many rows of full length
            rows = data[key] // (data["max_prompt_tokens"] + data["max_response_tokens"])
            data[key] = rows * (PROMPT + RESPONSE)
    data.update(max_prompt_tokens=PROMPT, max_response_tokens=RESPONSE)


def _cut_json(doc: dict[str, Any], folder: Path) -> None:
    def write(name: str) -> str:
        raw = json.loads(json.dumps(ds_config.load(name)))
        raw["train_micro_batch_size_per_gpu"] = 2
        zero = raw.get("zero_optimization", {})
        zero.update(dict.fromkeys(THRESHOLDS, 0) if zero.get("stage") == 3 else {})
        path = folder / f"{name}.json"
        path.write_text(json.dumps(raw))
        return str(path)

    if isinstance(doc["deepspeed"], str):
        doc["deepspeed"] = write(doc["deepspeed"])
    else:
        doc["deepspeed"] = {role: write(name) for role, name in doc["deepspeed"].items()}
    if "normalise" in doc:
        doc["normalise"]["deepspeed"] = write(doc["normalise"]["deepspeed"])


def _cut_rollout(doc: dict[str, Any], ranks: int) -> None:
    rollout = doc["rollout"]
    rollout.update(prompts_per_step=4 * ranks, batch_size=4)
    if rollout.get("tensor_parallel"):
        rollout["tensor_parallel"] = 2
    doc["update"]["minibatch_size"] = 2 * ranks
