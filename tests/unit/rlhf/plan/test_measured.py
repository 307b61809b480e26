"""Plans from what was measured: hand-worked rates and steps."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.plan.collectives import all_gather, all_reduce, group
from rlhf.plan.hardware import load_devices
from rlhf.plan.layer import layer, optimizer_bytes, pointwise_bytes
from rlhf.plan.layout import OURS, Layout
from rlhf.plan.measured import Collective, Measured
from rlhf.plan.rollout import decode_step, gather, score
from rlhf.plan.setting import Choices, from_models
from rlhf.plan.shapes import shape_of
from rlhf.plan.step import step
from rlhf.plan.steps import CONTEXT, context_of, plan_step

SHAPE = shape_of({
    "model_type": "opt", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 1, "ffn_dim": 256,
    "vocab_size": 128, "max_position_embeddings": 64,
})  # fmt: skip


def measured(**changes: Any) -> Measured:
    """One rate for all products and one for attention: 1 and 0.5 TFLOP/s forward, half of it backward."""
    values: dict[str, Any] = {
        "products": {"fp32": [[64, 64, 64, 1.0, 0.5]]}, "attention": {"fp32": [[32, 0.5, 0.25]]},
        "pointwise": [[64, 1e9]], "optimizer_gb_s": 1e9, "update_layer": 0.01, "update_step": 0.1,
        "gather_layer": {"1": 1e-9}, "gather_gb_s": {"1": 1e9}, "sharded_optimizer_gb_s": {"1": 1e9},
        "score_layer": 0.001,
        "score_pass": 0.002, "decode_layer": 0.003, "decode_token": 0.004,
        "draw_logit": 1e-6, "process_gb": 0.5,
    }  # fmt: skip
    return Measured(**{**values, **changes})


def test_a_measured_shape_has_its_own_rate_and_others_a_mean_in_logarithms() -> None:
    found = measured(products={"fp32": [[64, 64, 64, 1.0, 0.5], [256, 64, 64, 4.0, 2.0]]})
    assert found.product("fp32", 64, 64, 64) == 2 * 64**3 / 1e12
    assert found.product("fp32", 64, 64, 64, backward=True) == 4 * 64**3 / 0.5e12
    # Half-way between both in powers of two: the geometric mean of 1 and 4.
    assert found.product("fp32", 128, 64, 64) == pytest.approx(2 * 128 * 64 * 64 / 2e12)
    # At a third of the way the distances are 2/3 and 4/3, the weights 4 : 1.
    rate = math.exp((4 * math.log(1.0) + math.log(4.0)) / 5)
    assert found.product("fp32", 64 * 2 ** (2 / 3), 64, 64) == pytest.approx(2 * 64 * 2 ** (2 / 3) * 4096 / rate / 1e12)


def test_attention_backward_is_two_and_a_half_forwards() -> None:
    assert measured().attention_seconds("fp32", 1e9, 32) == pytest.approx(2e-3)
    assert measured().attention_seconds("fp32", 1e9, 32, backward=True) == pytest.approx(10e-3)


def test_a_type_that_was_not_measured_is_named() -> None:
    with pytest.raises(ValueError, match="bf16 was not measured on this machine; fp32 was"):
        measured().product("bf16", 1, 1, 1)


def test_an_update_on_a_processor_adds_up(make_device: Any) -> None:
    """Products, attention, what a layer and a step cost beside them; pointwise and optimiser cost nothing here."""
    device = make_device(architecture="cpu", peak_tflops={"fp32": 1.0}, measured=measured(), bandwidth_gb_s=1e12)
    found = step(SHAPE, Layout(gpus=1, length=32, micro_batch=4, dtype="fp32"), device)
    tokens = 128
    products = 2 * tokens * (64 * 192 + 64 * 64 + 2 * 64 * 256) / 1e12
    attention = 4 * 4 * 32 * 32 * 64 / 2
    layer = products + 4 * products + attention / 0.5e12 + 2.5 * attention / 0.25e12
    head = 2 * tokens * 128 * 64 / 1e12 * 5
    assert found.computing == pytest.approx(2 * layer + head, rel=1e-6)
    assert found.host == pytest.approx(2 * 0.01 + 0.1)
    assert found.total == pytest.approx(found.computing + found.host, rel=1e-6)


def test_an_accelerator_hides_the_host_behind_what_it_computes(make_device: Any) -> None:
    slow = measured(update_layer=1e-12)
    device = make_device(architecture="measured", peak_tflops={"fp32": 1.0}, measured=slow)
    assert step(SHAPE, Layout(gpus=1, length=32, dtype="fp32"), device).host == pytest.approx(0.1)


def test_a_decoding_step_adds_up(make_device: Any) -> None:
    device = make_device(architecture="cpu", peak_tflops={"fp32": 1.0}, measured=measured(), bandwidth_gb_s=1e12)
    products = 2 * 8 * (64 * 192 + 64 * 64 + 2 * 64 * 256) / 1e12
    head = 2 * 8 * 128 * 64 / 1e12
    seconds = decode_step(SHAPE, Layout(gpus=1, length=32, dtype="fp32"), device, 8, 16)
    assert seconds == pytest.approx(2 * (products + 0.003) + head + 0.004 + 8 * 128e-6, rel=1e-6)


def test_zero3_adds_its_hooks_and_what_it_moves(make_device: Any) -> None:
    """Two layers and the half that is outside of them, 0.2 s each; two gathers of 4 bytes a weight and their reduction,
    at 1 GB/s alone and 0.5 by two; Adam, on half of the weights, at 2 GB/s. Collectives are in these rates."""
    found = measured(
        gather_layer={"1": 0.1, "2": 0.2}, gather_gb_s={"1": 1.0, "2": 0.5},
        sharded_optimizer_gb_s={"1": 3.0, "2": 2.0}, optimizer_gb_s=8.0,
        collectives={"2": Collective(latency=9.0, gb_s=1e-9)},
    )  # fmt: skip
    device = make_device(architecture="cpu", peak_tflops={"fp32": 1.0}, measured=found, bandwidth_gb_s=1e12)
    plain = step(SHAPE, Layout(gpus=2, length=32, zero=0, dtype="fp32"), device)
    sharded = step(SHAPE, Layout(gpus=2, length=32, zero=3, dtype="fp32"), device)
    assert sharded.host - plain.host == pytest.approx(2.5 * 0.2)
    moved = 4 * 2 * SHAPE.parameters + 2 * SHAPE.parameters  # gradients in the two bytes of OURS
    assert sharded.gather == pytest.approx(moved / 0.5e9, rel=1e-6)
    assert plain.optimizer == pytest.approx(optimizer_bytes(SHAPE.parameters, OURS) / 8e9)
    assert sharded.optimizer == pytest.approx(optimizer_bytes(SHAPE.parameters / 2, OURS) / 2e9)
    alone = step(SHAPE, Layout(gpus=1, length=32, zero=3, dtype="fp32"), device)
    assert alone.gather == pytest.approx(moved / 1e9) and alone.reduce == 0.0
    assert alone.optimizer == pytest.approx(optimizer_bytes(SHAPE.parameters, OURS) / 3e9)


def test_zero3_over_machines_pays_for_its_collectives(make_device: Any) -> None:
    found = measured(gather_gb_s={"1": 1e9, "2": 1e9}, gather_layer={"2": 1e-12})
    device = make_device(architecture="cpu", peak_tflops={"fp32": 1.0}, measured=found, bandwidth_gb_s=1e12, node=2,
                         nics=1, nic_gbit_s=8)  # fmt: skip
    inside, over = (step(SHAPE, Layout(gpus=gpus, length=32, zero=3, dtype="fp32"), device).gather for gpus in (2, 4))
    assert inside < 1e-9 < all_gather(group(device, 4), 4 * SHAPE.parameters) < over


def test_pointwise_operations_and_the_optimiser_take_their_measured_rates(make_device: Any) -> None:
    """1 GB/s for widths of 64 and 4 for 256: of the pass and 1.6 times as much backward. Adam at 2 GB/s."""
    found = measured(pointwise=[[64, 1.0], [256, 4.0]], optimizer_gb_s=2.0)
    assert found.pointwise_seconds(1e9, 64) == 1.0 and found.pointwise_seconds(1e9, 128) == pytest.approx(0.5)
    values = {"architecture": "cpu", "peak_tflops": {"fp32": 1.0}, "bandwidth_gb_s": 1e12}
    layout = Layout(gpus=1, length=32, dtype="fp32")
    free = step(SHAPE, layout, make_device(measured=measured(), **values))
    paid = step(SHAPE, layout, make_device(measured=found, **values))
    moved = pointwise_bytes(SHAPE, layout, OURS)
    assert paid.computing - free.computing == pytest.approx(2 * 2.6 * moved / 1e9, rel=1e-6)
    assert paid.optimizer == pytest.approx(optimizer_bytes(SHAPE.parameters, OURS) / 2e9)


def test_frozen_matrices_have_one_product_backward(make_device: Any) -> None:
    """With adapters of rank 1: half of the measured backward pass, and twice the adapters' own products."""
    device = make_device(architecture="cpu", peak_tflops={"fp32": 1.0}, measured=measured(), bandwidth_gb_s=1e12)
    one = layer(SHAPE, Layout(gpus=1, length=32, lora=1, dtype="fp32"), device, OURS)
    frozen = 2 * 32 * (64 * 192 + 64 * 64 + 2 * 64 * 256) / 1e12
    adapters = 2 * 32 * (64 + 192 + 64 + 64 + 2 * (64 + 256)) / 1e12
    assert one.products == pytest.approx(frozen + adapters)
    assert one.backward_products == pytest.approx(4 * frozen / 2 + 2 * adapters)


