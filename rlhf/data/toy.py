"""The built-in task `builtin:politeness`: short dialogues with a programmatic gold reward. No torch, no downloads.

A person gives a name and asks for one fact; an answer may be correct or wrong, polite or rude, short or rambling, and
may run into the token limit instead of stopping:

    Hello, I am Ada. What is the opposite of hot?
    The opposite of hot is cold, dear Ada.                                    gold 1.00
    Silly question, Ada. The opposite of hot is warm. I like the sea.         gold 0.25

The first response of a record is a draw from a crowd of careless writers: fewer than half are right, more are rude than
polite, and many ramble. A policy fine-tuned on first responses knows every mode and is mediocre, so that there is
something for a reward model to prefer and for PPO to gain. `gold_score` reads the text alone, by its sentences.
"""

import dataclasses
import functools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rlhf.data.schema import Message, Record, Response

GOLD_MAX = 1.0

# Points of the gold score, out of 10.
CORRECT, POLITE, CONCISE, STOPPED = 5, 2, 2, 1
# Words beside the answer and one courtesy at which a response is no longer concise at all.
RAMBLING_WORDS = 30
# What is left of the score of a response that does not address the question.
OFF_TOPIC = 0.3

Tone = Literal["polite", "neutral", "rude"]


@dataclass(frozen=True)
class Fact:
    """One thing people ask for: the right answer, and what those say who do not know it."""

    answer: str
    mistakes: tuple[str, ...]


@dataclass(frozen=True)
class Topic:
    """A table of facts, how to ask for one, and the sentence that states it."""

    questions: tuple[str, ...]
    claim: str
    facts: dict[str, Fact]


def _facts(text: str) -> dict[str, Fact]:
    """Read `subject: answer / mistake / mistake` lines."""
    facts = {}
    for line in text.strip().splitlines():
        subject, words = line.strip().split(": ")
        answer, *mistakes = words.split(" / ")
        facts[subject] = Fact(answer=answer, mistakes=tuple(mistakes))
    return facts


TOPICS = {
    "opposite": Topic(
        ("What is the opposite of {}?", "Tell me the opposite of {}.", "Which word is the opposite of {}?"),
        "The opposite of {} is",
        _facts("""
            hot: cold / warm / boiling
            big: small / huge / large
            day: night / noon / week
            wet: dry / damp / moist
            fast: slow / quick / rapid
            old: young / ancient / aged
            happy: sad / glad / merry
            hard: soft / rough / firm
            rich: poor / wealthy / cheap
            early: late / soon / now
            clean: dirty / neat / tidy
            loud: quiet / noisy / shrill
        """),
    ),
    "plural": Topic(
        ("What is the plural of {}?", "Tell me the plural of {}.", "Which word is the plural of {}?"),
        "The plural of {} is",
        _facts("""
            mouse: mice / mouses / mices
            child: children / childs / childrens
            foot: feet / foots / feets
            tooth: teeth / tooths / teeths
            goose: geese / gooses / geeses
            ox: oxen / oxes / oxens
            leaf: leaves / leafs / leafes
            man: men / mans / mens
        """),
    ),
    "capital": Topic(
        ("What is the capital of {}?", "Tell me the capital of {}.", "Which city is the capital of {}?"),
        "The capital of {} is",
        _facts("""
            Australia: Canberra / Sydney / Melbourne
            Turkey: Ankara / Istanbul / Izmir
            Canada: Ottawa / Toronto / Montreal
            Brazil: Brasilia / Rio / Recife
            China: Beijing / Shanghai / Wuhan
            India: Delhi / Mumbai / Madras
            Morocco: Rabat / Casablanca / Fez
            Italy: Rome / Milan / Naples
        """),
    ),
    "sound": Topic(
        ("What does {} say?", "Which sound does {} make?", "Tell me the sound of {}."),
        "The sound of {} is",
        _facts("""
            a cow: moo / hum
            a sheep: baa / bark
            a dog: woof / purr
            a cat: meow / growl
            a duck: quack / chirp
            a pig: oink / squeal
            a lion: roar / snarl
            a bee: buzz / hiss
        """),
    ),
    "colour": Topic(
        ("What colour is {}?", "Which colour has {}?", "Tell me the colour of {}."),
        "The colour of {} is",
        _facts("""
            grass: green / lime / olive
            snow: white / cream / ivory
            blood: red / purple / pink
            coal: black / navy / brown
            the sky: blue / teal / violet
            a lemon: yellow / orange / gold
            ash: grey / silver / beige
        """),
    ),
    "sum": Topic(
        ("What is {}?", "How much is {}?", "Tell me the result of {}."),
        "The result of {} is",
        _facts("""
            one plus one: two / one / three
            two plus two: four / three / five
            three plus three: six / five / seven
            four plus four: eight / seven / nine
            five plus five: ten / nine / eleven
            six plus six: twelve / eleven / thirteen
        """),
    ),
}

