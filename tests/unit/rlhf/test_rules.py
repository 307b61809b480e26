"""Rules: what a response is worth without a model."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.rules import RULES, last_number, rule_named


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("She has 12 apples.", "12"),
        ("It costs $1,234.50.", "1234.50"),
        ("The answer is 72.", "72"),
        ("3 + 4 = 7", "7"),
        ("10-4", "4"),
        ("It fell to -3.", "-3"),
        ("a loss of -$5", "-5"),
        ("#### 1,000,000", "1000000"),
        ("1, 2, 3", "3"),
        ("12,34", "34"),
        ("half of it: .5", "0.5"),
        ("version 3.5", "3.5"),
        ("Total: 18%", "18"),
        ("*42*", "42"),
        ("no number", None),
        ("", None),
    ],
)
def test_last_number_by_hand(text: str, expected: str | None) -> None:
    assert last_number(text) == (None if expected is None else Decimal(expected))


@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}"]), st.sampled_from(["", ".", " dollars", "!"]))
def test_last_number_reads_what_python_writes(number: int, form: str, tail: str) -> None:
    assert last_number(f"First 5, then {form.format(number)}{tail}") == number


@pytest.mark.parametrize(
    ("answer", "response", "expected"),
    [
        ("42", "So 40 + 2 = 42.", 1.0),
        ("42", "42 is not it, 41 is.", 0.0),
        ("42", "There are 42.00 of them", 1.0),
        ("1,200", "That is $1200", 1.0),
        (42, "42", 1.0),
        ("9 * 2 = 18\n#### 18", "18 dollars", 1.0),
        ("42", "forty two", 0.0),
        ("42", "", 0.0),
    ],
)
def test_final_number(answer: object, response: str, expected: float) -> None:
    rule = rule_named("final_number")
    assert rule.score({"answer": answer}, response, True) == expected
    assert rule.maximum == 1.0


@pytest.mark.parametrize("meta", [{}, {"answer": "many"}])
def test_final_number_needs_an_answer(meta: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="final_number needs a number in the record's meta"):
        rule_named("final_number").score(meta, "4", True)


def test_politeness_is_the_gold_of_the_toy_task() -> None:
    rule = rule_named("politeness")
    meta = {"topic": "opposite", "claim": "The opposite of hot is", "answer": "cold", "name": "Ada"}
    assert rule.score(meta, "The opposite of hot is cold, Ada.", True) == rule.maximum == 1.0
    assert rule.score(meta, "The opposite of hot is cold, Ada.", False) == pytest.approx(0.9)


def test_politeness_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"politeness needs \['claim', 'name', 'topic'\]"):
        rule_named("politeness").score({"answer": "4"}, "4", True)


def test_unknown_rule_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no rule 'polite'. Rules: final_number, politeness"):
        rule_named("polite")


def test_names_are_keys() -> None:
    assert all(name == rule.name for name, rule in RULES.items())