def test_nothing_hides_the_sum_of_gradients_on_a_processor(make_device: Any) -> None:
    found = measured(collectives={"2": Collective(latency=0.0, gb_s=1.0)}, update_layer=100.0)
    device = make_device(architecture="cpu", peak_tflops={"fp32": 1e-9}, measured=found, bandwidth_gb_s=1e12)
    layout = Layout(gpus=2, length=32, dtype="fp32")
    assert step(SHAPE, layout, device).reduce == pytest.approx(all_reduce(group(device, 2), 4 * SHAPE.parameters))


def test_gathering_for_a_rollout_takes_its_hooks_and_its_bytes(make_device: Any) -> None:
    """Half of what ZeRO-3 adds to an update, for two layers; 4 bytes a weight at the rate of two ranks."""
    found = measured(gather_layer={"1": 0.1, "2": 0.2}, gather_gb_s={"1": 1.0, "2": 0.5})
    device = make_device(architecture="cpu", peak_tflops={"fp32": 1.0}, measured=found)
    seconds = gather(SHAPE, Layout(gpus=2, length=32, zero=3, dtype="fp32"), device)
    assert seconds == pytest.approx(2 * 0.1 + 4 * SHAPE.parameters / 0.5e9)


def test_a_process_takes_what_it_was_measured_to_take(make_device: Any) -> None:
    assert context_of(make_device(measured=measured(process_gb=0.5))) == 0.5e9 and context_of(make_device()) == CONTEXT
    for number in (1, 3):
        device = make_device(measured=measured(process_gb=7.0, products={"bf16": [[1, 1, 1, 1, 1]]},
                                               attention={"bf16": [[1, 1, 1]]}))  # fmt: skip
        plan = plan_step(from_models("opt-125m", "opt-125m", device, 1, Choices()), number)
        assert all(part.context == 7e9 for part in plan.memory.values())


