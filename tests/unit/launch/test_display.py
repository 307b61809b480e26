"""Progress lines and the closing table."""

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from launch import display
from launch.display import StageProgress, closing_table, progress_text, read_progress

PROGRESS = {
    "step": 120,
    "num_steps": 400,
    "loss": 1.23456,
    "tokens_per_second": 5210.4,
    "eta_seconds": 3725.9,
    "phase": "train",
}


def test_text() -> None:
    assert progress_text(PROGRESS) == "step 120/400  loss 1.235  5,210 tokens/s  1:02:05 left  (train)"
    assert progress_text({"step": 0, "num_steps": 4, "phase": "start"}) == "step 0/4  (start)"
    assert (
        progress_text({"step": 4, "num_steps": 4, "score": None, "eta_seconds": 0.0, "phase": "done"})
        == "step 4/4  (done)"
    )
    firing = {"step": 3, "num_steps": 4, "firing": ["kl_explosion"], "rollbacks": 1, "phase": "train"}
    assert progress_text(firing) == "step 3/4  unhealthy: kl_explosion  (train)"
    assert progress_text({}) == ""


def test_reading_never_fails_and_passes_over_an_earlier_attempt(tmp_path: Path) -> None:
    path = tmp_path / "progress.json"
    assert read_progress(path) == {}
    path.write_text('{"step": 1')
    assert read_progress(path) == {}
    path.write_text(json.dumps(PROGRESS))
    os.utime(path, (1000, 1000))
    assert read_progress(path) == PROGRESS
    assert read_progress(path, not_before=1001) == {}


def test_lines_without_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_REDRAW_SECONDS", 0.0)
    monkeypatch.setattr(display, "_LINE_SECONDS", 0.0)
    console, path = Console(file=io.StringIO(), width=200), tmp_path / "progress.json"
    with StageProgress(console, "step1_sft", path) as progress:
        progress.tick()
        for step in (1, 1, 2):
            path.write_text(json.dumps({**PROGRESS, "step": step}))
            progress.tick()
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split("  ")[2] for line in lines] == ["step 1/400", "step 2/400"]


def test_live_line_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "_REDRAW_SECONDS", 0.0)
    console, path = Console(file=io.StringIO(), width=150, force_terminal=True), tmp_path / "progress.json"
    with StageProgress(console, "step1_sft", path) as progress:
        path.write_text(json.dumps(PROGRESS))
        progress.tick()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[#######.................]" in text and "step 120/400" in text


def test_table() -> None:
    done = {"status": "done", "seconds": 9.0, "wall_seconds": 12.0, "tokens_per_second": 1234.5}
    metrics = {"gold_sft": 0.5, "gold_ppo": 0.81, "gold_max": 1.0, "kl": 0.034}
    missing = {"status": "missing", "seconds": None, "wall_seconds": None, "tokens_per_second": None, "metrics": {}}
    summary = {"recipe": "r", "seed": 3, "stages": {"step2_reward": missing, "step3_ppo": {**done, "metrics": metrics}}}
    console = Console(file=io.StringIO(), width=150)
    console.print(closing_table(summary))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "gold 0.5 -> 0.81 (of 1), KL 0.034" in text and "1,234" in text and "missing" in text
