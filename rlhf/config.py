"""What the three stages have in common in their YAML: models, data, optimiser, run. No torch.

A stage's root config (`step1_sft/config.py` and so on) nests these sections. The frozen dataclass is the schema, the
YAML file is the recipe, dotted flags override it; `parse_config` is the only code that touches jsonargparse.
"""

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from rlhf import strict
from rlhf.health_config import SUPERVISED, HealthConfig

Config = TypeVar("Config")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) through peft; the base weights are frozen."""

    rank: int = 0
    """Rank of the update; 0 trains all weights and adds no adapter."""
    alpha: float = 32.0
    """Scale of the update: delta = alpha / rank * B A."""
    dropout: float = 0.0
    """Dropout on the adapter's input, while training only."""
    target_modules: list[str] = field(default_factory=list)
    """Names (suffixes) of the linear layers that get an adapter; empty: every linear layer but the head."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"lora.rank must be >= 0, got {self.rank}. Use 0 for no adapter.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be in [0, 1), got {self.dropout}.")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Where the tokenizer comes from; by default the model's own folder."""

    path: str | None = None
    """Folder or hub name of a tokenizer that is not the model's."""
    train_vocab_size: int = 0
    """Train a byte-level BPE of at most this many entries on the stage's training texts; 0: load one."""

    def __post_init__(self) -> None:
        if self.path and self.train_vocab_size:
            raise ValueError(
                f"tokenizer.path={self.path} and tokenizer.train_vocab_size={self.train_vocab_size} exclude each "
                "other. Keep one."
            )
        if self.train_vocab_size and self.train_vocab_size < 300:
            raise ValueError(
                f"tokenizer.train_vocab_size must be 0 or at least 300 (256 bytes and the special tokens), got "
                f"{self.train_vocab_size}."
            )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model: a folder or hub name to load, or a Hugging Face config to start from nothing."""

    path: str | None = None
    """Folder or hub name to load weights from. The architecture is its config's model_type, never its name."""
    config: dict[str, Any] | None = None
    """A Hugging Face config with `model_type`; the model starts from random weights."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights as loaded; mixed precision of the update is the DeepSpeed JSON's."""
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "sdpa"
    """Attention implementation of transformers."""
    dropout: float | None = None
    """Sets every dropout probability of the config; null keeps the model's own. Step 3 always scores without."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: of whole layers (a third more compute, least memory), or all but
    attention's and every second product's."""
    recompute_every: int = 1
    """Recompute in the first of every so many decoder layers; 1: in all."""
    recompute_budget: float = 0.0
    """Share of what recomputation saves that may be kept: so many of the decoder layers, the last ones, are kept whole
    (docs/parallelism.md)."""
    offload_activations: bool = False
    """Keep in host memory what the decoder layers save for the backward pass (with recompute=full, their inputs)."""
    compile: bool = False
    """Compile the decoder layers with torch.compile: the first steps take long, the others may be faster."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Multiply in float8 in linear layers, by torchao's recipe of that name; weights keep their type."""
    float8_filter_fqns: list[str] = field(default_factory=list)
    """Parts of the names of linear layers that do not, beside the heads."""
    float8_min_features: int = 0
    """Fewest input and output features of a layer that does."""
    float8_emulate: bool = False
    """Compute float8's numbers without its kernels, at a loss of speed; CPUs always do."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Low-rank adapters."""

    def __post_init__(self) -> None:
        if self.path and self.config:
            raise ValueError(f"model.path={self.path} and model.config exclude each other. Keep one.")
        if self.config is not None and "model_type" not in self.config:
            raise ValueError(
                f"model.config has no model_type, got the keys {sorted(self.config)}. Add for example model_type: opt."
            )
        if self.dropout is not None and not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout must be in [0, 1) or null, got {self.dropout}.")
        self._check_recompute()
        self._check_float8()

    def _check_recompute(self) -> None:
        if self.recompute_every < 1:
            raise ValueError(f"model.recompute_every must be >= 1, got {self.recompute_every}. Use 1 for every layer.")
        if not 0 <= self.recompute_budget < 1:
            raise ValueError(
                f"model.recompute_budget must be in [0, 1), got {self.recompute_budget}. Use 0 to recompute in every "
                "layer, or recompute=none to keep all."
            )
        for name, neutral in (("recompute_every", 1), ("recompute_budget", 0.0)):
            if getattr(self, name) != neutral and self.recompute == "none":
                raise ValueError(
                    f"model.{name}={getattr(self, name)} has no effect with model.recompute=none. Set recompute to "
                    f"full or selective, or leave {name} out."
                )
        if self.recompute_every > 1 and self.recompute_budget:
            raise ValueError(
                f"model.recompute_every={self.recompute_every} and model.recompute_budget={self.recompute_budget} both "
                "choose the layers that are recomputed. Leave one of them out."
            )

    def _check_float8(self) -> None:
        if self.float8_min_features < 0:
            raise ValueError(f"model.float8_min_features must be >= 0, got {self.float8_min_features}.")
        if self.float8 == "none" and (self.float8_filter_fqns or self.float8_min_features or self.float8_emulate):
            raise ValueError(
                f"model.float8_filter_fqns={self.float8_filter_fqns}, float8_min_features={self.float8_min_features} "
                f"and float8_emulate={self.float8_emulate} have no effect with model.float8=none. Set float8 to "
                "tensorwise or rowwise, or leave them out."
            )


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One set of raw rows."""

    path: str
    """File or folder (JSONL, JSON, Parquet, text, plain or .gz), `hub:owner/name`, or `builtin:politeness`."""
    name: str | None = None
    """Name in metrics and reports; by default the last part of the path."""
    split: str = "train"
    """Split of a hub data set or of a built-in task."""
    format: str | None = None
    """Row format (docs/data.md); null: recognised from the columns."""
    columns: dict[str, str] = field(default_factory=dict)
    """Our field name -> the name of the column in the rows, for formats that are not recognised."""
    weight: float = 1.0
    """Rows drawn per epoch as a share of the source: 1 all, 0.5 half, 2 each row twice."""
    max_rows: int | None = None
    """Read at most this many rows."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of a built-in task, for example its number of rows, or of `datasets.load_dataset`."""

    def __post_init__(self) -> None:
        if self.weight <= 0:
            raise ValueError(f"data.sources[].weight must be > 0, got {self.weight} for {self.path}.")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"data.sources[].max_rows must be >= 1 or null, got {self.max_rows} for {self.path}.")

    @property
    def label(self) -> str:
        """Name used in metrics."""
        return self.name or self.path.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1].split(".")[0]


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """Shares of each source's prompts: a prompt belongs to one stage or to evaluation, by a hash of its text."""

    sft: float = 0.2
    """Share trained on in step 1 (DeepSpeed-Chat's 2:4:4, with evaluation apart)."""
    reward: float = 0.4
    """Share trained on in step 2."""
    ppo: float = 0.4
    """Share rolled out in step 3."""
    eval: float = 0.05
    """Share of all prompts held out for evaluation, before the other three are divided."""
    seed: int = 0
    """Salt of the hash."""

    def __post_init__(self) -> None:
        shares = (self.sft, self.reward, self.ppo)
        if min(shares) < 0 or sum(shares) <= 0:
            raise ValueError(f"data.split shares must be >= 0 and not all 0, got sft, reward, ppo = {shares}.")
        if not 0 <= self.eval < 1:
            raise ValueError(f"data.split.eval must be in [0, 1), got {self.eval}.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which rows, how they become tokens, and how they are divided over the stages."""

    sources: list[SourceConfig]
    """One or several sources."""
    root: str | None = None
    """Folder that relative source paths start from; null: the working directory."""
    template: str = "auto"
    """Chat template: `auto` (the tokenizer's own, else `human_assistant`), a name (docs/data.md), or a .jinja file."""
    max_prompt_tokens: int = 256
    """Longest prompt, template included."""
    max_response_tokens: int = 256
    """Longest response, stop token included; in step 3 the number of new tokens."""
    overlong_prompt: Literal["drop", "truncate_left", "error"] = "drop"
    """A prompt over the limit: drop the row, cut its oldest turns and tokens (bos and role headers stay), or stop."""
    overlong_response: Literal["drop", "truncate", "error"] = "truncate"
    """A response over the limit: drop it, cut it (then it has no stop token), or stop. Plain text: several rows."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Sequences side by side in one row instead of padded ones: `auto` where the model's family and attention allow."""
    micro_batch_tokens: int = 0
    """Most tokens of a packed training micro-batch; 0: of `train_micro_batch_size_per_gpu` rows of full length."""
    score_micro_batch_tokens: int | None = None
    """Most tokens of a micro-batch without gradients (scoring, evaluation); null: by free memory, on CPUs fixed."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Division of prompts over the stages."""
    cache_dir: str | None = None
    """Folder of tokenised data; null: `.rlhf_cache` under the user's cache folder."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("data.sources is empty. Name at least one source.")
        for name in ("max_prompt_tokens", "max_response_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} must be >= 1, got {getattr(self, name)}.")
        if self.micro_batch_tokens < 0:
            raise ValueError(f"data.micro_batch_tokens must be >= 0, got {self.micro_batch_tokens}.")
        if self.score_micro_batch_tokens is not None and self.score_micro_batch_tokens < 1:
            raise ValueError(
                f"data.score_micro_batch_tokens must be >= 1 or null, got {self.score_micro_batch_tokens}. Leave it "
                "out to have it found."
            )
        labels = [source.label for source in self.sources]
        if len(set(labels)) != len(labels):
            raise ValueError(f"data.sources have the same name twice: {labels}. Give each a `name`.")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How ranks share rows, beside what ZeRO shares of the model (docs/parallelism.md)."""

    sp: int = 1
    """Ranks that share each row's tokens; 1: each rank has rows of its own."""
    tp: int = 1
    """Ranks that share the weights of the trained models, and so their rows; 1: each rank, or ZeRO, has all."""
    pp: int = 1
    """Pipeline stages that the model's layers are dealt to; 1: each rank has all layers."""

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"parallel.{name} must be >= 1, got {size}. Use 1 for ranks that share nothing.")

    def check_model(self, model: ModelConfig, data: DataConfig, *, name: str = "model", compiles: bool = False) -> None:
        """Check that the model, that of section `name`, can be read by ranks that share rows or weights.

        Args:
            model: of the stage.
            data: of the stage.
            name: the model's section.
            compiles: whether the stage has been run with compiled layers on rows that ranks share.

        Raises:
            ValueError: rows are not packed, attention is not ours, or layers are compiled where that was not run.
        """
        if self.sp > 1 and data.packing == "off":
            raise ValueError(
                f"parallel.sp={self.sp} shares packed rows between ranks, but data.packing is `off`. Use `auto` or "
                "`on`, or parallel.sp=1."
            )
        if self.sp > 1 and model.compile and not compiles:
            raise ValueError(
                f"parallel.sp={self.sp} has been tried with compiled layers in step 1 alone, but {name}.compile is "
                "true. Set it to false, or parallel.sp=1."
            )
        for knob in ("sp", "tp"):
            size = getattr(self, knob)
            if size > 1 and model.attention != "sdpa":
                raise ValueError(
                    f"parallel.{knob}={size} gives each rank heads that are attended to by sdpa, but {name}.attention "
                    f"is {model.attention}. Use sdpa, or parallel.{knob}=1."
                )

    def check_has(self, *names: str) -> None:
        """Check that nothing is asked for but what a stage has.

        Raises:
            ValueError: something is.
        """
        for name, size in vars(self).items():
            if size > 1 and name not in names:
                raise ValueError(f"parallel.{name}={size}: only step 1 has it. Set it to 1.")

    def check_ranks(self, num_ranks: int) -> None:
        """Check that so many ranks divide into groups.

        Raises:
            ValueError: they do not.
        """
        for name, size in vars(self).items():
            if num_ranks % size:
                raise ValueError(
                    f"parallel.{name}={size} does not divide the number of ranks, {num_ranks}. Use a divisor of it, or "
                    f"start a multiple of {size} ranks."
                )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimiser and its learning-rate schedule."""

    name: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """torch's AdamW in its fused kernel, bitsandbytes' AdamW with 8-bit moments, or Muon (docs/engine.md)."""
    lr: float
    """Peak learning rate; Muon's steps are scaled so that AdamW's rates hold for it."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW betas; 0.95 as in GPT-3 (Brown et al. 2020, app. B) and DeepSpeed-Chat."""
    eps: float = 1e-8
    """AdamW epsilon."""
    momentum: float = 0.95
    """Muon's momentum on matrices; what is no hidden matrix goes by betas and eps."""
    weight_decay: float = 0.0
    """Decoupled weight decay on matrices; biases, norms and embeddings of one dimension get none."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up."""
    warmup_frac: float = 0.03
    """Share of all steps over which the rate rises linearly from lr / warm-up steps."""
    min_lr_frac: float = 0.0
    """Rate that the decay tends to, as a share of lr; it is reached one step after the last."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0: no clipping."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"optim.lr must be > 0, got {self.lr}.")
        if not (0 <= self.betas[0] < 1 and 0 <= self.betas[1] < 1):
            raise ValueError(f"optim.betas must be in [0, 1), got {self.betas}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"optim.momentum must be in [0, 1), got {self.momentum}.")
        if not 0 <= self.warmup_frac < 1:
            raise ValueError(f"optim.warmup_frac must be in [0, 1), got {self.warmup_frac}.")
        if not 0 <= self.min_lr_frac <= 1:
            raise ValueError(f"optim.min_lr_frac must be in [0, 1], got {self.min_lr_frac}.")
        if self.weight_decay < 0 or self.clip_norm < 0 or self.eps <= 0:
            raise ValueError(
                f"optim.weight_decay and optim.clip_norm must be >= 0 and optim.eps > 0, got {self.weight_decay}, "
                f"{self.clip_norm}, {self.eps}."
            )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How responses are drawn; step 3 scores them with the same transforms."""

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches it."""
    min_new_tokens: int = 0
    """Stop tokens cannot be drawn before this many tokens."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Further ids that end a response, beside the model's own stop token."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a response; their tokens stay part of it."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"sampling.temperature must be >= 0, got {self.temperature}.")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or self.min_new_tokens < 0:
            raise ValueError(
                f"sampling.top_k and sampling.min_new_tokens must be >= 0 and sampling.top_p in (0, 1], got "
                f"{self.top_k}, {self.min_new_tokens}, {self.top_p}."
            )


