"""Published figures: reading, predicting, judging."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf.plan.hardware import load_devices
from rlhf.plan.predict import Prediction, predict
from rlhf.plan.published import Record, load
from rlhf.plan.validate import GOALS, find_sweeps, group_errors, percentile, ranks, spearman, validate

DEVICES = load_devices()
RECORDS = load()
MPT: dict[str, Any] = {
    "system": "MosaicML llm-foundry MPT", "hardware": "a100_80gb", "n_gpus": 8, "model": "mpt-13b", "layers": 40,
    "hidden": 5120, "heads": 40, "seq": 2048, "vocab": 50368, "tp": 1, "pp": 1, "mbs": 2, "gas": 3, "gbs": 48,
    "zero_stage": 3, "act_ckpt": "none", "precision": "amp_bf16",
}  # fmt: skip


def record(**changes: Any) -> Record:
    return Record(**{**MPT, "metric": "tokens/s/GPU", "unit": "tokens/s/GPU", "value": 2262.0, **changes})


def test_the_packages_figures() -> None:
    records = load()
    assert len(records) > 1200
    assert all(r.source for r in records)
    assert not [r for r in records if "/work" in r.source + r.note or "/tmp" in r.source + r.note]


def test_both_forms_of_a_file(tmp_path: Path) -> None:
    flat, grouped = tmp_path / "flat.json", tmp_path / "grouped.json"
    figure = {"metric": "MFU", "value": 59.57, "unit": "%"}
    flat.write_text(json.dumps({"fields": [], "records": [{**MPT, **figure, "mine": 1}]}))
    grouped.write_text(json.dumps({"runs": [{**MPT, "figures": [figure]}]}))
    assert load(flat) == load(grouped) == [record(metric="MFU", value=59.57, unit="%")]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not valid JSON"),
        ("[]", "neither `records` nor `runs`"),
        ('{"records": [{"system": "a"}]}', "record 0 lacks"),
        ('{"records": [{"system": "a", "metric": "b", "tp": "two"}]}', "tp='two' is not a number"),
    ],
)
def test_a_file_of_another_form(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=said):
        load(tmp_path / "x.json")


def test_conventions_of_mosaic() -> None:
    """MFU and TFLOP/s follow from tokens/s: 6 P + 12 L h s FLOPs a token; HFU is MFU when nothing is recomputed."""
    tokens = predict(record(), DEVICES).predicted
    per_token = 6 * 12.854e9 + 12 * 40 * 5120 * 2048
    tflops = predict(record(metric="model TFLOP/s per GPU", unit="TFLOPS", value=185), DEVICES).predicted
    assert tflops == pytest.approx(tokens * per_token / 1e12, rel=1e-3)
    mfu = predict(record(metric="MFU", unit="%", value=59.57), DEVICES).predicted
    hfu = predict(record(metric="HFU", unit="%", value=59.57), DEVICES).predicted
    assert mfu == hfu == pytest.approx(100 * tflops / 312)
    full = {"act_ckpt": "full"}
    ratio = predict(record(metric="HFU", unit="%", **full), DEVICES).predicted
    ratio /= predict(record(metric="MFU", unit="%", **full), DEVICES).predicted
    assert ratio == pytest.approx(4 / 3)


def test_convention_of_megatron() -> None:
    """BigScience, 24 c B s L h^2 (1 + s / 6h + V / 16 L h) with c = 4, over the time of the same row."""
    row = {
        "system": "BigScience tr11", "hardware": "A100-80", "n_gpus": 384, "model": "176B", "layers": 70,
        "hidden": 14336, "heads": 112, "seq": 2048, "vocab": 250000, "tp": 4, "pp": 12, "mbs": 2, "gas": 128,
        "gbs": 2048, "zero_stage": 1, "act_ckpt": "full", "precision": "bf16 (fp32 grad accumulation)",
    }  # fmt: skip
    seconds = predict(Record(**row, metric="iteration time", unit="s", value=104.5), DEVICES).predicted
    tflops = predict(Record(**row, metric="TFLOPs per GPU (HFU, factor 4)", unit="TFLOPS", value=150.05), DEVICES)
    h, layers, s = 14336, 70, 2048
    flops = 24 * 4 * 2048 * s * layers * h * h * (1 + s / (6 * h) + 250000 / (16 * layers * h))
    assert tflops.predicted == pytest.approx(flops / 384 / seconds / 1e12, rel=1e-6)
    # And the published pair says the same formula.
    assert flops / 384 / 104.5 / 1e12 == pytest.approx(150.05, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"system": "nobody"}, "the system is not known"),
        ({"system": "OpenRLHF(ray)"}, "another engine's"),
        ({"value": "33-39"}, "not a number"),
        ({"hardware": "?"}, "the hardware is not said"),
        ({"n_gpus": None}, "the number of devices is not said"),
        ({"metric": "accuracy", "unit": ""}, "the metric is not known"),
        ({"hidden": None, "model": "x"}, "the model's shape is not said"),
    ],
)
def test_what_is_left_out_has_a_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        predict(record(**changes), DEVICES)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_gap_has_a_reason(data: st.DataObject) -> None:
    """A record of any system with fields left out or changed is predicted or refused, never an accident."""
    whole = data.draw(st.sampled_from(RECORDS))
    numbers = ("n_gpus", "layers", "hidden", "heads", "seq", "vocab", "tp", "pp", "vpp", "cp", "mbs", "gas", "gbs")
    gaps: dict[str, Any] = {
        name: data.draw(st.sampled_from([None, 0, 1, 3, 8]))
        for name in data.draw(st.sets(st.sampled_from([*numbers, "zero_stage", "lora", "kv_heads", "ffn"]), max_size=3))
    }
    texts = data.draw(st.sets(st.sampled_from(["model", "precision", "act_ckpt", "hardware"]), max_size=2))
    gaps |= {name: "" if name == "hardware" else data.draw(st.sampled_from([None, "", "x"])) for name in texts}
    try:
        found = predict(replace(whole, **gaps), DEVICES)
    except ValueError as error:
        assert str(error)
    else:
        assert 0 < found.predicted < float("inf")


def test_the_named_figures_are_predicted() -> None:
    """The ones people ask for are not left out."""
    found = validate(load(), DEVICES)
    values = {p.published for p in found.predictions}
    for value in (2.8, 2.5, 3.1, 127.51, 36.14, 31.96, 100, 89, 87, 5762, 6667, 8532, 290, 132, 5120):
        assert value in values, value


def test_goals_that_are_reached_stay_reached() -> None:
    found = validate(load(), DEVICES)
    groups = {(g.name, g.kind): g for g in found.groups}
    for key in (
        ("MosaicML MPT", "time"), ("BigScience tr11", "time"), ("Lambda step 1", "time"), ("InternEvo", "time"),
        ("Lambda step 2", "time"), ("Lambda ratios", "time"),
        ("Megatron SC21, table 2", "time"), ("torchtitan", "time"), ("Megatron-Bridge", "time"),
        ("all unfitted", "memory"), ("all unfitted", "scaling"),
    ):  # fmt: skip
        assert groups[key].reached, groups[key]
    assert all(sweep.best <= 3 for sweep in found.sweeps)


def prediction(published: float, predicted: float, **changes: Any) -> Prediction:
    return Prediction(
        record=replace(record(), **changes), group="g", kind="time", fitted=False, published=published,
        predicted=predicted,
    )  # fmt: skip


def test_errors_of_a_group_by_hand() -> None:
    members = [prediction(100, value) for value in (90, 105, 120, 100, 102)]
    group, everything = group_errors(members)
    assert (group.count, group.median, group.bias) == (5, pytest.approx(0.05), pytest.approx(0.02))
    assert group.p90 == pytest.approx(0.16)  # 0.1 and 0.2 are the last two; six tenths of the way
    assert group.reached and everything.name == "all unfitted"
    assert not group_errors([prediction(100, 150)])[0].reached
    assert GOALS["memory"][0] == 0.08


def test_statistics_by_hand() -> None:
    assert percentile([1, 2, 3], 0.5) == 2
    assert percentile([1, 2], 0.9) == pytest.approx(1.9)
    assert ranks([10, 30, 20, 20]) == [1, 4, 2.5, 2.5]
    assert spearman([1, 2, 3], [10, 20, 30]) == 1
    assert spearman([1, 2, 3], [3, 2, 1]) == -1
    assert spearman([1, 2, 3], [5, 5, 5]) == 0


def test_a_sweep_finds_the_place_of_the_best() -> None:
    """Tokens a second: the published best, TP 4, is second in the plan."""
    members = [
        prediction(published, predicted, tp=float(tp))
        for tp, published, predicted in ((1, 100, 110), (2, 120, 130), (4, 140, 125), (8, 90, 80))
    ]
    (sweep,) = find_sweeps(members)
    assert (sweep.count, sweep.best) == (4, 2)
    assert sweep.correlation == pytest.approx(0.8)
