"""Scored sequences of different length, made by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from step3_ppo.algorithm import KLConfig, Method, UpdateConfig, choose_method
from step3_ppo.experience import ScoredSequence


@pytest.fixture
def method() -> Callable[..., Method]:
    """The method of an algorithm; responses of 8 tokens at most."""

    def make(name: Any = "ppo", *, group_size: int = 1, kl: Any = None, **update: Any) -> Method:
        return choose_method(
            name,
            UpdateConfig(minibatch_size=1, **update),
            KLConfig(**(kl or {})),
            group_size=group_size,
            max_response_tokens=8,
        )

    return make


@pytest.fixture
def sequence() -> Callable[..., ScoredSequence]:
    def make(key: tuple[int, int], length: int, *, seed: int = 0, **fields: Any) -> ScoredSequence:
        generator = torch.Generator().manual_seed(seed + 100 * key[0] + key[1])

        def draw() -> torch.Tensor:
            return torch.randn(length, generator=generator)

        values: dict[str, Any] = {
            "key": key,
            "prompt_ids": list(range(1, 2 + key[0])),
            "response_ids": [5] * length,
            "text": f"text {key}",
            "stopped": True,
            "rollout_logprob_R": draw(),
            "old_logprob_R": draw(),
            "ref_logprob_R": draw(),
            "old_value_R": draw(),
            "entropy": 1.0,
            "score": 0.5,
            "model_score": 0.5,
            "gold": None,
        }
        return ScoredSequence(**{**values, **fields})

    return make
