"""`rlhf chaos` with a few kills: the real launcher, two ranks, one ZeRO stage."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("zero", ["0", "3"])
def test_a_killed_and_resumed_pipeline_equals_one_that_was_left_alone(tmp_path: Path, zero: str) -> None:
    """F12, F13: ranks and launchers killed at moments drawn from a seed, in all three stages."""
    work = tmp_path / "work"
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- rlhf chaos: begin -->\n<!-- rlhf chaos: end -->\nafter\n")
    arguments = ["--recipe", "tiny_cpu", "--kills", "4", "--seed", zero, "--zero", zero, "--quick", "--work", str(work)]
    done = subprocess.run(
        [sys.executable, "-m", "rlhf.cli", "chaos", *arguments, "--write", str(page)],
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    kills = json.loads((work / "chaos.json").read_text())["kills"]
    assert len(kills) == 4 and {kill["stage"] for kill in kills} == {"sft", "reward", "ppo"}
    assert all(kill["equal"] == "equal" and kill["killed"] != "-" for kill in kills)
    assert page.read_text().count("| equal |") == 4 and page.read_text().startswith("before\n")
