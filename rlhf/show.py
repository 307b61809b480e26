"""`rlhf data show`: rows of a stage as the model will see them, tokens with a loss in double angle brackets."""

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from rlhf.config import DataConfig, ModelConfig, TokenizerConfig
from rlhf.data.dataset import PreferenceRow, Row, SFTRow, TokenDataset, build_dataset
from rlhf.data.tokenize import Part, Stage
from rlhf.stage import Language, load_language


def show_rows(
    data: DataConfig, tokenizer: TokenizerConfig, model: ModelConfig, *, stage: Stage, part: Part, rows: int
) -> Iterator[str]:
    """Build a stage's data set as the stage would, and describe its first `rows` rows, a line at a time."""
    language = load_language(data, tokenizer, model, stage=stage)
    dataset = build_dataset(data, stage=stage, part=part, template=language.template, tokenizer=language.tokenizer)
    yield f"{len(dataset)} rows of stage {stage}, part {part}, template {language.template.name}"
    for index in range(min(rows, len(dataset))):
        yield ""
        yield from _row_lines(dataset, index, language)


def _row_lines(dataset: TokenDataset[Row], index: int, language: Language) -> Iterator[str]:
    row: Row = dataset[index]
    where = dataset.where(index)
    tokenizer = language.tokenizer
    if isinstance(row, SFTRow):
        yield f"-- row {index} ({where}): {len(row.token_ids)} tokens, {int(row.loss_mask.sum())} with a loss"
        yield marked(row.token_ids.tolist(), row.loss_mask.tolist(), tokenizer)
    elif isinstance(row, PreferenceRow):
        yield f"-- row {index} ({where}): {len(row.prompt_ids)} prompt tokens, {len(row.responses)} responses"
        yield _text(row.prompt_ids.tolist(), tokenizer)
        for response, rank in sorted(zip(row.responses, row.ranks, strict=True), key=lambda pair: -pair[1]):
            yield f"   rank {rank:g}, {len(response)} tokens: {_text(response.tolist(), tokenizer)}"
    else:
        yield f"-- row {index} ({where}): {len(row.prompt_ids)} prompt tokens, meta {row.meta}"
        yield _text(row.prompt_ids.tolist(), tokenizer)


def marked(token_ids: Sequence[int], loss_mask: Sequence[bool], tokenizer: PreTrainedTokenizerBase) -> str:
    """Text of a row; each run of tokens with a loss stands between << and >>."""
    parts = []
    start = 0
    for end in range(1, len(token_ids) + 1):
        if end == len(token_ids) or loss_mask[end] != loss_mask[start]:
            text = _text(token_ids[start:end], tokenizer)
            parts.append(f"<<{text}>>" if loss_mask[start] else text)
            start = end
    return "".join(parts)


def _text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Decoded with special tokens shown."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
