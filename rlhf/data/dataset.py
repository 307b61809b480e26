"""Tokenised data of one stage and part: built once per content, mapped into memory, the same for every rank."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

import numpy as np
import numpy.typing as npt

from rlhf.config import DataConfig
from rlhf.data.schema import split_text
from rlhf.data.sources import content_digest, read_source
from rlhf.data.splits import Part as Part
from rlhf.data.splits import Stage as Stage
from rlhf.data.splits import part_of
from rlhf.data.store import Store, default_cache_dir, open_or_build
from rlhf.data.template import ChatTemplate
from rlhf.data.tokenize import STAGE_NUMBER, Builder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Settings of the data section that rows do not depend on.
BATCHING_SETTINGS = ("packing", "micro_batch_tokens", "score_micro_batch_tokens")

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SFTRow:
    """One sequence of step 1; `loss_mask` is True on assistant turns, stop tokens included."""

    token_ids: Ids
    loss_mask: npt.NDArray[np.bool_]
    source: int
    index: int


@dataclass(frozen=True)
class PreferenceRow:
    """One prompt of step 2 with two or more ranked responses, not all of one rank."""

    prompt_ids: Ids
    responses: list[Ids]
    ranks: list[float]
    margin: float
    source: int
    index: int


@dataclass(frozen=True)
class PromptRow:
    """One prompt of step 3. `uid` identifies it in every run and process: sampling is keyed on it."""

    prompt_ids: Ids
    meta: dict[str, Any]
    text: str
    source: int
    index: int
    uid: int


Row = SFTRow | PreferenceRow | PromptRow
RowT_co = TypeVar("RowT_co", bound=Row, covariant=True)


class TokenDataset(Generic[RowT_co]):
    """Rows of one stage and part. `index` of a row is its position here; `source` its position in `source_names`."""

    def __init__(self, rows: Store, *, stage: Stage, part: Part, key: str, weights: Sequence[float]) -> None:
        self._store = rows
        self.stage = stage
        self.part = part
        self.key = key
        self.weights = list(weights)
        self.report: dict[str, Any] = rows.report
        self.source_names: list[str] = list(rows.report["sources"])

    def __len__(self) -> int:
        return int(self._store["row_end"].size)

    def __getitem__(self, index: int) -> RowT_co:
        return cast(RowT_co, self._row(index))

    def _row(self, index: int) -> Row:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        segments = range(_start(self._store["row_end"], index), int(self._store["row_end"][index]))
        source = int(self._store["source"][index])
        if self.stage == "sft":
            loss_mask = self._segment(segments[0], "loss").astype(np.bool_)
            return SFTRow(self._segment(segments[0]), loss_mask, source, index)
        if self.stage == "reward":
            return PreferenceRow(
                prompt_ids=self._segment(segments[0]),
                responses=[self._segment(i) for i in segments[1:]],
                ranks=[float(self._store["rank"][i]) for i in segments[1:]],
                margin=float(self._store["margin"][index]),
                source=source,
                index=index,
            )
        note = self._note(index)
        uid = int(self._store["uid"][index])
        return PromptRow(self._segment(segments[0]), note["meta"], note["text"], source, index, uid)

    @property
    def lengths(self) -> Ids:
        """Tokens per row; with several responses, prompt and response of each."""
        return self._store["length"]

    @property
    def sources(self) -> npt.NDArray[np.int32]:
        """Source of each row."""
        return self._store["source"]

    def where(self, index: int) -> str:
        """File and line that a row came from."""
        return str(self._note(index)["where"])

    def _segment(self, segment: int, name: str = "tokens") -> npt.NDArray[Any]:
        ends = self._store["segment_end"]
        return np.array(self._store[name][_start(ends, segment) : int(ends[segment])])

    def _note(self, index: int) -> dict[str, Any]:
        ends = self._store["note_end"]
        note: dict[str, Any] = json.loads(bytes(self._store["notes"][_start(ends, index) : int(ends[index])]))
        return note


@overload
def build_dataset(
    cfg: DataConfig,
    *,
    stage: Literal["sft"],
    part: Part,
    template: ChatTemplate,
    tokenizer: "PreTrainedTokenizerBase",
) -> TokenDataset[SFTRow]: ...
@overload
def build_dataset(
    cfg: DataConfig,
    *,
    stage: Literal["reward"],
    part: Part,
    template: ChatTemplate,
    tokenizer: "PreTrainedTokenizerBase",
) -> TokenDataset[PreferenceRow]: ...
@overload
def build_dataset(
    cfg: DataConfig,
    *,
    stage: Literal["ppo"],
    part: Part,
    template: ChatTemplate,
    tokenizer: "PreTrainedTokenizerBase",
) -> TokenDataset[PromptRow]: ...
@overload
def build_dataset(
    cfg: DataConfig,
    *,
    stage: Stage,
    part: Part,
    template: ChatTemplate,
    tokenizer: "PreTrainedTokenizerBase",
) -> TokenDataset[Row]: ...
def build_dataset(
    cfg: DataConfig,
    *,
    stage: Stage,
    part: Part,
    template: ChatTemplate,
    tokenizer: "PreTrainedTokenizerBase",
) -> TokenDataset[Any]:
    """Rows of one stage and part, from the cache if they were tokenised before.

    Training rows are those whose prompt hashes to this stage, evaluation rows those held out from all three.

    Args:
        cfg: the `data` section.
        stage: what a row is (`SFTRow`, `PreferenceRow`, `PromptRow`).
        part: `train`, or `eval`, which may be empty.
        template: resolved for `tokenizer`.
        tokenizer: the tokenizer.

    Raises:
        ValueError: a source cannot serve this stage, a row is over a limit whose policy is `error`, or no training row
            remains.
        FileNotFoundError: a source does not exist.
        OSError: the cache folder cannot be used.
    """
    key = cache_key(cfg, stage=stage, part=part, template=template, tokenizer=tokenizer)
    cache_dir = Path(cfg.cache_dir).expanduser() if cfg.cache_dir else default_cache_dir()
    builder = Builder(cfg, stage=stage, part=part, template=template)
    rows, is_new = open_or_build(cache_dir, key, builder.build)
    dataset: TokenDataset[Any] = TokenDataset(
        rows, stage=stage, part=part, key=key, weights=[source.weight for source in cfg.sources]
    )
    if is_new:
        for line in report_lines(dataset.report):
            logger.info(line)
    if not len(dataset):
        if part == "train":
            raise ValueError(_empty_message(dataset.report, cfg))
        logger.warning("no evaluation rows for step %d: evaluation is skipped", STAGE_NUMBER[stage])
    return dataset


def cache_key(
    cfg: DataConfig,
    *,
    stage: Stage,
    part: Part,
    template: ChatTemplate,
    tokenizer: "PreTrainedTokenizerBase",
) -> str:
    """Name of the tokenised rows: a digest of file contents, tokenizer, template, settings and this package's code.

    Paths are no part of it (moved files keep their rows), nor are source weights (the loader's) and micro-batches.
    """
    from rlhf.models.build import tokenizer_fingerprint  # noqa: PLC0415  imports torch models, needed here alone

    settings = dataclasses.asdict(cfg)
    for name in ("sources", "root", "cache_dir", "template", *BATCHING_SETTINGS):
        del settings[name]
    described = []
    for source in cfg.sources:
        fields = dataclasses.asdict(source)
        del fields["weight"], fields["path"], fields["name"]
        described.append({**fields, "label": source.label, "content": content_digest(source, cfg.root)})
    parts = [stage, part, settings, described, tokenizer_fingerprint(tokenizer), template.fingerprint, _code_digest()]
    text = json.dumps(parts, sort_keys=True)
    return f"{stage}-{part}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def training_texts(cfg: DataConfig, stage: Stage) -> Iterator[str]:
    """Texts of the stage's training rows, with plain role markers, to train a tokenizer on."""
    for source in cfg.sources:
        for record in read_source(source, cfg.root):
            if part_of(split_text(record), cfg.split) != stage:
                continue
            if record.text:
                yield record.text
                continue
            for message in record.prompt:
                marker = {"user": "\n\nHuman: ", "assistant": "\n\nAssistant: ", "system": ""}[message.role]
                yield marker + message.content
            for response in record.responses:
                yield f"\n\nAssistant: {response.text}"


def report_lines(report: dict[str, Any]) -> list[str]:
    """The report of a data set in a few lines of text."""
    lines = []
    for name, counts in report["sources"].items():
        line = f"{name}: {counts['kept']} rows for step {STAGE_NUMBER[report['stage']]} {report['part']}"
        line += f", {counts['other_parts']} in other parts"
        for kind in ("cut", "dropped"):
            for reason, count in counts[kind].items():
                places = ", ".join(counts["examples"].get(reason, []))
                line += f"; {kind} {count}: {reason}" + (f" ({places})" if places else "")
        lines.append(line)
    leaks = report["leaks"]
    lines.append(
        f"{leaks['prompts']} different prompts; in two parts: {leaks['across_parts']}; in training and evaluation, "
        f"punctuation aside: {leaks['near_train_and_eval']}; in two sources: {leaks['across_sources'] or 'none'}"
    )
    return lines


def _start(ends: npt.NDArray[Any], position: int) -> int:
    return int(ends[position - 1]) if position else 0


def _code_digest() -> str:
    """Digest of the modules that decide what the arrays hold: a change of code is a change of content."""
    names = ("schema", "formats", "sources", "splits", "template", "tokenize", "store")
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join((folder / f"{name}.py").read_bytes() for name in names)).hexdigest()


def _empty_message(report: dict[str, Any], cfg: DataConfig) -> str:
    return (
        f"no training row remains for step {STAGE_NUMBER[report['stage']]}: "
        + " | ".join(report_lines(report)[:-1])
        + f". Change data.split (shares {cfg.split.sft}, {cfg.split.reward}, {cfg.split.ppo}), raise "
        f"data.max_prompt_tokens={cfg.max_prompt_tokens} or data.max_response_tokens={cfg.max_response_tokens}, or "
        "mend the rows."
    )
