"""Accelerators, InfiniBand and what joins them, on each machine and compared with the others. No torch."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from launch.cluster.finding import Finding, odd_ones
from launch.cluster.tools import (
    GpuList,
    Port,
    Topology,
    chosen_names,
    parse_ibstat,
    parse_nvidia_query,
    parse_rocm,
    parse_topology,
)
from launch.hostfile import Host

_PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "ib_peer_mem")
_USED_SHARE = 0.05
"""Of an idle accelerator's memory, the driver takes less."""
Facts = Mapping[str, Any]


def gpus_of(facts: Facts) -> GpuList:
    """Accelerators as the vendor's tool shows them; none on a machine without one."""
    tools = facts["tools"]
    if "nvidia_query" in tools:
        answer = tools["nvidia_query"]
        return parse_nvidia_query(answer["text"] or answer["error"])
    if "rocm" in tools:
        return parse_rocm(tools["rocm"]["text"])
    return GpuList(gpus=(), broken=())


def topology_of(facts: Facts) -> Topology:
    """What joins the accelerators of a machine."""
    tools = facts["tools"]
    name = "nvidia_topology" if "nvidia_topology" in tools else "rocm_topology"
    return parse_topology(tools[name]["text"]) if name in tools else Topology(links={})


def ports_of(facts: Facts) -> list[Port]:
    """InfiniBand and RoCE ports: by ibstat where it is installed, else as the kernel shows them."""
    ibstat = facts["tools"].get("ibstat", {}).get("text", "")
    return parse_ibstat(ibstat) or [Port(**port) for port in facts["infiniband"]]


def gpu_findings(host: Host, facts: Facts, *, needed: bool, on_cpu: bool) -> Iterator[Finding]:
    """Number, health and free memory of accelerators.

    Args:
        host: with the slots that are used.
        facts: of it.
        needed: the recipe does not run without.
        on_cpu: ranks get DS_ACCELERATOR=cpu.
    """
    listed = gpus_of(facts)
    if needed and on_cpu:
        yield Finding(
            check="accelerators", host=host.name, status="failed", found="not used: DS_ACCELERATOR=cpu",
            expected="the recipe to run on them", repair="Unset DS_ACCELERATOR, or take a CPU recipe.",
        )  # fmt: skip
        return
    if on_cpu or (not needed and not listed.gpus):
        yield Finding(check="accelerators", host=host.name, status="none", found="none, and ranks use the CPU")
        return
    bad = list(_gpu_problems(host, facts, listed))
    yield from bad
    if bad or not listed.gpus:
        return
    free = [gpu.free_bytes for gpu in listed.gpus if gpu.free_bytes is not None]
    room = f", {min(free) / 1e9:.0f} GB free or more on each" if free else ""
    yield Finding(check="accelerators", host=host.name, status="ok",
                  found=f"{len(listed.gpus)} x {listed.gpus[0].name}{room}")  # fmt: skip


def _gpu_problems(host: Host, facts: Facts, listed: GpuList) -> Iterator[Finding]:
    def problem(found: str, expected: str, repair: str) -> Finding:
        return Finding(check="accelerators", host=host.name, status="failed", found=found, expected=expected,
                       repair=repair)  # fmt: skip

    for line in listed.broken:
        yield problem(line.rstrip("."), "a healthy device", "Reset it or reboot; see `dmesg | grep -i xid`.")
    usable, highest = facts["torch"].get("devices"), max(host.slots) + 1
    count = len(listed.gpus) or usable or 0
    if count < highest:
        yield problem(f"{count} accelerators", f"{highest} for its slots", "Lower its slots, or see why one is lost.")
    elif usable is not None and usable < highest:
        yield problem(
            f"torch sees {usable} of {count} accelerators", f"{highest} for its slots",
            "The driver may be older than torch's CUDA or ROCm: update it, or install the matching torch.",
        )  # fmt: skip
    for gpu in listed.gpus:
        if gpu.index not in host.slots:
            continue
        if gpu.errors:
            yield problem(f"GPU {gpu.index} has {gpu.errors} memory errors that were not corrected", "none",
                          "Reset it (nvidia-smi --gpu-reset); replace it if they come back.")  # fmt: skip
        if gpu.total_bytes and gpu.free_bytes is not None and gpu.free_bytes < gpu.total_bytes * (1 - _USED_SHARE):
            used = (gpu.total_bytes - gpu.free_bytes) / 1e9
            yield problem(f"GPU {gpu.index}: {used:.1f} of {gpu.total_bytes / 1e9:.1f} GB is in use", "it to be idle",
                          "End what runs there (nvidia-smi, rocm-smi), or leave it out with --exclude.")  # fmt: skip
        if gpu.lanes and gpu.lanes[0] < gpu.lanes[1]:
            yield Finding(
                check="accelerators", host=host.name, status="warning",
                found=f"GPU {gpu.index} runs on {gpu.lanes[0]} PCIe lanes", expected=f"{gpu.lanes[1]}",
                repair="Reseat the card.",
            )  # fmt: skip


