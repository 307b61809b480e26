"""Which part a prompt belongs to, and the check that no prompt stands in two. No torch.

A part is a function of the prompt's text alone: the same prompt lands in the same part in every source and process.
"""

import hashlib
import unicodedata
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
    return "".join(character for character in normalise(text) if character.isalnum())


@dataclass
class LeakReport:
    """Prompts that stand in more than one part or source.

    One bit for each part and, above those, one for each source: a few tens of bytes per prompt, for sets of millions.
    """

    seen: dict[int, int] = field(default_factory=dict)
    loosely_seen: dict[int, int] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    repeats: Counter[str] = field(default_factory=Counter)

    def add(self, text: str, *, part: Share, source: str) -> None:
        """Note one prompt."""
        if source not in self.sources:
            self.sources.append(source)
        part_bit = 1 << SHARES.index(part)
        source_bit = 1 << (len(SHARES) + self.sources.index(source))
        key = digest(normalise(text))
        bits = self.seen.get(key, 0)
        if bits & source_bit:
            self.repeats[source] += 1
        self.seen[key] = bits | part_bit | source_bit
        letters = loose(text)
        if letters:
            key = digest(letters)
            self.loosely_seen[key] = self.loosely_seen.get(key, 0) | part_bit

    def summary(self) -> dict[str, Any]:
        """Counts of prompts: in two parts (0 by construction), nearly in two parts, in two sources, repeated."""
        across_sources: Counter[str] = Counter()
        for bits in self.seen.values():
            names = [name for i, name in enumerate(self.sources) if bits >> (len(SHARES) + i) & 1]
            across_sources.update(f"{a} + {b}" for a, b in combinations(names, 2))
        eval_bit = 1 << SHARES.index("eval")
        return {
            "prompts": len(self.seen),
            "across_parts": sum(_is_in_two_parts(bits) for bits in self.seen.values()),
            "near_across_parts": sum(_is_in_two_parts(bits) for bits in self.loosely_seen.values()),
            "near_train_and_eval": sum(bool(b & eval_bit) and _is_in_two_parts(b) for b in self.loosely_seen.values()),
            "across_sources": dict(across_sources),
            "repeated_in_source": dict(self.repeats),
        }


def _is_in_two_parts(bits: int) -> bool:
    return (bits & ((1 << len(SHARES)) - 1)).bit_count() > 1


def leak_report(rows: Iterable[tuple[str, Share, str]]) -> dict[str, Any]:
    """Leak report of (prompt text, part, source) rows; see `LeakReport.summary`."""
    report = LeakReport()
    for text, part, source in rows:
        report.add(text, part=part, source=source)
    return report.summary()
