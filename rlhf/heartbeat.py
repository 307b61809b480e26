"""What this process is doing, noted in memory, and the record of it that every rank keeps on disk. No torch.

The loop notes where it is with plain assignments; a thread of the same process (`rlhf.watchdog`) writes them down once
a second, so a rank that computes pays nothing and one that is stuck is still seen. There is no collective: a record is
a small file of its own, on the disk that all machines share, and clocks of two machines are never compared.

    rank3.beat      one line of JSON, blanks up to a fixed size, written in place
    rank3.stacks    Python stacks of all its threads, when the run was found stuck
    stuck.json      which rank is behind: whoever finds out first writes it, the ranks end when they see it
    launcher.beat   changes as long as `rlhf run` is there
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType

from rlhf.host import available_memory_bytes, resident_bytes

WATCH_DIR = "RLHF_WATCH_DIR"
"""Variable that names the folder of the records; set by `rlhf run` for each attempt at a stage."""
STUCK = "stuck.json"
LAUNCHER = "launcher.beat"
PHASES = ("start", "input", "rollout", "score", "update", "eval", "save", "other")
"""What a rank's time goes to; `other` is what lies between the named ones."""

_RECORD_BYTES = 2048
_PACKAGES = ("rlhf", "step1_sft", "step2_reward", "step3_ppo")
_ROOT = Path(__file__).resolve().parent.parent
_MECHANISM = {str(_ROOT / "rlhf" / name) for name in ("heartbeat.py", "watchdog.py", "distributed.py")}


@dataclass
class _Activity:
    """Where the main thread is. Written by it alone; read by the watchdog's thread."""

    phase: str = "start"
    phases: int = 0
    role: str = ""
    step: int = 0
    num_steps: int = 0
    calls: int = 0
    waits_for: str = ""
    raised_in: str = ""
    """Phase that an exception has just left."""
    since: float = field(default_factory=time.monotonic)


_activity = _Activity()


def tick() -> None:
    """Progress was made; costs one reading of the clock."""
    _activity.since = time.monotonic()


def call(role: str = "") -> None:
    """A model is about to be called, a token was drawn; `role` is kept from the last call if it is empty."""
    _activity.calls += 1
    _activity.role = role or _activity.role
    _activity.since = time.monotonic()


def at_step(step: int, num_steps: int) -> None:
    """Step `step` begins."""
    _activity.step, _activity.num_steps = step, num_steps
    if _activity.phase == "start":
        _enter("other")
    tick()


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """Note a phase; inside another one than `start` and `other` the outer one stays."""
    outer = _activity.phase
    if outer not in ("start", "other"):
        yield
        return
    _enter(phase)
    try:
        yield
    except BaseException:
        _enter(outer)
        _activity.raised_in = phase
        raise
    _enter(outer)


def _enter(phase: str) -> None:
    _activity.phase = phase
    _activity.raised_in = ""
    _activity.phases += 1
    _activity.calls = 0
    tick()


@contextlib.contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """Note that this rank waits for somebody else, so that it is not taken for the one that is stuck."""
    _activity.waits_for = what
    try:
        yield
    finally:
        _activity.waits_for = ""
        tick()


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Record of one rank."""

    rank: int
    world_size: int
    host: str
    pid: int
    state: str = "running"
    """running, failed (an exception ended it) or ended."""
    phase: str = "start"
    phases: int = 0
    """Phases begun so far: the same sequence on every rank."""
    role: str = ""
    step: int = 0
    num_steps: int = 0
    calls: int = 0
    """Model calls and drawn tokens of this phase."""
    idle_seconds: float = 0.0
    """Since the last sign of progress."""
    limit_seconds: float = 0.0
    """The phase's time-out; 0: none."""
    at: str = ""
    """Where in this code the main thread is; given while it makes no progress."""
    waits_for: str = ""
    """The collective, or whatever else of other processes, it waits for."""
    error: str = ""
    """The exception that ended it."""
    error_time: float = 0.0
    """Unix time of it."""
    exit_code: int = 0
    """The exit code that goes with it, where it has one of its own."""
    resident_bytes: int = 0
    """Memory of the process."""
    available_bytes: int = 0
    """Memory that its machine had left."""
    number: int = 0
    """Counts the writes; a number that stands still is a process that does not run."""

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.host} (process {self.pid})"
        step = f"step {self.step} of {self.num_steps}" if self.step else "before the first step"
        role = f", role {self.role}" if self.role else ""
        calls = f", model call {self.calls}" if self.calls else ""
        return f"{where}, {step}, phase {self.phase}{role}{calls}"


@dataclass(frozen=True, kw_only=True)
class Stuck:
    """Why a run is ended: the rank that is behind and what it was seen doing."""

    rank: int
    text: str
    """One or two sentences for a person."""


def current_beat(*, rank: int, world_size: int, host: str, number: int, limits: Mapping[str, float]) -> Beat:
    """This process's record as of now."""
    idle = time.monotonic() - _activity.since
    at, collective = _whereabouts() if idle > 1 else ("", "")
    return Beat(
        rank=rank,
        world_size=world_size,
        host=host,
        pid=os.getpid(),
        phase=_activity.raised_in or _activity.phase,
        phases=_activity.phases,
        role=_activity.role,
        step=_activity.step,
        num_steps=_activity.num_steps,
        calls=_activity.calls,
        idle_seconds=round(idle, 1),
        limit_seconds=limits.get(_activity.phase, 0.0),
        at=at,
        waits_for=_activity.waits_for or collective,
        resident_bytes=resident_bytes(),
        available_bytes=available_memory_bytes(),
        number=number,
    )