def infiniband_findings(host: str, facts: Facts, environment: Mapping[str, str]) -> Iterator[Finding]:
    """State of the ports that NCCL would use."""
    if environment.get("NCCL_IB_DISABLE") == "1":
        yield Finding(check="InfiniBand", host=host, status="none", found="not used: NCCL_IB_DISABLE=1")
        return
    setting, ports = environment.get("NCCL_IB_HCA", ""), ports_of(facts)
    names = chosen_names(setting, [port.device for port in ports]) if setting else [port.device for port in ports]
    used = [port for port in ports if port.device in names]
    if not used:
        status = "failed" if setting and not setting.startswith("^") else "none"
        yield Finding(
            check="InfiniBand", host=host, status=status,  # type: ignore[arg-type]
            found=f"NCCL_IB_HCA={setting} names none of {', '.join(p.device for p in ports) or 'no devices'}"
            if setting else "none",
            repair="Correct NCCL_IB_HCA." if setting else "",
        )  # fmt: skip
        return
    down = [port for port in used if (port.state, port.physical) != ("Active", "LinkUp")]
    for port in down:
        yield Finding(
            # An Ethernet port without a cable is common, an InfiniBand port rarely meant.
            check="InfiniBand", host=host, status="failed" if port.layer == "InfiniBand" else "warning",
            found=str(port), expected="Active/LinkUp",
            repair="See cable, switch and subnet manager, or leave the device out: NCCL_IB_HCA=^" + port.device,
        )  # fmt: skip
    if not down:
        yield Finding(check="InfiniBand", host=host, status="ok", found=", ".join(map(str, used)))


def direct_findings(host: str, facts: Facts) -> Iterator[Finding]:
    """Whether network cards reach accelerator memory without a copy through the host."""
    if not gpus_of(facts).gpus or not ports_of(facts):
        yield Finding(check="GPUDirect", host=host, status="none", found="none: no accelerator with InfiniBand")
        return
    modules = [name for name in _PEER_MODULES if name in facts["modules"]]
    if modules or "Open Kernel Module" in facts["driver"] or facts["driver"].startswith("amdgpu"):
        yield Finding(check="GPUDirect", host=host, status="ok", found=modules[0] if modules else "by DMA-BUF")
    else:
        yield Finding(
            check="GPUDirect", host=host, status="warning", found="nvidia_peermem is not loaded",
            expected="it, or the open kernel modules with DMA-BUF", repair="There: modprobe nvidia_peermem",
        )  # fmt: skip


def compared_findings(facts_by_host: Mapping[str, Facts]) -> Iterator[Finding]:
    """Machines beside one another: those that differ from most are named."""
    gpus = {host: gpus_of(facts) for host, facts in facts_by_host.items()}
    drivers = {
        host: next((gpu.driver for gpu in gpus[host].gpus if gpu.driver), facts["driver"])
        for host, facts in facts_by_host.items()
    }
    yield from odd_ones("driver", drivers, status="failed", repair="Install one driver version on all machines.")
    models = {host: ", ".join(sorted({gpu.name for gpu in listed.gpus})) for host, listed in gpus.items()}
    yield from odd_ones("accelerator model", models, status="warning", repair="The slowest sets the pace of all.")
    layouts = {}
    for host, facts in facts_by_host.items():
        topology = topology_of(facts)
        parts = [("GPU-GPU", topology.between_gpus()), ("GPU-NIC", topology.to_nics())]
        layouts[host] = "; ".join(f"{label} {text}" for label, text in parts if text)
    yield from odd_ones("topology", layouts, status="warning",
                        repair="A link may be lost: see nvidia-smi topo -m and nvidia-smi nvlink -s.")  # fmt: skip
    rates = {host: _rates(ports_of(facts)) for host, facts in facts_by_host.items()}
    if any(rates.values()):
        yield from odd_ones("InfiniBand rate", rates, status="failed",
                            repair="A port has trained to a lower rate: reseat or change its cable.")  # fmt: skip


def _rates(ports: list[Port]) -> str:
    rates = sorted((port.gbit_s for port in ports if port.state == "Active"), reverse=True)
    return re.sub(r"\.0\b", "", ", ".join(map(str, rates))) + " Gbit/s" * bool(rates)
