"""`rlhf bench machine`: measure this machine and write it as a hardware YAML that `rlhf plan` reads. No torch."""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlhf.bench.jobs import launch
from rlhf.bench.process import exit_code, run_child
from rlhf.bench.ssh import measure_ssh
from rlhf.plan.hardware import load_devices
from rlhf.terminal import console, make_table

_SMALL = 4096
"""Bytes of a collective that only its latency counts of."""
_LARGE_CPU, _LARGE = 1 << 25, 1 << 29
_LINK_SECONDS = 60.0
_SSH_SECONDS = 120.0
"""Limit of one ssh command: a stream at 10 Mbit/s fits."""
_HEAD = "# Written by `rlhf bench machine`. nics and nic_gbit_s are not measured: set them for several machines.\n"
_FIELDS = ("products", "attention", "pointwise", "optimizer_gb_s", "update_layer", "update_step", "gather_layer",
           "gather_gb_s", "sharded_optimizer_gb_s",
           "score_layer", "score_pass", "decode_layer", "decode_token", "draw_logit", "process_gb", "disk",
           "ssh")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Remote:
    """How the launcher reaches other machines."""

    read_hosts: Callable[[Path], Sequence[str]]
    """Names in a hostfile; raises ValueError where it cannot be used."""
    ssh_command: Callable[[str], list[str]]
    """A host's name -> start of an ssh command."""


def main(arguments: argparse.Namespace, environment: Mapping[str, str], remote: Remote) -> int:
    """Measure; 0, 1 if a program failed, 2 if something cannot be used.

    Args:
        arguments: of the command line.
        environment: that a stage's ranks would be started with: the number of threads decides what they measure.
        remote: the hosts that ssh is timed to.
    """
    return exit_code(lambda: _run(arguments, environment, remote))


def _run(arguments: argparse.Namespace, environment: Mapping[str, str], remote: Remote) -> None:
    check(arguments)
    names = [] if arguments.hostfile is None else remote.read_hosts(arguments.hostfile)
    # First, since it takes seconds and can fail.
    ssh = measure_ssh(names, remote.ssh_command, environment=environment, timeout=_SSH_SECONDS)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    found = {**measure(arguments, environment), "ssh": ssh}
    with tempfile.TemporaryDirectory(dir=arguments.out.parent) as folder:
        part = Path(folder) / arguments.out.name
        part.write_text(as_yaml(arguments.name, found), encoding="utf-8")
        load_devices(part)
        part.replace(arguments.out)
    show(arguments.name, found)
    sys.stdout.write(f"written to {arguments.out}; plan with it: rlhf plan --hardware {arguments.out} "
                     f"--gpu {arguments.name} --recipe ...\n")  # fmt: skip


