"""Scaling curves: what is lost adds up, and to what."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.plan.hardware import load_devices
from rlhf.plan.scale import BATCH_FLOOR, STRAGGLERS, at_size, counts_up_to, curves, expected_maximum
from rlhf.plan.scale_plot import write_plot
from rlhf.plan.setting import Choices, Setting, from_models
from rlhf.plan.steps import plan_step

DEVICES = load_devices()


def setting(gpus: int = 8, gpu: str = "h100-sxm", actor: str = "opt-1.3b", **choices: Any) -> Setting:
    return from_models(actor, "opt-350m", DEVICES[gpu], gpus, Choices(**choices))


def test_counts() -> None:
    assert counts_up_to(8) == [1, 2, 4, 8]
    assert counts_up_to(24, smallest=3) == [3, 6, 12, 24]
    assert counts_up_to(100, smallest=8) == [8, 16, 32, 64, 100]
    assert counts_up_to(5, smallest=5) == [5]
    with pytest.raises(ValueError, match="--from must be >= 1 and at most --to, got 9 and 8"):
        counts_up_to(8, smallest=9)


def test_the_slowest_of_many() -> None:
    """Exact: 1/sqrt(pi) of two, 1.4236 of eight, 2.5076 of a hundred."""
    assert expected_maximum(1) == 0
    assert expected_maximum(2) == pytest.approx(0.5642, rel=0.05)
    assert expected_maximum(8) == pytest.approx(1.4236, rel=0.01)
    assert expected_maximum(100) == pytest.approx(2.5076, rel=0.01)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_efficiency_and_losses_make_one(number: int) -> None:
    for curve in curves(setting(), [number], counts_up_to(256), jitter=0.02):
        assert curve.points[0].efficiency == 1
        rate = curve.points[0].tokens_per_gpu
        for point in curve.points:
            assert point.efficiency + sum(point.losses.values()) == pytest.approx(1)
            assert point.efficiency == pytest.approx(point.tokens_per_gpu / rate)
        assert curve.points[-1].efficiency < 1


def test_weak_scaling_keeps_the_rows_of_a_device() -> None:
    start = setting(global_batch=64)
    for gpus in (1, 8, 64):
        layout = at_size(start, gpus, "weak").sft.layout
        assert (layout.micro_batch, layout.accumulation, layout.global_batch) == (4, 2, 8 * gpus)
        assert at_size(start, gpus, "weak").ppo.prompts_per_step == 64 * gpus


def test_strong_scaling_keeps_the_batch_until_ranks_have_no_row() -> None:
    """64 sequences: micro-batches of 4 on up to 16 devices, then of 2 and 1, then half of 128 devices wait."""
    start = setting(global_batch=64)
    found = {n: at_size(start, n, "strong").sft.layout for n in (1, 8, 16, 32, 64, 128)}
    assert [(layout.micro_batch, layout.accumulation) for layout in found.values()] == [
        (4, 16), (4, 2), (4, 1), (2, 1), (1, 1), (1, 1)
    ]  # fmt: skip
    assert found[128].global_batch == 128
    _, strong = curves(start, [1], [64, 128], jitter=0.0)
    assert strong.points[0].losses[BATCH_FLOOR] == 0
    assert strong.points[1].losses[BATCH_FLOOR] == pytest.approx(0.5)
    assert strong.points[1].tokens_per_gpu == pytest.approx(64 * 512 / strong.points[1].seconds / 128)


def test_stragglers_by_hand() -> None:
    """The step of two ranks takes 1 + 0.1 x 0.589 of the plan's."""
    weak, _ = curves(setting(), [1], [1, 2], jitter=0.1)
    planned = plan_step(at_size(setting(), 2, "weak"), 1).step_seconds
    slowed = 1 + 0.1 * expected_maximum(2)
    assert weak.points[1].seconds == pytest.approx(planned * slowed)
    assert weak.points[1].losses[STRAGGLERS] == pytest.approx(1 - 1 / slowed)
    still, _ = curves(setting(), [1], [1, 2], jitter=0.0)
    assert still.points[1].losses[STRAGGLERS] == 0


def test_losses_have_the_right_names() -> None:
    """Gathers under ZeRO-3, reductions under ZeRO-1, the bubble of a pipeline with fewer micro-batches to fill it."""
    gathers, reduces = ({"zero": zero} for zero in (3, 1))
    for name, choices in (("gather", gathers), ("reduce", reduces)):
        weak, _ = curves(setting(gpus=64, **choices), [1], [64, 256, 1024], jitter=0.0)
        losses = weak.points[-1].losses
        assert max(losses, key=lambda part: losses[part]) == name
    piped = setting(gpus=64, actor="gpt-22b", tensor=8, pipeline=4, recompute="full", global_batch=256)
    weak, strong = curves(piped, [1], [64, 128, 256], jitter=0.0)
    assert [point.losses["bubble"] > 0.1 for point in strong.points] == [False, False, True]
    assert abs(weak.points[-1].losses["bubble"]) < 0.01


def test_what_does_not_fit_or_split_is_left_out_with_the_reason() -> None:
    weak, _ = curves(setting(actor="opt-13b"), [1], [1, 8], jitter=0.0)
    assert [point.gpus for point in weak.points] == [8] and "GB of a device are missing" in weak.left_out[1]
    split = setting(gpus=64, actor="gpt-22b", tensor=8, pipeline=2)
    weak, _ = curves(split, [1], [8, 16, 64], jitter=0.0)
    assert "do not split into tensor 8 x pipeline 2" in weak.left_out[8] and 64 in {p.gpus for p in weak.points}
    nothing, _ = curves(setting(actor="opt-66b"), [1], [1, 2], jitter=0.0)
    assert nothing.points == () and set(nothing.left_out) == {1, 2}
    with pytest.raises(ValueError, match="--jitter must be at least 0 and below 1, got 1"):
        curves(setting(), [1], [1], jitter=1.0)


@given(st.integers(0, 10), st.sampled_from((1, 2, 3)))
def test_a_strong_curve_never_gains_more_than_its_devices(exponent: int, number: int) -> None:
    """Parts that stay outside of the step, caches and the like, are not in the plan: the efficiency is at most 1."""
    _, strong = curves(setting(), [number], [1, 2**exponent] if exponent else [1], jitter=0.0)
    assert all(point.efficiency <= 1.001 for point in strong.points)


@pytest.mark.parametrize("ending", ["png", "svg", "html"])
def test_plots(ending: str, tmp_path: Path) -> None:
    found = curves(setting(), [1, 3], counts_up_to(64), jitter=0.01)
    path = tmp_path / "plots" / f"scale.{ending}"
    write_plot(path, "OPT <1.3B>", found)
    content = path.read_bytes()
    if ending == "png":
        assert content.startswith(b"\x89PNG")
    else:
        text = content.decode()
        assert "step 1, SFT" in text and "weak scaling: lost to" in text and "stragglers" in text
    if ending == "html":
        assert "<h1" in text and "OPT &lt;1.3B&gt;" in text and "http://" not in text.replace("http://www.w3.org", "")


def test_plots_that_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in .png, .svg, .html"):
        write_plot(tmp_path / "scale.pdf", "x", curves(setting(), [1], [1, 8], jitter=0.0))
    with pytest.raises(ValueError, match="nothing to draw"):
        write_plot(tmp_path / "scale.png", "x", curves(setting(actor="opt-66b"), [1], [1], jitter=0.0))
    assert not list(tmp_path.iterdir())
