"""States of the random generators, as JSON."""

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf import distributed


def rng_state() -> dict[str, Any]:
    """States of Python's, NumPy's and torch's generators on this rank, as JSON."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002  the global one is saved
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
    }
    device = distributed.device()
    if device.type != "cpu":
        state["accelerator"] = _encode(torch.get_device_module(device).get_rng_state())
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Go on where `rng_state` was taken."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(_decode(state["torch"]))
    device = distributed.device()
    if device.type != "cpu" and "accelerator" in state:
        torch.get_device_module(device).set_rng_state(_decode(state["accelerator"]))


def _encode(values: Tensor) -> str:
    return base64.b64encode(values.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
