"""Records: what every raw row becomes before tokens. No torch.

A record holds a prompt and its responses, whatever the file looked like. Step 1 trains on the best response, step 2 on
all pairs of different rank, step 3 uses the prompt alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")


class RowError(ValueError):
    """A row that cannot be used. `reason` has no row content, so that equal reasons can be counted."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(f"{where}: {reason}" if where else reason)
        self.reason = reason
        self.where = where


@dataclass(frozen=True)
class Message:
    """One turn."""

    role: Role
    content: str


@dataclass(frozen=True)
class Response:
    """One answer to a prompt; a higher rank is better, equal ranks are a tie."""

    text: str
    rank: float = 0.0


@dataclass(frozen=True)
class Record:
    """One row of a source.

    `prompt` ends in a user turn and may hold earlier assistant turns; it is empty for a row of plain text, which has
    `text` instead. `meta` is JSON and holds what a rule needs. `where` is the row's file and line, `row` its number in
    the source.
    """

    prompt: tuple[Message, ...]
    responses: tuple[Response, ...] = ()
    text: str = ""
    margin: float = 0.0
    meta: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    row: int = 0
    where: str = ""


@dataclass
class Drops:
    """Rows left out, by reason, with the places of the first few."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    max_examples: int = 3

    def add(self, reason: str, where: str) -> None:
        """Count one row."""
        self.counts[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < self.max_examples:
            places.append(where)


def check_record(record: Record) -> Record:
    """Return the record if every stage can rely on its form.

    Raises:
        RowError: no prompt and no text, an unknown role, an empty turn or response, or a turn out of place.
    """
    if record.text:
        if record.prompt or record.responses:
            raise RowError("plain text beside a prompt", record.where)
        return record
    reason = _fault_of_turns(record.prompt)
    if reason is None and any(not response.text.strip() for response in record.responses):
        reason = "empty response"
    if reason:
        raise RowError(reason, record.where)
    return record


def _fault_of_turns(prompt: tuple[Message, ...]) -> str | None:
    if not prompt:
        return "no prompt"
    for position, message in enumerate(prompt):
        if message.role not in ROLES:
            return f"role {message.role!r} is none of {', '.join(ROLES)}"
        if message.role == "system" and position > 0:
            return "system turn after the first turn"
        if not message.content.strip():
            return f"empty {message.role} turn"
    turns = [message.role for message in prompt if message.role != "system"]
    if not turns or turns[0] != "user":
        return "conversation does not start with a user turn"
    return None if turns[-1] == "user" else "prompt does not end in a user turn"


def prompt_text(record: Record) -> str:
    """The prompt for people: the user's text, or all turns with their roles when there are several."""
    if record.text:
        return record.text
    if len(record.prompt) == 1:
        return record.prompt[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in record.prompt)


def split_text(record: Record) -> str:
    """The text that decides a record's part: its first user turn.

    Continuations of one conversation share it, so that no early turn is trained on while a later one is evaluated.
    """
    return next((message.content for message in record.prompt if message.role == "user"), record.text)


def as_messages(rows: Sequence[Mapping[str, str]]) -> tuple[Message, ...]:
    """Messages from `{"role": ..., "content": ...}` mappings, as chat APIs write them."""
    return tuple(Message(role=row["role"], content=row["content"]) for row in rows)  # type: ignore[arg-type]