@dataclass(frozen=True, kw_only=True)
class VLLMConfig:
    """What vLLM may take of the machine where it decodes (docs/vllm.md)."""

    gpu_memory_share: float = 0.3
    """Share of the device's memory (on CPUs: of the NUMA node's) for weights, activations and KV cache together."""
    kv_cache_bytes: int | None = None
    """Size of the KV cache; null: what gpu_memory_share leaves."""
    prefill_tokens: int = 8192
    """Prompt tokens of one forward at most; a longer prompt is split."""
    compiled: bool = False
    """Compile the model (torch.compile, on GPUs CUDA graphs too): minutes at the start for less time per token."""
    sleep: bool = False
    """Give weights and KV cache back between rollouts; needs a GPU."""

    def __post_init__(self) -> None:
        if self.prefill_tokens < 1:
            raise ValueError(f"vllm.prefill_tokens must be >= 1, got {self.prefill_tokens}.")
        if not 0 < self.gpu_memory_share < 1:
            raise ValueError(
                f"vllm.gpu_memory_share must be in (0, 1), got {self.gpu_memory_share}. The trainer needs the rest."
            )
        if self.kv_cache_bytes is not None and self.kv_cache_bytes < 1:
            raise ValueError(f"vllm.kv_cache_bytes must be >= 1, got {self.kv_cache_bytes}. Leave it out to derive it.")


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """What an evaluation looks at."""

    max_rows: int = 512
    """Held-out rows used at most; 0: no evaluation."""
    generate_rows: int = 64
    """Held-out prompts answered at most, for stop rate, samples and rules; 0: none."""
    greedy: bool = False
    """Answer with the most likely tokens instead of by the sampling section."""

    def __post_init__(self) -> None:
        if self.max_rows < 0 or self.generate_rows < 0:
            raise ValueError(
                f"eval.max_rows and eval.generate_rows must be >= 0, got {self.max_rows}, {self.generate_rows}."
            )


