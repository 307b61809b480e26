"""Time collectives over each machine, each pair of neighbours and all, through the real launcher. No torch."""

import json
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any

from launch import command, process
from launch.cluster.finding import Finding
from launch.placement import Placement

CPU_MIB, ACCELERATOR_MIB = 8, 64
"""Size of the tensors where no flag says it."""
_MARK = "RLHF-LINK "
_START_SECONDS = 180
"""For Python, torch and deepspeed to load on all machines."""
_FEW = 3
"""Up to so many of a kind, the fastest is the measure: of a ring of three, one slow machine makes two pairs slow."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A group of machines and how fast its collectives were."""

    kind: str
    """host, pair or all."""
    hosts: tuple[str, ...]
    ranks: int
    num_bytes: int = 0
    all_reduce_seconds: float = 0.0
    all_gather_seconds: float = 0.0
    errors: Mapping[str, str] = field(default_factory=dict)
    """Host -> why its ranks failed."""

    def __str__(self) -> str:
        return self.hosts[0] if self.kind == "host" else " - ".join(self.hosts) if self.kind == "pair" else "all"

    @property
    def reduce_gb_s(self) -> float:
        """Bytes a second that each rank must send and take at least in an all-reduce, 10^9."""
        return 2 * (self.ranks - 1) / self.ranks * self.num_bytes / self.all_reduce_seconds / 1e9

    @property
    def gather_gb_s(self) -> float:
        """The same for an all-gather."""
        return (self.ranks - 1) / self.ranks * self.num_bytes / self.all_gather_seconds / 1e9


