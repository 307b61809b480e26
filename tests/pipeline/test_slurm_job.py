"""launch/slurm/run.sbatch under a real Slurm: told to stop, it saves, goes back into the queue, and ends its work. A
minute."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf.heartbeat import read_beat
from tests import hosts as emulated
from tests.hosts import ROOT
from tests.slurm import PROGRAMS, Slurm

pytestmark = pytest.mark.slow

FLAGS = (
    "--recipe", "tiny_cpu", "--launcher", "slurm", "--stages", "sft", "--sft.max_steps=60", "--sft.epochs=100",
    "--sft.eval.max_rows=8", "--sft.eval.generate_rows=0", "--sft.run.log_every=1",
    '--sft.data.sources=[{"path":"builtin:politeness","options":{"rows":500,"seed":0,"responses":1}}]',
)  # fmt: skip


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    reason = emulated.lacking(*PROGRAMS)
    if reason:
        pytest.skip(reason)
    (tmp_path / "hosts").mkdir()
    with emulated.namespaces(tmp_path / "hosts") as hosts:
        yield Slurm(hosts)


def test_a_job_is_requeued_and_resumed(slurm: Slurm, tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "job.log"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "rlhf"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "from rlhf.cli import main; exit(main())" "$@"\n')
    program.chmod(0o755)
    number = slurm.run(
        "sh", "-c", 'PATH="$0:$PATH" exec sbatch "$@"', str(program.parent), "--parsable", "--gpus-per-node=0",
        f"--output={log}", str(ROOT / "launch" / "slurm" / "run.sbatch"), "--out", str(run), *FLAGS,
        SLOTS="1", PYTHONPATH=str(ROOT),
    )  # fmt: skip
    beats = run / "logs" / "step1_sft.1"
    wait(lambda: (beat := read_beat(beats, 1)) is not None and beat.step >= 3, slurm, number, log)
    slurm.run("scancel", "--batch", "--signal=USR1", number)
    wait(
        lambda: slurm.job(number)["Restarts"] == "1" and slurm.job(number)["JobState"] == "PENDING", slurm, number, log
    )
    assert "step1_sft: stopped on request, state saved" in log.read_text()
    assert not list(Path.cwd().glob("hostfile.*"))
    saved = steps(run)
    assert 3 <= saved[-1] < 60
    # By itself it starts two minutes later. Within the second of its end a machine refuses it, which counts in seconds.
    time.sleep(2)
    slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now")
    wait(lambda: slurm.job(number)["JobState"] == "COMPLETED", slurm, number, log)
    assert slurm.job(number)["ExitCode"] == "0:0"
    assert "step1_sft: continues from its saved state; attempt 2" in log.read_text()
    assert steps(run) == list(range(1, 61))
    assert not list(Path.cwd().glob("hostfile.*"))


def steps(run: Path) -> list[int]:
    lines = [json.loads(line) for line in (run / "step1_sft" / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["split"] == "train"]


def wait(is_so, slurm: Slurm, number: str, log: Path) -> None:  # noqa: ANN001
    deadline = time.monotonic() + 400
    while not is_so():
        state = slurm.job(number)
        told = f"{state}\n{log.read_text() if log.exists() else ''}"
        assert state["JobState"] not in ("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"), told
        assert time.monotonic() < deadline, told
        time.sleep(0.3)
