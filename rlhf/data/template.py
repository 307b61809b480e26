"""Chat templates: how turns become token ids, and where a response ends.

A template is a Jinja source in Hugging Face's form: the tokenizer's own, a file, or one of `NAMED`. Three rules hold:

- The prompt (history included) and each response are tokenised apart and their ids concatenated, so a training row and
  a rollout of the same text have identical ids.
- A response ends in one id, the stop token. It is put in as an id, so no tokenizer can take its text apart.
- What users wrote never becomes a special token, even if it reads like one.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf.data.schema import Message, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TURNS = "{% for m in messages %}"
_HUMAN_ASSISTANT = (
    "{{ bos }}" + _TURNS + "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '\n\nHuman: ' + m.content }}"
    "{% else %}{{ '\n\nAssistant: ' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\nAssistant:' }}{% endif %}"
)
_PLAIN = (
    "{{ bos }}" + _TURNS + "{% if m.role == 'system' %}{{ m.content + '\n\n' }}"
    "{% elif m.role == 'user' %}{{ m.content }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)
_ALPACA = (
    "{{ bos }}{% if messages[0].role != 'system' %}{{ 'Below is an instruction that describes a task. Write a response "
    "that appropriately completes the request.' }}{% endif %}" + _TURNS + "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}{{ '\n\n### Instruction:\n' + m.content }}"
    "{% else %}{{ '\n\n### Response:\n' + m.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}"
)
_CHATML = (
    "{{ bos }}" + _TURNS + "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMED = {"human_assistant": _HUMAN_ASSISTANT, "plain": _PLAIN, "alpaca": _ALPACA, "chatml": _CHATML}
DEFAULT = "human_assistant"

# Stand-ins for content while a template is rendered: characters for private use, which no template trims or tests for.
_MARK = re.compile("\ue000(\\d+)\ue001")
_PROBE = "\ue0000\ue001"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a row: text that is tokenised on its own, or one id."""

    text: str = ""
    token_id: int | None = None
    is_template: bool = False
    """Special tokens written in the text become their ids."""
    is_response: bool = False
    """Part of an assistant turn."""