def beat_path(folder: Path, rank: int) -> Path:
    """Record of a rank."""
    return folder / f"rank{rank}.beat"


def stacks_path(folder: Path, rank: int) -> Path:
    """Stacks of a rank."""
    return folder / f"rank{rank}.stacks"


def write_beat(folder: Path, beat: Beat) -> None:
    """Write a record in place: one write of one page; closing the file sends it to a shared disk's server."""
    text = json.dumps(asdict(beat))
    if len(text) >= _RECORD_BYTES:
        text = json.dumps(asdict(replace(beat, error=beat.error[:200], at=beat.at[:200])))
    record = text.encode().ljust(_RECORD_BYTES - 1) + b"\n"
    descriptor = os.open(beat_path(folder, beat.rank), os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        os.pwrite(descriptor, record, 0)
    finally:
        os.close(descriptor)


def read_beat(folder: Path, rank: int) -> Beat | None:
    """A rank's record; None while there is none that can be read."""
    try:
        return Beat(**json.loads(beat_path(folder, rank).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_stuck(folder: Path, stuck: Stuck) -> Stuck:
    """Tell all ranks to end; returns what stands there, which may be what another process found first."""
    with contextlib.suppress(FileExistsError), (folder / STUCK).open("x", encoding="utf-8") as file:
        file.write(json.dumps(asdict(stuck)))
    return read_stuck(folder) or stuck


def read_stuck(folder: Path) -> Stuck | None:
    """What a process found, if one did."""
    try:
        return Stuck(**json.loads((folder / STUCK).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def find_stuck(
    beats: Mapping[int, Beat | None], silent_seconds: Mapping[int, float], *, silent_limit: float, start_limit: float
) -> Stuck | None:
    """The rank that holds the run up, if one does.

    A rank over its limit that waits for others is stuck only if nobody else is at work.

    Args:
        beats: record of every rank; None: none was written.
        silent_seconds: for how long the reader has seen each record, or the lack of one, unchanged.
        silent_limit: a process whose record stands still for longer does not run; 0: never.
        start_limit: the same for a rank that has not written any record.
    """
    running = {rank: beat for rank, beat in beats.items() if beat is None or beat.state == "running"}
    mute = [
        rank
        for rank, beat in running.items()
        if 0 < (start_limit if beat is None else silent_limit) < silent_seconds.get(rank, 0.0)
    ]
    known = [beat for beat in running.values() if beat is not None]
    late = [beat for beat in known if 0 < beat.limit_seconds < beat.idle_seconds]
    if mute:
        rank = max(mute, key=lambda rank: silent_seconds[rank])
        return Stuck(rank=rank, text=_mute_text(rank, running[rank], silent_seconds[rank], start_limit))
    alone = [beat for beat in late if not beat.waits_for]
    if not alone and (not late or len(late) < len(running)):
        return None
    behind = min(alone or late, key=lambda beat: (beat.phases, beat.calls, beat.rank))
    return Stuck(rank=behind.rank, text=_late_text(behind, [beat for beat in known if beat.rank != behind.rank]))


def _mute_text(rank: int, beat: Beat | None, seconds: float, start_limit: float) -> str:
    if beat is None:
        return (
            f"rank {rank} has written no record for {seconds:.0f} s (limit {start_limit:g} s, "
            "run.watchdog.start_seconds): it did not start, or its machine does not see the run folder."
        )
    return (
        f"{beat} has not given a sign of life for {seconds:.0f} s: it was stopped, or its machine or the way to it is "
        "gone."
    )


def _late_text(behind: Beat, others: list[Beat]) -> str:
    doing = f" It is at {behind.at}." if behind.at else ""
    if behind.waits_for:
        doing = f" It waits in {behind.waits_for}{f' at {behind.at}' if behind.at else ''}."
    rest = sorted({f"{beat.waits_for or 'no collective'}" for beat in others})
    seen = f" The other ranks are in {', '.join(rest)}." if rest else ""
    return (
        f"{behind} has made no progress for {behind.idle_seconds:.0f} s (limit {behind.limit_seconds:g} s, "
        f"run.watchdog.{behind.phase}_seconds).{doing}{seen}"
    )


def _whereabouts() -> tuple[str, str]:
    """Innermost line of this code in the main thread, and the collective it is inside, if any."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    at = collective = ""
    while frame is not None and not at:
        path = frame.f_code.co_filename
        if not collective and _is_collective(path, frame.f_code.co_name):
            collective = frame.f_code.co_name
        name = _own_name(path)
        if name and path not in _MECHANISM:
            at = f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return at, collective


def _is_collective(path: str, function: str) -> bool:
    return (
        "/torch/distributed/" in path or "/deepspeed/comm/" in path or ("/deepspeed/" in path and function == "wait")
    ) and function not in ("wrapper", "<module>")


def _own_name(path: str) -> str:
    try:
        name = Path(path).relative_to(_ROOT)
    except ValueError:
        return ""
    return str(name) if name.parts[0] in _PACKAGES else ""
