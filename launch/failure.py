"""Which rank is at fault when a stage has failed, where it was, and what a person should read first. No torch."""

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.process import Outcome, RankExit, describe_code, describe_failure, exit_code
from launch.ranks import Ranks
from rlhf import heartbeat
from rlhf.heartbeat import Beat
from rlhf.watchdog import EXIT_ORPHANED, EXIT_STUCK

_LINES = 30
_STACK_LINES = 12
_STACK_RANKS = 8
_OUT_OF_MEMORY = re.compile(
    r"^(?:OutOfMemoryError|MemoryError)\b|can't allocate memory|not enough memory|out of memory|Cannot allocate memory",
    re.IGNORECASE,
)
_CAUSED_BY_OTHERS = re.compile(
    r"^Dist\w*Error\b|gloo|Connection (?:closed|reset) by peer|failed on rank \d+|Broken pipe|NCCL", re.IGNORECASE
)
# What mpirun and srun say about a rank that a signal has ended; srun has the signal's words, not its number.
_ENDED_BY_SIGNAL = (
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on signal (?P<number>\d+)"),
    re.compile(r"^srun: error: \S+: task (?P<rank>\d+): (?P<words>[A-Z][a-z]+(?: [a-z]+)*)", re.MULTILINE),
)
_FAILED_HOST = re.compile(r"^pdsh@\S+: (\S+): ssh exited with exit code \d+$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What is said about a failed attempt."""

    text: str
    """How it ended: host, rank, role, phase and step as far as they are known."""
    exit_code: int
    lines: list[str]
    """Last lines of the rank at fault, or of all ranks where it is not known."""
    lines_path: Path
    """Where they come from."""
    stacks: dict[int, list[str]]
    """Innermost calls of each rank, if it was stuck."""
    stacks_pattern: str
    """Files with all of them."""
    step: int
    """The furthest step that a rank was at."""


def explain(outcome: Outcome, ranks: Ranks, log_path: Path) -> Failure:
    """Find the rank at fault in what is known about all of them."""
    log_text = log_path.read_text(encoding="utf-8", errors="replace")
    beats = ranks.beats()
    known = {rank: beat for rank, beat in beats.items() if beat is not None}
    code = exit_code(outcome.returncode)
    if outcome.stuck is not None:
        rank: int | None = outcome.stuck.rank
        text, code = f"the run was stuck: {outcome.stuck.text}", EXIT_STUCK
    else:
        rank, text, end = _culprit(outcome, known, log_text)
        if end is not None and end.status is not None:
            # The launcher's own code is that of the lowest rank that failed, maybe because of this one.
            code = exit_code(os.waitstatus_to_exitcode(end.status))
        if rank is not None and rank in known:
            text += _details(known[rank], text, outcome, ranks.out_of_memory_kills())
            code = known[rank].exit_code or code
    lines, path = log_text.rstrip().splitlines()[-_LINES:], log_path
    own = ranks.last_lines(rank, _LINES) if rank is not None else []
    if rank is not None and own:
        lines, path = own, ranks.output_path(rank) or log_path
    stacked = range(ranks.world_size) if outcome.stuck is not None else ()
    stacks = {number: stack for number in stacked if (stack := ranks.main_stack(number, _STACK_LINES))}
    return Failure(
        text=text,
        exit_code=code,
        lines=lines,
        lines_path=path,
        stacks=dict(list(stacks.items())[:_STACK_RANKS]),
        stacks_pattern=str(heartbeat.stacks_path(ranks.folder, 0)).replace("rank0", "rank*"),
        step=max((beat.step for beat in known.values()), default=0),
    )


def _culprit(outcome: Outcome, beats: Mapping[int, Beat], log_text: str) -> tuple[int | None, str, RankExit | None]:
    """The first rank that ended by itself: by a signal, or with an exception that no other rank caused.

    Returns:
        The rank, what is said of it, and its end where that is what is said.
    """
    killed = [end for end in outcome.rank_exits if _is_by_signal(end)]
    raised = [beat for beat in beats.values() if beat.state == "failed" and not _CAUSED_BY_OTHERS.search(beat.error)]
    first_killed = min(killed, key=lambda end: end.time, default=None)
    first_raised = min(raised, key=lambda beat: beat.error_time, default=None)
    if first_killed and not (first_raised and first_raised.error_time < first_killed.time):
        return first_killed.rank, describe_failure(outcome, log_text, end=first_killed), first_killed
    if first_raised:
        verb = "ran out of memory" if _OUT_OF_MEMORY.search(first_raised.error) else "failed"
        return first_raised.rank, f"rank {first_raised.rank} {verb}: {first_raised.error}", None
    if outcome.rank_exit is not None:
        return outcome.rank_exit.rank, describe_failure(outcome, log_text), outcome.rank_exit
    ended = _ended_by_signal(log_text)
    if ended is not None:
        return ended[0], f"rank {ended[0]} ended with {describe_code(-ended[1])}", None
    text = describe_failure(outcome, log_text)
    lost = _lost_ranks(_FAILED_HOST.findall(log_text), beats)
    if not lost:
        return None, text, None
    names = ", ".join(map(str, lost))
    return lost[0], f"{text}; rank{'s' if len(lost) > 1 else ''} {names} of it left no word", None


def _ended_by_signal(log_text: str) -> tuple[int, int] | None:
    """Rank and signal of the first that mpirun or srun names; SIGTERM is theirs."""
    numbers = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
    for pattern in _ENDED_BY_SIGNAL:
        for match in pattern.finditer(log_text):
            words = match.groupdict()
            number = int(words["number"]) if "number" in words else numbers.get(words["words"], signal.SIGTERM)
            if number != signal.SIGTERM:
                return int(words["rank"]), number
    return None


def _lost_ranks(hosts: Sequence[str], beats: Mapping[int, Beat]) -> list[int]:
    """Ranks of the first failed host that neither ended nor said why they failed."""
    short = {host.rpartition("@")[2].split(".")[0] for host in hosts[:1]}
    return [beat.rank for beat in beats.values() if beat.state == "running" and beat.host.split(".")[0] in short]


def _is_by_signal(end: RankExit) -> bool:
    return end.status is not None and os.WIFSIGNALED(end.status) and os.WTERMSIG(end.status) != signal.SIGTERM


def _details(beat: Beat, text: str, outcome: Outcome, out_of_memory_kills: int | None) -> str:
    """Where the rank was, and what a code or a signal means here."""
    where = f". When last heard of: {beat}"
    if "SIGKILL" in text:
        memory = f"it held {beat.resident_bytes / 1e9:.1f} GB, its machine had {beat.available_bytes / 1e9:.1f} GB left"
        if out_of_memory_kills:
            return f"{where}. The kernel's out-of-memory killer struck on this machine meanwhile; {memory}"
        return f"{where}; {memory}. SIGKILL comes from the kernel's out-of-memory killer, a batch system or a person"
    if describe_code(EXIT_ORPHANED) in text:
        return f"{where}. It ended because the launcher was gone"
    return where
