"""Results of the three steps: rates, percentiles, their file."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlhf.bench.result import Foreseen, Result, check_target, read_results, write_result

Make = Callable[..., Result]


def test_rates_are_over_all_measured_steps(make_result: Make) -> None:
    """Steps of 1, 2, 3, 4 s with 100 tokens each: 400 in 10 s; 5 % between the two fastest."""
    result = make_result(step_seconds=[2.0, 1.0, 4.0, 3.0], tokens=100.0, rows=10.0)
    assert result.tokens_per_second == 40.0 and result.rows_per_second == 4.0 and result.median_seconds == 2.5
    assert result.rate == 100 / 2.5 / 2
    assert result.percentile(0.0) == 1.0 and result.percentile(1.0) == 4.0
    assert result.percentile(0.05) == pytest.approx(1.15) and result.percentile(0.5) == 2.5
    assert make_result(step_seconds=[2.0]).percentile(0.95) == 2.0


def test_utilisation_is_of_the_peak_and_counts_recomputation_apart(make_result: Make) -> None:
    result = make_result(flops_per_second=30e9, peak_flops=100e9, hardware_factor=4 / 3)
    assert result.model_utilisation == pytest.approx(0.3) and result.hardware_utilisation == pytest.approx(0.4)
    assert make_result(peak_flops=None).model_utilisation is None
    assert make_result(flops_per_second=None, peak_flops=1.0).hardware_utilisation is None


def test_a_file_takes_the_steps_of_one_machine(make_result: Make, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    foreseen = Foreseen(device="mine", step_seconds=1.0, phases={"host": 1.0}, peak_bytes=2.0)
    first, third = make_result(number=1, foreseen=foreseen), make_result(number=3)
    write_result(path, third)
    write_result(path, first)
    assert read_results(path) == {1: first, 3: third}
    check_target(path, "tiny_cpu")
    with pytest.raises(ValueError, match="holds results of tiny_cpu, but this is other"):
        check_target(path, "other")
    again = make_result(number=1, step_seconds=[9.0])
    write_result(path, again)
    assert read_results(path)[1] == again
    with pytest.raises(ValueError, match="2 x CPU, but this is tiny_cpu on 4 x CPU. Name another file"):
        write_result(path, make_result(ranks=4))


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": "other", "steps": {}}',
                                  '{"format": "rlhf-bench-1", "steps": {"1": {}}}'])  # fmt: skip
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="a.json is no result of `rlhf bench step1"):
        read_results(path)


def test_result_is_what_json_holds(make_result: Make, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.json"
    result = make_result(settings=["--sft.optim.lr=1"], memory={"weights": 1.0, "peak": 3.0})
    write_result(path, result)
    assert read_results(path)[1] == result
