"""What the set-up of every stage shares: the tokenizer with its chat template, and the model folder at the end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from rlhf import artifacts, checkpoint
from rlhf.artifacts import Contract
from rlhf.config import DataConfig, ModelConfig, TokenizerConfig
from rlhf.data.dataset import Stage, training_texts
from rlhf.data.template import ChatTemplate, load_template
from rlhf.distributed import broadcast_object, is_main, together
from rlhf.engine import TrainEngine
from rlhf.models.build import load_tokenizer, tokenizer_fingerprint, train_bpe


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
            "model.config starts a new model, but tokenizer.path and tokenizer.train_vocab_size are both empty. Set one."
        )
    assert loaded is not None
    return Language(tokenizer=loaded, template=load_template(data.template, loaded))


def export_model(
    engine: TrainEngine,
    language: Language,
    folder: Path,
    *,
    kind: artifacts.Kind,
    stage: str,
    parents: Sequence[str | None],
    seed: int,
    metrics: Mapping[str, float],
) -> None:
    """Write the engine's model as a verified folder with its manifest. Collective."""
