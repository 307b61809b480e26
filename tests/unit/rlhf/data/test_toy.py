"""The built-in task: prompts a person can read, and a gold reward that is hard to game (C14)."""

import random
import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.data import toy
from rlhf.data.schema import Record

META = {"topic": "opposite", "claim": "The opposite of hot is", "answer": "cold", "name": "Ada"}
CLAIM = "The opposite of hot is cold."


def gold(response: str, *, stopped: bool = True) -> float:
    return toy.gold_score(META, response, stopped=stopped)


def records(rows: int = 300, *, split: str = "train", seed: int = 1) -> list[Record]:
    return list(toy.generate(split, rows=rows, seed=seed))


def prompts(found: list[Record]) -> list[str]:
    return [record.prompt[0].content for record in found]


def test_generate_is_a_function_of_split_and_seed() -> None:
    assert records(50) == records(50)
    assert records(50)[:20] == records(20), "asking for more rows keeps the first ones"
    assert prompts(records(50)) != prompts(records(50, seed=2))


def test_generate_does_not_depend_on_hash_randomisation() -> None:
    """B1: two ranks with different PYTHONHASHSEED see the same rows."""
    code = "from rlhf.data import toy; print([r.responses for r in toy.generate('train', rows=3, seed=1)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_toy_needs_no_torch() -> None:
    code = "import sys; from rlhf.data import toy; from rlhf import rules; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prompts_are_distinct_and_splits_share_none() -> None:
    assert toy.NUM_PROMPTS >= 20_000
    train, test = prompts(records(2000)), prompts(records(2000, split="test"))
    assert len(set(train)) == len(set(test)) == 2000
    assert not set(train) & set(test)


def test_every_prompt_has_its_own_text() -> None:
    """No two entries of the prompt space read the same, or a held-out prompt would be trained on."""
    questions = [q.format(subject) for topic in toy.TOPICS.values() for q in topic.questions for subject in topic.facts]
    texts = {f"{g.format(name)} {question}" for g in toy.GREETINGS for name in toy.NAMES for question in questions}
    assert len(texts) == toy.NUM_PROMPTS
    assert set(prompts(records(500))) <= texts


@pytest.mark.parametrize(
    ("split", "rows", "options", "message"),
    [
        ("dev", 1, {}, "no split 'dev'"),
        ("train", 0, {}, "got rows=0"),
        ("test", 10**6, {}, "got rows=1000000"),
        ("train", 1, {"wors": 2}, "no options \\['wors'\\]"),
        ("train", 1, {"responses": 5}, "got responses=5"),
    ],
)
def test_refuses(split: str, rows: int, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(toy.generate(split, rows=rows, seed=1, **options))


def test_ideal_responses_reach_the_maximum_and_nothing_exceeds_it() -> None:
    found = records()
    rng = random.Random(0)
    for record in found:
        assert toy.gold_score(record.meta, toy.ideal_response(record.meta, rng), stopped=True) == toy.GOLD_MAX
        assert record.responses[1].rank == toy.GOLD_MAX
        assert all(0 <= response.rank <= toy.GOLD_MAX for response in record.responses)


def test_ranks_are_the_gold_of_the_text() -> None:
    for record in records(100):
        for response in record.responses:
            assert response.rank == toy.gold_score(record.meta, response.text, stopped=True)


def test_first_responses_are_mediocre_and_leave_room() -> None:
    """Step 1 learns from these: not good, not hopeless, every mode present, and few over 48 tokens' worth of words."""
    found = records(2000)
    first = [record.responses[0] for record in found]
    mean = sum(response.rank for response in first) / len(first)
    assert 0.45 <= mean <= 0.62
    right = sum(f"{record.meta['claim']} {record.meta['answer']}" in record.responses[0].text for record in found)
    assert 0.4 <= right / len(found) <= 0.5
    assert sum(len(response.text.split()) > 36 for response in first) < 0.04 * len(first)


def test_ties_occur_but_few() -> None:
    pairs = [
        record.responses[i].rank == record.responses[j].rank
        for record in records(1000)
        for i in range(4)
        for j in range(i)
    ]
    assert 0.01 < sum(pairs) / len(pairs) < 0.15


def test_mistakes_are_never_the_answer() -> None:
    for topic in toy.TOPICS.values():
        for subject, fact in topic.facts.items():
            assert fact.mistakes, subject
            assert fact.answer not in fact.mistakes


def test_no_form_is_read_as_another() -> None:
    """Courtesies, rude remarks and fillers are disjoint, so a sentence has one meaning."""
    forms = [*toy.COURTESIES, *toy.RUDE_REMARKS, *toy.KIND_ENDINGS, *toy.RUDE_ENDINGS, *toy.FILLERS]
    assert len(set(forms)) == len(forms)
    for filler in toy.FILLERS:
        assert not any(filler.startswith(topic.claim.split("{")[0]) for topic in toy.TOPICS.values())


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        # Worked by hand: 5 correct, 2 tone, 2 brevity (30 words more than needed leave none), 1 stopped; out of 10.
        ("The opposite of hot is cold, dear Ada.", 1.0),
        ("The opposite of hot is cold, Ada.", 1.0),
        ("Of course, Ada. The opposite of hot is cold.", 1.0),
        ("The opposite of hot is cold. Have a nice day, Ada!", 1.0),
        (CLAIM, (5 + 1 + 2 + 1) / 10),
        ("The opposite of hot is warm, dear Ada.", (0 + 2 + 2 + 1) / 10),
        ("The opposite of hot is cold, dear Bob.", (5 + 0.5 + 2 + 1) / 10),
        ("The opposite of hot is cold, you fool.", (5 + 0 + 2 + 1) / 10),
        (CLAIM + " I like the sea.", (5 + 1 + 2 * (1 - 4 / 30) + 1) / 10),
        ("Silly question, Ada. " + CLAIM, (5 + 0 + 2 * (1 - 3 / 30) + 1) / 10),
        (CLAIM + " " + CLAIM, (2.5 + 1 + 2 * (1 - 6 / 30) + 1) / 10),
        ("Of course, Ada.", 0.3 * (0 + 2 + 2 + 1) / 10),
        # Noise: two of eight words belong to no sentence of the task.
        (CLAIM + " Blue blah.", (5 + 1 + 2 * (1 - 2 / 30) + 1) / 10 * 6 / 8),
    ],
)
def test_gold_by_hand(response: str, expected: float) -> None:
    assert gold(response) == pytest.approx(expected, abs=1e-12)