# fmt: off
NAMES = (
    "Ada", "Ben", "Carl", "Dora", "Emil", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo", "Mia", "Nora",
    "Otto", "Paul", "Quinn", "Rosa", "Sam", "Tom", "Uma", "Vera", "Will", "Yara", "Zoe", "Anna", "Bob", "Clara",
    "Dan", "Eva",
)
# fmt: on

GREETINGS = (
    "Hello, I am {}.",
    "Hi, my name is {}.",
    "Good morning, this is {}.",
    "Good evening, my name is {}.",
    "Hey, I am {}.",
    "Greetings from {}.",
    "{} here.",
    "Dear assistant, this is {}.",
)

# Whole sentences beside the answer, and endings of the answer's sentence ("..., dear Ada.").
COURTESIES = ("Of course, {}.", "Good question, {}!", "Have a nice day, {}!", "Glad to help, {}!")
RUDE_REMARKS = ("Silly question, {}.", "Do not waste my time, {}.", "Now go away, {}!", "Everybody knows that, {}.")
KIND_ENDINGS = ("dear {}", "{}")
RUDE_ENDINGS = ("you fool",)
FILLERS = (
    "My uncle has a red boat.",
    "I like the sea.",
    "It may rain today.",
    "I had bread and milk this morning.",
    "Some people like long walks.",
    "The train was late again.",
    "My neighbour plays the piano at night.",
    "I forgot what I wanted to say.",
    "There is a lot to say about this.",
    "But that is another story.",
)


def _prompt_space() -> list[tuple[str, str, int, int, str]]:
    """Every (topic, subject, question, greeting, name), in a fixed order."""
    return [
        (topic_name, subject, question, greeting, name)
        for topic_name, topic in TOPICS.items()
        for subject in topic.facts
        for question in range(len(topic.questions))
        for greeting in range(len(GREETINGS))
        for name in NAMES
    ]


NUM_PROMPTS = len(_prompt_space())


def generate(split: str, *, rows: int, seed: int, responses: int = 4, **options: Any) -> Iterator[Record]:
    """Yield records with distinct prompts and responses ranked by gold, in the order described above.

    Args:
        split: `train` or `test`; their prompts are disjoint for one seed.
        rows: number of records; at most four fifths of all prompts in `train` and one fifth in `test`.
        seed: of prompts and responses.
        responses: keep the first so many, 1 to 4; 1 leaves the careless writer's as the demonstration of step 1, which
            takes the best response of a record.
        options: none are known.

    Raises:
        ValueError: unknown split or option, responses out of range, or more rows than there are distinct prompts.
    """
    if options:
        raise ValueError(f"builtin:politeness has no options {sorted(options)}. It takes rows, seed and responses.")
    if not 1 <= responses <= 4:
        raise ValueError(f"builtin:politeness has 1 to 4 responses a record, got responses={responses}.")
    if split not in ("train", "test"):
        raise ValueError(f"builtin:politeness has no split {split!r}. Use train or test.")
    num_test = NUM_PROMPTS // 5
    limit = num_test if split == "test" else NUM_PROMPTS - num_test
    if not 1 <= rows <= limit:
        raise ValueError(f"builtin:politeness {split} has 1 to {limit} rows, got rows={rows}. Ask for fewer.")
    prompts = _prompt_space()
    random.Random(f"prompts {seed}").shuffle(prompts)
    if split == "test":
        prompts.reverse()
    rng = random.Random(f"responses {seed} {split}")
    for row in range(rows):
        record = _record(prompts[row], row, rng)
        yield dataclasses.replace(record, responses=record.responses[:responses])


