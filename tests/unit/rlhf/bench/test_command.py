"""`rlhf bench peers`: turns, failures, resuming; the children are stand-ins that write what a peer's program writes."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from rlhf.bench import command
from rlhf.bench.jobs import Job
from rlhf.bench.lines import Contestant, Goal, Line
from rlhf.bench.process import Finished
from rlhf.bench.record import Sample
from rlhf.bench.table import BEGIN, END
from rlhf.cli import _parser, main


def contestant(name: str, order: list[str], *, code: str = "pass", wall: float = 1.0, package: str = "") -> Contestant:
    def job(_bench: Any, folder: Path) -> Job:
        def read(_finished: Finished) -> Sample:
            order.append(name)
            return Sample(wall_seconds=wall, cpu_seconds=wall, steps=1, tokens=10, rows=1)

        assert list(folder.iterdir()) == []
        return Job(argv=[sys.executable, "-c", code], read=read)

    return Contestant(name=name, job=job, package=package)


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two lines: ours at twice the peer's speed beside one that fails, and one that needs a missing package."""
    order: list[str] = []
    goal = Goal(work="Work", against="peer", measure="tokens", target=1.5)
    lines = (
        Line(
            name="first",
            contestants=(
                contestant("ours", order),
                contestant("broken", order, code="raise SystemExit(4)"),
                contestant("peer", order, wall=2.0),
            ),
            goals=(goal,),
        ),
        Line(
            name="second",
            contestants=(contestant("ours", order), contestant("vLLM", order, package="vllm")),
            goals=(),
        ),
    )
    monkeypatch.setattr(command, "select", lambda names: [x for x in lines if not names or x.name in names])
    monkeypatch.setattr("rlhf.bench.table.make_lines", lambda: {line.name: line for line in lines})

    def program(settings: command.Settings, name: str, _arguments: Any) -> None:
        if name == "peak":
            peaks = {"matmul_fp32_flops": 1e9, "matmul_bf16_flops": 1e9, "copy_bytes_per_second": 1e9}
            (settings.work / "peaks.json").write_text(json.dumps(peaks))

    monkeypatch.setattr(command, "_program", program)
    return order


def run(tmp_path: Path, *extra: str) -> tuple[int, dict[str, Any]]:
    code = main(["bench", "peers", "--rounds", "2", "--work", str(tmp_path / "work"),
                 "--vllm-python", "/no/such/python", *extra])  # fmt: skip
    report: dict[str, Any] = json.loads((tmp_path / "work" / "peers.json").read_text())
    return code, report


def test_contestants_take_turns_and_a_failure_stops_only_itself(
    tmp_path: Path, order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run(tmp_path, "--lines", "first")
    assert code == 1 and order == ["ours", "peer", "ours", "peer"]
    contestants = report["lines"]["first"]["contestants"]
    assert [len(contestants[name]["samples"]) for name in ("ours", "broken", "peer")] == [2, 0, 2]
    assert "exit code 4" in contestants["broken"]["error"]
    assert "Work against peer: 2.00 x (at least 1.50 x: reached)" in capsys.readouterr().out
    # Only what failed is left to look at.
    assert [path.name for path in (tmp_path / "work" / "runs" / "first").iterdir()] == ["1_broken"]


def test_a_missing_package_is_named_and_its_line_goes_on(tmp_path: Path, order: list[str]) -> None:
    code, report = run(tmp_path, "--lines", "second")
    assert code == 0 and order == ["ours", "ours"]
    assert report["left_out"] == {"vLLM": "`import vllm` failed"}
    assert report["lines"]["second"]["status"] == "done"


def test_resume_keeps_finished_lines_and_repeats_failed_ones(tmp_path: Path, order: list[str]) -> None:
    run(tmp_path)
    order.clear()
    _, report = run(tmp_path, "--resume")
    assert order == ["ours", "peer", "ours", "peer"] and set(report["lines"]) == {"first", "second"}
    order.clear()
    run(tmp_path, "--lines", "second")
    assert order == ["ours", "ours"]


def test_resume_with_other_settings_is_refused(
    tmp_path: Path, order: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--lines", "second")
    code, _ = run(tmp_path, "--lines", "second", "--resume", "--set", "sft.data.packing=off")
    assert code == 2 and "Use the same settings, or another --json" in capsys.readouterr().err


def test_the_page_gets_the_table_after_every_line(tmp_path: Path, order: list[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n{BEGIN}\n{END}\n")
    run(tmp_path, "--write", str(page))
    text = page.read_text()
    assert "| Work | 10 tokens/s | peer | 5 tokens/s | 2.00 x | at least 1.50 x | yes |" in text
    assert "rlhf bench peers --rounds 2 --write docs/performance.md" in text and str(tmp_path) not in text


def test_settings() -> None:
    words = ["bench", "peers", "--quick", "--set", "sft.data.packing=off", "--set", "sft.run.seed=2"]
    arguments: Namespace = _parser().parse_args(words)
    settings = command.read_settings(arguments)
    assert settings.rounds == 1 and settings.sizes.name == "quick" and settings.work.is_absolute()
    assert settings.overrides == {"sft": ["--data.packing=off", "--run.seed=2"]}
    for text in ("sft", "data.packing=off", "sft.data.packing"):
        with pytest.raises(ValueError, match="is not STAGE.KEY=VALUE"):
            command.read_settings(_parser().parse_args(["bench", "peers", "--set", text]))
    with pytest.raises(ValueError, match="--rounds=0"):
        command.read_settings(_parser().parse_args(["bench", "peers", "--rounds", "0"]))
