"""What one run of one contestant measured, and how runs are compared. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Sums over the measured steps of one run. Seconds are wall seconds of the slowest rank; tokens are real ones."""

    wall_seconds: float = 0.0
    cpu_seconds: float | None = None
    """Of all ranks."""
    steps: int = 0
    tokens: float = 0.0
    """Of all ranks, without padding; in a rollout the response's alone."""
    rows: float = 0.0
    """Sequences, pairs or responses."""
    padding_frac: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase."""
    flops: float | None = None
    """Model FLOPs that the steps needed."""
    ranks: int = 1
    peak_rss_bytes: int | None = None
    startup_seconds: float | None = None
    """From the start of the process to its first step."""
    process_seconds: float = 0.0
    """Wall seconds of the whole process."""
    compile_seconds: float = 0.0
    """Of them for torch.compile's compiling."""

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per wall second."""
        return self.tokens / self.wall_seconds

    @property
    def rows_per_second(self) -> float:
        """Rows per wall second."""
        return self.rows / self.wall_seconds

    @property
    def step_seconds(self) -> float:
        """Wall seconds of one step."""
        return self.wall_seconds / self.steps

    @property
    def cpu_per_row(self) -> float | None:
        """Processor seconds for one row."""
        return None if self.cpu_seconds is None else self.cpu_seconds / self.rows

    @property
    def flops_per_second(self) -> float | None:
        """Model FLOPs per wall second and rank."""
        return None if self.flops is None else self.flops / self.wall_seconds / self.ranks


def to_json(sample: Sample) -> dict[str, Any]:
    """Plain form of a sample."""
    return asdict(sample)


def from_json(values: Mapping[str, Any]) -> Sample:
    """The sample that `to_json` wrote."""
    return Sample(**values)


def median_of(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> float | None:
    """Median over the rounds that have the value; None if none has."""
    values = [v for v in map(value, samples) if v is not None]
    return median(values) if values else None


def median_ratio(
    ours: Sequence[Sample], theirs: Sequence[Sample], value: Callable[[Sample], float | None]
) -> float | None:
    """Median over the rounds of our value over theirs in the same round: what slows a whole round cancels."""
    pairs = [(value(a), value(b)) for a, b in zip(ours, theirs, strict=False)]
    ratios = [a / b for a, b in pairs if a is not None and b]
    return median(ratios) if ratios else None


def from_steps(ranks: Sequence[Sequence[Mapping[str, Any]]], *, warmup: int) -> Sample:
    """Sample of the steps that each rank's recorder (peers/recorder.py) wrote, the first `warmup` left out.

    Raises:
        ValueError: no step is left, or the ranks made different numbers of them.
    """
    counts = {len(steps) for steps in ranks}
    if len(counts) != 1 or min(counts) <= warmup:
        raise ValueError(
            f"{sorted(counts)} steps were recorded on {len(ranks)} ranks, but more than {warmup} are needed."
        )
    kept = [steps[warmup:] for steps in ranks]
    every = [step for steps in kept for step in steps]
    positions = sum(step["positions"] for step in every)
    names = {name for step in every for name in step["phases"]}
    return Sample(
        wall_seconds=sum(max(step["wall"] for step in same) for same in zip(*kept, strict=True)),
        cpu_seconds=sum(step["cpu"] for step in every),
        steps=len(kept[0]),
        tokens=sum(step["tokens"] for step in every),
        rows=sum(step["rows"] for step in every),
        padding_frac=1 - sum(step["filled"] for step in every) / positions if positions else None,
        phases={
            name: sum(max(step["phases"].get(name, 0.0) for step in same) for same in zip(*kept, strict=True))
            for name in sorted(names)
        },
        ranks=len(ranks),
    )