@dataclass(frozen=True)
class ChatTemplate:
    """One template with the tokenizer it was resolved for."""

    name: str
    """`human_assistant`, `plain`, `alpaca`, `chatml`, `tokenizer`, or a file's name."""
    jinja: str
    """Source, in the form that a tokenizer's `chat_template` has: rendering it gives the same prompts."""
    tokenizer: "PreTrainedTokenizerBase" = field(repr=False)
    """Turns text into ids."""
    stop_token_id: int
    """The id that ends every response."""
    closing: str = ""
    """What the source writes for the stop token; empty if it writes none."""
    prefix: str = ""
    """White space between the generation prompt and a response; part of the response, as in its words' tokens."""
    suffix: str = ""
    """White space between a response and the stop token."""
    bos_token_id: int | None = None
    """The id the tokenizer puts before every text, if it does."""

    @property
    def fingerprint(self) -> str:
        """Digest of everything but the tokenizer that decides how turns become text and where responses stop."""
        parts = [self.jinja, self.stop_token_id, self.closing, self.prefix, self.suffix, self.bos_token_id]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def encode_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of turns that end in a user turn, with bos and the generation prompt where the template has them."""
        return self.encode([self.prompt_pieces(messages)])[0][0]

    def encode_response(self, text: str) -> list[int]:
        """Ids of a response; the last one is the stop token, which occurs once."""
        return self.encode([self.response_pieces(text)])[0][0]

    def encode_conversation(self, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
        """Ids and loss mask of turns that end in an assistant turn; True on every assistant turn with its stop token.

        Equal to `encode_prompt(messages[:-1]) + encode_response(messages[-1].content)`.
        """
        return self.encode([[*self.prompt_pieces(messages[:-1]), *self.response_pieces(messages[-1].content)]])[0]

    def decode_response(self, token_ids: Sequence[int]) -> str:
        """Text of a response without the stop token and the white space that the template puts around it."""
        ids = list(token_ids)
        if ids and ids[-1] == self.stop_token_id:
            ids.pop()
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return text.removeprefix(self.prefix).removesuffix(self.suffix)

    def prompt_pieces(self, messages: Sequence[Message], *, isolate: int | None = None) -> list[Piece]:
        """Pieces of a prompt.

        Args:
            messages: end in a user turn.
            isolate: position of a turn whose content becomes a piece of its own.

        Raises:
            RowError: the template refuses these turns.
        """
        apart = [
            i
            for i, message in enumerate(messages)
            if i == isolate or message.role == "assistant" or self._looks_special(message.content)
        ]
        turns = [
            {"role": m.role, "content": f"\ue000{i}\ue001" if i in apart else m.content} for i, m in enumerate(messages)
        ]
        rendered = self._render(turns, add_generation_prompt=True)
        around = _MARK.split(rendered)
        if [int(i) for i in around[1::2]] != apart:
            raise RowError(f"template {self.name} does not keep every turn once and in order")
        pieces: list[Piece] = []
        after_response = False
        for text, mark in zip(around[::2], [*around[1::2], None], strict=True):
            message = None if mark is None else messages[int(mark)]
            if after_response:
                text = text.removeprefix(self.suffix).removeprefix(self.closing)  # noqa: PLW2901
            after_response = message is not None and message.role == "assistant"
            if after_response:
                text = text.removesuffix(self.prefix)  # noqa: PLW2901
            space = ""
            if message is not None and not after_response and text.endswith(" "):
                text, space = text[:-1], " "  # noqa: PLW2901  byte-level BPE joins a space to the word after it
            pieces.append(Piece(text, is_template=True))
            if message is not None:
                pieces += self.response_pieces(message.content) if after_response else [Piece(space + message.content)]
        return [piece for piece in pieces if piece.text or piece.token_id is not None]

    def response_pieces(self, text: str) -> list[Piece]:
        """Pieces of a response: its text and the stop token."""
        written = Piece(self.prefix + text + self.suffix, is_response=True)
        return [written, Piece(token_id=self.stop_token_id, is_response=True)]

    def text_pieces(self, text: str) -> list[Piece]:
        """Pieces of a plain text: bos where the tokenizer puts one, the text, eos."""
        pieces = [] if self.bos_token_id is None else [Piece(token_id=self.bos_token_id)]
        eos = Piece(token_id=self.tokenizer.eos_token_id, is_response=True)
        return [*pieces, Piece(text, is_response=True), eos]

    def encode(self, rows: Sequence[Sequence[Piece]]) -> list[tuple[list[int], list[bool]]]:
        """Ids and assistant mask of many rows of pieces, in two calls of the tokenizer."""
        ids_of: dict[bool, dict[str, list[int]]] = {}
        for is_template in (True, False):
            texts = list({piece.text: None for row in rows for piece in row if piece.is_template is is_template})
            ids_of[is_template] = dict(zip(texts, self._encode_texts(texts, is_template=is_template), strict=True))
        encoded = []
        for row in rows:
            token_ids: list[int] = []
            mask: list[bool] = []
            for piece in row:
                ids = ids_of[piece.is_template][piece.text] if piece.token_id is None else [piece.token_id]
                token_ids += ids
                mask += [piece.is_response] * len(ids)
            encoded.append((token_ids, mask))
        return encoded

    def truncated_prompt(self, messages: Sequence[Message], max_tokens: int) -> tuple[list[int], list[bool]]:
        """Ids and assistant mask of the newest part of a prompt that fits.

        The oldest question-and-answer pairs go first, then the oldest tokens of the last user turn. What the template
        writes (bos, role headers, generation prompt) and the system turn stay.

        Raises:
            RowError: the template and the system turn alone are over the limit.
        """
        start = 1 if messages[0].role == "system" else 0
        system, turns = list(messages[:start]), list(messages[start:])
        ids, mask = self.encode([self.prompt_pieces([*system, *turns])])[0]
        while len(ids) > max_tokens:
            later = [i for i, message in enumerate(turns) if message.role == "user" and i > 0]
            if not later:
                break
            turns = turns[later[0] :]
            ids, mask = self.encode([self.prompt_pieces([*system, *turns])])[0]
        if len(ids) <= max_tokens:
            return ids, mask
        pieces = self.prompt_pieces([*system, *turns], isolate=len(system) + len(turns) - 1)
        at = max(i for i, piece in enumerate(pieces) if not piece.is_template and piece.token_id is None)
        (head, _), (content, _), (tail, _) = self.encode([pieces[:at], pieces[at : at + 1], pieces[at + 1 :]])
        room = max_tokens - len(head) - len(tail)
        if room < 1:
            raise RowError("prompt over max_prompt_tokens with its template and system turn alone")
        ids = [*head, *content[-room:], *tail]
        return ids, [False] * len(ids)

    def _encode_texts(self, texts: list[str], *, is_template: bool) -> list[list[int]]:
        if not texts:
            return []
        # verbose=False: rows over the model's length are dealt with by data.max_prompt_tokens, not by a warning.
        batch = self.tokenizer(
            texts,
            add_special_tokens=False,
            split_special_tokens=not is_template,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return list(batch["input_ids"])

    def _looks_special(self, content: str) -> bool:
        return "\ue000" in content or any(text in content for text in special_texts(self.tokenizer))

    def _render(self, turns: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return _render(self.tokenizer, self.jinja, turns, add_generation_prompt=add_generation_prompt)


def load_template(name: str, tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate:
    """Resolve `data.template` for a tokenizer.

    Args:
        name: `auto` (the tokenizer's own template, else `human_assistant`), a name in `NAMED`, or the path of a .jinja
            file.
        tokenizer: must have an eos token.

    Raises:
        ValueError: unknown name, no eos token, or a template whose responses do not end in one special token.
        FileNotFoundError: no such file.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError(
            "the tokenizer has no eos token, so a response cannot end. Set `eos_token` in its tokenizer_config.json."
        )
    bos_token_id = _added_bos(tokenizer)
    label, jinja = _source(name, tokenizer, has_bos=bos_token_id is not None)
    if label == "chatml":
        _check_single_tokens(("<|im_start|>", "<|im_end|>"), tokenizer)
    probe = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _PROBE}]
    prompt = _render(tokenizer, jinja, probe[:1], add_generation_prompt=True)
    before, found, after = _render(tokenizer, jinja, probe, add_generation_prompt=False).partition(_PROBE)
    if not found:
        raise ValueError(f"data.template={label} does not write the assistant's text. Use another template.")
    prefix = before.removeprefix(prompt) if before.startswith(prompt) else ""
    # Tokenizers that put a space before every text themselves would make it two.
    if prefix.strip() or _adds_space(tokenizer):
        prefix = ""
    closing = after.lstrip()
    suffix = after[: len(after) - len(closing)] if closing else ""
    stop_token_id, closing = _stop_token(closing, label, tokenizer)
    return ChatTemplate(
        name=label,
        jinja=jinja,
        tokenizer=tokenizer,
        stop_token_id=stop_token_id,
        closing=closing,
        prefix=prefix,
        suffix=suffix,
        bos_token_id=bos_token_id,
    )