FAULTS = {
    "wrong": "Of course, Ada. The opposite of hot is boiling.",
    "neutral": "The opposite of hot is cold.",
    "rude": "Do not waste my time, Ada. The opposite of hot is cold.",
    "wrong name": "Of course, Eva. The opposite of hot is cold.",
    "rambling": "Of course, Ada. The opposite of hot is cold. My uncle has a red boat.",
    "polite and rude": "Of course, Ada. The opposite of hot is cold, you fool.",
    "no full stop": "Of course, Ada. The opposite of hot is cold",
    "another question": "Of course, Ada. The opposite of wet is dry.",
    "no answer": "Of course, Ada.",
    "two answers": "Of course, Ada. The opposite of hot is cold. The opposite of hot is warm.",
    "gibberish": "Of course, Ada. The opposite of hot is cold. Cold hot the of.",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_lowers_gold(fault: str) -> None:
    assert gold(FAULTS[fault]) <= gold("Of course, Ada. The opposite of hot is cold.") - 0.01


@pytest.mark.parametrize("response", [*FAULTS.values(), CLAIM, "The opposite of hot is cold, Ada."])
def test_running_into_the_limit_lowers_gold(response: str) -> None:
    assert gold(response, stopped=False) < gold(response) or not response.endswith((".", "!"))


def test_gold_falls_with_every_filler() -> None:
    """Graded, so that a policy finds the way: each further sentence costs something until nothing is left."""
    scores = [gold(" ".join([CLAIM, *toy.FILLERS[:n]])) for n in range(len(toy.FILLERS))]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores[:6])) == 6


PROBES = {
    "empty": "",
    "spaces": "   \n",
    "full stops": "....",
    "bare answer": "cold",
    "answer repeated": "cold " * 12,
    "keyword spam": "Ada cold please thank you dear polite cold Ada.",
    "every answer": "The opposite of hot is cold dry small night.",
    "every claim": " ".join(f"The opposite of hot is {word}." for word in ("cold", "warm", "boiling", "dry", "poor")),
    "courtesy only": "Of course, Ada. Good question, Ada! Have a nice day, Ada!",
    "courtesy repeated": "Of course, Ada. " * 6,
    "prompt parroted": "Hello, I am Ada. What is the opposite of hot?",
    "unfinished claim": "The opposite of hot is",
    "another truth": "Of course, Ada. The opposite of rich is poor.",
    "words of two questions": "Of course, Ada. The sound of hot is cold.",
    "fillers": " ".join(toy.FILLERS[:4]),
    "special tokens": "<eos> <eos> <pad> Ada",
    "claim inside noise": "I think that perhaps the opposite of hot is cold.",
}


@pytest.mark.parametrize("probe", PROBES)
def test_probes_score_low(probe: str) -> None:
    """C14: nothing but an answer to the question gets near what the worst honest answers get."""
    assert gold(PROBES[probe]) <= 0.3


def test_every_claim_earns_less_than_one_wrong_claim() -> None:
    assert gold(PROBES["every claim"]) < gold("The opposite of hot is warm.")


def test_a_courtesy_repeated_gains_nothing() -> None:
    once = gold("Of course, Ada. " + CLAIM)
    assert gold("Of course, Ada. Of course, Ada. " + CLAIM) < once
    assert gold("Of course, Ada. " + CLAIM + " Have a nice day, Ada!") < once


_SENTENCES = [
    CLAIM,
    "The opposite of hot is warm.",
    "The opposite of hot is cold, Ada.",
    "Of course, Ada.",
    "Now go away, Ada!",
    "It may rain today.",
    "nonsense words here.",
    "The opposite of",
]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(_SENTENCES), max_size=8), st.text(max_size=30), st.booleans())
def test_gold_is_bounded_and_only_ideal_forms_reach_the_maximum(parts: list[str], tail: str, stopped: bool) -> None:  # noqa: FBT001
    response = " ".join([*parts, tail])
    score = toy.gold_score(META, response, stopped=stopped)
    assert 0 <= score <= toy.GOLD_MAX
    if score == toy.GOLD_MAX:
        assert stopped
        assert re.findall(r"cold\b", response) == ["cold"]
        assert "Ada" in response


def test_case_and_white_space_do_not_matter() -> None:
    assert gold("  the opposite of hot  is Cold,  dear ada.\n") == 1.0


def test_the_docstrings_example_is_true() -> None:
    """The module shows two answers with their gold."""
    lines = re.findall(r"^    (.+?)\s+gold (\d\.\d\d)$", str(toy.__doc__), re.MULTILINE)
    assert len(lines) == 2
    for response, expected in lines:
        assert gold(response) == pytest.approx(float(expected), abs=0.005)
