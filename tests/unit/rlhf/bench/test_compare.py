"""Two results side by side."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.bench.compare import compare, main
from rlhf.bench.result import Result, write_result

Make = Callable[..., Result]


def arguments(tmp_path: Path, **changes: object) -> argparse.Namespace:
    values = {"first": tmp_path / "a.json", "second": tmp_path / "b.json", "plot": None, "json": None}
    return argparse.Namespace(**{**values, **changes})


def test_a_ratio_is_of_tokens_per_second_and_device(make_result: Make) -> None:
    """100 tokens in 2 s on 2 ranks are 25; 300 in 1 s on 4 are 75: 3 x. Steps that are all alike have no spread."""
    (found,) = compare(
        {1: make_result(step_seconds=[2.0, 2.0], tokens=100.0, ranks=2)},
        {1: make_result(step_seconds=[1.0, 1.0], tokens=300.0, ranks=4, dtype="bf16")},
    )
    assert found.ratio == pytest.approx(3.0) and found.low == found.high == pytest.approx(3.0)
    assert "ranks 2 and 4" in found.differences and "type fp32 and bf16" in found.differences


def test_the_spread_is_that_of_the_steps(make_result: Make) -> None:
    times = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0, 1.05]
    (found,) = compare({1: make_result(step_seconds=times)}, {1: make_result(step_seconds=[t / 2 for t in times])})
    assert found.ratio == pytest.approx(2.0) and 1.5 < found.low < 2.0 < found.high < 2.7
    assert compare({1: make_result()}, {2: make_result(number=2)}) == []


def test_the_command_prints_draws_and_writes(
    make_result: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, seconds in (("a", 2.0), ("b", 1.0)):
        for number in (1, 3):
            write_result(tmp_path / f"{name}.json", make_result(number=number, step_seconds=[seconds, seconds]))
    plot, out = tmp_path / "plot.html", tmp_path / "out.json"
    assert main(arguments(tmp_path, plot=plot, json=out)) == 0
    printed = capsys.readouterr().out
    assert "2.00 x" in printed and "step 1, SFT" in printed and "step 3, PPO" in printed
    assert plot.read_text().count("<svg") == 1
    assert json.loads(out.read_text())["steps"]["1"]["ratio"] == 2.0
    assert main(arguments(tmp_path, plot=tmp_path / "plot.png")) == 0 and (tmp_path / "plot.png").stat().st_size > 1000


def test_what_cannot_be_compared_is_an_error(
    make_result: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(tmp_path)) == 2
    write_result(tmp_path / "a.json", make_result(number=1))
    write_result(tmp_path / "b.json", make_result(number=2))
    assert main(arguments(tmp_path)) == 2
    assert main(arguments(tmp_path, plot=Path("x.bmp"))) == 2
    printed = capsys.readouterr().err
    assert "a.json" in printed and "no step in common" in printed and "must end in .png, .svg, .html" in printed
