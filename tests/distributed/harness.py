"""Run a function on several ranks in about two seconds.

Importing torch, DeepSpeed and transformers takes far longer than a test. A server process imports them once; for each
job it forks the ranks, which join over gloo as if a launcher had started them. pytest's own process is never forked:
other tests leave process groups and threads in it.

A job is a module-level function of a test file. Its arguments and its result are pickled. A rank that fails, or a job
over its limit (then with the stack of every rank), fails the test with that rank's output; no process is left.
"""

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUTPUT_LINES = 40
# How long the other ranks may go on after one has failed.
GRACE_SECONDS = 3.0


class RanksFailed(AssertionError):
    """A job failed; the message holds the output of the ranks that did."""


@dataclass(frozen=True)
class _Job:
    file: str
    function: str
    arguments: dict[str, Any]
    world_size: int
    timeout: float


class Ranks:
    """The server, seen from pytest: call it with a job. Starts at the first call."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None

    def __call__(
        self, function: Callable[..., Any], *, world_size: int = 2, timeout: float = 60, **arguments: Any
    ) -> list[Any]:
        """Run `function(**arguments)` on every rank; its results in rank order.

        Args:
            function: module-level; the process group is its own affair (`engine.setup`).
            world_size: number of ranks.
            timeout: seconds until all ranks are ended.
            arguments: picklable.

        Raises:
            RanksFailed: a rank raised, died or did not end in time.
        """
        job = _Job(
            str(sys.modules[function.__module__].__file__), function.__qualname__, arguments, world_size, timeout
        )
        server = self._start()
        assert server.stdin is not None and server.stdout is not None
        pickle.dump(job, server.stdin)
        server.stdin.flush()
        try:
            results, failure = pickle.load(server.stdout)
        except EOFError:
            self.close()
            raise RanksFailed("the server of the ranks died; its stderr is above.") from None
        if failure:
            raise RanksFailed(failure)
        return results

    def _start(self) -> subprocess.Popen[bytes]:
        if self._server is None:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "false",
            }
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                environment.pop(name, None)
            self._server = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, cwd=ROOT
            )
        return self._server

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            assert self._server.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._server.stdin.close()
            self._server.wait(timeout=30)
            self._server = None


def _serve() -> None:
    """Read jobs from stdin until it closes; answer on the real stdout."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints, prints to stderr
    jobs = sys.stdin.buffer
    import torch
    import transformers.models.llama.modeling_llama
    import transformers.models.opt.modeling_opt  # noqa: F401  warm, the ones above too

    import rlhf.checkpoint
    import rlhf.engine  # noqa: F401  warm

    for name in ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.zero.stage3"):
        importlib.import_module(name)  # what DeepSpeed imports at its first step, 2 s
    torch.set_num_threads(1)
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        folder = Path(tempfile.mkdtemp(prefix="rlhf_ranks_"))
        try:
            pickle.dump(_run(job, folder), answers)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        answers.flush()


def _run(job: _Job, folder: Path) -> tuple[list[Any], str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = {}
    for rank in range(job.world_size):
        pid = os.fork()
        if pid == 0:
            _rank(job, folder, rank, port)
        running[pid] = rank
    codes = _wait(running, job.timeout)
    bad = {rank: code for rank, code in codes.items() if code != 0}
    if bad:
        return [], "\n".join(_describe(job, folder, rank, code) for rank, code in sorted(bad.items()))
    return [pickle.loads((folder / f"result_{rank}").read_bytes()) for rank in range(job.world_size)], ""


def _wait(running: dict[int, int], timeout: float) -> dict[int, int | None]:
    """Exit code of each rank; None for those that had to be ended."""
    codes: dict[int, int | None] = {}
    deadline = time.monotonic() + timeout
    while running and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.02)
            continue
        code = os.waitstatus_to_exitcode(status)
        codes[running.pop(pid)] = code
        if code != 0:
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for pid in running:
        os.kill(pid, signal.SIGUSR1)  # every thread's stack, by faulthandler
    if running:
        time.sleep(0.5)
    for pid, rank in running.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        codes[rank] = None
    return codes


def _describe(job: _Job, folder: Path, rank: int, code: int | None) -> str:
    ended = "was ended while it waited" if code is None else f"exit code {code}"
    lines = (folder / f"output_{rank}").read_text(errors="replace").splitlines()[-OUTPUT_LINES:]
    return f"---- {job.function}: rank {rank} of {job.world_size}, {ended}\n" + "\n".join(lines)


def _rank(job: _Job, folder: Path, rank: int, port: int) -> None:
    """Be one rank; never returns."""
    output = os.open(folder / f"output_{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.world_size, "LOCAL_SIZE": job.world_size}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        spec = importlib.util.spec_from_file_location(f"job_{Path(job.file).stem}", job.file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        result = getattr(module, job.function)(**job.arguments)
        (folder / f"result_{rank}").write_bytes(pickle.dumps(result))
        from rlhf import distributed

        distributed.barrier()  # rank 0 holds the store that the others still need
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    # Jobs are pickled by pytest's process under this module's real name.
    sys.path.insert(0, str(ROOT))
    from tests.distributed.harness import _serve as serve

    serve()