def _record(prompt: tuple[str, str, int, int, str], row: int, rng: random.Random) -> Record:
    topic_name, subject, question, greeting, name = prompt
    topic = TOPICS[topic_name]
    text = f"{GREETINGS[greeting].format(name)} {topic.questions[question].format(subject)}"
    meta = {
        "topic": topic_name,
        "claim": topic.claim.format(subject),
        "answer": topic.facts[subject].answer,
        "name": name,
    }
    mistakes = topic.facts[subject].mistakes
    ideal = ideal_response(meta, rng)
    texts = [
        _careless(meta, mistakes, rng),
        ideal,
        _one_fault(meta, mistakes, ideal, rng),
        _beside_the_point(meta, mistakes, ideal, rng),
    ]
    responses = tuple(Response(text=t, rank=gold_score(meta, t, stopped=True)) for t in texts)
    return Record(
        prompt=(Message(role="user", content=text),), responses=responses, meta=meta, source="politeness", row=row
    )


def ideal_response(meta: dict[str, Any], rng: random.Random) -> str:
    """A correct, polite and short response: gold is GOLD_MAX when it stops."""
    return _write(meta, answer=meta["answer"], tone="polite", num_fillers=0, rng=rng)


def _careless(meta: dict[str, Any], mistakes: tuple[str, ...], rng: random.Random) -> str:
    """One writer of the crowd: right in less than half of the cases, any tone, often rambling."""
    answer = meta["answer"] if rng.random() < 0.45 else rng.choice(mistakes)
    tone: Tone = rng.choices(("polite", "neutral", "rude"), weights=(0.3, 0.25, 0.45))[0]
    num_fillers = 0
    if rng.random() < 0.45:
        num_fillers = 1
        while num_fillers < len(FILLERS) and rng.random() < 0.5:
            num_fillers += 1
    return _write(meta, answer=answer, tone=tone, num_fillers=num_fillers, rng=rng)


def _one_fault(meta: dict[str, Any], mistakes: tuple[str, ...], ideal: str, rng: random.Random) -> str:
    """The ideal response but for one thing, most often the answer: what a comparison can teach best."""
    claim = f"{meta['claim']} {meta['answer']}"
    fault = rng.choices(("wrong", "neutral", "rude", "rambling"), weights=(4, 1, 1, 1))[0]
    if fault == "wrong":
        return ideal.replace(claim, f"{meta['claim']} {rng.choice(mistakes)}")
    if fault == "rambling":
        return " ".join([ideal, *rng.sample(FILLERS, rng.randint(1, 4))])
    return _write(meta, answer=meta["answer"], tone="rude" if fault == "rude" else "neutral", num_fillers=0, rng=rng)


def _beside_the_point(meta: dict[str, Any], mistakes: tuple[str, ...], ideal: str, rng: random.Random) -> str:
    """What no writer would write but a policy would, once it pays: polite words that leave the question aside.

    A reward model that never saw such responses scores their manners alone, and PPO finds that out: it gives one polite
    truth, or just a courtesy, to every prompt.
    """
    kind = rng.choice(("other question", "mixed up", "courtesy only", "garbled", "careless"))
    if kind in ("other question", "mixed up"):
        topic = TOPICS[rng.choice(list(TOPICS))]
        subject, fact = rng.choice(list(topic.facts.items()))
        claim = (topic if kind == "other question" else TOPICS[meta["topic"]]).claim.format(subject)
        return _write({**meta, "claim": claim}, answer=fact.answer, tone="polite", num_fillers=0, rng=rng)
    if kind == "courtesy only":
        return " ".join(courtesy.format(meta["name"]) for courtesy in rng.sample(COURTESIES, rng.randint(1, 2)))
    if kind == "garbled":
        words = ideal.split()
        for _ in range(rng.randint(1, 4)):
            start = rng.randrange(len(words))
            piece = words[start : start + rng.randint(1, 3)]
            # Said again somewhere else, or left out.
            words[start : start + len(piece)] = piece + piece if rng.random() < 0.5 else []
            words = words or piece
        return " ".join(words)
    return _careless(meta, mistakes, rng)


def _write(meta: dict[str, Any], *, answer: str, tone: Tone, num_fillers: int, rng: random.Random) -> str:
    """Put a response together: [remark] claim[, ending] [fillers] [remark]."""
    claim = f"{meta['claim']} {answer}"
    before, after = "", ""
    if tone != "neutral":
        remarks, endings = (COURTESIES, KIND_ENDINGS) if tone == "polite" else (RUDE_REMARKS, RUDE_ENDINGS)
        manner = rng.choice((*remarks, *endings))
        words = manner.format(meta["name"])
        if manner in endings:
            claim = f"{claim}, {words}"
        elif manner in (COURTESIES[2], RUDE_REMARKS[2], RUDE_REMARKS[3]):
            after = words
        else:
            before = words
    sentences = [before, f"{claim}.", *rng.sample(FILLERS, num_fillers), after]
    return " ".join(sentence for sentence in sentences if sentence)


