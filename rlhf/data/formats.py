"""Row formats: how the columns of one raw row become records. No torch.

`FORMATS` is in order of recognition: the first format whose columns are all there is taken. docs/data.md shows each.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf.data.schema import Message, Record, Response, Role, RowError

Row = Mapping[str, Any]

ROLE_NAMES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
HH_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


@dataclass(frozen=True)
class Format:
    """One row format: the columns it is recognised by and how a row is read."""

    name: str
    columns: tuple[str, ...]
    read: Callable[[Row], Iterator[Record]]


def text_of(value: Any, name: str) -> str:
    """A text column, with white space at its ends removed: templates put their own around it."""
    if not isinstance(value, str):
        raise RowError(f"`{name}` is {_type_name(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise RowError(f"`{name}` holds half of a surrogate pair, which is no text") from None
    return value.strip()


def messages_of(value: Any, name: str) -> tuple[Message, ...]:
    """Turns from a list of {role, content} or {from, value} mappings."""
    if not _is_list(value):
        raise RowError(f"`{name}` is {_type_name(value)}, not a list of turns")
    return tuple(_message_of(turn, name) for turn in value)


def hh_messages(text: str) -> tuple[Message, ...]:
    """Turns of a text with "Human:" and "Assistant:" markers (Bai et al. 2022, arXiv:2204.05862).

    A trailing empty "Assistant:" is the place of the response and no turn.
    """
    pieces = HH_TURN.split("\n\n" + text.strip())
    if pieces[0].strip() or len(pieces) < 3:
        raise RowError("text does not start with `Human:` or `Assistant:`")
    turns = [
        Message(role="user" if name == "Human" else "assistant", content=content.strip())
        for name, content in zip(pieces[1::2], pieces[2::2], strict=True)
    ]
    if turns[-1].role == "assistant" and not turns[-1].content:
        turns.pop()
    return tuple(turns)


def prompt_of(value: Any, name: str) -> tuple[Message, ...]:
    """A prompt given as text, as text with HH markers, or as turns."""
    if not isinstance(value, str):
        return messages_of(value, name)
    text = value.strip()
    if re.match(r"Human:", text) and re.search(r"\n\nAssistant:$", text):
        return hh_messages(text)
    return (Message("user", text),)


def _prompt_response(row: Row) -> Iterator[Record]:
    column = "response" if "response" in row else "completion"
    response = row[column]
    text = text_of(_only_assistant_turn(response, column), column)
    prompt = _with_system(row, prompt_of(row["prompt"], "prompt"))
    yield Record(prompt, (Response(text),), meta=_meta(row, ("prompt", column, "system")))


def _prompt_only(row: Row) -> Iterator[Record]:
    yield Record(_with_system(row, prompt_of(row["prompt"], "prompt")), meta=_meta(row, ("prompt", "system")))


def _alpaca(row: Row) -> Iterator[Record]:
    yield Record(_alpaca_prompt(row), (Response(text_of(row["output"], "output")),), meta=_meta(row, _ALPACA_COLUMNS))


def _alpaca_prompt(row: Row) -> tuple[Message, ...]:
    instruction, extra = text_of(row["instruction"], "instruction"), text_of(row.get("input") or "", "input")
    turns: list[Message] = []
    for pair in row.get("history") or []:
        if not _is_list(pair) or len(pair) != 2:
            raise RowError("`history` is not a list of [question, answer] pairs")
        turns += [Message("user", text_of(pair[0], "history")), Message("assistant", text_of(pair[1], "history"))]
    return _with_system(row, (*turns, Message("user", f"{instruction}\n\n{extra}" if extra else instruction)))


_ALPACA_COLUMNS = ("instruction", "input", "output", "history", "system")


def _instances(row: Row) -> Iterator[Record]:
    if not _is_list(row["instances"]) or not row["instances"]:
        raise RowError("`instances` is empty or not a list")
    for instance in row["instances"]:
        if not isinstance(instance, Mapping) or "output" not in instance:
            raise RowError("an instance has no `output`")
        example = {"instruction": row["instruction"], **instance}
        meta = _meta(row, ("instruction", "instances"))
        yield Record(_alpaca_prompt(example), (Response(text_of(instance["output"], "output")),), meta=meta)


def _question_answer(row: Row) -> Iterator[Record]:
    answer = text_of(row["answer"], "answer")
    # GSM8K ends its worked answers in "#### 18"; the number is what a rule can check.
    final = answer.rsplit("####", 1)[-1].strip()
    if "####" in answer:
        final = final.replace(",", "")
    meta = {**_meta(row, ("question", "answer", "system")), "answer": final}
    yield Record(_with_system(row, prompt_of(row["question"], "question")), (Response(answer),), meta=meta)


def _conversation(column: str) -> Callable[[Row], Iterator[Record]]:
    def read(row: Row) -> Iterator[Record]:
        turns = _with_system(row, messages_of(row[column], column))
        if not turns:
            raise RowError(f"`{column}` is empty")
        meta = _meta(row, (column, "system"))
        if turns[-1].role != "assistant":
            yield Record(turns, meta=meta)
        else:
            yield Record(turns[:-1], (Response(turns[-1].content),), meta=meta)

    return read


def _preference(row: Row) -> Iterator[Record]:
    prompt_column = next((name for name in ("prompt", "messages", "conversations", "question") if name in row), None)
    prompt = prompt_of(row[prompt_column], prompt_column) if prompt_column else ()
    chosen_prompt, chosen = _side(row["chosen"], "chosen")
    rejected_prompt, rejected = _side(row["rejected"], "rejected")
    if chosen_prompt != rejected_prompt:
        raise RowError("`chosen` and `rejected` differ before the last answer")
    # A side that is a whole conversation repeats the prompt and is more exact: `prompt` may be its first turn only.
    prompt = _with_system(row, chosen_prompt or prompt)
    columns = ("chosen", "rejected", "margin", "system", "messages", "conversations", prompt_column or "")
    responses = (Response(chosen, rank=1.0), Response(rejected, rank=0.0))
    yield Record(prompt, responses, margin=_number(row.get("margin") or 0.0, "margin"), meta=_meta(row, columns))


def _side(value: Any, name: str) -> tuple[tuple[Message, ...], str]:
    """(turns before the last answer, last answer) of `chosen` or `rejected`."""
    if isinstance(value, str):
        if not re.match(r"\s*Human:", value):
            return (), text_of(value, name)
        turns = hh_messages(value)
    elif isinstance(value, Mapping):
        turns = (_message_of(value, name),)
    elif value is None or (_is_list(value) and not value):
        raise RowError(f"empty `{name}`")
    else:
        turns = messages_of(value, name)
    if turns[-1].role != "assistant":
        raise RowError(f"`{name}` does not end in an assistant turn")
    return turns[:-1], turns[-1].content


def _ranked(row: Row) -> Iterator[Record]:
    if not _is_list(row["responses"]):
        raise RowError(f"`responses` is {_type_name(row['responses'])}, not a list")
    texts: list[Any] = list(row["responses"])
    if not texts:
        raise RowError("empty `responses`")
    ranks = row.get("ranks", row.get("scores"))
    if ranks is None:
        if not all(isinstance(item, Mapping) for item in texts):
            raise RowError("`responses` has no `ranks`")
        ranks = [item.get("rank", item.get("score")) for item in texts]
        texts = [item.get("text", item.get("content")) for item in texts]
    if not _is_list(ranks) or len(ranks) != len(texts):
        raise RowError("`ranks` is not one number for each response")
    responses = tuple(
        Response(text_of(text, "responses"), rank=_number(rank, "ranks"))
        for text, rank in zip(texts, ranks, strict=True)
    )
    meta = _meta(row, ("prompt", "responses", "ranks", "scores", "margin", "system"))
    yield Record(_with_system(row, prompt_of(row["prompt"], "prompt")), responses, meta=meta)


def _open_assistant_tree(row: Row) -> Iterator[Record]:
    if not isinstance(row["prompt"], Mapping):
        raise RowError("`prompt` of a message tree is not a message")
    yield from _replies(row["prompt"], ())


def _open_assistant_message(row: Row) -> Iterator[Record]:
    if ROLE_NAMES.get(row["role"]) != "user" or row.get("parent_id"):
        raise RowError("a message without its tree: only trees from their first prompt can be read")
    yield from _replies(row, ())


def _replies(node: Row, before: tuple[Message, ...]) -> Iterator[Record]:
    """One record for each prompter message of the tree under `node`, with all its ranked replies."""
    prompt = (*before, Message("user", text_of(node.get("text"), "text")))
    replies = [reply for reply in node.get("replies") or [] if not reply.get("deleted")]
    ranked = [reply for reply in replies if reply.get("rank") is not None]
    # Rank 0 is best there. Replies that nobody ranked say nothing beside ranked ones; alone they are ties.
    responses = [Response(text_of(r.get("text"), "text"), rank=-float(r.get("rank") or 0)) for r in ranked or replies]
    yield Record(prompt, tuple(responses), meta={"message_id": str(node.get("message_id", ""))})
    for reply in replies:
        turns = (*prompt, Message("assistant", text_of(reply.get("text"), "text")))
        for follow_up in reply.get("replies") or []:
            if not follow_up.get("deleted"):
                yield from _replies(follow_up, turns)


def _turns(row: Row) -> Iterator[Record]:
    turns = row["turns"]
    if not _is_list(turns) or not turns:
        raise RowError("`turns` is empty or not a list")
    if all(isinstance(turn, str) for turn in turns):
        # Later questions refer to the answer to the first, which is not there.
        yield Record((Message("user", turns[0].strip()),), meta=_meta(row, ("turns",)))
    else:
        yield from _conversation("turns")(row)


def _text(row: Row) -> Iterator[Record]:
    text = text_of(row["text"], "text")
    if not text:
        raise RowError("empty text")
    yield Record((), text=text)


FORMATS: dict[str, Format] = {
    item.name: item
    for item in (
        Format("open_assistant_tree", ("message_tree_id", "prompt"), _open_assistant_tree),
        Format("open_assistant_message", ("message_id", "text", "role", "replies"), _open_assistant_message),
        Format("preference", ("chosen", "rejected"), _preference),
        Format("ranked", ("prompt", "responses"), _ranked),
        Format("prompt_response", ("prompt", "response"), _prompt_response),
        Format("prompt_completion", ("prompt", "completion"), _prompt_response),
        Format("alpaca", ("instruction", "output"), _alpaca),
        Format("instances", ("instruction", "instances"), _instances),
        Format("question_answer", ("question", "answer"), _question_answer),
        Format("messages", ("messages",), _conversation("messages")),
        Format("sharegpt", ("conversations",), _conversation("conversations")),
        Format("turns", ("turns",), _turns),
        Format("prompt", ("prompt",), _prompt_only),
        Format("text", ("text",), _text),
    )
}


def recognise(columns: Iterable[str]) -> Format | None:
    """The first format whose columns are all there."""
    present = set(columns)
    return next((item for item in FORMATS.values() if present.issuperset(item.columns)), None)


def format_named(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: no such format; the message lists them.
    """
    if name not in FORMATS:
        raise ValueError(f"data.sources[].format={name!r} is unknown. Use one of: {', '.join(FORMATS)}.")
    return FORMATS[name]


