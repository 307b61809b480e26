"""What ssh from this machine to others takes: a command that does nothing, and a stream of bytes. No torch."""

import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

STREAM_BYTES = 1 << 27
"""Sent to each host; ssh is told not to compress them."""
_ROUNDS = 5
"""Commands whose median counts; one before them does not."""


def measure_ssh(
    names: Sequence[str],
    ssh_command: Callable[[str], list[str]],
    *,
    environment: Mapping[str, str],
    timeout: float,
    size: int = STREAM_BYTES,
) -> dict[str, dict[str, float]]:
    """Time ssh to each host, one after the other, since they share this machine's network.

    Args:
        names: of the hosts.
        ssh_command: a host's name -> start of an ssh command that never asks for anything.
        environment: that ssh is started with.
        timeout: seconds that one command may take.
        size: bytes of the stream.

    Returns:
        Host -> `seconds` of `ssh HOST true`, login and end included, and `gb_s`, 10^9 bytes a second of a stream
        to it, without them.

    Raises:
        ValueError: ssh is not installed, or hosts cannot be reached; a line for each of these.
    """
    if names and shutil.which("ssh", path=environment.get("PATH")) is None:
        raise ValueError("ssh is not installed on this machine. Install openssh-client, or drop --hostfile.")
    found, problems = {}, []
    with tempfile.TemporaryFile() as stream:
        stream.truncate(size)
        for name in names:
            start = ssh_command(name)
            try:
                trip = _round_trip(start, environment, timeout)
                whole = _seconds([*start[:1], "-o", "Compression=no", *start[1:], "cat > /dev/null"],
                                 environment, timeout, stream)  # fmt: skip
            except ValueError as error:
                problems.append(f"host {name}: {error} Mend it, or take the host out of the hostfile.")
                continue
            # Of a stream of next to nothing the difference is noise.
            found[name] = {"seconds": trip, "gb_s": size / max(whole - trip, 0.1 * whole) / 1e9}
    if problems:
        raise ValueError("\n".join(problems))
    return found


def _round_trip(start: Sequence[str], environment: Mapping[str, str], timeout: float) -> float:
    times = [_seconds([*start, "true"], environment, timeout) for _ in range(_ROUNDS + 1)]
    return statistics.median(times[1:])


def _seconds(
    argv: Sequence[str], environment: Mapping[str, str], timeout: float, stream: BinaryIO | None = None
) -> float:
    """Seconds of a command whose input is the whole stream.

    Raises:
        ValueError: it failed or took too long.
    """
    said = f"`{argv[0]} ... {' '.join(argv[-2:])}`"
    if stream is not None:
        stream.seek(0)
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL if stream is None else stream, capture_output=True, env=dict(environment),
            timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ValueError(f"{said} took more than {timeout:g} s and was stopped.") from None
    seconds = time.perf_counter() - begin
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it says nothing"]
        raise ValueError(f"{said} ended with exit code {done.returncode}: {lines[-1].strip().rstrip('.')}.")
    return seconds
