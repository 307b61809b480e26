"""What `rlhf bench step1|step2|step3` measured, and the JSON file that holds it. No torch."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf.artifacts import write_json

NAMES = {1: "step 1, SFT", 2: "step 2, reward model", 3: "step 3, PPO"}
FORMAT = "rlhf-bench-1"


@dataclass(frozen=True, kw_only=True)
class Foreseen:
    """The plan's prediction of the same work on the same machine."""

    device: str
    step_seconds: float
    phases: Mapping[str, float]
    """Seconds of one step by the plan's phases."""
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """One step of a recipe, measured on one machine."""

    number: int
    recipe: str
    settings: Sequence[str]
    """What the command line changed of the recipe."""
    hardware: str
    ranks: int
    dtype: str
    date: str
    git_commit: str | None
    versions: Mapping[str, str]
    rows: float
    """Sequences, pairs or responses of one step."""
    step_seconds: Sequence[float]
    """Of each measured step."""
    tokens: float
    """Real tokens of one step, mean."""
    phases: Mapping[str, float]
    """Seconds of one step by phase, mean."""
    flops_per_second: float | None
    """Model FLOPs of one rank."""
    hardware_factor: float = 1.0
    """FLOPs that are computed, recomputation included, over those that the algorithm needs."""
    peak_flops: float | None = None
    """Of one device, in the type of the step; None: the device is not described."""
    padding_frac: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    """Bytes on the fullest rank: weights, gradients, optimizer, other, peak."""
    communication_frac: float | None = None
    """Share of a step in which a collective ran, on the slowest rank; None: not profiled."""
    exposed_frac: float | None = None
    """The part of it that nothing else ran beside."""
    foreseen: Foreseen | None = None

    @property
    def median_seconds(self) -> float:
        """Of a step."""
        return statistics.median(self.step_seconds)

    def percentile(self, share: float) -> float:
        """Seconds of a step that this share of the steps did not take longer than, between the two nearest ones."""
        ordered = sorted(self.step_seconds)
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    @property
    def rate(self) -> float:
        """Real tokens a second and device in the median step."""
        return self.tokens / self.median_seconds / self.ranks

    @property
    def tokens_per_second(self) -> float:
        """Real tokens of all ranks per second of training."""
        return self.tokens * len(self.step_seconds) / sum(self.step_seconds)

    @property
    def rows_per_second(self) -> float:
        """Sequences, pairs or responses of all ranks."""
        return self.rows * len(self.step_seconds) / sum(self.step_seconds)

    @property
    def model_utilisation(self) -> float | None:
        """Model FLOPs as a share of the peak."""
        if self.flops_per_second is None or not self.peak_flops:
            return None
        return self.flops_per_second / self.peak_flops

    @property
    def hardware_utilisation(self) -> float | None:
        """The same with what is computed twice."""
        return None if self.model_utilisation is None else self.model_utilisation * self.hardware_factor


def write_result(path: Path, result: Result) -> None:
    """Put a step's result into a file that may hold those of the recipe's other steps.

    Raises:
        ValueError: the file holds something else, or another machine's or recipe's results.
    """
    steps: dict[str, Any] = {}
    if path.exists():
        old = read_results(path)
        other = next((o for o in old.values() if (o.recipe, o.hardware, o.ranks) != _identity(result)), None)
        if other is not None:
            raise ValueError(
                f"--json {path} holds {NAMES[other.number]} of {other.recipe} on {other.ranks} x {other.hardware}, but "
                f"this is {result.recipe} on {result.ranks} x {result.hardware}. Name another file."
            )
        steps = {str(number): asdict(one) for number, one in old.items()}
    steps[str(result.number)] = asdict(result)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"format": FORMAT, "steps": dict(sorted(steps.items()))})


def check_target(path: Path, recipe: str) -> None:
    """Check, before anything is measured, that a file can take a result of the recipe.

    Raises:
        ValueError: it holds something else.
    """
    other = (
        next((old.recipe for old in read_results(path).values() if old.recipe != recipe), None)
        if path.exists()
        else None
    )
    if other is not None:
        raise ValueError(f"--json {path} holds results of {other}, but this is {recipe}. Name another file.")


def _identity(result: Result) -> tuple[str, str, int]:
    return result.recipe, result.hardware, result.ranks


def read_results(path: Path) -> dict[int, Result]:
    """Number of a step -> its result.

    Raises:
        ValueError: the file was not written by `rlhf bench step1`, `step2` or `step3`.
        FileNotFoundError: it is not there.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise ValueError(raw["format"])
        return {int(number): _read(step) for number, step in raw["steps"].items()}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no result of `rlhf bench step1|step2|step3` ({error}).") from error


def _read(raw: Mapping[str, Any]) -> Result:
    foreseen = None if raw["foreseen"] is None else Foreseen(**raw["foreseen"])
    return Result(**{**raw, "foreseen": foreseen})
