"""Talk with the probe on one machine, through ssh or here, and with many machines at once. No torch."""

import json
import os
import resource
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from launch.cluster import probe

CONNECT_SECONDS = 8
"""Limit of ssh for a connection."""
_MOST_AT_ONCE = 32
_SOURCE = Path(probe.__file__).read_bytes()
_START = f"import sys; exec(compile(sys.stdin.buffer.read({len(_SOURCE)}), 'probe.py', 'exec'))"
T = TypeVar("T")
R = TypeVar("R")


class SessionError(RuntimeError):
    """A machine could not be reached, or does not answer any more."""


def ssh_command(name: str, *, seconds: int = CONNECT_SECONDS) -> list[str]:
    """Start of an ssh command that never asks, and gives up on a dead line."""
    return ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={seconds}", "-o", "ServerAliveInterval=5",
            "-o", "ServerAliveCountMax=3", name]  # fmt: skip


def allow_open_files(number: int) -> None:
    """Let this process have so many files open, as far as it may: a session has three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def at_once(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Results of a function for each item, in their order, up to 32 at a time."""
    if not items:
        return []
    with ThreadPoolExecutor(max_workers=min(_MOST_AT_ONCE, len(items))) as pool:
        return list(pool.map(function, items))


class Session:
    """A probe that runs on a machine until `close`; one request at a time."""

    def __init__(self, name: str | None, *, python: str = sys.executable) -> None:
        """Start it.

        Args:
            name: for ssh; None: this machine, without ssh.
            python: interpreter that ranks get; where it is not there, `python3` answers in its place.
        """
        if name is None:
            argv = [python, "-u", "-c", _START]
        else:
            start = f"-u -c {shlex.quote(_START)}"
            python = shlex.quote(python)
            command = f"test -x {python} && exec {python} {start}; exec python3 {start}"
            argv = [*ssh_command(name), f"exec sh -c {shlex.quote(command)}"]
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the process that writes to it
        self._buffer = b""
        try:
            self._process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, start_new_session=True
            )
        except OSError as error:
            self._said.close()
            raise SessionError(f"{argv[0]} could not be started: {error.strerror}") from None
        assert self._process.stdin is not None
        self._waiting = _SOURCE

    def ask(self, do: str, *, seconds: float, **arguments: Any) -> dict[str, Any]:
        """Answer to a request.

        Raises:
            SessionError: the machine cannot be reached, does not answer in time, or the request failed there.
        """
        self._send(json.dumps({"do": do, **arguments}).encode() + b"\n")
        mark, deadline = probe.MARK.encode(), time.monotonic() + seconds
        while True:
            line = self._line(deadline, seconds)
            if line.startswith(mark):
                answer: dict[str, Any] = json.loads(line[len(mark) :])
                if set(answer) == {"error"}:
                    raise SessionError(answer["error"])
                return answer

    def close(self) -> None:
        """End the probe."""
        for stream in (self._process.stdin, self._process.stdout):
            try:
                if stream is not None:
                    stream.close()
            except OSError:  # what was to be sent to a machine that is gone
                continue
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _send(self, line: bytes) -> None:
        data, self._waiting = self._waiting + line, b""
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except OSError:
            raise SessionError(self._why()) from None

    def _line(self, deadline: float, seconds: float) -> bytes:
        assert self._process.stdout is not None
        stream = self._process.stdout.fileno()
        poll = select.poll()  # select() itself takes no descriptor above 1023
        poll.register(stream, select.POLLIN)
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not poll.poll(1000 * left):
                raise SessionError(f"no answer within {seconds:g} s")
            data = os.read(stream, 1 << 16)
            if not data:
                raise SessionError(self._why())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _why(self) -> str:
        """Why it ended: the last line it said, or its exit code."""
        try:
            code = self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            return "closed the connection"
        self._said.seek(0)
        lines = [line for line in self._said.read().decode("utf-8", "replace").splitlines() if line.strip()]
        return f"exit code {code}{': ' + lines[-1].strip() if lines else ''}"
