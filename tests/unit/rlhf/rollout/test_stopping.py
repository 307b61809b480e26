import random

import pytest

from rlhf.models.build import train_bpe
from rlhf.rollout.stopping import StopRule


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(["the quick brown fox jumps over the lazy dog, said Anna."] * 20, vocab_size=300)


def rule(*strings, token_ids=(), tokenizer=None):
    return StopRule(token_ids=frozenset(token_ids), strings=strings, tokenizer=tokenizer)


def test_first_stop_token_ends():
    assert rule(token_ids=[7, 8]).end([5, 8, 7, 5], num_seen=0) == 2
    assert rule(token_ids=[7, 8]).end([5, 8, 7, 5], num_seen=2) == 3
    assert rule(token_ids=[7, 8]).end([5, 8, 7, 5], num_seen=3) is None
    assert rule().end([5], num_seen=0) is None


@pytest.mark.parametrize("stop", ["XYZQW", "\u00e9\u20ac!", "\n\nHuman:", " the", "o"])
@pytest.mark.parametrize("block", [1, 3, 1000])
def test_stop_string_at_every_place(tokenizer, stop, block):
    """Oracle: decode every prefix. Strings of one-byte tokens, of wide characters, inside a longer token."""
    strings = rule("never", stop, tokenizer=tokenizer)
    generator = random.Random(0)
    for length in (0, 1, 2, 30):
        before = generator.choices(tokenizer("ZYX WQ , jumps . \u20ac", add_special_tokens=False).input_ids, k=length)
        token_ids = before + tokenizer(stop + " fox", add_special_tokens=False).input_ids
        expected = next(i for i in range(1, len(token_ids) + 1) if stop in tokenizer.decode(token_ids[:i]))
        found = None
        for num_seen in range(0, len(token_ids), block):
            found = strings.end(token_ids[: num_seen + block], num_seen=num_seen)
            if found is not None:
                break
        assert found == expected


def test_whichever_ends_first(tokenizer):
    token_ids = tokenizer("abXYcd", add_special_tokens=False).input_ids
    at = next(i for i in range(1, len(token_ids) + 1) if "XY" in tokenizer.decode(token_ids[:i]))
    for stop_at in (0, at - 1, len(token_ids) - 1):
        both = rule("XY", token_ids=[token_ids[stop_at]], tokenizer=tokenizer)
        assert both.end(token_ids, num_seen=0) == min(at, stop_at + 1)


def test_strings_need_a_tokenizer():
    with pytest.raises(ValueError, match="need the tokenizer"):
        rule("x")
