"""Published figures of training systems: read from the package's own file or from a user's. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlhf import strict

BUILT_IN = Path(__file__).parent / "data" / "published.json"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One figure and the configuration it was measured on; None where the source does not say."""

    system: str
    metric: str
    value: float | str | None = None
    unit: str = ""
    source: str = ""
    verified: bool = True
    """Read in the source itself."""
    confidence: str = ""
    note: str = ""
    hardware: str = ""
    model: str | None = None
    precision: str | None = None
    act_ckpt: str | None = None
    n_gpus: float | None = None
    params: float | None = None
    layers: float | None = None
    hidden: float | None = None
    heads: float | None = None
    kv_heads: float | None = None
    ffn: float | None = None
    seq: float | None = None
    vocab: float | None = None
    tp: float | None = None
    pp: float | None = None
    vpp: float | None = None
    cp: float | None = None
    dp: float | None = None
    mbs: float | None = None
    gas: float | None = None
    gbs: float | None = None
    zero_stage: float | None = None
    lora: float | None = None

    @property
    def number(self) -> float | None:
        """Value, if it is one."""
        return float(self.value) if isinstance(self.value, (int, float)) else None

    def whole(self, name: str, default: int = 1) -> int:
        """A count, or the default where the source does not give it."""
        value = getattr(self, name)
        return default if value is None else round(value)


NAMES = {f.name for f in fields(Record)}


def load(path: Path | None = None) -> list[Record]:
    """Figures of the package's file, or of a file with `records` (one figure each) or `runs` (several a run).

    Raises:
        ValueError: the file has neither, or a record lacks its system or metric.
        FileNotFoundError: there is no such file.
    """
    source = BUILT_IN if path is None else path
    raw = strict.read_json(source)
    if not isinstance(raw, dict) or not isinstance(raw.get("records", raw.get("runs")), list):
        raise ValueError(f"{source}: has neither `records` nor `runs`, a list.")
    return [_record(entry, index, source) for index, entry in enumerate(_entries(raw))]


def _entries(raw: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield from raw.get("records", ())
    for run in raw.get("runs", ()):
        shared = {key: value for key, value in run.items() if key != "figures"}
        for figure in run["figures"]:
            yield {**shared, **figure}


def _record(entry: Any, index: int, source: Path) -> Record:
    if not isinstance(entry, dict) or not entry.get("system") or not entry.get("metric"):
        raise ValueError(f"{source}: record {index} lacks `system` or `metric`.")
    known = {key: value for key, value in entry.items() if key in NAMES and value is not None}
    for key in ("note", "hardware", "precision", "act_ckpt", "model"):
        if key in known:
            known[key] = str(known[key])
    for key, value in known.items():
        number = Record.__annotations__[key] == float | None
        if number and not isinstance(value, (int, float)):
            raise ValueError(f"{source}: record {index}: {key}={value!r} is not a number.")
    return Record(**known)