def test_a_forward_pass_without_gradients_adds_up(make_device: Any) -> None:
    device = make_device(architecture="cpu", peak_tflops={"fp32": 1.0}, measured=measured(), bandwidth_gb_s=1e12)
    layout = Layout(gpus=1, length=32, micro_batch=4, dtype="fp32")
    layer = 2 * 128 * (64 * 192 + 64 * 64 + 2 * 64 * 256) / 1e12 + 4 * 4 * 32 * 32 * 64 / 2 / 0.5e12
    seconds = score(SHAPE, layout, device, 8, head=False)
    assert seconds == pytest.approx(2 * (2 * (layer + 0.001) + 0.002), rel=1e-6)


def test_a_forward_pass_under_zero3_gathers_its_weights(make_device: Any) -> None:
    """Twice, for 8 rows in batches of 4: half a layer's hooks, and 4 bytes a weight at 1 GB/s."""
    found = measured(gather_layer={"1": 0.1}, gather_gb_s={"1": 1.0})
    device = make_device(architecture="cpu", peak_tflops={"fp32": 1.0}, measured=found, bandwidth_gb_s=1e12)
    plain, sharded = (
        score(SHAPE, Layout(gpus=1, length=32, micro_batch=4, zero=zero, dtype="fp32"), device, 8, head=False)
        for zero in (0, 3)
    )
    assert sharded - plain == pytest.approx(2 * (2 * 0.05 + 4 * SHAPE.parameters / 1e9))


