"""Read what `nvidia-smi`, `rocm-smi` and `ibstat` print. No torch.

Each function takes the text of one program and raises nothing for text that it cannot read: what is missing in the
result is then said by who uses it.
"""

import csv
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator."""

    index: int
    name: str
    driver: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    """None: not reported."""
    errors: int | None = None
    """Memory errors that were not corrected, since the driver was loaded."""
    lanes: tuple[int, int] | None = None
    """PCIe lanes in use, and those there are."""


@dataclass(frozen=True, kw_only=True)
class GpuList:
    """All accelerators of a machine."""

    gpus: tuple[Gpu, ...]
    broken: tuple[str, ...]
    """Lines that are no row of the table: what the driver says of one it cannot use."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How the accelerators and network cards of a machine are joined."""

    links: Mapping[tuple[str, str], str]
    """(GPU0, GPU1) and (GPU0, mlx5_0) -> NV18, PIX, SYS and so on; each pair once, in the order of the table."""

    def between_gpus(self) -> str:
        """Kinds of links between accelerators with the number of pairs: `28 NV18`; "" for one accelerator."""
        return _counted(kind for (a, b), kind in self.links.items() if a.startswith("GPU") and b.startswith("GPU"))

    def to_nics(self) -> str:
        """Kinds of links between accelerators and network cards with the number of pairs; "" without cards."""
        return _counted(kind for (a, b), kind in self.links.items() if a.startswith("GPU") and not b.startswith("GPU"))


@dataclass(frozen=True, kw_only=True)
class Port:
    """A port of an InfiniBand or RoCE device."""

    device: str
    port: int
    state: str
    """Active, Down, Initializing, Armed."""
    physical: str
    """LinkUp, Disabled, Polling."""
    gbit_s: float
    layer: str
    """InfiniBand or Ethernet."""

    def __str__(self) -> str:
        return f"{self.device}:{self.port} {self.state}/{self.physical} {self.gbit_s:g} Gbit/s {self.layer}"


def parse_nvidia_query(text: str) -> GpuList:
    """`nvidia-smi --query-gpu=index,name,... --format=csv`, with its header; units as it prints them."""
    rows = list(csv.reader(text.splitlines(), skipinitialspace=True))
    start = next((i for i, row in enumerate(rows) if row and row[0] == "index" and len(row) > 1), None)
    if start is None:
        return GpuList(gpus=(), broken=tuple(" ".join(row) for row in rows if row))
    names = [re.sub(r" \[.*\]$", "", name.strip()) for name in rows[start]]
    gpus, broken = [], [" ".join(row) for row in rows[:start] if row]
    for row in rows[start + 1 :]:
        if len(row) != len(names) or not row[0].strip().isdigit():
            broken += [", ".join(row)] if row else []
            continue
        entry = {name: value.strip() for name, value in zip(names, row, strict=True)}
        lost = next((value for value in entry.values() if re.search(r"ERR!|requires reset|Unknown Error", value)), None)
        if lost is not None:
            broken.append(f"GPU {entry['index']}: {lost}")
        width, most = _whole(entry.get("pcie.link.width.current")), _whole(entry.get("pcie.link.width.max"))
        gpus.append(Gpu(
            index=int(entry["index"]),
            name=entry.get("name", ""),
            driver=entry.get("driver_version", ""),
            total_bytes=_mib(entry.get("memory.total")),
            free_bytes=_mib(entry.get("memory.free")),
            errors=_whole(entry.get("ecc.errors.uncorrected.volatile.total")),
            lanes=(width, most) if width and most else None,
        ))  # fmt: skip
    return GpuList(gpus=tuple(gpus), broken=tuple(broken))