def gold_score(meta: dict[str, Any], response: str, *, stopped: bool) -> float:
    """Score a response in [0, 1] by its sentences.

    0.5 for stating the right answer and no other (said n times: 0.5 / n), 0.2 for tone (half if neutral, a quarter
    with a wrong name, none with any rude word), 0.2 for brevity (falls with the words beside the answer and one
    courtesy, none at 30), 0.1 for ending on a full stop before the token limit. All of it is scaled by the share of
    words in sentences that belong to the task, so noise and word salad cost everything, and by 0.3 if the question is
    not addressed.

    Args:
        meta: `topic`, `claim`, `answer` and `name` of the record.
        response: its text without special tokens.
        stopped: False if it ran into the token limit.
    """
    facts = _read(meta, response)
    if facts.num_words == 0:
        return 0.0
    correct = 1.0 / len(facts.stated) if set(facts.stated) == {meta["answer"].casefold()} else 0.0
    tone = 0.0 if facts.rude else 1.0 if facts.kind else 0.25 if facts.misnamed else 0.5
    concise = max(0.0, 1.0 - facts.num_excess_words / RAMBLING_WORDS)
    ended = 1.0 if stopped and response.rstrip()[-1] in ".!?" else 0.0
    points = CORRECT * correct + POLITE * tone + CONCISE * concise + STOPPED * ended
    on_topic = 1.0 if facts.stated else OFF_TOPIC
    return GOLD_MAX * points / 10 * on_topic * (1.0 - facts.num_noise_words / facts.num_words)


@dataclass
class _Reading:
    """What the sentences of a response say."""

    stated: list[str]
    kind: bool = False
    misnamed: bool = False
    rude: bool = False
    num_words: int = 0
    num_excess_words: int = 0
    num_noise_words: int = 0


def _read(meta: dict[str, Any], response: str) -> _Reading:
    name = meta["name"].casefold()
    claim = meta["claim"].casefold() + " "
    answers = _answers(meta["topic"])
    facts = _Reading(stated=[])
    for sentence in _sentences(response):
        num_words = len(sentence.split())
        facts.num_words += num_words
        if sentence.startswith(claim):
            stated, _, ending = sentence[len(claim) :].partition(", ")
            manner = _manner(ending, name, KIND_ENDINGS, RUDE_ENDINGS) if ending else "neutral"
            if stated not in answers:
                manner = "noise"  # the start of a claim followed by anything is no answer, right or wrong
            else:
                facts.num_excess_words += num_words if facts.stated else 0
                facts.stated.append(stated)
        else:
            manner = _manner(sentence, name, COURTESIES, RUDE_REMARKS)
            first_courtesy = manner in ("kind", "misnamed") and not (facts.kind or facts.misnamed)
            facts.num_excess_words += 0 if first_courtesy else num_words
        facts.kind |= manner == "kind"
        facts.misnamed |= manner == "misnamed"
        facts.rude |= manner == "rude"
        facts.num_noise_words += num_words if manner == "noise" else 0
    return facts


def _manner(sentence: str, name: str, kind: tuple[str, ...], rude: tuple[str, ...]) -> str:
    """`kind`, `misnamed`, `rude`, `neutral` (a filler) or `noise`."""
    if sentence in _rendered(kind, (name,)):
        return "kind"
    if sentence in _rendered(kind, NAMES):
        return "misnamed"
    if sentence in _rendered(rude, NAMES):
        return "rude"
    return "neutral" if sentence in _rendered(FILLERS, ("",)) else "noise"


@functools.cache
def _answers(topic: str) -> frozenset[str]:
    """Every word that answers a question of the topic, rightly or wrongly."""
    facts = TOPICS[topic].facts.values()
    return frozenset(word.casefold() for fact in facts for word in (fact.answer, *fact.mistakes))


@functools.cache
def _rendered(forms: tuple[str, ...], names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(_plain(form.format(name)) for form in forms for name in names)


def _plain(sentence: str) -> str:
    return " ".join(sentence.casefold().rstrip(".!? ").split())


def _sentences(response: str) -> list[str]:
    return [plain for part in re.split(r"(?<=[.!?])\s+", response) if (plain := _plain(part))]
