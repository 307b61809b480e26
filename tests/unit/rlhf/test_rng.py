"""Random generators of one process."""

import json
import random

import numpy as np
import torch

from rlhf.rng import rng_state, set_rng_state


def test_random_generators_go_on_where_they_were() -> None:
    def draws() -> tuple[float, float, float, float]:
        return random.random(), float(np.random.rand()), torch.rand(1).item(), torch.randn(1).item()  # noqa: NPY002

    random.gauss(0, 1)  # leaves a second value behind, which is state too
    state = json.loads(json.dumps(rng_state()))
    expected = [draws(), draws()]
    draws()
    set_rng_state(state)
    assert [draws(), draws()] == expected
