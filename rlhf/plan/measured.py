"""What `rlhf bench machine` measured of a device, in the place of tables fitted to other machines. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

_NEAREST = 4
"""Measured shapes that a product's rate is taken from."""

_ABOVE_ZERO = ("optimizer_gb_s", "update_layer", "update_step", "score_layer", "score_pass",
               "decode_layer", "decode_token", "draw_logit", "process_gb")  # fmt: skip

_SHARDED = ("gather_layer", "gather_gb_s", "sharded_optimizer_gb_s")
"""Of ZeRO-3, by ranks."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One group of ranks of a machine."""

    latency: float
    """Seconds of a collective of nothing."""
    gb_s: float
    """10^9 bytes a second past each rank, of an all-gather."""


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """ssh from the measuring machine to another."""

    seconds: float
    """Of `ssh HOST true`."""
    gb_s: float
    """10^9 bytes a second of a stream."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Rates and times of one rank while the others work too."""

    products: Mapping[str, Sequence[Sequence[float]]]
    """Type -> rows of (m, n, k, TFLOP/s forward, of both products backward): m tokens, k wide, made n wide."""
    attention: Mapping[str, Sequence[Sequence[float]]]
    """Type -> rows of (length, TFLOP/s forward, backward), the lower triangle counted."""
    pointwise: Sequence[Sequence[float]]
    """Rows of (hidden size, 10^9 bytes a second) of norms, residuals and activations, in the plan's count of bytes."""
    optimizer_gb_s: float
    """Clipping and Adam, in the plan's count of their bytes."""
    update_layer: float
    """Seconds of a layer's forward and backward pass in a micro-batch that is too small to compute anything."""
    update_step: float
    """Seconds of such an update that do not depend on its layers."""
    gather_layer: Mapping[str, float]
    """Ranks -> seconds that ZeRO-3 over them adds to a layer's update, its messages included."""
    gather_gb_s: Mapping[str, float]
    """Ranks -> 10^9 bytes a second of weights gathered and gradients reduced by ZeRO-3 over them beside that, copies,
    new memory and the bytes of its messages included."""
    sharded_optimizer_gb_s: Mapping[str, float]
    """Ranks -> clipping and Adam under ZeRO-3 over them, as `optimizer_gb_s`."""
    score_layer: float
    """Seconds of a layer's forward pass without gradients, of next to nothing."""
    score_pass: float
    """Seconds of such a pass that do not depend on its layers."""
    decode_layer: float
    """Seconds of a layer of a decoding step."""
    decode_token: float
    """Seconds of such a step that do not depend on its layers: the look at what ended, next to nothing drawn."""
    draw_logit: float
    """Seconds of the draw for each row and entry of the vocabulary."""
    process_gb: float
    """10^9 bytes of a process before its first model: libraries, and the device's context."""
    collectives: Mapping[str, Collective] = field(default_factory=dict)
    """Ranks -> what they reach."""
    disk: Mapping[str, float] = field(default_factory=dict)
    """write_gb_s and read_gb_s of one file, where it was asked for; for people, the plan does not use it."""

    ssh: Mapping[str, Ssh] = field(default_factory=dict)
    """Host -> what ssh to it takes, where a hostfile was given; for people, the plan does not use it."""

    def product(self, dtype: str, m: float, n: float, k: float, *, backward: bool = False) -> float:
        """Seconds of a linear layer's product of m tokens forward, or of both of its backward pass.

        Raises:
            ValueError: the type was not measured.
        """
        rows = self._rows(self.products, dtype)
        rate = _nearest([(row[:3], row[3 + backward]) for row in rows], (m, n, k))
        return 2 * m * n * k * (1 + backward) / (rate * 1e12)

    def attention_seconds(self, dtype: str, operations: float, length: float, *, backward: bool = False) -> float:
        """Seconds of attention, forward or backward, that takes so many FLOPs forward.

        Raises:
            ValueError: the type was not measured.
        """
        rows = self._rows(self.attention, dtype)
        rate = _nearest([(row[:1], row[1 + backward]) for row in rows], (length,))
        return operations * (2.5 if backward else 1.0) / (rate * 1e12)

    def pointwise_seconds(self, size: float, hidden: float) -> float:
        """Seconds of a layer's norms, residuals and activations that move so many bytes."""
        return size / (_nearest([(row[:1], row[1]) for row in self.pointwise], (hidden,)) * 1e9)

    def collective(self, ranks: int) -> Collective | None:
        """Of a group within the machine: the measured one that is nearest in size; None if none was measured."""
        return self.collectives[_nearest_size(self.collectives, ranks)] if self.collectives else None

    def gather_seconds(self, ranks: int) -> float:
        """Seconds that ZeRO-3 over so many ranks adds to a layer's update."""
        return self.gather_layer[_nearest_size(self.gather_layer, ranks)]

    def sharded_seconds(self, size: float, ranks: int) -> float:
        """Seconds to gather or reduce `size` bytes under ZeRO-3 over ranks of this machine."""
        return size / (self.gather_gb_s[_nearest_size(self.gather_gb_s, ranks)] * 1e9)

    def optimizer_rate(self, zero: int, ranks: int) -> float:
        """10^9 bytes a second of clipping and Adam."""
        by_ranks = self.sharded_optimizer_gb_s
        return by_ranks[_nearest_size(by_ranks, ranks)] if zero == 3 else self.optimizer_gb_s

    @staticmethod
    def _rows(table: Mapping[str, Sequence[Sequence[float]]], dtype: str) -> Sequence[Sequence[float]]:
        if dtype not in table:
            raise ValueError(f"{dtype} was not measured on this machine; {', '.join(table)} was.")
        return table[dtype]


