"""Config of step 2. No torch."""

from dataclasses import dataclass, field

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
class RankingConfig:
    """The pairwise ranking loss: -log sigmoid(score_chosen - score_rejected - margin) + centring."""

    use_margin: bool = False
    """Subtract the row's `margin` column (Touvron et al. 2023, arXiv:2307.09288, eq. 2); a row without one counts 0."""
    centring_coef: float = 0.0
    """Weight of (score_chosen + score_rejected)^2 (Eisenstein et al. 2023, arXiv:2312.09244); 0.01 is usual."""

    def __post_init__(self) -> None:
        if self.centring_coef < 0:
            raise ValueError(f"ranking.centring_coef must be >= 0, got {self.centring_coef}.")


@dataclass(frozen=True, kw_only=True)
class NormaliseConfig:
    """Score normalisation: mean 0, variance 1 on the SFT policy's answers (Ziegler et al. 2019, sec. 2.1)."""

    policy: str | None = None
    """Model folder of step 1; null: no normalisation."""
    deepspeed: str = "frozen"
    """DeepSpeed JSON of the policy: a path, or a name in ds_configs."""
    rows: int = 256
    """Prompts answered."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """How they are answered."""

    def __post_init__(self) -> None:
        if self.rows < 2:
            raise ValueError(f"normalise.rows must be >= 2, got {self.rows}.")


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Step 2: a reward model from preferences."""

    model: ModelConfig
    """The base: a causal LM (gets a new head) or a reward model (keeps its head)."""
    data: DataConfig
    """The preferences."""
    optim: OptimConfig
    """Optimiser and schedule."""
    run: RunConfig
    """Folder, seed, cadence."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """Ranks that share rows, or the model's weights."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation."""
    ranking: RankingConfig = field(default_factory=RankingConfig)
    """The loss."""
    normalise: NormaliseConfig = field(default_factory=NormaliseConfig)
    """Score normalisation after training."""
    deepspeed: str
    """DeepSpeed JSON: a path, or a name in ds_configs."""
    global_batch_size: int
    """Prompts (each with its ranked responses) of one optimiser step, over all ranks and micro-batches."""
    epochs: float = 1.0
    """Passes over the training rows; more than one overfits quickly (Ouyang et al. 2022, app. C.2)."""
    max_steps: int = 0
    """Stop after this many steps; 0: by epochs alone."""

    def __post_init__(self) -> None:
        check_length(global_batch_size=self.global_batch_size, epochs=self.epochs, max_steps=self.max_steps)
        self.run.check_supervised()
        self.parallel.check_has("sp", "tp")
        self.parallel.check_model(self.model, self.data)
        if not (self.model.path or self.model.config):
            raise ValueError("model.path and model.config are both empty. Name a model folder or give a config.")
