import os
from typing import Any

import pytest


@pytest.fixture(scope="session")
def one_rank() -> None:
    """Make this process a world of one with DeepSpeed ready."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    from rlhf import engine

    torch.set_num_threads(1)
    engine.setup(timeout_seconds=60)


@pytest.fixture
def experiences(monkeypatch: pytest.MonkeyPatch, one_rank: None) -> list[Any]:
    """What each step of a PPO run is trained on, as the update gets it."""
    from step3_ppo import train as program

    seen: list[Any] = []
    to_experience = program.to_experience

    def spy(*arguments: Any, **named: Any) -> Any:
        seen.append(to_experience(*arguments, **named))
        return seen[-1]

    monkeypatch.setattr(program, "to_experience", spy)
    return seen
