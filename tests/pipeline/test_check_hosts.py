"""`rlhf check --hostfile` on four emulated machines, one of which is worse than the others in each test. Minutes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import hosts as emulated
from tests.hosts import INTERFACE, Host, Hosts, rlhf

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    reason = emulated.lacking("pdsh", "ip", "tc")
    if reason:
        pytest.skip(reason)
    with emulated.namespaces(tmp_path_factory.mktemp("hosts"), 4) as hosts:
        yield hosts


def check(hosts: Hosts, folder: Path, *flags: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and output of a check that is started on the first host."""
    report = folder / "report.json"
    argv = rlhf("check", "--recipe", "tiny_cpu", "--hostfile", str(hosts.hostfile()), "--out", str(folder / "run"))
    done = hosts[0].run(*argv, "--json", str(report), *flags, timeout=500)
    assert report.is_file(), done.stdout
    assert [path.name for path in folder.iterdir()] == ["report.json"], "nothing stays behind"
    return done.returncode, json.loads(report.read_text()), done.stdout


def on(host: Host, *argv: str) -> None:
    done = host.run(*argv)
    assert done.returncode == 0, done.stdout


def bad(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(each["check"], each["host"], each["status"]) for each in report["findings"]
            if each["status"] not in ("ok", "none")]  # fmt: skip


def test_a_slow_machine(four: Hosts, tmp_path: Path) -> None:
    """Its wires pass 50 Mbit/s: both pairs that it is in are slow, and it is named."""
    on(four[3], "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", "50mbit", "burst", "64kb",
       "latency", "400ms")  # fmt: skip
    try:
        code, report, out = check(four, tmp_path, "--link-mib", "2")
    finally:
        on(four[3], "tc", "qdisc", "del", "dev", INTERFACE, "root")
    assert code == 1, out
    links = "links of neighbours"
    assert sorted(bad(report)) == [(links, "node1 - node4", "slow"), (links, "node3 - node4", "slow")]
    assert "node4 is in all of them" in out
    speeds = {tuple(link["hosts"]): link["all_reduce_gb_s"] for link in report["links"]}
    assert 0.003 < speeds["node3", "node4"] < 0.01, "50 Mbit/s are 6 MB/s"
    assert speeds["node1", "node2"] > 5 * speeds["node3", "node4"]


def test_a_broken_link(four: Hosts, tmp_path: Path) -> None:
    """Two machines that the first one reaches do not reach one another: their pair fails, and what needs it."""
    on(four[1], "ip", "route", "add", "blackhole", four[2].address)
    try:
        # Neighbours on the same two cores make small tensors twice as slow now and then; that is not looked at here.
        flags = ("--include", "node1@node2@node3", "--link-mib", "1", "--link-seconds", "3", "--slow-link", "0")
        code, report, out = check(four, tmp_path, *flags)
    finally:
        on(four[1], "ip", "route", "del", "blackhole", four[2].address)
    assert code == 1, out
    assert bad(report) == [
        ("links of neighbours", "node2 - node3", "failed"),
        ("links of all", "all", "failed"),
    ], out
    assert "Connect timeout" in out


def test_machines_that_are_not_alike(four: Hosts, tmp_path: Path) -> None:
    """Another disk at the run's path, an own name that the others cannot use, and one that is off."""
    on(four[1], "mount", "-t", "tmpfs", "tmpfs", str(tmp_path))
    (four[2].folder / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node3\n10.77.0.11 node1\n")
    four[3].unplug()
    try:
        code, report, out = check(four, tmp_path)
    finally:
        on(four[1], "umount", str(tmp_path))
        four[3].plug_in()
    assert code == 1, out
    assert bad(report) == [
        ("ssh", "node4", "failed"),
        ("interfaces", "node3", "failed"),
        ("run folder", "node2", "failed"),
        ("links", "", "not checked"),
    ], out
    assert f"node2: run folder: {tmp_path} is another disk: a file written here is not there" in out
    assert "node3: interfaces: its own name, node3, stands for 127.0.1.1" in out