def test_collectives_of_a_machine_are_the_measured_ones(make_device: Any) -> None:
    """2 messages of 1 ms and 3/4 of 8 GB at 2 GB/s; for 3 ranks the group of 4 is nearer than that of 2."""
    found = measured(collectives={"2": Collective(latency=1.0, gb_s=1.0), "4": Collective(latency=1e-3, gb_s=2.0)})
    device = make_device(measured=found)
    assert all_gather(group(device, 4), 8e9, messages=2) == pytest.approx(2e-3 + 3.0)
    assert found.collective(3) == found.collectives["4"]


def as_yaml(tmp_path: Path, **changes: Any) -> Path:
    section = {key: value for key, value in vars(measured()).items() if key != "collectives"}
    section["collectives"] = {"2": {"latency": 1e-3, "gb_s": 1.0}}
    section["gather_layer"] = {1: 0.5, 4: 0.6}
    section["products"] = {"fp32": [list(row) for row in measured().products["fp32"]]}
    entry = {
        "architecture": "cpu", "cores": 2, "peak_tflops": {"fp32": 1.0}, "memory_gb": 8, "bandwidth_gb_s": 10,
        "node": 2, "link_gb_s": 1, "nics": 1, "nic_gbit_s": 10, "measured": {**section, **changes},
    }  # fmt: skip
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump({"mine": entry}))
    return path


def test_a_file_gives_back_what_was_measured(tmp_path: Path) -> None:
    device = load_devices(as_yaml(tmp_path))["mine"]
    assert device.is_serial and device.measured is not None
    assert device.measured.collectives["2"] == Collective(latency=1e-3, gb_s=1.0)
    assert device.measured.product("fp32", 64, 64, 64) == 2 * 64**3 / 1e12
    assert [device.measured.gather_seconds(ranks) for ranks in (1, 3, 8)] == [0.5, 0.6, 0.6]


@pytest.mark.parametrize(
    "changes",
    [{"decode_layer": 0.0}, {"nonsense": 1}, {"products": {"fp32": [[1, 2, 3]]}}, {"attention": 7},
     {"collectives": {"2": {"latency": 1.0}}}, {"collectives": {"2": {"latency": 0.0, "gb_s": 1.0}}},
     {"gather_gb_s": {}}, {"sharded_optimizer_gb_s": {2: 0}}, {"ssh": {"a": {"seconds": 1.0}}},
     {"ssh": {"a": {"seconds": 1.0, "gb_s": -1.0}}},
     {"gather_layer": {1: -1.0}}, {"gather_layer": {}}, {"gather_layer": {0: 1.0}}, {"disk": {"read_gb_s": "x"}},
     {"update_step": float("nan")}, {"score_pass": "fast"}],
)  # fmt: skip
def test_a_broken_section_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"machine.yaml: mine: measured is not what .* Run it again"):
        load_devices(as_yaml(tmp_path, **changes))
