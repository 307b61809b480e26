"""Times of ssh, by a program of that name that waits as long as it is told."""

import os
from pathlib import Path

import pytest

from rlhf.bench.ssh import measure_ssh

# Says no on `closed`, waits for ever on `silent`; a command takes 0.2 s, a stream half a second more on `slow`.
PROGRAM = """#!/bin/sh
echo "$@" >> "$LOG"
for last; do :; done
case "$*" in
  *closed*) echo "first" >&2; echo "Permission denied (publickey)." >&2; exit 255 ;;
  *silent*) exec sleep 60 ;;
esac
sleep 0.2
[ "$last" = true ] && exit 0
case "$*" in *slow*) sleep 0.5 ;; esac
exec wc -c >> "$LOG"
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(PROGRAM)
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "LOG": str(tmp_path / "log")}


def command(name: str) -> list[str]:
    return ["ssh", "-o", "BatchMode=yes", name]


def test_a_trip_and_a_stream_without_its_trip(environment: dict[str, str], tmp_path: Path) -> None:
    found = measure_ssh(["fast", "slow"], command, environment=environment, timeout=20, size=10_000_000)
    assert list(found) == ["fast", "slow"]
    assert 0.2 <= found["slow"]["seconds"] < 0.6, "of the command alone, not of the stream"
    # 10 MB in half a second, and what starting programs adds on a busy machine.
    assert 0.01 < found["slow"]["gb_s"] <= 0.025 < found["fast"]["gb_s"]
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines.count("10000000") == 2, "the whole stream went to each host"
    assert lines.count("-o BatchMode=yes slow true") == 6
    assert "-o Compression=no -o BatchMode=yes slow cat > /dev/null" in lines


def test_every_host_that_cannot_be_used_is_named(environment: dict[str, str]) -> None:
    with pytest.raises(ValueError) as raised:
        measure_ssh(["closed", "fast", "silent"], command, environment=environment, timeout=1, size=1000)
    assert str(raised.value).splitlines() == [
        "host closed: `ssh ... closed true` ended with exit code 255: Permission denied (publickey). "
        "Mend it, or take the host out of the hostfile.",
        "host silent: `ssh ... silent true` took more than 1 s and was stopped. "
        "Mend it, or take the host out of the hostfile.",
    ]


def test_without_hosts_nothing_is_started_and_without_ssh_it_is_said(tmp_path: Path) -> None:
    nothing = {"PATH": str(tmp_path)}
    assert measure_ssh([], command, environment=nothing, timeout=1) == {}
    with pytest.raises(ValueError, match="ssh is not installed on this machine. Install openssh-client"):
        measure_ssh(["fast"], command, environment=nothing, timeout=1)
