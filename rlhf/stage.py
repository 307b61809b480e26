"""What the set-up of every stage shares: the tokenizer with its chat template, and the model folder at the end."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf import artifacts, heartbeat
from rlhf.artifacts import Contract
from rlhf.config import DataConfig, ModelConfig, ParallelConfig, TokenizerConfig
from rlhf.data.batching import Batching
from rlhf.data.dataset import training_texts
from rlhf.data.splits import Stage
from rlhf.data.template import ChatTemplate, load_template
from rlhf.distributed import (
    Group,
    all_gather_objects,
    broadcast_object,
    device_type,
    group_of,
    is_main,
    together,
    world_size,
)
from rlhf.engine import TrainEngine
from rlhf.memory import free_bytes
from rlhf.model_folder import save_model_folder
from rlhf.models.attention import FAMILIES, takes_layout
from rlhf.models.build import load_tokenizer, read_config, tokenizer_fingerprint, train_bpe
from rlhf.models.forward_memory import fitting_tokens, forward_bytes_per_token, head_bytes
from rlhf.models.policy import CHUNK_TOKENS
from rlhf.plan.shapes import Shape, shape_of
from rlhf.rollout.split import check_heads
from rlhf.run import Run

logger = logging.getLogger(__name__)

# Of a micro-batch without gradients on a CPU. Policy and reward model of hidden sizes 512 and 256 took the same
# processor seconds at any budget from 512 to 16384 tokens, within the noise of 5 %; at 256 they took 12 % more.
CPU_SCORE_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class Language:
    """How text becomes tokens: what models that meet have to agree on."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate

    @property
    def pad_id(self) -> int:
        """Fills batches; masks, not this id, say what is padding."""
        return int(self.tokenizer.pad_token_id)

    @property
    def contract(self) -> Contract:
        """The manifest's form of it."""
        return Contract(
            tokenizer=tokenizer_fingerprint(self.tokenizer),
            template_name=self.template.name,
            template_fingerprint=self.template.fingerprint,
            stop_token_id=self.template.stop_token_id,
        )

    def save(self, folder: Path) -> None:
        """Write the tokenizer, with the template as its own."""
        self.tokenizer.chat_template = self.template.jinja
        self.tokenizer.save_pretrained(folder)


def flop_shape(model: nn.Module) -> Shape | None:
    """What a model's FLOPs are counted from; None for a family that is not counted."""
    try:
        return shape_of(cast(Any, model).config.to_dict())
    except ValueError as error:
        logger.info("speed/model_flops_per_second is not logged: %s", error)
        return None


def load_language(data: DataConfig, tokenizer: TokenizerConfig, model: ModelConfig, *, stage: Stage) -> Language:
    """Load the tokenizer, or train it on the stage's texts, and resolve the template for it. Collective.

    Raises:
        ValueError: the model starts from a config and no tokenizer is named.
    """
    path = tokenizer.path or model.path
    if tokenizer.train_vocab_size:
        with together("training the tokenizer"):
            trained = (
                train_bpe(training_texts(data, stage), vocab_size=tokenizer.train_vocab_size) if is_main() else None
            )
        loaded: PreTrainedTokenizerBase | None = broadcast_object(trained)
    elif path:
        loaded = load_tokenizer(path)
    else:
        raise ValueError(
            "model.config starts a new model, but tokenizer.path and tokenizer.train_vocab_size are both empty. Set "
            "one."
        )
    assert loaded is not None
    return Language(tokenizer=loaded, template=load_template(data.template, loaded))


def join_group(parallel: ParallelConfig, models: Sequence[ModelConfig], language: Language) -> Group:
    """The ranks that share this rank's rows, which all the models read. Collective.

    Raises:
        ValueError: the ranks or the model's heads do not divide, or the family cannot read packed rows.
    """
    if parallel.sp > 1:
        parallel.check_ranks(world_size())
    for model in models if parallel.sp > 1 else []:
        config, said = read_config(model, language.tokenizer), f"parallel.sp={parallel.sp}"
        if not takes_layout(config):
            raise ValueError(
                f"{said} shares packed rows between ranks, but a model of model_type {config.model_type} cannot read "
                f"them: that takes one of the families {', '.join(FAMILIES)} without a sliding window. Use "
                "parallel.sp=1 or another model."
            )
        check_heads(config.get_text_config().to_dict(), parallel.sp, said=said)
    return group_of(parallel.sp)


