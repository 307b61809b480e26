"""Time all-reduce and all-gather over groups of machines: `python -m rlhf.links`, started by the deepspeed launcher.

Each group makes a process group of its own, one round of disjoint groups after the other, so that a link that is dead
fails the groups that need it and no other. The results are lines on stdout that start with MARK, one a group from its
first rank, and one from every rank that failed.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from rlhf import distributed

MARK = "RLHF-LINK "
_MOST_ROUNDS = 10
_ROUNDS_SECONDS = 1.5
_PATIENCE = 8
"""Limits that others wait for a group that fails: gloo tries a connection five times."""
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every group that this rank belongs to; 0, whatever was found."""
    parser = argparse.ArgumentParser(prog="rlhf.links", allow_abbrev=False)
    parser.add_argument(
        "--config", type=Path, required=True,
        help="JSON: host_of, the host's number of each rank; rounds of groups of hosts ([[[0], [1]], [[0, 1]]]: two "
        "alone, then both); num_bytes of the tensors; limit_seconds for one connection or collective",
    )  # fmt: skip
    config = json.loads(parser.parse_args(argv).config.read_text(encoding="utf-8"))
    limit = config["limit_seconds"]
    rank, world_size = distributed.rank(), distributed.world_size()
    store, host_of = distributed.open_store(limit), config["host_of"]
    for number, groups in enumerate(config["rounds"]):
        for hosts in groups:
            ranks = [other for other in range(world_size) if host_of[other] in hosts]
            if rank in ranks and len(ranks) > 1:
                _measure(hosts, ranks, host=host_of[rank], store=store, num_bytes=config["num_bytes"], limit=limit)
        distributed.meet(store, f"round {number}", seconds=_PATIENCE * limit)
    return 0


def _measure(
    hosts: Sequence[int], ranks: Sequence[int], *, host: int, store: distributed.Store, num_bytes: int, limit: float
) -> None:
    number = list(ranks).index(distributed.rank())
    name = "-".join(map(str, hosts))
    result: dict[str, object] = {"hosts": list(hosts), "from": host, "ranks": len(ranks)}
    try:
        with distributed.joined(store, f"group {name}", rank=number, size=len(ranks), timeout_seconds=limit) as joined:
            result |= {"num_bytes": num_bytes, **time_collectives(joined, num_bytes)}
    except (RuntimeError, ValueError) as error:
        # Without gloo's source lines and addresses, which may be those of an earlier group.
        text = re.sub(r"\[/\S+\] | \[(?:none|[\da-f.:]+)\](?::\d+)?", "", str(error))
        lines = [line for line in text.splitlines() if line.strip()]
        _say({**result, "error": lines[0] if lines else type(error).__name__})
        return
    if number == 0:
        _say(result)


def time_collectives(group: distributed.Group, num_bytes: int) -> dict[str, float]:
    """Seconds of an all-reduce and an all-gather of float32 tensors of so many bytes, of the fastest round.

    A round counts as long as its slowest rank's; the results are compared with what they must be. Collective.

    Raises:
        RuntimeError: a collective failed, or its result is wrong.
    """
    count = max(1, num_bytes // 4 // group.size)
    whole = torch.empty(count * group.size, device=distributed.device())
    part = torch.full((count,), group.rank + 1.0, device=whole.device)

    def reduce() -> float:
        whole.fill_(group.rank + 1.0)
        seconds, x = _timed(lambda: group.sum_(whole))
        _expect(x, group.size * (group.size + 1) / 2, "all-reduce")
        return seconds

    def gather() -> float:
        seconds, parts = _timed(lambda: group.gather(part))
        for other, x in enumerate(parts):
            _expect(x, other + 1.0, "all-gather")
        return seconds

    return {"all_reduce_seconds": _fastest(reduce, group), "all_gather_seconds": _fastest(gather, group)}


def _timed(collective: Callable[[], T]) -> tuple[float, T]:
    distributed.synchronise()
    started = time.perf_counter()
    result = collective()
    distributed.synchronise()
    return time.perf_counter() - started, result


def _expect(x: Tensor, value: float, name: str) -> None:
    low, high = x.aminmax()
    if low.item() != value or high.item() != value:
        raise RuntimeError(f"{name} gave values in [{low.item()}, {high.item()}] where all must be {value}")


def _fastest(once: Callable[[], float], group: distributed.Group) -> float:
    def slowest_rank() -> float:
        return max(group.gather_objects(once()))

    first = slowest_rank()  # makes connections and buffers
    rounds = max(1, min(_MOST_ROUNDS, int(_ROUNDS_SECONDS / max(first, 1e-9))))
    return min(slowest_rank() for _ in range(rounds))


def _say(result: dict[str, object]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
