"""A stage's folder as a run begins: claimed, with its log, and with where and how the run was started."""

import logging
import os
import platform
import random
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf import artifacts, distributed, heartbeat, host, states
from rlhf.stopping import REQUEST

HEARTBEAT = "heartbeat"
"""Folder of the ranks' records where `rlhf run` has named none."""
RECORDS = ("metrics.jsonl", "health.jsonl", "samples.jsonl", "histograms.json", "result.json", "state", "model")
_OUR_LOGGERS = ("rlhf", "step1_sft", "step2_reward", "step3_ppo", "__main__")


def environment(*, stage: str, seed: int) -> dict[str, Any]:
    """Where and how a run was started, for its report."""
    return {
        "stage": stage,
        "seed": seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join([Path(sys.executable).name, *_argv()]),
        "world_size": distributed.world_size(),
        "hardware": {
            "accelerator": distributed.accelerator_name() or "none (CPU)",
            "cpu": host.cpu_name(),
            "cpu_count": os.cpu_count(),
            "memory_bytes": host.memory_bytes(),
            "platform": platform.platform(),
        },
        "git_commit": artifacts.git_commit(),
        "versions": artifacts.versions(),
    }


def claim_folder(folder: Path, *, resume: bool) -> None:
    """Rank 0 looks and makes the folder; all ranks raise its error."""
    problem: tuple[type[OSError], str] | None = None
    if distributed.is_main():
        found = [name for name in RECORDS if (folder / name).exists()]
        state = states.states_of(folder)
        if resume and not states.complete(state):
            problem = (FileNotFoundError, f"nothing to resume: run.resume is true, but {state} holds no saved state. "
                       "Start over with run.resume=false; run.save_every > 0 writes states.")  # fmt: skip
        elif found and not resume:
            kind = "a finished run" if "result.json" in found else "an unfinished run"
            problem = (FileExistsError, f"run.out_dir={folder} holds {kind} ({', '.join(found)}). Use another "
                       "run.out_dir, remove the folder, or continue it with run.resume=true.")  # fmt: skip
        else:
            folder.mkdir(parents=True, exist_ok=True)
            # A run that goes on is not done, whatever an earlier attempt wrote.
            (folder / "result.json").unlink(missing_ok=True)
            (folder / HEARTBEAT / heartbeat.STUCK).unlink(missing_ok=True)
            (folder / REQUEST).unlink(missing_ok=True)
    problem = distributed.broadcast_object(problem)
    if problem is not None:
        raise problem[0](problem[1])


class _RankFilter(logging.Filter):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def filter(self, record: logging.LogRecord) -> bool:
        record.rank = self.rank
        return True


def configure_logging(folder: Path) -> None:
    """INFO of this code on rank 0, warnings elsewhere and of libraries; to stdout and the end of log.txt."""
    root = logging.getLogger()
    for handler in [h for h in root.handlers if (h.name or "").startswith("rlhf.")]:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if folder.is_dir():  # on another node without a shared disk there is none
        handlers.append(logging.FileHandler(folder / "log.txt", mode="a", encoding="utf-8", delay=True))
    for i, handler in enumerate(handlers):
        handler.set_name(f"rlhf.{i}")
        handler.addFilter(_RankFilter(distributed.rank()))
        handler.setFormatter(logging.Formatter("%(asctime)s [rank %(rank)d] %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    for name in _OUR_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO if distributed.is_main() else logging.WARNING)


def seed_generators(seed: int, *, share: int = 0) -> None:
    """Seed Python's, NumPy's and torch's generators.

    Args:
        seed: equal on all ranks.
        share: number of this rank among those that share its rows. Torch's generator, which draws dropout's masks, is
            another for each: with equal ones, columns of one row would be masked alike.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(int(np.random.SeedSequence([seed, share]).generate_state(1)[0]) if share else seed)


def _argv() -> list[str]:
    """Arguments after the interpreter, as typed: `-m package.module ...` instead of a file's path."""
    return list(getattr(sys, "orig_argv", [sys.executable, *sys.argv]))[1:]
