"""Seconds of collectives on machines of several devices with several network cards. No torch.

Rings, as NCCL builds them: a ring enters and leaves each machine once, over the cards of the ranks it holds, so its
rate is the smaller of a device's link and the machine's cards; each hop adds a latency. A ring all-gather of S bytes
over n ranks moves (n - 1) / n S bytes past each rank in n - 1 hops; an all-reduce does that twice. Source of the
factors: nccl-tests, PERFORMANCE.md; of the latencies, NCCL's tuning model (3.4 us inside a machine; 14 us between
machines for large messages).
"""

from dataclasses import dataclass

from rlhf.plan.hardware import Device
from rlhf.plan.measured import Collective

LINK = 0.55
"""Of the links' rate inside a machine that sums of some 100 MB between products reach (fitted). Alone, and larger, they
reach 0.75."""
NETWORK = 0.5
"""Of the rate of several cards that a ring over many machines reaches (fitted: RoCE, Omni-Path; judged: InfiniBand)."""
ALONE = 0.9
"""Of a card's rate when one flow has it to itself: ib_write_bw's."""
HOP_INSIDE = 3.4e-6
HOP_BETWEEN = 37e-6
"""Seconds of a hop between machines, waiting for the slowest rank included (fitted; NCCL counts 14 us)."""
START = 15e-6
"""Seconds to launch a collective."""
TREE_MESSAGE = 4e6
"""All-reduces below this size go over a tree, whose hops grow with the logarithm of the machines."""


def device_share(device: Device) -> float:
    """Of the rate of a machine's cards that a collective reaches."""
    return ALONE if device.nics == 1 else NETWORK


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that communicate."""

    ranks: int
    per_node: int
    """Of these on one machine."""
    device: Device
    single_card: bool = False
    """Only one network card of a machine is used."""

    @property
    def nodes(self) -> int:
        """Machines that the group spans."""
        return -(-self.ranks // self.per_node)

    @property
    def inside(self) -> float:
        """Bytes a second of a ring inside one machine."""
        device = self.device
        link = device.link_gb_s
        if device.pair_gb_s:  # two dies of one module, or one peer of several
            link = device.pair_gb_s if self.per_node == 2 else device.link_gb_s
        return link * 1e9 * LINK

    @property
    def rate(self) -> float:
        """Bytes a second past each rank of a ring; groups side by side share the cards of a machine."""
        device = self.device
        if self.measured is not None:
            return self.measured.gb_s * 1e9
        between = device.node_bandwidth * device_share(device) * self.per_node / device.node
        if self.single_card:
            between = device.node_bandwidth / device.nics * ALONE
        inside = self.inside if self.per_node > 1 else float("inf")
        return inside if self.nodes == 1 else min(inside, between)

    @property
    def measured(self) -> Collective | None:
        """What was measured of such a group, if it was."""
        inside = self.device.measured if self.nodes == 1 else None
        return None if inside is None else inside.collective(self.ranks)

    @property
    def hops(self) -> float:
        """Seconds of latency of once around the ring."""
        between = self.nodes - 1
        return between * HOP_BETWEEN + (self.ranks - 1 - between) * HOP_INSIDE

    def start(self, hops: float) -> float:
        """Seconds of a message beside what it moves: as measured, or its launch and hops."""
        return START + hops if self.measured is None else self.measured.latency


def group(device: Device, ranks: int, *, stride: int = 1) -> Group:
    """Ranks `stride` apart in the order of the launch, machines filled one after the other."""
    per_node = max(1, min(ranks, device.node // stride))
    return Group(ranks=ranks, per_node=per_node, device=device)


def all_gather(members: Group, size: float, *, messages: float = 1) -> float:
    """Seconds to gather `size` bytes in all, in several messages; a reduce-scatter takes as long."""
    if members.ranks == 1:
        return 0.0
    return messages * members.start(members.hops) + size * (members.ranks - 1) / members.ranks / members.rate


def all_reduce(members: Group, size: float, *, messages: float = 1) -> float:
    """Seconds to sum `size` bytes."""
    if members.ranks == 1:
        return 0.0
    moved = 2 * size * (members.ranks - 1) / members.ranks / members.rate
    latency = 2 * members.hops
    if size / messages < TREE_MESSAGE and members.nodes > 1:
        depth = (members.nodes - 1).bit_length()
        latency = min(latency, 2 * (depth * HOP_BETWEEN + (members.per_node - 1) * HOP_INSIDE))
    return messages * members.start(latency) + moved


def send(device: Device, size: float, *, between: bool, sharing: int = 1) -> float:
    """Seconds from one rank to another; `sharing` ranks of a machine send at once when it is between machines."""
    if not between:
        return START + size / (device.link_gb_s * 1e9 * LINK)
    return START + HOP_BETWEEN + size * sharing / (device.node_bandwidth * device_share(device))
