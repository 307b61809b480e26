"""Config of step 1. No torch."""

from dataclasses import dataclass, field
from typing import Literal

from rlhf.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    SamplingConfig,
    TokenizerConfig,
    check_length,
)


@dataclass(frozen=True, kw_only=True)
class SFTConfig:
    """Step 1: supervised fine-tuning of a causal language model on demonstrations."""

    model: ModelConfig
    """The policy."""
    data: DataConfig
    """The demonstrations."""
    optim: OptimConfig
    """Optimiser and schedule."""
    run: RunConfig
    """Folder, seed, cadence."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Ranks that share rows, weights or layers."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How evaluation prompts are answered."""
    deepspeed: str
    """DeepSpeed JSON: a path, or a name in ds_configs."""
    global_batch_size: int
    """Sequences of one optimiser step, over all ranks and micro-batches."""
    epochs: float = 1.0
    """Passes over the training rows."""
    max_steps: int = 0
    """Stop after this many steps; 0: by epochs alone."""
    loss_on: Literal["responses", "all"] = "responses"
    """Tokens with a loss: the assistant's turns, stop token included, or every token."""
    fused_loss: Literal["auto", "off"] = "auto"
    """Liger's kernels for the loss: `auto` on CUDA where Liger is installed and the ZeRO stage is below 3."""

    def __post_init__(self) -> None:
        check_length(global_batch_size=self.global_batch_size, epochs=self.epochs, max_steps=self.max_steps)
        self.run.check_supervised()
        self.parallel.check_model(self.model, self.data, compiles=True)
        if not (self.model.path or self.model.config):
            raise ValueError("model.path and model.config are both empty. Name a model folder or give a config.")