def special_texts(tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """Texts that the tokenizer turns into special ids."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def _source(name: str, tokenizer: "PreTrainedTokenizerBase", *, has_bos: bool) -> tuple[str, str]:
    """(name, Jinja source) of a template."""
    named = {key: source.replace("{{ bos }}", "{{ bos_token }}" if has_bos else "") for key, source in NAMED.items()}
    if name == "auto":
        own = tokenizer.get_chat_template() if tokenizer.chat_template else named[DEFAULT]
        # A model folder of ours carries its named template as the tokenizer's own.
        return next((key for key, source in named.items() if source == own), "tokenizer"), own
    if name in named:
        return name, named[name]
    if name.endswith(".jinja"):
        path = Path(name).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"data.template={name} does not exist. Give a .jinja file or one of {_names()}.")
        return path.name, path.read_text(encoding="utf-8")
    raise ValueError(f"data.template={name!r} is unknown. Use one of {_names()}, or a path to a .jinja file.")


def _names() -> str:
    return ", ".join(["auto", *NAMED])


def _stop_token(closing: str, label: str, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, str]:
    """(id, text) of the token that closes an assistant turn, given what the template writes after it."""
    if not closing:
        return int(tokenizer.eos_token_id), ""
    special = [text for text in special_texts(tokenizer) if closing.startswith(text)]
    if not special:
        ids = tokenizer(closing, add_special_tokens=False)["input_ids"]
        raise ValueError(
            f"data.template={label} ends a response with {closing!r}, which is no special token of this tokenizer but "
            f"{len(ids)} ordinary ones, so a model could not learn to stop at one. Use another template (one of "
            f"{_names()}), or add the token to the tokenizer."
        )
    text = max(special, key=len)
    return int(tokenizer.convert_tokens_to_ids(text)), text  # type: ignore[arg-type]


def _check_single_tokens(texts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> None:
    missing = [text for text in texts if text not in special_texts(tokenizer)]
    if missing:
        raise ValueError(
            f"data.template=chatml needs {' and '.join(texts)} as special tokens, but this tokenizer has no "
            f"{' and no '.join(missing)}. Use data.template=human_assistant."
        )


def _added_bos(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The bos id if the tokenizer puts it before a text: found by trying, because its config may say otherwise."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    adds = tokenizer.bos_token_id is not None and full[:1] == [tokenizer.bos_token_id] and bare[:1] != full[:1]
    return int(tokenizer.bos_token_id) if adds else None


def _adds_space(tokenizer: "PreTrainedTokenizerBase") -> bool:
    ids = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    return str(tokenizer.convert_ids_to_tokens(ids)[0]).startswith(("\u2581", "\u0120"))


def _render(
    tokenizer: "PreTrainedTokenizerBase", jinja: str, turns: list[dict[str, Any]], *, add_generation_prompt: bool
) -> str:
    from jinja2 import TemplateError  # noqa: PLC0415  comes with transformers' chat templates

    try:
        return str(
            tokenizer.apply_chat_template(
                turns, chat_template=jinja, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )
    except TemplateError as error:
        raise RowError(f"the template refuses these turns: {error}") from error
