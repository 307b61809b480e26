"""Read a hostfile, strictly, and apply --include / --exclude to it. No torch.

DeepSpeed's own reader accepts zero slots, `slots=2abc`, a byte-order mark inside the first name and shell text as a
name, and takes a missing file for "train on this machine alone". Here each of these is an error that names the line.
"""

import re
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.-]*@)?(?:[A-Za-z0-9][A-Za-z0-9.-]*|\[?[0-9A-Fa-f:]+\]?)")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """One machine and the accelerator slots of it that are used."""

    name: str
    slots: tuple[int, ...]
    line: int = field(default=0, compare=False)
    """Of the hostfile; 0: not from one."""

    def __str__(self) -> str:
        return f"{self.name} slots={len(self.slots)}"


class HostfileError(ValueError):
    """A hostfile or a filter that cannot be used; the message names file, line, rule and repair."""


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Parse lines `name slots=N`; blank lines and lines that start with # are skipped.

    Raises:
        HostfileError: all that is wrong with the file, one line each.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise HostfileError(f"hostfile {path} is no file. Give a file with one `name slots=N` a line.")
        raw = path.read_bytes()
    except FileNotFoundError:
        raise HostfileError(
            f"hostfile {path} does not exist. DeepSpeed would train on this machine alone; give the right path, "
            "or drop --hostfile for a run on one machine."
        ) from None
    except OSError as error:
        raise HostfileError(f"hostfile {path} cannot be read: {error.strerror}.") from None
    hosts, problems = _parse(raw, path)
    if not hosts and not problems:
        problems.append(f"{path}: names no host. Write one line per machine, for example `node1 slots=8`.")
    if problems:
        raise HostfileError("\n".join(problems))
    return tuple(hosts)


def _parse(raw: bytes, path: Path) -> tuple[list[Host], list[str]]:
    problems: list[str] = []
    hosts: list[Host] = []
    lines_of: dict[str, int] = {}
    if raw.startswith(b"\xef\xbb\xbf"):
        problems.append(f"{path}:1: starts with a byte-order mark. Save the file as UTF-8 without BOM.")
        raw = raw[3:]
    if b"\r" in raw:
        line = raw[: raw.index(b"\r")].count(b"\n") + 1
        problems.append(
            f"{path}:{line}: has Windows line ends (CR LF). Convert it, for example: sed -i 's/\\r$//' {path}"
        )
        raw = raw.replace(b"\r", b"")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        return [], [*problems, f"{path}:{line}: is not UTF-8 text. Is this a hostfile?"]
    for number, line_text in enumerate(text.split("\n"), start=1):
        words = line_text.split()
        if not words or words[0].startswith("#"):
            continue
        problem = _line_problem(words)
        if problem:
            problems.append(f"{path}:{number}: `{line_text.strip()[:80]}`: {problem}")
            continue
        name, slots = words[0], int(words[1].removeprefix("slots="))
        if name in lines_of:
            problems.append(
                f"{path}:{number}: host {name} stands in line {lines_of[name]} already. Keep one line per host and add "
                "the slots up."
            )
            continue
        lines_of[name] = number
        hosts.append(Host(name, tuple(range(slots)), number))
    return hosts, problems + (_loopback_problems(hosts, path) if len(hosts) > 1 else [])


def _loopback_problems(hosts: Sequence[Host], path: Path) -> list[str]:
    """Names that mean another machine on each machine, and two names of this one."""
    problems = [
        f"{path}:{host.line}: `{host.name}` means another machine on each of {len(hosts)} hosts. Write the name by "
        "which the others reach it."
        for host in hosts
        if _is_loopback(host.name)
    ]
    others = [host for host in hosts if not _is_loopback(host.name)]
    with ThreadPoolExecutor(max_workers=64) as pool:  # a name server may be slow, and there may be hundreds of names
        here = [
            host for host, is_here in zip(others, pool.map(is_local, [h.name for h in others]), strict=True) if is_here
        ]
    problems += [
        f"{path}:{host.line}: `{host.name}` is this machine, as is `{here[0].name}` in line {here[0].line}. Keep one "
        "line per host and add the slots up."
        for host in here[1:]
    ]
    return problems


def _is_loopback(name: str) -> bool:
    bare = name.rpartition("@")[2].strip("[]")
    return bare == "localhost" or bare.startswith(("localhost.", "127.")) or bare == "::1"


def _line_problem(words: Sequence[str]) -> str | None:
    if not _NAME.fullmatch(words[0]):
        return f"{words[0]!r} is not a host name. Write `name slots=N`."
    if len(words) == 1:
        return "has no slots. Write `name slots=N`."
    match = re.fullmatch(r"slots=([0-9]+)", words[1])
    if not match:
        return f"{words[1]!r} is not of the form slots=N with a whole number N and no blanks around `=`."
    if int(match.group(1)) == 0:
        return "has 0 slots. Delete or comment out the line."
    if int(match.group(1)) > 1024:
        return f"has {match.group(1)} slots; more than 1024 accelerators in one machine is taken for a slip."
    if len(words) > 2:
        return f"has text after the slots: {' '.join(words[2:])!r}. Put a comment on its own line."
    return None


def filter_hosts(hosts: Sequence[Host], *, include: str = "", exclude: str = "") -> tuple[Host, ...]:
    """Hosts and slots left by `node1@node2:0,2` specifications, in the hostfile's order.

    Raises:
        HostfileError: both are given, a host or slot is unknown, the text is malformed, or nothing is left.
    """
    if include and exclude:
        raise HostfileError(f"--include {include} and --exclude {exclude} exclude each other. Give one.")
    if not include and not exclude:
        return tuple(hosts)
    flag, text = ("--include", include) if include else ("--exclude", exclude)
    named = _parse_filter(flag, text, {host.name: host for host in hosts})
    left = []
    for host in hosts:
        chosen = named.get(host.name, ())
        slots = tuple(slot for slot in host.slots if (slot in chosen) == bool(include))
        if slots:
            left.append(replace(host, slots=slots))
    if not left:
        raise HostfileError(f"{flag} {text} leaves no slot of {', '.join(map(str, hosts))}. Leave at least one.")
    return tuple(left)


def _parse_filter(flag: str, text: str, known: dict[str, Host]) -> dict[str, tuple[int, ...]]:
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, slots_text = part.partition(":")
        if name not in known:
            raise HostfileError(
                f"{flag} {text}: host {name!r} is not among {', '.join(known)}. Use a name of the hostfile."
            )
        if colon and not re.fullmatch(r"\d+(,\d+)*", slots_text):
            raise HostfileError(f"{flag} {text}: {part!r} is not of the form NAME or NAME:0,2.")
        slots = tuple(int(slot) for slot in slots_text.split(",")) if colon else known[name].slots
        unknown = sorted(set(slots) - set(known[name].slots))
        if unknown:
            raise HostfileError(
                f"{flag} {text}: {name} has the slots {list(known[name].slots)}, not {unknown}. Correct the list."
            )
        named[name] = tuple(sorted({*named.get(name, ()), *slots}))
    return named


def is_local(name: str) -> bool:
    """Whether a host name means this machine: localhost, its own name, or one of its own addresses."""
    name = name.rpartition("@")[2]
    if name in _LOCAL_NAMES or name == socket.gethostname():
        return True
    try:
        candidates = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in candidates:
        with socket.socket(family, kind, protocol) as probe:
            try:  # only an address of this machine can be bound
                probe.bind(address)
            except OSError:
                continue
            return True
    return False
