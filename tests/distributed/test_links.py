"""`rlhf.links` on three ranks: what it says of groups that work, and of one in which a rank does not come."""

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

from rlhf import distributed, links
from rlhf.host import free_port
from tests.distributed.harness import Ranks


def measure(config: str, port: int, absent: list[int]) -> list[dict[str, Any]]:
    """Run it; rank 1 stays away from one group."""
    harness_port = os.environ["MASTER_PORT"]
    os.environ["MASTER_PORT"] = str(port)
    joined = links._measure

    def stay_away(group: list[int], ranks: list[int], **arguments: Any) -> None:
        if group != absent or distributed.rank() != 1:
            joined(group, ranks, **arguments)

    links._measure = stay_away
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert links.main(["--config", config]) == 0
    os.environ["MASTER_PORT"] = harness_port
    distributed.init()  # the harness ends a job with a barrier
    return [json.loads(line.removeprefix(links.MARK)) for line in out.getvalue().splitlines()]


def run(ranks: Ranks, folder: Path, rounds: list[Any], hosts: list[int], absent: list[int]) -> list[Any]:
    path = folder / "links.json"
    path.write_text(json.dumps({"host_of": hosts, "rounds": rounds, "num_bytes": 120_000, "limit_seconds": 2.0}))
    return ranks(measure, world_size=3, config=str(path), port=free_port(), absent=absent)


def test_the_first_rank_of_a_group_says_how_fast_it_was(ranks: Ranks, tmp_path: Path) -> None:
    """A machine with two ranks alone, one with a single rank, which has no link, and both."""
    first, second, third = run(ranks, tmp_path, [[[0], [1]], [[0, 1]]], hosts=[0, 0, 1], absent=[])
    assert second == third == []
    assert [(each["hosts"], each["ranks"], each["from"]) for each in first] == [([0], 2, 0), ([0, 1], 3, 0)]
    for each in first:
        assert each["num_bytes"] == 120_000
        assert 0 < each["all_reduce_seconds"] < 2 and 0 < each["all_gather_seconds"] < 2


def test_a_rank_that_does_not_come_fails_its_group_alone(ranks: Ranks, tmp_path: Path) -> None:
    """Groups before and after are measured, also by the rank that waited in vain."""
    said = run(ranks, tmp_path, [[[0, 1]], [[1, 2]], [[0, 2]]], hosts=[0, 1, 2], absent=[1, 2])
    assert [[each["hosts"] for each in of] for of in said] == [[[0, 1], [0, 2]], [], [[1, 2]]]
    assert all("error" not in each for each in said[0])
    assert "timeout" in said[2][0]["error"]