def _nearest_size(by_ranks: Mapping[str, Any], ranks: int) -> str:
    """The measured number of ranks that is nearest in ratio."""
    return min(by_ranks, key=lambda size: abs(math.log(int(size) / ranks)))


def _nearest(rows: Sequence[tuple[Sequence[float], float]], point: Sequence[float]) -> float:
    """Mean in logarithms of the nearest rows' values, weighted by 1 / distance^2, in powers of two."""
    distances = sorted(
        (sum(math.log2(a / b) ** 2 for a, b in zip(place, point, strict=True)), value) for place, value in rows
    )[:_NEAREST]
    if distances[0][0] < 1e-12:
        return distances[0][1]
    weights = [1 / distance for distance, _ in distances]
    logs = [math.log(value) for _, value in distances]
    return math.exp(sum(w * x for w, x in zip(weights, logs, strict=True)) / sum(weights))


def from_mapping(raw: Any, source: str) -> Measured:
    """The `measured` section of a device in a YAML.

    Raises:
        ValueError: it is not what `rlhf bench machine` writes.
    """
    try:
        unknown = sorted(set(raw) - {f.name for f in fields(Measured)})
        if unknown:
            raise ValueError(f"{unknown[0]} is not a setting")
        collectives = {str(ranks): Collective(**c) for ranks, c in raw["collectives"].items()}
        sharded = {name: {str(ranks): x for ranks, x in raw[name].items()} for name in _SHARDED}
        ssh = {str(host): Ssh(**values) for host, values in raw.get("ssh", {}).items()}
        made = Measured(**{**raw, "collectives": collectives, **sharded, "ssh": ssh})
        widths = ((made.products, 5), (made.attention, 3), ({"": made.pointwise}, 2))
        numbers = [x for table, width in widths for rows in table.values() for row in rows
                   for x in (row if len(row) == width else [0.0])]  # fmt: skip
        numbers += [getattr(made, name) for name in _ABOVE_ZERO]
        numbers += [x for c in made.collectives.values() for x in (c.latency, c.gb_s)] + list(made.disk.values())
        numbers += [x for each in made.ssh.values() for x in (each.seconds, each.gb_s)]
        numbers += [x for by_ranks in sharded.values() for pair in by_ranks.items() for x in (int(pair[0]), pair[1])]
        numbers += map(int, made.collectives)
        if not all(sharded.values()) or not all(isinstance(x, int | float) and 0 < x < math.inf for x in numbers):
            raise ValueError("a rate or time is not a number above 0, or a row is too short")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{source}: measured is not what `rlhf bench machine` writes: {error}. Run it again."
        ) from error
    return made
