"""The page's section: numbers as measured, rows by goal, and only what stands between the markers is replaced."""

from pathlib import Path
from typing import Any

import pytest

from rlhf.bench.lines import make_lines
from rlhf.bench.table import BEGIN, END, markdown, summary
from rlhf.sections import write_section


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_goal_row(report: dict[str, Any]) -> None:
    """Ratios of the rounds are 2, 4 and 3; the medians of the speeds 50 and 25 tokens a second."""
    text = markdown(report)
    assert cells(text, "SFT, fp32, 1 rank") == [
        "SFT, fp32, 1 rank", "50 tokens/s", "TRL", "25 tokens/s", "3.00 x", "at least 1.80 x", "yes"
    ]  # fmt: skip
    assert "medians of 3 rounds" in text.lower()
    assert "matmul 50 GFLOP/s fp32 and 100 bf16, copy 20 GB/s" in text and "trl 1.12.0" in text


def test_detail_rows(report: dict[str, Any]) -> None:
    """50e9 FLOPs in 2 s are half of the matmul peak; the peer's FLOPs were not counted."""
    rows = [line for line in markdown(report).splitlines() if line.startswith("| `sft_fp32`")]
    ours, trl = ([cell.strip() for cell in row.strip("|").split("|")] for row in rows)
    assert ours == ["`sft_fp32`", "ours", "50", "2.00", "0.250", "1.0%", "50%", "-", "update 75%"]
    assert trl == ["`sft_fp32`", "TRL", "25", "1.00", "0.250", "40.0%", "-", "-", "-"]


def test_what_is_missing_is_said_without_the_log(report: dict[str, Any]) -> None:
    text = markdown(report)
    assert "- vLLM: left out, `import vllm` failed" in text
    assert "- `sft_fp32`, TRL, packing: ChildError: -m x ended with exit code 1." in text
    assert "the log" not in text


def test_quick_sizes_are_no_results(report: dict[str, Any]) -> None:
    assert "nothing about speed" not in markdown(report)
    report["settings"]["sizes"] = "quick"
    assert "nothing about speed" in markdown(report)


def test_a_goal_that_is_not_met(report: dict[str, Any]) -> None:
    contestants = report["lines"]["sft_fp32"]["contestants"]
    contestants["TRL"]["samples"] = contestants["ours"]["samples"]
    assert cells(markdown(report), "SFT, fp32")[-3:] == ["1.00 x", "at least 1.80 x", "no"]
    (said,) = summary(report, make_lines()["sft_fp32"])
    assert said == "SFT, fp32, 1 rank against TRL: 1.00 x (at least 1.80 x: not reached)"


def test_section_is_replaced_and_the_page_kept(tmp_path: Path) -> None:
    """E18: a page's table is what a script wrote."""
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    for text in ("one", "two"):
        write_section(page, text, begin=BEGIN, end=END)
        assert page.read_text() == f"# Title\n\n{BEGIN}\n{text}\n{END}\n\nafter\n"
    page.write_text(f"{END}\n{BEGIN}\n")
    with pytest.raises(ValueError, match="once and in this order"):
        write_section(page, "x", begin=BEGIN, end=END)
