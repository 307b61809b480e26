"""Rules: scores of a response that need no model, for measuring it or as a part of the reward. No torch."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from rlhf.data import toy

# 1,234.5 and 1234.5; a minus sign counts where no digit stands before it (10-4 ends in 4).
_NUMBER = re.compile(r"(?:(?<![\d.])-\s?\$?)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)")


@dataclass(frozen=True)
class Rule:
    """A score in [0, maximum] of (the record's meta, response text, whether it stopped before the token limit)."""

    name: str
    score: Callable[[dict[str, Any], str, bool], float]
    maximum: float


def last_number(text: str) -> Decimal | None:
    """The last number of a text, whatever commas, dollar sign or full stop stand around it; None if it has none."""
    found = _NUMBER.findall(text)
    return Decimal(re.sub(r"[,$\s]", "", found[-1])) if found else None


def _final_number(meta: dict[str, Any], response: str, _stopped: bool) -> float:  # noqa: FBT001  Rule.score's signature
    wanted = last_number(str(meta.get("answer", "")))
    if wanted is None:
        raise ValueError(
            f"Rule final_number needs a number in the record's meta['answer'], got {meta.get('answer')!r}. Map the "
            "column that holds the answer, or use another rule."
        )
    return 1.0 if last_number(response) == wanted else 0.0


def _politeness(meta: dict[str, Any], response: str, stopped: bool) -> float:  # noqa: FBT001  Rule.score's signature
    missing = sorted({"topic", "claim", "answer", "name"} - meta.keys())
    if missing:
        raise ValueError(f"Rule politeness needs {missing} in the record's meta. It fits builtin:politeness only.")
    return toy.gold_score(meta, response, stopped=stopped)


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Rule("politeness", _politeness, toy.GOLD_MAX),
        Rule("final_number", _final_number, 1.0),
    )
}


def rule_named(name: str) -> Rule:
    """The rule of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in RULES:
        raise ValueError(f"There is no rule {name!r}. Rules: {', '.join(sorted(RULES))}.")
    return RULES[name]
