"""The presets as `rlhf run` starts them, on tiny models: every setting beside sizes as the recipe has it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cut_recipe import cut

pytestmark = pytest.mark.slow

RANKS = {"quick_prototype": 2, "production_throughput": 4, "extreme_scale": 4, "frontier_175b": 8, "frontier_1t": 8}
"""Processes: what the groups of ranks, cut to two, take together."""


@pytest.mark.parametrize("name", RANKS)
def test_a_preset_runs(name: str, tmp_path: Path) -> None:
    recipe = cut(name, tmp_path / "recipe", ranks=RANKS[name])
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.cli", "run", "--recipe", str(recipe), "--out", str(out)],
        capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["stages"] and all(stage["status"] == "done" for stage in summary["stages"].values())
    for stage in summary["stages"]:
        lines = [json.loads(line) for line in (out / stage / "metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "train/loss" in line or "policy/loss" in line]
        assert len(steps) == 2, [sorted(line) for line in lines]
