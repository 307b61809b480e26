"""A device whose numbers make hand-worked examples short."""

from typing import Any

import pytest

from rlhf.plan.hardware import Device


@pytest.fixture
def make_device() -> Any:
    """Device with round numbers; keywords change them."""

    def make(**changes: Any) -> Device:
        values: dict[str, Any] = {
            "name": "round", "architecture": "ampere", "cores": 100, "peak_tflops": {"bf16": 100.0, "fp16": 100.0},
            "memory_gb": 10, "bandwidth_gb_s": 1000, "node": 4, "link_gb_s": 100, "nics": 4, "nic_gbit_s": 80,
            "usd_per_hour": 2.0,
        }  # fmt: skip
        return Device(**{**values, **changes})

    return make
