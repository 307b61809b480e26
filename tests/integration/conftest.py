import os

import pytest


@pytest.fixture(scope="session")
def one_rank() -> None:
    """Make this process a world of one with DeepSpeed ready."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    from rlhf import engine

    torch.set_num_threads(1)
    engine.setup(timeout_seconds=60)