@dataclass(frozen=True, kw_only=True)
class WatchdogConfig:
    """Seconds without progress after which a rank counts as stuck and the run is ended, by phase; 0: never."""

    start_seconds: float = 3600.0
    """From the start of the process to the first step: data, models, engines."""
    input_seconds: float = 900.0
    """Waiting for a batch."""
    rollout_seconds: float = 900.0
    """Between two tokens of a rollout."""
    score_seconds: float = 900.0
    """Between two model calls of a scoring."""
    update_seconds: float = 900.0
    """Between two micro-batches of an update."""
    eval_seconds: float = 900.0
    """Between two model calls or tokens of an evaluation."""
    save_seconds: float = 1800.0
    """Writing a state or a model folder."""
    other_seconds: float = 900.0
    """What lies between the named phases."""
    silent_seconds: float = 300.0
    """A process that has not even written its heartbeat for so long was stopped, or its machine is gone."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if not (value == 0 or 1 <= value < float("inf")):
                raise ValueError(f"run.watchdog.{f.name} must be 0 (never) or >= 1, got {value}.")
        if 0 < self.silent_seconds < 5:
            raise ValueError(
                f"run.watchdog.silent_seconds must be 0 (never) or >= 5, got {self.silent_seconds}: a heartbeat is "
                "written once a second."
            )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Folder, seed, cadence and sinks of one stage."""

    out_dir: str
    """The stage's folder: resolved configs, metrics, log, state and model are written under it."""
    seed: int = 1
    """Seed of weights, order and sampling."""
    log_every: int = 1
    """Write metrics every so many steps."""
    eval_every: int = 0
    """Evaluate every so many steps; 0: before the first and after the last step only."""
    save_every: int = 0
    """Save resumable state every so many steps; 0: not by steps."""
    save_minutes: float = 0.0
    """Save it also when so many minutes have passed since the last one; 0: not by time."""
    save_async: bool = False
    """Write it beside training, from a copy in host memory."""
    keep_states: int = 2
    """Number of newest states to keep."""
    keep_best: str | None = None
    """Also keep the state with the best value of this metric, for example eval/loss."""
    resume: bool = False
    """Continue from the newest intact state in out_dir; an error if there is none."""
    resume_weights_only: bool = False
    """With resume: take weights and positions, not the optimiser."""
    profile_steps: int = 0
    """Run so many of the last steps under torch's profiler: trace and communication share in `profile/`; 0: none."""
    tensorboard: bool = False
    """Also write TensorBoard events."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project."""
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    """When a rank counts as stuck (docs/reliability.md)."""
    health: HealthConfig = field(default_factory=HealthConfig)
    """Detectors of training that goes wrong (docs/reliability.md)."""

    def __post_init__(self) -> None:
        if self.profile_steps < 0:
            raise ValueError(f"run.profile_steps must be >= 0, got {self.profile_steps}.")
        if self.log_every < 1 or self.eval_every < 0 or self.save_every < 0 or self.keep_states < 1:
            raise ValueError(
                "run.log_every and run.keep_states must be >= 1, run.eval_every and run.save_every >= 0, got "
                f"{self.log_every}, {self.keep_states}, {self.eval_every}, {self.save_every}."
            )
        if not 0 <= self.save_minutes < math.inf:
            raise ValueError(f"run.save_minutes must be >= 0 and finite, got {self.save_minutes}.")
        if self.resume_weights_only and not self.resume:
            raise ValueError("run.resume_weights_only is about a resume. Set run.resume too, or leave it out.")
        if self.keep_best is not None:
            self._check_keep_best(self.keep_best)
        if not self.save_every and (turning := self.health.with_action("rollback")):
            raise ValueError(
                f"run.health.{turning[0]}.action is rollback, but run.save_every is 0: there would be no state to go "
                "back to. Set run.save_every, or use action=stop."
            )

    def check_supervised(self) -> None:
        """Check what only steps 1 and 2 have to: they have no responses.

        Raises:
            ValueError: a detector of responses is to stop the stage or to roll it back.
        """
        self.health.check_measured(SUPERVISED)

    def _check_keep_best(self, metric: str) -> None:
        """A state competes with the value that was written in its own step, so both have to come together."""
        key = "eval_every" if metric.startswith("eval/") else "log_every"
        every = getattr(self, key)
        if not every or not self.save_every or self.save_every % every:
            raise ValueError(
                f"run.keep_best={metric} needs a state wherever the metric is written: run.save_every a multiple of "
                f"run.{key}, got {self.save_every} and {every}."
            )