def choose_batching(
    models: Sequence[ModelConfig], data: DataConfig, language: Language, *, max_rows: int, longest_row: int
) -> Batching:
    """Packed micro-batches where all the models that read them allow it, else padded ones.

    Args:
        models: with their paths or configs.
        data: says whether to pack, and the budget.
        language: of the models.
        max_rows: the micro-batch size of the DeepSpeed JSON.
        longest_row: tokens of the longest row.

    Raises:
        ValueError: data.packing is `on` and a model does not allow it.
    """
    configs = [read_config(model, language.tokenizer) for model in models]
    if data.packing == "off":
        return Batching(max_rows=max_rows)
    refusals = [
        f"{config.model_type} with attention={model.attention}"
        for model, config in zip(models, configs, strict=True)
        if not (model.attention == "sdpa" and takes_layout(config))
    ]
    if refusals and data.packing == "on":
        raise ValueError(
            f"data.packing is `on`, but {', '.join(refusals)} cannot read packed rows: that takes attention=sdpa and "
            f"one of the families {', '.join(FAMILIES)} without a sliding window. Use packing=auto or another model."
        )
    if refusals:  # data/padding_frac shows it
        return Batching(max_rows=max_rows)
    return Batching(
        max_rows=max_rows,
        max_tokens=data.micro_batch_tokens or max_rows * longest_row,
        hidden_size=min(int(config.get_text_config().hidden_size) for config in configs),
    )


def choose_scoring(
    training: Batching,
    models: Mapping[str, ModelConfig],
    dtypes: Mapping[str, str],
    data: DataConfig,
    language: Language,
    *,
    longest_row: int,
) -> Batching:
    """Micro-batches without gradients: packed or padded as those of training are, and as large as fits. Collective.

    Called when all models are in memory: on accelerators, what is free then decides.

    Args:
        training: of the same models.
        models: that score, by role.
        dtypes: name of the type that each computes in.
        data: `score_micro_batch_tokens` overrides what is found.
        language: of the models.
        longest_row: tokens of the longest row.
    """
    if data.score_micro_batch_tokens is not None:
        tokens, reason = data.score_micro_batch_tokens, "data.score_micro_batch_tokens"
    elif device_type() == "cpu":
        tokens, reason = CPU_SCORE_TOKENS, "on CPUs"
    else:
        configs = {role: read_config(model, language.tokenizer) for role, model in models.items()}
        free = min(all_gather_objects(free_bytes()))
        per_token = max(
            forward_bytes_per_token(
                config,
                dtype_bytes=getattr(torch, dtypes[role]).itemsize,
                padded_row=0 if training.packed else longest_row,
                fused=models[role].attention == "sdpa" and takes_layout(config),
            )
            for role, config in configs.items()
        )
        head = max(head_bytes(config, chunk_tokens=CHUNK_TOKENS) for config in configs.values())
        tokens = fitting_tokens(free, bytes_per_token=per_token, fixed_bytes=head)
        reason = f"{free / 1e9:.1f} GB free, {per_token / 1e3:.0f} kB a token"
    logger.info("scoring: micro-batches of at most %d tokens (%s)", tokens, reason)
    if training.packed:
        return replace(training, max_tokens=tokens)
    return Batching(max_rows=max(1, tokens // max(1, longest_row)))


@heartbeat.during("save")
def export_model(
    engine: TrainEngine,
    language: Language,
    run: Run,
    *,
    kind: artifacts.Kind,
    parents: Sequence[str | None],
    metrics: Mapping[str, float],
    name: str = "model",
) -> Path:
    """Write the engine's model under run.folder/name, verified, with its manifest. Collective.

    Args:
        engine: of a `Policy` or a `ScalarModel`.
        language: saved beside the weights, with the template as the tokenizer's own.
        run: of the stage.
        kind: what the model is.
        parents: folders or hub names of the models it was made from; None is no parent.
        metrics: final numbers for the manifest.
        name: of the folder.
    """
    folder = run.folder / name
    language.tokenizer.chat_template = language.template.jinja

    def finish(part: Path) -> None:
        artifacts.write_manifest(
            part,
            kind=kind,
            stage=run.stage,
            contract=language.contract,
            parents=[parent for parent in parents if parent],
            seed=run.config.seed,
            metrics=metrics,
        )

    save_model_folder(
        cast(nn.Module, engine.module.model),
        engine,
        language.tokenizer,
        folder,
        stop_token_id=language.template.stop_token_id,
        finish=finish,
    )
    return folder
