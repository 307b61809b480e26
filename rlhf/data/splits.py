"""Which part a prompt belongs to, and the check that no prompt stands in two. No torch.

A part is a function of the prompt's text alone: the same prompt lands in the same part in every source and process.
"""

import hashlib
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from rlhf.config import SplitConfig

Stage = Literal["sft", "reward", "ppo"]
Part = Literal["train", "eval"]
Share = Literal["sft", "reward", "ppo", "eval"]
SHARES: tuple[Share, ...] = ("sft", "reward", "ppo", "eval")


def normalise(text: str) -> str:
    """Text without differences of case, width and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def digest(*texts: str) -> int:
    """Stable 64-bit number of some texts: equal in every process, unlike Python's salted `hash`."""
    joined = b"\x00".join(text.encode("utf-8", "surrogatepass") for text in texts)
    return int.from_bytes(hashlib.blake2b(joined, digest_size=8).digest(), "big")


def part_of(prompt_text: str, split: SplitConfig) -> Share:
    """The part that a prompt belongs to.

    The hash falls in [0, 1): below `split.eval` it is evaluation, the rest is divided by the three shares. A larger
    evaluation share only adds prompts to it.
    """
    position = digest(f"split {split.seed}", normalise(prompt_text)) / 2**64
    if position < split.eval:
        return "eval"
    shares = (split.sft, split.reward, split.ppo)
    remaining = (position - split.eval) / (1 - split.eval) * sum(shares)
    used = [(part, share) for part, share in zip(SHARES, shares, strict=False) if share > 0]
    for part, share in used:
        if remaining < share:
            return part
        remaining -= share
    return used[-1][0]  # rounding at the upper end


def loose(text: str) -> str:
    """Letters and digits only: prompts that differ in punctuation alone are equal here."""
    return re.sub(r"[\W_]+", "", normalise(text))


@dataclass
class LeakReport:
    """Prompts that stand in more than one part or source.

    Two hashes and one number of bits (the part's, above those the source's) for each row: 24 bytes, for millions.
    """

    sources: list[str] = field(default_factory=list)
    keys: "array[int]" = field(default_factory=lambda: array("Q"))
    loose_keys: "array[int]" = field(default_factory=lambda: array("Q"))
    bits: "array[int]" = field(default_factory=lambda: array("Q"))

    def add(self, text: str, *, part: Share, source: str) -> None:
        """Note one prompt."""
        if source not in self.sources:
            if len(self.sources) == 60:
                raise ValueError("data.sources has more than 60 entries. Join files in folders.")
            self.sources.append(source)
        letters = loose(text)
        self.keys.append(digest(normalise(text)))
        # Texts without letters are near nothing but themselves.
        self.loose_keys.append(digest(letters) if letters else self.keys[-1])
        self.bits.append(1 << SHARES.index(part) | 1 << (len(SHARES) + self.sources.index(source)))

    def summary(self) -> dict[str, Any]:
        """Counts of prompts: in two parts (0 by construction), nearly in two parts, in two sources, repeated."""
        bits = _bits_of_equal(self.keys, self.bits)
        loose_bits = _bits_of_equal(self.loose_keys, self.bits)
        across_sources: Counter[str] = Counter()
        in_source: Counter[str] = Counter()
        for group, count in Counter(b >> len(SHARES) for b in bits).items():
            names = [name for i, name in enumerate(self.sources) if group >> i & 1]
            across_sources.update({f"{a} + {b}": count for a, b in combinations(names, 2)})
            in_source.update(dict.fromkeys(names, count))
        rows = Counter(self.sources[(b >> len(SHARES)).bit_length() - 1] for b in self.bits)
        held_out = 1 << SHARES.index("eval")
        return {
            "prompts": len(bits),
            "across_parts": sum(_is_in_two_parts(b) for b in bits),
            "near_across_parts": sum(_is_in_two_parts(b) for b in loose_bits),
            "near_train_and_eval": sum(bool(b & held_out) and _is_in_two_parts(b) for b in loose_bits),
            "across_sources": dict(across_sources),
            "repeated_in_source": {name: n - in_source[name] for name, n in rows.items() if n > in_source[name]},
        }


def _bits_of_equal(keys: "array[int]", bits: "array[int]") -> list[int]:
    """For each different key, the bits of all its rows together."""
    if not keys:
        return []
    import numpy as np  # noqa: PLC0415  the launcher divides nothing and need not load it

    numbers = np.frombuffer(keys, np.uint64)
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=~numbers[order[:1]]))
    return [int(b) for b in np.bitwise_or.reduceat(np.frombuffer(bits, np.uint64)[order], starts)]


def _is_in_two_parts(bits: int) -> bool:
    return (bits & ((1 << len(SHARES)) - 1)).bit_count() > 1


def leak_report(rows: Iterable[tuple[str, Share, str]]) -> dict[str, Any]:
    """Leak report of (prompt text, part, source) rows; see `LeakReport.summary`."""
    report = LeakReport()
    for text, part, source in rows:
        report.add(text, part=part, source=source)
    return report.summary()