def check(arguments: argparse.Namespace) -> None:
    """Check the flags.

    Raises:
        ValueError: one cannot be used.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", arguments.name):
        raise ValueError(f"--name {arguments.name!r} must be made of small letters, digits, `.` and `-`.")
    if arguments.num_gpus < 1:
        raise ValueError(f"--num_gpus must be >= 1, got {arguments.num_gpus}.")
    if not arguments.seconds > 0:
        raise ValueError(f"--seconds must be > 0, got {arguments.seconds}.")
    if arguments.disk is not None and not arguments.disk.is_dir():
        raise ValueError(f"--disk {arguments.disk} is not a folder. Name one on the disk that checkpoints go to.")
    if arguments.out.exists() and not arguments.out.read_text(encoding="utf-8", errors="replace").startswith(_HEAD):
        raise ValueError(f"--out {arguments.out} holds something that this command did not write. Name another file.")


def measure(arguments: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run the programs and bring together what they found."""
    ranks, log = arguments.num_gpus, arguments.out.with_suffix(".log").resolve()
    sys.stdout.write(f"measuring {ranks} ranks; log in {log}\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        wanted = ["--disk", str(arguments.disk.resolve())] if arguments.disk is not None else []

        def probe(ranks: int, *flags: str) -> dict[str, Any]:
            part = Path(folder) / "found.json"
            argv = [*launch(sys.executable, "rlhf.bench.probe", ranks=ranks, launcher="deepspeed"), "--out", str(part),
                    "--seconds", str(arguments.seconds), *flags]  # fmt: skip
            run_child(argv, environment=environment, log=log, timeout=arguments.timeout)
            found: dict[str, Any] = json.loads(part.read_text(encoding="utf-8"))
            return found

        # ZeRO-3 on one rank has its hooks and nothing to wait for.
        alone = probe(1, "--gather") if ranks > 1 else {}
        found = probe(ranks, *wanted)
        for name, by_ranks in alone.items():
            if name != "disk":
                found[name] |= by_ranks
        large = _LARGE_CPU if found["on_cpu"] else _LARGE
        collectives = _collectives(ranks, large, Path(folder), environment, arguments.timeout) if ranks > 1 else {}
    return {**found, "ranks": ranks, "collectives": collectives}


def _collectives(
    ranks: int, large: int, work: Path, environment: Mapping[str, str], timeout: float
) -> dict[str, dict[str, float]]:
    """Latency and rate of groups of 2, 4, 8 ... and all ranks, by an all-gather of next to nothing and a large one."""
    sizes = sorted({ranks, *(2**i for i in range(1, ranks.bit_length()))})
    small_seconds, large_seconds = (
        _gather_seconds(sizes, ranks, size, work, environment, timeout) for size in (_SMALL, large)
    )
    found = {}
    for size in sizes:
        latency, whole = small_seconds[size], large_seconds[size]
        moved = large * (size - 1) / size
        found[str(size)] = {"latency": latency, "gb_s": moved / max(whole - latency, 0.1 * whole) / 1e9}
    return found


def _gather_seconds(
    sizes: list[int], ranks: int, num_bytes: int, work: Path, environment: Mapping[str, str], timeout: float
) -> dict[int, float]:
    config, log = work / "links.json", work / "links.log"
    config.write_text(json.dumps({
        "host_of": list(range(ranks)), "rounds": [[list(range(size))] for size in sizes], "num_bytes": num_bytes,
        "limit_seconds": _LINK_SECONDS,
    }), encoding="utf-8")  # fmt: skip
    argv = launch(sys.executable, "rlhf.links", ranks=ranks, launcher="deepspeed")
    run_child([*argv, "--config", str(config)], environment=environment, log=log, timeout=timeout)
    found: dict[int, float] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        _, mark, text = line.partition("RLHF-LINK ")
        if mark:
            result = json.loads(text)
            if "error" in result:
                raise ValueError(f"{result['ranks']} ranks: {result['error']}")
            found[result["ranks"]] = result["all_gather_seconds"]
    return found


def as_yaml(name: str, found: Mapping[str, Any]) -> str:
    """The device as a file for --hardware."""
    collectives = found["collectives"]
    rate = max((entry["gb_s"] for entry in collectives.values()), default=found["bandwidth_gb_s"])
    entry = {
        "architecture": "cpu" if found["on_cpu"] else "measured",
        "cores": os.cpu_count() or 1,
        "peak_tflops": found["peak_tflops"],
        "memory_gb": found["memory_gb"],
        "bandwidth_gb_s": found["bandwidth_gb_s"],
        "node": found["ranks"],
        "link_gb_s": rate,
        "nics": 1,
        "nic_gbit_s": 100,
        "usd_per_hour": 0.0,
        "source": f"rlhf bench machine, {found['hardware']}",
        "measured": {**{field: found[field] for field in _FIELDS}, "collectives": collectives},
    }
    return _HEAD + yaml.safe_dump({name: _rounded(entry)}, sort_keys=False, default_flow_style=None, width=120)


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def show(name: str, found: Mapping[str, Any]) -> None:
    """What was measured, as a person asks for it."""
    out = console()
    out.print(f"[bold]{name}[/bold]: {found['ranks']} x {found['hardware']}, {found['memory_gb']:.1f} GB a rank")
    made = make_table("product, TFLOP/s forward / backward", *found["products"])
    shapes = [row[:3] for row in next(iter(found["products"].values()))]
    for number, (m, n, k) in enumerate(shapes):
        cells = [f"{rows[number][3]:.3g} / {rows[number][4]:.3g}" for rows in found["products"].values()]
        made.add_row(f"{m:g} x {k:g} -> {n:g}", *cells)
    out.print(made)
    made = make_table("", "")
    rows = [("copy", f"{found['bandwidth_gb_s']:.1f} GB/s"),
            *((f"pointwise operations, width {width:g}", f"{rate:.1f} GB/s") for width, rate in found["pointwise"]),
            ("optimiser", f"{found['optimizer_gb_s']:.1f} GB/s")]  # fmt: skip
    for size, value in sorted(found["gather_layer"].items()):
        rows.append((f"what ZeRO-3 on {size} ranks adds to a layer's update", f"{value * 1e6:,.0f} us"))
        rows.append(("its weights and gradients there", f"{found['gather_gb_s'][size]:.2f} GB/s"))
        rows.append(("optimiser there", f"{found['sharded_optimizer_gb_s'][size]:.1f} GB/s"))
    for key, what in (("update_layer", "a layer's update"), ("score_layer", "its forward pass"),
                      ("decode_layer", "its decoding step")):  # fmt: skip
        rows.append((f"{what}, beside computing", f"{found[key] * 1e6:,.0f} us"))
    for size, entry in found["collectives"].items():
        rows.append((f"all-gather of {size} ranks", f"{entry['latency'] * 1e6:,.0f} us + {entry['gb_s']:.2f} GB/s"))
    rows += [(f"disk, {key.removesuffix('_gb_s')}", f"{value:.2f} GB/s") for key, value in found["disk"].items()]
    rows += [(f"ssh to {host}", f"{value['seconds'] * 1e3:,.0f} ms, stream {value['gb_s']:.3f} GB/s")
             for host, value in found["ssh"].items()]  # fmt: skip
    for row in rows:
        made.add_row(*row)
    out.print(made)
    if not found["ssh"]:
        out.print("ssh was not timed: there is no --hostfile.")
