import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.config import SplitConfig
from rlhf.data.splits import digest, leak_report, loose, normalise, part_of

PROMPTS = [f"What is {i} and {i * 7 % 11}?" for i in range(4000)]


def test_shares_are_met_and_nothing_is_left_over() -> None:
    """eval comes first; 2:4:4 divides the rest. 4000 prompts: three standard deviations are 0.024."""
    counts = Counter(part_of(prompt, SplitConfig(sft=0.2, reward=0.4, ppo=0.4, eval=0.1)) for prompt in PROMPTS)
    for part, share in {"eval": 0.1, "sft": 0.18, "reward": 0.36, "ppo": 0.36}.items():
        assert counts[part] / len(PROMPTS) == pytest.approx(share, abs=0.024)  # type: ignore[index]


def test_a_larger_evaluation_share_only_adds_prompts_to_it() -> None:
    small = {p for p in PROMPTS if part_of(p, SplitConfig(eval=0.05)) == "eval"}
    large = {p for p in PROMPTS if part_of(p, SplitConfig(eval=0.2, sft=1, reward=0, ppo=0)) == "eval"}
    assert small < large


def test_shares_of_zero_get_nothing_and_eval_zero_holds_nothing_out() -> None:
    assert {part_of(p, SplitConfig(sft=0, reward=3, ppo=0, eval=0)) for p in PROMPTS} == {"reward"}


def test_seed_divides_anew() -> None:
    moved = sum(part_of(p, SplitConfig()) != part_of(p, SplitConfig(seed=1)) for p in PROMPTS)
    assert moved > len(PROMPTS) / 4


@given(st.text(), st.sampled_from(["", " ", "\n\t "]))
def test_near_identical_prompts_share_their_part(text: str, space: str) -> None:
    split = SplitConfig()
    assert part_of(f"{space}{text}{space}", split) == part_of(text, split)
    assert normalise(normalise(text)) == normalise(text)


def test_case_width_and_space_do_not_matter() -> None:
    assert normalise("  What\u00a0IS\n two\uff11") == "what is two1"


def test_parts_do_not_depend_on_the_process() -> None:
    """B1: two processes with different hash seeds agree, and with the number of record."""
    code = "from rlhf.data.splits import digest, part_of; from rlhf.config import SplitConfig\n"
    code += "print(digest('a', 'b'), [part_of(f'p{i}', SplitConfig()) for i in range(50)])"
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().split()[0] == str(digest("a", "b")) == "18429100309458631331"


def test_leak_report_finds_what_was_planted() -> None:
    report = leak_report(
        [
            ("Hello there", "sft", "a"),
            ("hello   there", "sft", "a"),  # again in the same source
            ("Hello there", "sft", "b"),  # and in another
            ("Hello, there!", "eval", "b"),  # the same but for punctuation, held out
            ("Same text", "sft", "a"),
            ("same text", "eval", "a"),  # cannot come from part_of
            ("Other", "ppo", "b"),
        ]
    )
    assert report == {
        "prompts": 4,
        "across_parts": 1,
        "near_across_parts": 2,
        "near_train_and_eval": 2,
        "across_sources": {"a + b": 1},
        "repeated_in_source": {"a": 2},
    }


def test_texts_without_letters_do_not_count_as_near() -> None:
    assert loose("?!") == ""
    assert leak_report([("?", "sft", "a"), ("!", "eval", "a")])["near_across_parts"] == 0