def _message_of(turn: Any, name: str) -> Message:
    if not isinstance(turn, Mapping):
        raise RowError(f"a turn of `{name}` is {_type_name(turn)}, not a mapping")
    role = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if role not in ROLE_NAMES:
        raise RowError(f"a turn of `{name}` has the role {role!r}, none of {', '.join(ROLE_NAMES)}")
    if _is_list(content):
        content = _text_parts(content, name)
    return Message(ROLE_NAMES[role], text_of(content, f"{name} content"))


def _text_parts(parts: Sequence[Any], name: str) -> str:
    """Content given as parts; only text parts have a meaning here."""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RowError(f"a turn of `{name}` has parts that are not text")
    return "".join(str(text) for text in texts)


def _only_assistant_turn(value: Any, name: str) -> Any:
    """A response given as a one-turn conversation, or the value as it is."""
    if isinstance(value, Mapping):
        value = [value]
    if not _is_list(value):
        return value
    turns = messages_of(value, name)
    if len(turns) != 1 or turns[0].role != "assistant":
        raise RowError(f"`{name}` is not one assistant turn")
    return turns[0].content


def _with_system(row: Row, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    system = row.get("system")
    if not system or (turns and turns[0].role == "system"):
        return turns
    return (Message("system", text_of(system, "system")), *turns)


def _meta(row: Row, used: Sequence[str]) -> dict[str, Any]:
    """Columns that are plain values and used for nothing else, and the content of a `meta` column: what rules read."""
    meta = {key: value for key, value in row.items() if key not in used and isinstance(value, str | int | float | bool)}
    if isinstance(row.get("meta"), Mapping):
        meta.update(row["meta"])
    return meta


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise RowError(f"`{name}` is not a number")
    return float(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _type_name(value: Any) -> str:
    return "missing" if value is None else f"of type {type(value).__name__}"
