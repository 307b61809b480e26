"""Devices, the links between them and their price, from YAML. No torch."""

import difflib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rlhf import strict
from rlhf.plan.measured import Measured, from_mapping

BUILT_IN = Path(__file__).parent / "data" / "devices.yaml"
DTYPES = ("fp32", "fp16", "bf16", "fp8", "fp4")


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator and its place in a machine."""

    name: str
    """Key in the YAML."""
    architecture: str
    """Row of the efficiency table."""
    cores: int
    """Streaming multiprocessors or compute units."""
    peak_tflops: Mapping[str, float] = field(hash=False)
    """Dense, by type."""
    memory_gb: float
    """10^9 bytes."""
    bandwidth_gb_s: float
    """Of the device's memory."""
    node: int
    """Devices on a machine, or in one domain of fast links."""
    link_gb_s: float
    """From one device to the others of its machine, one direction."""
    pair_gb_s: float = 0.0
    """Between two neighbours, where that differs from `link_gb_s`; 0: it does not."""
    nics: int
    """Network cards of a machine."""
    nic_gbit_s: float
    """Rate of one card."""
    host_scale: float = 1.0
    """Time of the host's part of a step, in units of a current server processor."""
    power_limit: float = 1.0
    """Clock under load, as a share of the part that the efficiency table was made on."""
    usd_per_hour: float = 0.0
    """Of one device; 0: not known."""
    source: str = ""
    """Where the numbers are from."""
    measured: Measured | None = field(default=None, hash=False)
    """Of `rlhf bench machine`; None: the efficiency table says what the device reaches."""

    def __post_init__(self) -> None:
        for name in ("cores", "memory_gb", "bandwidth_gb_s", "node", "link_gb_s", "host_scale", "power_limit"):
            if getattr(self, name) <= 0:
                raise ValueError(f"hardware {self.name}: {name} must be > 0, got {getattr(self, name)}.")
        for dtype, value in self.peak_tflops.items():
            if dtype not in DTYPES or value <= 0:
                raise ValueError(
                    f"hardware {self.name}: peak_tflops.{dtype}={value} needs one of {', '.join(DTYPES)} and > 0."
                )

    def peak(self, dtype: str) -> float:
        """Dense FLOP/s in a type.

        Raises:
            ValueError: the device has no such rate.
        """
        if dtype not in self.peak_tflops:
            raise ValueError(f"hardware {self.name} has no {dtype} peak. It has {', '.join(self.peak_tflops)}.")
        return self.peak_tflops[dtype] * 1e12

    @property
    def is_serial(self) -> bool:
        """A processor that launches nothing: what its programs do beside computing adds to it, and nothing overlaps."""
        return self.architecture == "cpu"

    @property
    def memory(self) -> float:
        """Bytes."""
        return self.memory_gb * 1e9

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the device's memory."""
        return self.bandwidth_gb_s * 1e9

    @property
    def node_bandwidth(self) -> float:
        """Bytes a second out of a machine."""
        return self.nics * self.nic_gbit_s * 1e9 / 8


def load_devices(path: Path | None = None) -> dict[str, Device]:
    """Built-in devices, and those of a user's file, which take precedence.

    Raises:
        ValueError: the file is not of the form at the head of data/devices.yaml.
        FileNotFoundError: there is no such file.
    """
    devices = _read(BUILT_IN)
    return devices if path is None else {**devices, **_read(path)}


def find_device(name: str, devices: Mapping[str, Device]) -> Device:
    """Device by name.

    Raises:
        ValueError: there is none of that name.
    """
    short = name.lower().replace("_", "-")
    if short not in devices:
        close = difflib.get_close_matches(short, devices, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"hardware {name!r} is not known.{hint} There are {', '.join(devices)}; --hardware adds more.")
    return devices[short]


def with_network(device: Device, *, nics: int | None = None, nic_gbit_s: float | None = None) -> Device:
    """The same device in machines with another network."""
    return replace(
        device,
        nics=device.nics if nics is None else nics,
        nic_gbit_s=device.nic_gbit_s if nic_gbit_s is None else nic_gbit_s,
    )


def _read(path: Path) -> dict[str, Device]:
    raw = strict.read_yaml(path)
    if not isinstance(raw, dict) or not raw:
        raise ValueError(f"{path}: expected `name: {{...}}` of at least one device.")
    return {str(name): _device(str(name), entry, path) for name, entry in raw.items()}


def _device(name: str, entry: Any, path: Path) -> Device:
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: {name} must be a mapping, got {entry!r}.")
    known = {f.name for f in fields(Device)} - {"name"}
    unknown = sorted(set(entry) - known)
    if unknown:
        close = difflib.get_close_matches(unknown[0], known, n=1)
        raise ValueError(f"{path}: {name}.{unknown[0]} is not a setting.{f' Did you mean {close[0]}?' * bool(close)}")
    required = {f.name for f in fields(Device) if f.default is MISSING} - {"name"}
    missing = sorted(required - set(entry))
    if missing:
        raise ValueError(f"{path}: {name} lacks {', '.join(missing)}.")
    measured = from_mapping(entry["measured"], f"{path}: {name}") if entry.get("measured") else None
    entry = {key: value for key, value in entry.items() if key != "measured"}
    for key, value in entry.items():
        numbers = value.values() if isinstance(value, dict) else [value]
        wanted = str if key in ("architecture", "source") else (int, float)
        if (key == "peak_tflops") != isinstance(value, dict) or not all(isinstance(v, wanted) for v in numbers):
            raise ValueError(f"{path}: {name}.{key}={value!r} has the wrong type.")
    return Device(name=name, measured=measured, **entry)
