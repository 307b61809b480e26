"""From the records of all sources to the arrays of one stage and part; every row cut or left out is counted."""

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlhf.config import DataConfig, SourceConfig
from rlhf.data.schema import Drops, Record, Response, RowError, prompt_text, split_text
from rlhf.data.sources import read_source
from rlhf.data.splits import LeakReport, digest, part_of
from rlhf.data.splits import Part as Part
from rlhf.data.splits import Stage as Stage
from rlhf.data.store import Writer
from rlhf.data.template import ChatTemplate, Piece

Encoded = tuple[list[int], list[bool]]  # ids, and True where an assistant speaks

STAGE_NUMBER: dict[Stage, int] = {"sft": 1, "reward": 2, "ppo": 3}
CHUNK_ROWS = 1024

_NEEDS: dict[Stage, str] = {"sft": "responses", "reward": "rejected answers", "ppo": "prompts"}


@dataclass
class SourceCounts:
    """What became of one source's rows."""

    read: int = 0
    usable: int = 0
    other_parts: int = 0
    kept: int = 0
    tokens: int = 0
    ties: int = 0
    cut: Counter[str] = field(default_factory=Counter)
    drops: Drops = field(default_factory=Drops)

    def as_dict(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {
            "read": self.read,
            "other_parts": self.other_parts,
            "kept": self.kept,
            "tokens": self.tokens,
            "ties": self.ties,
            "cut": dict(self.cut),
            "dropped": dict(self.drops.counts),
            "examples": self.drops.examples,
        }


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens: a sequence (step 1), a prompt, or a response with its rank."""

    ids: list[int]
    mask: list[bool]
    rank: float = 0.0


class Builder:
    """Reads, divides, tokenises and writes; one chunk of rows in memory at a time."""

    def __init__(self, cfg: DataConfig, *, stage: Stage, part: Part, template: ChatTemplate) -> None:
        self.cfg = cfg
        self.stage: Stage = stage
        self.part: Part = part
        self.template = template
        self.leaks = LeakReport()
        self.same_prompts: Counter[int] = Counter()
        self.ends = {"tokens": 0, "segments": 0, "notes": 0}

    def build(self, writer: Writer) -> dict[str, Any]:
        """Write all rows and return the report."""
        counts = {s.label: self._build_source(writer, s, number) for number, s in enumerate(self.cfg.sources)}
        return {
            "stage": self.stage,
            "part": self.part,
            "rows": sum(c.kept for c in counts.values()),
            "tokens": sum(c.tokens for c in counts.values()),
            "sources": {name: c.as_dict() for name, c in counts.items()},
            "leaks": self.leaks.summary(),
        }

    def _build_source(self, writer: Writer, source: SourceConfig, number: int) -> SourceCounts:
        counts = SourceCounts()
        chunk: list[Record] = []
        wanted = self.stage if self.part == "train" else "eval"
        for record in read_source(source, self.cfg.root, counts.drops):
            counts.read += 1
            counts.usable += _serves(record, self.stage)
            part = part_of(split_text(record), self.cfg.split)
            self.leaks.add(prompt_text(record), part=part, source=source.label)
            if part != wanted:
                counts.other_parts += 1
                continue
            chunk.append(record)
            if len(chunk) == CHUNK_ROWS:
                self._write_chunk(writer, chunk, number, counts)
                chunk = []
        self._write_chunk(writer, chunk, number, counts)
        _check_source(source.label, counts, self.stage)
        return counts

    def _write_chunk(self, writer: Writer, chunk: Sequence[Record], number: int, counts: SourceCounts) -> None:
        records: list[Record] = []
        pieces: list[list[list[Piece]]] = []
        for record in chunk:
            try:
                chosen = self._for_stage(record, counts)
                pieces.append(self._pieces(chosen))
                records.append(chosen)
            except RowError as error:
                counts.drops.add(error.reason, record.where)
        encoded = iter(self.template.encode([piece for row in pieces for piece in row]))
        rows = _Rows()
        for record, row in zip(records, pieces, strict=True):
            parts = [next(encoded) for _ in row]
            try:
                for segments in self._segments(record, parts, counts):
                    self._add(rows, record, segments, number, counts)
            except RowError as error:
                counts.drops.add(error.reason, record.where)
        for name, values in rows.columns().items():
            writer.append(name, values)

    def _for_stage(self, record: Record, counts: SourceCounts) -> Record:
        """The record with what this stage uses of it."""
        if self.stage == "sft":
            return record if record.text else _demonstration(record, counts)
        if record.text:
            raise RowError("plain text, no prompt")
        if self.stage == "ppo":
            return dataclasses.replace(record, responses=())
        if len(record.responses) < 2:
            raise RowError("no rejected answer")
        for reason, values in (
            ("tie: all responses are identical", {response.text for response in record.responses}),
            ("tie: all responses have the same rank", {response.rank for response in record.responses}),
        ):
            if len(values) == 1:
                counts.ties += 1
                raise RowError(reason)
        return record

    def _pieces(self, record: Record) -> list[list[Piece]]:
        """What is tokenised for a record: its text, or its prompt and each response."""
        if record.text:
            return [self.template.text_pieces(record.text)]
        responses = [self.template.response_pieces(response.text) for response in record.responses]
        return [self.template.prompt_pieces(record.prompt), *responses]

    def _segments(self, record: Record, parts: list[Encoded], counts: SourceCounts) -> list[list[Segment]]:
        """The rows of a record (several only for a long text), each as its segments, within the limits."""
        if record.text:
            return self._text_rows(record, parts[0], counts)
        ids, mask = self._within_prompt_limit(record, parts[0], counts)
        if self.stage == "ppo":
            return [[Segment(ids, mask)]]
        if self.stage == "sft":
            spoken, spoken_mask = self._within_response_limit(record, parts[1], counts)
            return [[Segment(ids + spoken, mask + spoken_mask)]]
        segments = [Segment(ids, mask)]
        for encoded, response in zip(parts[1:], record.responses, strict=True):
            try:
                segments.append(Segment(*self._within_response_limit(record, encoded, counts), rank=response.rank))
            except RowError:
                if len(parts) == 3:  # one of two: no pair is left
                    raise
                counts.cut["response over max_response_tokens left out of its row"] += 1
        pairs = [(a, b) for a in segments[1:] for b in segments[1:] if a.rank > b.rank]
        if not pairs:
            raise RowError("fewer than two ranks within max_response_tokens")
        if all(better.ids == worse.ids for better, worse in pairs):
            counts.ties += 1
            raise RowError("tie: responses are identical within max_response_tokens")
        return [segments]

    def _within_prompt_limit(self, record: Record, encoded: Encoded, counts: SourceCounts) -> Encoded:
        ids, limit = encoded[0], self.cfg.max_prompt_tokens
        if not ids:
            raise RowError("prompt without a token")
        if len(ids) <= limit:
            return encoded
        if self.cfg.overlong_prompt == "error":
            raise ValueError(
                f"{record.where}: the prompt has {len(ids)} tokens, data.max_prompt_tokens={limit}. Raise the limit, "
                "or set data.overlong_prompt to drop or truncate_left."
            )
        if self.cfg.overlong_prompt == "drop":
            raise RowError("prompt over max_prompt_tokens")
        cut = self.template.truncated_prompt(record.prompt, limit)
        counts.cut["prompt over max_prompt_tokens"] += 1
        return cut

    def _within_response_limit(self, record: Record, encoded: Encoded, counts: SourceCounts) -> Encoded:
        ids, mask = encoded
        limit = self.cfg.max_response_tokens
        if len(ids) <= limit:
            return encoded
        if self.cfg.overlong_response == "error":
            raise ValueError(
                f"{record.where}: a response has {len(ids)} tokens, data.max_response_tokens={limit}. Raise the limit, "
                "or set data.overlong_response to drop or truncate."
            )
        if self.cfg.overlong_response == "drop":
            raise RowError("response over max_response_tokens")
        counts.cut["response over max_response_tokens"] += 1
        return ids[:limit], mask[:limit]

    def _text_rows(self, record: Record, encoded: Encoded, counts: SourceCounts) -> list[list[Segment]]:
        """Plain text in rows of the full length; the last one ends in eos."""
        ids, mask = encoded
        limit = self.cfg.max_prompt_tokens + self.cfg.max_response_tokens
        if len(ids) > limit:
            if self.cfg.overlong_response == "error":
                raise ValueError(
                    f"{record.where}: a text has {len(ids)} tokens; data.max_prompt_tokens + data.max_response_tokens="
                    f"{limit}. Raise them, or set data.overlong_response to truncate: several rows of one text."
                )
            if self.cfg.overlong_response == "drop":
                raise RowError("text over max_prompt_tokens + max_response_tokens")
            counts.cut["text divided into several rows"] += 1
        return [[Segment(ids[i : i + limit], mask[i : i + limit])] for i in range(0, len(ids), limit)]

    def _add(self, rows: "_Rows", record: Record, segments: list[Segment], number: int, counts: SourceCounts) -> None:
        for segment in segments:
            self.ends["tokens"] += len(segment.ids)
            rows.tokens += segment.ids
            rows.loss += segment.mask
            rows.segment_end.append(self.ends["tokens"])
            rows.rank.append(segment.rank)
        prompt = len(segments[0].ids)
        length = sum(prompt + len(segment.ids) for segment in segments[1:]) if self.stage == "reward" else prompt
        note: dict[str, Any] = {"where": record.where}
        if self.stage == "ppo":
            note |= {"text": prompt_text(record), "meta": record.meta}
        encoded = json.dumps(note).encode()
        self.ends["segments"] += len(segments)
        self.ends["notes"] += len(encoded)
        rows.notes += encoded
        rows.note_end.append(self.ends["notes"])
        rows.row_end.append(self.ends["segments"])
        rows.length.append(length)
        rows.margin.append(record.margin)
        rows.source.append(number)
        rows.uid.append(self._uid(record) if self.stage == "ppo" else 0)
        counts.kept += 1
        counts.tokens += length

    def _uid(self, record: Record) -> int:
        """62-bit hash of source and prompt; a prompt that stands there again gets a number of its own each time."""
        turns = json.dumps([[message.role, message.content] for message in record.prompt] or record.text)
        first = digest("uid", record.source, turns)
        before = self.same_prompts[first]
        self.same_prompts[first] += 1
        return (digest("uid", record.source, turns, str(before)) if before else first) >> 2


@dataclass
class _Rows:
    """Arrays of one chunk; the names are those of `store.DTYPES`."""

    tokens: list[int] = field(default_factory=list)
    loss: list[bool] = field(default_factory=list)
    segment_end: list[int] = field(default_factory=list)
    rank: list[float] = field(default_factory=list)
    row_end: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    margin: list[float] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    uid: list[int] = field(default_factory=list)
    notes: bytearray = field(default_factory=bytearray)
    note_end: list[int] = field(default_factory=list)

    def columns(self) -> dict[str, Any]:
        """Each array by its name."""
        lists = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**lists, "notes": np.frombuffer(bytes(self.notes), dtype=np.uint8)}


def _serves(record: Record, stage: Stage) -> bool:
    """Whether a record has what the stage is about, ties and limits aside."""
    if stage == "sft":
        return bool(record.text or record.responses or any(message.role == "assistant" for message in record.prompt))
    return len(record.responses) >= 2 if stage == "reward" else bool(record.prompt)


def _demonstration(record: Record, counts: SourceCounts) -> Record:
    """The record with its best response alone; without responses, the conversation up to its last assistant turn."""
    if record.responses:
        best = max(record.responses, key=lambda response: response.rank)  # the first of equals
        return dataclasses.replace(record, responses=(dataclasses.replace(best, rank=0.0),))
    answered = [i for i, message in enumerate(record.prompt) if message.role == "assistant"]
    if not answered:
        raise RowError("no response")
    counts.cut["last user turn without a response"] += 1
    last = record.prompt[answered[-1]].content
    before = dataclasses.replace(record, prompt=record.prompt[: answered[-1]])
    return dataclasses.replace(before, responses=(Response(last),))


def _check_source(label: str, counts: SourceCounts, stage: Stage) -> None:
    """Stop when a source has rows but none that the stage can use, in whichever part.

    Raises:
        ValueError: with the name of the source and the reason.
    """
    if counts.usable:
        return
    if counts.read:
        raise ValueError(
            f"data set {label} has no {_NEEDS[stage]}, cannot be used in step {STAGE_NUMBER[stage]}. Remove it from "
            "this stage's data.sources, or name its columns in data.sources[].columns."
        )
    reasons = "; ".join(
        f"{n} rows: {why} ({', '.join(counts.drops.examples[why])})" for why, n in counts.drops.counts.items()
    )
    raise ValueError(
        f"data set {label} has no usable row. {reasons or 'It is empty'}. Mend the rows or remove the source."
    )
