"""What a DeepSpeed JSON and an optimiser may not hold where ranks share weights."""

from typing import Any

import pytest

from rlhf import ds_config
from rlhf.config import OptimConfig
from rlhf.tensor_checks import check_tensor


@pytest.mark.parametrize(
    ("ds", "optim", "said"),
    [
        ({}, "muon", "parallel.tp=2, but critic is trained by muon, which would take a rank's share"),
        ({}, "adamw_8bit", "critic is trained by adamw_8bit"),
        (
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
            "adamw",
            "says bfloat16 at ZeRO stage 0",
        ),
        (
            {"fp16": {"enabled": True}, "zero_optimization": {"stage": 0}},
            "adamw",
            "says float16 at ZeRO stage 0",
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "adamw", "zero_hpz_partition_size=2 in"),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "adamw",
            "quantized_weights=True in",
        ),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "adamw", "quantized_gradients=True in"),
    ],
)
def test_refused_by_name(ds: dict[str, Any], optim: str, said: str) -> None:
    raw, settings = {**ds_config.load("cpu_zero1"), **ds}, OptimConfig(lr=1e-3, name=optim)  # type: ignore[arg-type]
    check_tensor(1, raw, settings, name="critic")
    with pytest.raises(ValueError, match=said):
        check_tensor(2, raw, settings, name="critic")


@pytest.mark.parametrize("name", ["cpu_zero0", "cpu_zero3", "zero1", "zero2_offload", "zero3_offload_hybrid"])
def test_packaged_jsons_pass(name: str) -> None:
    check_tensor(2, ds_config.load(name), OptimConfig(lr=1e-3), name="model")
