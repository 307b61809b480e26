"""Groups whose collectives are timed, and which of them are slow or broken. Measured for real: tests/pipeline."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from launch.cluster.finding import Finding
from launch.cluster.links import Link, link_findings, read_links, rounds_of_groups
from launch.hostfile import Host
from launch.placement import Placement


@pytest.mark.parametrize("count", range(1, 9))
def test_each_round_uses_a_machine_once(count: int) -> None:
    rounds = rounds_of_groups([2] * count)
    for groups in rounds:
        used = [host for group in groups for host in group]
        assert len(used) == len(set(used))
    pairs = {group for groups in rounds for group in groups if len(group) == 2}
    ring = {tuple(sorted((host, (host + 1) % count))) for host in range(count)} if count > 1 else set()
    assert pairs == ring
    assert [(host,) for host in range(count)] == [group for groups in rounds for group in groups if len(group) == 1]
    assert count < 3 or rounds[-1] == [tuple(range(count))]


def test_a_machine_with_one_rank_has_no_link_of_its_own() -> None:
    assert rounds_of_groups([1, 2]) == [[(1,)], [(0, 1)]]
    assert rounds_of_groups([1]) == []


def ring(seconds: Mapping[tuple[str, str], float], errors: Mapping[tuple[str, str], str]) -> list[Link]:
    pairs = [*seconds, *errors]
    return [
        Link(kind="pair", hosts=pair, ranks=2, num_bytes=10**9, all_reduce_seconds=seconds.get(pair, 0.0),
             all_gather_seconds=seconds.get(pair, 0.0), errors={pair[0]: errors[pair]} if pair in errors else {})
        for pair in pairs
    ]  # fmt: skip


def judged(links: list[Link], share: float = 0.5, ended: str = "") -> dict[str, Finding]:
    return {finding.host: finding for finding in link_findings(links, ended=ended, slow_share=share)}


def test_rates() -> None:
    """Bytes that a rank must move at least: 2 (n-1)/n of an all-reduce, (n-1)/n of an all-gather."""
    link = Link(kind="all", hosts=("a",), ranks=4, num_bytes=8 * 10**9, all_reduce_seconds=2, all_gather_seconds=1)
    assert link.reduce_gb_s == pytest.approx(6) and link.gather_gb_s == pytest.approx(6)


def test_a_slow_machine_among_four() -> None:
    """Half of the pairs are slow, and the machine they share is named."""
    links = ring({("a", "b"): 1.0, ("b", "c"): 1.1, ("c", "d"): 2.5, ("a", "d"): 2.4}, {})
    found = judged(links)
    assert {name: each.status for name, each in found.items()} == {
        "a - b": "ok", "b - c": "ok", "c - d": "slow", "a - d": "slow",
    }  # fmt: skip
    slow = found["c - d"]
    assert "all-reduce 0.4 GB/s" in slow.found and "0.5 of the usual (all-reduce 0.909, " in slow.expected
    assert "d is in all of them" in slow.repair
    assert {each.status for each in judged(links, share=0.3).values()} == {"ok"}


def test_of_three_the_fastest_is_the_measure() -> None:
    found = judged(ring({("a", "b"): 1.0, ("b", "c"): 9.0, ("a", "c"): 9.0}, {}))
    assert [each.status for each in found.values()] == ["ok", "slow", "slow"]
    assert "c is in all of them" in found["b - c"].repair


def test_one_pair_has_nothing_to_compare_with() -> None:
    assert judged(ring({("a", "b"): 99.0}, {}))["a - b"].status == "ok"


def test_a_broken_link() -> None:
    found = judged(ring({("a", "b"): 1.0, ("a", "c"): 1.0}, {("b", "c"): "connection timed out"}), ended="pdsh failed")
    assert found["a - b"].status == found["a - c"].status == "ok"
    assert found["b - c"].status == "failed"
    assert found["b - c"].found == "broken: b: connection timed out; pdsh failed"


def line(**entry: object) -> str:
    return f"[2026-12-01 05:00:00] RLHF-LINK {json.dumps(entry)}"


def test_results_are_read_from_the_ranks_lines() -> None:
    placement = Placement(hosts=(Host("n1", (0, 1)), Host("n2", (0,)), Host("n3", (0,))), hostfile=Path("/h"))
    timed = {"num_bytes": 1000, "all_reduce_seconds": 0.5, "all_gather_seconds": 0.25, "from": 0}
    log = "\n".join([
        "noise",
        line(hosts=[0], ranks=2, **timed),
        line(hosts=[0, 1], ranks=3, **timed),
        line(hosts=[1, 2], ranks=2, **{"from": 2}, error="Connection refused"),
    ])  # fmt: skip
    own, first, second, third = read_links(log, placement, [[(0,)], [(0, 1)], [(1, 2)], [(0, 1, 2)]])
    assert (own.kind, own.hosts, own.ranks, own.all_reduce_seconds) == ("host", ("n1",), 2, 0.5)
    assert (first.kind, first.hosts, first.errors) == ("pair", ("n1", "n2"), {})
    assert (second.kind, second.errors) == ("pair", {"n3": "Connection refused"})
    assert (third.kind, third.errors) == ("all", {"n1": "no result", "n2": "no result", "n3": "no result"})
