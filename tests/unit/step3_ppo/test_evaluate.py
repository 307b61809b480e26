from collections.abc import Callable

import numpy as np
import pytest
import torch

from rlhf.data.dataset import PromptRow
from step3_ppo.evaluate import describe, to_samples
from step3_ppo.experience import ScoredSequence

Make = Callable[..., ScoredSequence]


def two(sequence: Make, **fields: object) -> list[ScoredSequence]:
    return [
        sequence(
            (4, 0),
            1,
            score=2.0,
            entropy=3.0,
            old_logprob_R=torch.tensor([-1.0]),
            ref_logprob_R=torch.tensor([-1.5]),
            text="same",
            **fields,
        ),
        sequence(
            (2, 0),
            3,
            score=-1.0,
            entropy=1.0,
            old_logprob_R=torch.tensor([-1.0, -1.0, -1.0]),
            ref_logprob_R=torch.tensor([-1.0, -1.25, -1.25]),
            text="same",
            stopped=False,
            **fields,
        ),
    ]


def test_hand_worked_means(sequence: Make) -> None:
    """Over responses; KL summed over a response's tokens; entropy over tokens: (1 x 3 + 3 x 1) / 4."""
    assert describe(two(sequence)) == {
        "score": 0.5,
        "kl_ref": 0.5,
        "entropy": 1.5,
        "response_length": 2.0,
        "stop_frac": 0.5,
        "distinct_frac": 0.5,
        "repeat_frac": 0.0,
    }
    assert describe([]) == {}
    rated = two(sequence, gold=0.75)
    assert describe(rated)["gold"] == 0.75


def test_samples_have_the_texts_of_their_prompts(sequence: Make) -> None:
    rows = [PromptRow(np.array([1], np.int32), {}, f"prompt {i}", 0, i, i) for i in (2, 4)]
    samples = to_samples(two(sequence), rows)
    assert [s["prompt"] for s in samples] == ["prompt 4", "prompt 2"]
    assert samples[0]["score"] == 2.0 and samples[0]["gold"] is None
    assert samples[1]["stopped"] is False
    assert [s["response"] for s in samples] == ["same", "same"]
    assert pytest.approx(samples[1]["score"]) == -1.0
