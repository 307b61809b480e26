"""When a response ends."""

import functools
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class StopRule:
    """Stop tokens and stop strings; checked on the host, over whole tokens."""

    token_ids: frozenset[int]
    strings: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase | None

    def __post_init__(self) -> None:
        if self.strings and self.tokenizer is None:
            raise ValueError(f"sampling.stop_strings={list(self.strings)} need the tokenizer, got None. Pass it.")

    @functools.cached_property
    def window(self) -> int:
        """Tokens that can hold the longest stop string: each stands for a byte or more."""
        return max((len(text.encode()) for text in self.strings), default=0) + 1

    def end(self, token_ids: list[int], *, num_seen: int) -> int | None:
        """Length of the response if one of its tokens from num_seen on ends it, else None."""
        end = next((i + 1 for i in range(num_seen, len(token_ids)) if token_ids[i] in self.token_ids), None)
        if self.strings:
            last = len(token_ids) if end is None else end - 1
            if last > num_seen and self._has_string(token_ids, num_seen + 1, last):
                return next((i for i in range(num_seen + 1, last + 1) if self._has_string(token_ids, i, i)), end)
        return end

    def _has_string(self, token_ids: list[int], first_end: int, last_end: int) -> bool:
        """Whether a stop string lies in the last `window` tokens of a prefix with first_end to last_end tokens."""
        assert self.tokenizer is not None
        tail = token_ids[max(0, first_end - self.window) : last_end]
        text = self.tokenizer.decode(tail, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)