def check_length(*, global_batch_size: int, epochs: float, max_steps: int) -> None:
    """Check the three numbers that say how long a supervised stage trains.

    Raises:
        ValueError: one of them is out of range.
    """
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size must be >= 1, got {global_batch_size}.")
    if epochs <= 0 or max_steps < 0:
        raise ValueError(f"epochs must be > 0 and max_steps >= 0, got {epochs}, {max_steps}.")


def parse_config(config_class: type[Config], argv: Sequence[str] | None = None, *, prog: str | None = None) -> Config:
    """Read `--config recipe.yaml` and dotted flags into a config; later ones override earlier ones.

    Args:
        config_class: a frozen dataclass, the root of a stage's config.
        argv: arguments without the program's name; None takes sys.argv. `--local_rank=N`, which the deepspeed
            launcher adds, is dropped.
        prog: program name in messages.

    Raises:
        SystemExit: code 2 with a one-line message for unknown keys, wrong types or values that break a rule.
    """
    from jsonargparse import ArgumentParser, set_parsing_settings  # noqa: PLC0415  0.2 s that a library user need not pay

    arguments = [a for a in (sys.argv[1:] if argv is None else argv) if not a.startswith("--local_rank")]
    # Field docstrings are what --help shows; reading them takes longer than all the rest.
    set_parsing_settings(
        docstring_parse_attribute_docstrings=any(a.startswith(("-h", "--h", "--p")) for a in arguments)
    )
    parser = ArgumentParser(
        prog=prog,
        description=config_class.__doc__,
        usage="%(prog)s --config recipe.yaml [--section.key value ...]",
    )
    parser.add_argument("--config", action="config", help="YAML recipe of this stage.")
    parser.add_class_arguments(config_class)
    try:
        for path in _config_paths(arguments):
            strict.read_yaml(path)  # the parser takes the last of two equal keys and does not say so
        # Indexed, not vars(): jsonargparse stores names of its own methods, such as `update`, under another spelling.
        values = parser.instantiate(parser.parse_args(arguments))
        config = config_class(**{f.name: values[f.name] for f in dataclasses.fields(config_class)})  # type: ignore[arg-type]
        for name in strict.not_finite(to_dict(config)):
            raise ValueError(f"{name} must be a finite number.")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return config


def _config_paths(arguments: Sequence[str]) -> Iterator[str]:
    """Files that `--config` names."""
    for flag, value in zip(arguments, [*arguments[1:], None], strict=True):
        if flag == "--config" and value is not None:
            yield value
        elif flag.startswith("--config="):
            yield flag.partition("=")[2]


def to_dict(config: Any) -> dict[str, Any]:
    """Plain YAML-ready form of a config: tuples become lists."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value

    return plain(dataclasses.asdict(config))  # type: ignore[no-any-return]


def save_config(config: Any, path: Path) -> None:
    """Write the resolved config as YAML; `parse_config(cls, ["--config", path])` reads the same config back."""
    path.write_text(yaml.safe_dump(to_dict(config), sort_keys=False, width=100), encoding="utf-8")