def parse_rocm(text: str) -> GpuList:
    """`rocm-smi --showproductname --showmeminfo vram --showdriverversion --json`; warnings may precede the JSON."""
    start = text.find("{")
    try:
        raw = json.loads(text[start:]) if start >= 0 else {}
    except ValueError:
        raw = {}
    if not isinstance(raw, dict) or not raw:
        return GpuList(gpus=(), broken=tuple(line for line in text.splitlines() if line.strip()))
    driver = str(_section(raw, "system").get("Driver version", ""))
    cards = sorted(
        (int(match.group(1)), _section(raw, key)) for key in raw if (match := re.fullmatch(r"card(\d+)", key))
    )
    gpus = []
    for index, entry in cards:
        total, used = (_whole(entry.get(f"VRAM Total {what}Memory (B)")) for what in ("", "Used "))
        names = ("Card Series", "Card series", "Card Model", "Card model", "Device Name")
        gpus.append(Gpu(
            index=index,
            name=next((str(entry[name]) for name in names if entry.get(name)), ""),
            driver=driver,
            total_bytes=total,
            free_bytes=None if total is None or used is None else total - used,
        ))  # fmt: skip
    return GpuList(gpus=tuple(gpus), broken=())


def parse_topology(text: str) -> Topology:
    """The matrix of `nvidia-smi topo -m` or of `rocm-smi --showtopotype`, cards by the name in the NIC legend."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    nics = dict(re.findall(r"^\s*(NIC\d+): (\S+)\s*$", text, re.MULTILINE))
    columns: list[str] = []
    links: dict[tuple[str, str], str] = {}
    for line in text.splitlines():
        words = line.split()
        if not columns:
            if len(words) > 0 and words[0] == "GPU0" and all(_is_device(word) for word in words[:2]):
                columns = [word for word in words if _is_device(word)]
            continue
        if not words or words[0] not in columns:
            if links and not words:
                break
            continue
        row = columns.index(words[0])
        for column, kind in list(enumerate(words[1 : len(columns) + 1]))[row + 1 :]:
            a, b = columns[row], columns[column]
            links[nics.get(a, a), nics.get(b, b)] = kind
    return Topology(links=links)


def parse_ibstat(text: str) -> list[Port]:
    """`ibstat`: every port of every channel adapter."""
    ports = []
    for block in re.split(r"^CA '", text, flags=re.MULTILINE)[1:]:
        device = block.partition("'")[0]
        pieces = re.split(r"^\s+Port (\d+):\s*$", block, flags=re.MULTILINE)
        for number, body in zip(pieces[1::2], pieces[2::2], strict=True):
            entry = dict(re.findall(r"^\s+([\w ]+): *(.*?)\s*$", body, re.MULTILINE))
            rate = re.match(r"[\d.]+", entry.get("Rate", ""))
            ports.append(Port(
                device=device,
                port=int(number),
                state=entry.get("State", ""),
                physical=entry.get("Physical state", ""),
                gbit_s=float(rate.group()) if rate else 0.0,
                layer=entry.get("Link layer", ""),
            ))  # fmt: skip
    return ports


def chosen_names(setting: str, names: list[str]) -> list[str]:
    """Names that a variable like NCCL_SOCKET_IFNAME or NCCL_IB_HCA means: prefixes, `=` exact, `^` all but these."""
    exclude, exact = setting.startswith("^"), setting.lstrip("^").startswith("=")
    wanted = [word.partition(":")[0] for word in setting.lstrip("^=").split(",") if word]
    hit = [name for name in names if any(name == word if exact else name.startswith(word) for word in wanted)]
    return [name for name in names if name not in hit] if exclude else hit


def _is_device(word: str) -> bool:
    return re.fullmatch(r"(GPU|NIC)\d+|mlx\d+_\d+|\w*ib\w*\d+|bnxt_re\d+|irdma\d+", word) is not None


def _counted(kinds: Any) -> str:
    counts: dict[str, int] = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _section(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def _mib(text: str | None) -> int | None:
    number = _whole(text)
    return None if number is None else number * _MIB


def _whole(text: Any) -> int | None:
    """Leading whole number of a value with or without unit; None for [N/A] and the like."""
    match = re.match(r"\s*(\d+)", str(text))
    return int(match.group(1)) if match else None
