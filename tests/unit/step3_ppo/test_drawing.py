"""What a step is trained on when some prompts' responses all score alike."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf.data.dataset import PromptRow
from step3_ppo.config import RolloutConfig
from step3_ppo.drawing import Draw, Drawn, draw_step
from step3_ppo.experience import ScoredSequence

Make = Callable[..., ScoredSequence]

# Prompt -> scores of its two responses, for each rollout of the step.
ROLLOUTS = [
    {3: (1.0, 2.0), 5: (0.5, 0.5), 6: (-1.0, -1.0)},
    {1: (0.0, 0.0), 2: (1.0, 0.0), 9: (0.0, 3.0)},
    {0: (4.0, 1.0), 7: (2.0, 2.0), 8: (2.0, 1.0)},
]


def drawn(sequence: Make, **config: Any) -> tuple[Drawn, list[int]]:
    """The step, and the numbers of the rollouts for which further prompts were asked."""
    asked: list[int] = []
    seen_sizes: list[int] = []

    def draw(prompts: list[list[PromptRow]], seen: Counter[int]) -> Draw:
        number = asked[-1] if asked else 0
        assert prompts == [number]
        rollout = ROLLOUTS[number]
        seen_sizes.append(len(seen))
        seen.update(list(rollout))
        rows = [
            sequence((prompt, i), 1, score=score) for prompt, pair in rollout.items() for i, score in enumerate(pair)
        ]
        return Draw(sequences=rows, score_B=torch.tensor([s.score for s in rows]), decoded=[])

    def more(number: int) -> Any:
        asked.append(number)
        return [number]

    rollout = RolloutConfig(prompts_per_step=3, samples_per_prompt=2, **config)
    found = draw_step(draw, [0], more, rollout)  # type: ignore[list-item]
    assert seen_sizes == [3 * number for number in range(len(seen_sizes))], "each rollout knows what was drawn before"
    return found, asked


def prompts_of(found: Drawn) -> list[int]:
    assert [s.key for s in found.kept_sequences] == sorted(s.key for s in found.kept_sequences)
    assert found.kept_score_B.tolist() == [s.score for s in found.kept_sequences]
    keys = [s.key for s in found.kept_sequences]
    assert [sample for _, sample in keys] == [0, 1] * (len(keys) // 2), "whole groups, one after the other"
    return [prompt for prompt, _ in keys[::2]]


def test_all_are_kept_unless_said(sequence: Make) -> None:
    found, asked = drawn(sequence)
    assert prompts_of(found) == [3, 5, 6] and not asked and found.metrics == {}


def test_flat_groups_are_left_out(sequence: Make) -> None:
    found, asked = drawn(sequence, flat_groups="drop")
    assert prompts_of(found) == [3] and not asked
    assert len(found.sequences) == 6, "what is said of the step is of all responses"
    assert found.metrics == {"ppo/flat_groups_frac": 2 / 3, "ppo/draws": 1.0, "ppo/trained_groups": 1.0}


def test_flat_groups_are_made_up_for(sequence: Make) -> None:
    """1 group, then 2 more: the step is full after the second rollout."""
    found, asked = drawn(sequence, flat_groups="refill")
    assert prompts_of(found) == [2, 3, 9] and asked == [1]
    assert len(found.sequences) == 12
    assert found.metrics == {"ppo/flat_groups_frac": 0.5, "ppo/draws": 2.0, "ppo/trained_groups": 3.0}


def test_of_more_than_a_step_the_first_drawn_stay(sequence: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLLOUTS[1], 2, (1.0, 1.0))
    found, asked = drawn(sequence, flat_groups="refill")
    assert asked == [1, 2] and prompts_of(found) == [0, 3, 9]
    assert found.metrics["ppo/trained_groups"] == 3.0 and found.metrics["ppo/flat_groups_frac"] == 5 / 9


def test_a_step_that_does_not_fill_is_trained_on_as_it_is(sequence: Make) -> None:
    found, asked = drawn(sequence, flat_groups="refill", most_draws=1)
    assert prompts_of(found) == [3] and not asked


def test_a_step_may_have_nothing_to_teach(sequence: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROLLOUTS[0], 3, (1.0, 1.0))
    found, _ = drawn(sequence, flat_groups="drop")
    assert found.kept == [] and found.kept_sequences == [] and found.metrics["ppo/flat_groups_frac"] == 1.0