def rounds_of_groups(num_ranks: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """Groups of machines, in rounds of groups that share no machine: each alone, neighbours in a ring, all.

    Args:
        num_ranks: of each machine; one with a single rank has nothing to measure alone.
    """
    count = len(num_ranks)
    rounds: list[list[tuple[int, ...]]] = [[(host,) for host, ranks in enumerate(num_ranks) if ranks > 1]]
    if count == 2:
        rounds.append([(0, 1)])
    pairs = [(host, (host + 1) % count) for host in range(count)] if count > 2 else []
    last = pairs[-1:] if count % 2 else []
    rest = pairs[: len(pairs) - len(last)]
    for each in (rest[::2], rest[1::2], last):
        rounds.append([(min(pair), max(pair)) for pair in each])
    if count > 2:
        rounds.append([tuple(range(count))])
    return [each for each in rounds if each]


def measure(
    placement: Placement,
    *,
    environment: Mapping[str, str],
    folder: Path,
    num_bytes: int,
    limit_seconds: float,
    port: int,
    interrupt: process.Interrupt,
) -> tuple[list[Link], str]:
    """Run `rlhf.links` on the placement and read what its ranks say.

    Args:
        placement: where ranks start.
        environment: of the launcher.
        folder: empty, that all machines see; ranks write to `rank_folder(folder)`.
        num_bytes: of the tensors.
        limit_seconds: for one connection or collective.
        port: of rank 0.
        interrupt: of `process.catch_signals`.

    Returns:
        A link for each group, without seconds where it failed, and how the launcher ended if not well.
    """
    rounds = rounds_of_groups([len(host.slots) for host in placement.hosts])
    if not rounds:
        return [], ""
    config_path, log_path, ranks = folder / "links.json", folder / "links.log", rank_folder(folder)
    config = {
        # The launcher counts ranks through the hosts in their order.
        "host_of": [number for number, host in enumerate(placement.hosts) for _ in host.slots],
        "rounds": rounds,
        "num_bytes": num_bytes,
        "limit_seconds": limit_seconds,
    }
    config_path.write_text(json.dumps(config), encoding="utf-8")
    own = process.Interrupt()
    # Each round connects and runs its collectives; one that failed makes the next one wait for its ranks.
    deadline = time.monotonic() + _START_SECONDS + 10 * limit_seconds * len(rounds)

    def tick() -> None:
        own.count, own.signum = interrupt.count, interrupt.signum
        if time.monotonic() > deadline:
            own.signum = signal.SIGALRM

    outcome = process.run_watched(
        command.stage_command("rlhf.links", config_path, placement, port=port, rank_logs=ranks),
        environment=environment, log_path=log_path, interrupt=own, on_tick=tick,
        ends_remote_ranks=placement.is_remote,
    )  # fmt: skip
    logs = [path.read_text(encoding="utf-8", errors="replace") for path in [log_path, *sorted(ranks.iterdir())]]
    links = read_links("\n".join(logs), placement, rounds)
    if outcome.interrupted_by == signal.SIGALRM:
        return links, "the measurement did not end in time"
    if outcome.returncode == 0 and not outcome.num_leftover:
        return links, ""
    lines = [line for log in logs for line in log.splitlines() if re.match(r"(?:\S+: )?\w*(?:Error|error)\b", line)]
    return links, process.describe_failure(outcome, logs[0]) + (f" ({lines[-1].strip()[:300]})" if lines else "")


def rank_folder(folder: Path) -> Path:
    """Output of the ranks, placed as in the folder of a run."""
    return folder / "logs" / "links.1"


def read_links(log: str, placement: Placement, rounds: Sequence[Sequence[tuple[int, ...]]]) -> list[Link]:
    """Results of all groups from the lines of their ranks."""
    said: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for body in re.findall(rf"{_MARK}(.*)$", log, re.MULTILINE):
        entry = json.loads(body)
        said.setdefault(tuple(entry["hosts"]), []).append(entry)
    names = [host.name for host in placement.hosts]
    links = []
    for group in (group for groups in rounds for group in groups):
        hosts = tuple(names[number] for number in group)
        entries = said.get(group, [])
        errors = {names[entry["from"]]: entry["error"] for entry in entries if "error" in entry}
        good = next((entry for entry in entries if "error" not in entry), None)
        if good is None and not errors:
            errors = dict.fromkeys(hosts, "no result")
        links.append(Link(
            kind="host" if len(group) == 1 else "all" if len(group) == len(names) > 2 else "pair",
            hosts=hosts,
            ranks=sum(len(placement.hosts[number].slots) for number in group),
            errors=errors,
            num_bytes=good["num_bytes"] if good else 0,
            all_reduce_seconds=good["all_reduce_seconds"] if good else 0.0,
            all_gather_seconds=good["all_gather_seconds"] if good else 0.0,
        ))  # fmt: skip
    return links


def link_findings(links: Sequence[Link], *, ended: str, slow_share: float) -> Iterator[Finding]:
    """Broken groups, and groups slower than `slow_share` of what is usual among groups of their kind."""
    names = {"host": "links in a host", "pair": "links of neighbours", "all": "links of all"}
    for kind, check in names.items():
        group = [link for link in links if link.kind == kind]
        whole = [link for link in group if not link.errors]
        usual = {name: _usual([_speeds(link)[name] for link in whole]) for name in ("all-reduce", "all-gather")}
        slow = [link for link in whole if _slow(link, usual, slow_share)]
        common = _common(slow + [link for link in group if link.errors])
        hint = f" {common} is in all of them." if kind == "pair" and common else ""
        for link in group:
            if link.errors:
                why = "; ".join(f"{host}: {error}" for host, error in link.errors.items())
                yield Finding(
                    check=check, host=str(link), status="failed", found=f"broken: {why}{'; ' + ended if ended else ''}",
                    expected="collectives that work",
                    repair="See cables, firewalls (all ports must be open between the machines), and the interface "
                    "variables." + hint,
                )  # fmt: skip
                continue
            rates = f"all-reduce {link.reduce_gb_s:.3g} GB/s, all-gather {link.gather_gb_s:.3g} GB/s"
            if link not in slow:
                yield Finding(check=check, host=str(link), status="ok", found=rates)
                continue
            expected = ", ".join(f"{name} {rate:.3g}" for name, rate in usual.items())
            yield Finding(
                check=check, host=str(link), status="slow", found=rates,
                expected=f"{slow_share:g} of the usual ({expected} GB/s) or more",
                repair="See cable, port rate, MTU and other load; leave the machine out with --exclude." + hint,
            )  # fmt: skip


def _speeds(link: Link) -> dict[str, float]:
    return {"all-reduce": link.reduce_gb_s, "all-gather": link.gather_gb_s}


def _usual(speeds: Sequence[float]) -> float:
    if not speeds:
        return 0.0
    return median_high(speeds) if len(speeds) > _FEW else max(speeds)


def _slow(link: Link, usual: Mapping[str, float], share: float) -> bool:
    return any(speed < share * usual[name] for name, speed in _speeds(link).items())


def _common(links: Sequence[Link]) -> str:
    """The one machine that is in several pairs at once; "" if there is none."""
    shared = set(links[0].hosts).intersection(*(link.hosts for link in links)) if len(links) > 1 else set()
    return shared.pop() if len(shared) == 1 else ""
