"""The real `deepspeed` launcher under supervision: a rank that dies, and Ctrl-C. Fault row F10. Two launches."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from launch.command import stage_command
from launch.hostfile import Host
from launch.placement import Placement
from launch.process import Interrupt, Outcome, catch_signals, describe_failure, exit_code, run_watched
from launch.ranks import Ranks
from rlhf.config import WatchdogConfig
from rlhf.host import free_port

PROGRAM = """
import os, pathlib, sys, time
folder, rank = pathlib.Path(sys.argv[sys.argv.index("--config") + 1]), int(os.environ["RANK"])
(folder / f"rank{rank}").write_text(f"{os.getpid()} {os.environ['WORLD_SIZE']} {os.environ['DS_ACCELERATOR']}")
print(f"[rank {rank}] ready", flush=True)
if rank == 1 and (folder / "die").exists():
    time.sleep(2)
    os.kill(os.getpid(), 9)
time.sleep(120)
"""


def launched(folder: Path, on_tick=lambda: None, interrupt: Interrupt | None = None) -> tuple[Outcome, str]:  # noqa: ANN001
    (folder / "stage_program.py").write_text(PROGRAM)
    placement = Placement(hosts=(Host("localhost", (0, 1)),), num_gpus=2)
    outcome = run_watched(
        stage_command("stage_program", folder, placement, port=free_port(), rank_logs=folder / "ranks"),
        environment={**os.environ, "PYTHONPATH": str(folder), "DS_ACCELERATOR": "cpu"},
        log_path=folder / "log",
        interrupt=interrupt or Interrupt(),
        on_tick=on_tick,
        ranks=Ranks(folder / "ranks", world_size=2, config=WatchdogConfig()),
    )
    return outcome, (folder / "log").read_text()


def assert_ranks_are_gone(folder: Path) -> None:
    for rank in (0, 1):
        pid, world_size, accelerator = (folder / f"rank{rank}").read_text().split()
        assert (world_size, accelerator) == ("2", "cpu")
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


def test_f10_killed_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "die").touch()
    outcome, log = launched(tmp_path)
    assert describe_failure(outcome, log) == "rank 1 ended with signal SIGKILL"
    assert exit_code(outcome.returncode) == 128 + signal.SIGKILL
    assert "[rank 1] ready" in log and log.startswith(f"$ {sys.executable} -m deepspeed.launcher.runner")
    assert_ranks_are_gone(tmp_path)


def test_ctrl_c_ends_launcher_and_ranks(tmp_path: Path) -> None:
    started = time.monotonic()

    def press_when_ready() -> None:
        if (tmp_path / "rank0").exists() and (tmp_path / "rank1").exists() and not interrupt.count:
            os.kill(os.getpid(), signal.SIGINT)

    with catch_signals() as interrupt:
        outcome, _ = launched(tmp_path, press_when_ready, interrupt)
    assert outcome.interrupted_by == signal.SIGINT
    assert_ranks_are_gone(tmp_path)
    assert time.monotonic() - started < 60
