"""How good a reward model is on held-out preferences, beyond its accuracy."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlhf.data.batching import Batching
from rlhf.data.collate import collate_preferences
from rlhf.data.dataset import PreferenceRow, TokenDataset
from rlhf.data.loader import eval_micro_batches
from rlhf.distributed import all_gather_objects
from rlhf.engine import TrainEngine
from rlhf.models.scalar_head import scores_at
from rlhf.sharing import Sharing

NUM_BINS = 10


@dataclass
class Judgements:
    """What a reward model said of held-out rows; lists, so that ranks' parts can be joined and told apart by source."""

    margin: list[float] = field(default_factory=list)
    """Score of the chosen response minus that of the rejected one, each pair."""
    margin_source: list[int] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    """Each response."""
    length: list[int] = field(default_factory=list)
    """Tokens of each response."""
    score_source: list[int] = field(default_factory=list)
    num_ties: int = 0
    """Pairs of equal rank, or made identical by cutting: not in `margin`."""

    def extend(self, other: "Judgements") -> None:
        """Take in another rank's part."""
        self.margin += other.margin
        self.margin_source += other.margin_source
        self.score += other.score
        self.length += other.length
        self.score_source += other.score_source
        self.num_ties += other.num_ties


def judge(
    reward: TrainEngine,
    dataset: TokenDataset[PreferenceRow],
    *,
    batching: Batching,
    sharing: Sharing,
    max_rows: int,
    pad_id: int,
) -> Judgements:
    """Score all held-out rows, each on one rank or group; every rank gets all judgements. Collective."""
    mine = Judgements()
    reward.eval()
    with torch.no_grad():
        for rows in eval_micro_batches(
            dataset, batching=batching, rank=sharing.rows.number, world_size=sharing.rows.count, max_rows=max_rows
        ):
            batch = collate_preferences(
                rows, pad_id=pad_id, device=reward.device, packed=batching.packed, group=sharing.sequence
            )
            score_S = batch.sequences.summed(scores_at(reward(**batch.sequences.inputs), batch.sequences.last_S))
            mine.margin += (score_S[batch.chosen_N] - score_S[batch.rejected_N]).tolist()
            mine.margin_source += batch.source_N.tolist()
            mine.score += score_S[batch.counted_S].tolist()
            mine.length += batch.response_length_S[batch.counted_S].tolist()
            mine.score_source += batch.source_S[batch.counted_S].tolist()
            mine.num_ties += batch.num_ties + batch.num_truncated_ties
    reward.train()
    everything = Judgements()
    for part in sharing.one_of_each(all_gather_objects(mine)):
        everything.extend(part)
    return everything


def summarise(judgements: Judgements, source_names: Sequence[str]) -> dict[str, float]:
    """Metrics of an evaluation, over all pairs and for each source; without pairs there are none."""
    margin = np.asarray(judgements.margin, dtype=np.float64)
    if not len(margin):
        return {}
    values = {
        **_pair_metrics(margin),
        "eval/tie_frac": judgements.num_ties / (judgements.num_ties + len(margin)),
        "eval/calibration_error": calibration(margin).error,
    }
    values["eval/score_low"], values["eval/score_high"] = min(judgements.score), max(judgements.score)
    correlation = pearson(judgements.score, judgements.length)
    if correlation is not None:
        values["eval/length_correlation"] = correlation
    margin_source = np.asarray(judgements.margin_source)
    for i, name in enumerate(source_names):
        of_source = margin[margin_source == i]
        if len(of_source) and len(source_names) > 1:
            values.update({f"{key}/{name}": value for key, value in _pair_metrics(of_source).items()})
    return values


def _pair_metrics(margin: npt.NDArray[np.float64]) -> dict[str, float]:
    return {
        "eval/loss": float(np.logaddexp(0.0, -margin).mean()),
        "eval/pair_accuracy": float((margin > 0).mean()),
        "eval/margin": float(margin.mean()),
    }


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """How far the model's stated confidence is from how often it is right."""

    error: float
    """Expected calibration error: mean over pairs of the gap of their bin; fraction."""
    predicted: list[float]
    """Mean confidence of each bin that holds pairs."""
    observed: list[float]
    """Share of its pairs that the model gets right."""
    counts: list[int]


def calibration(margin: npt.NDArray[np.float64]) -> Calibration:
    """Expected calibration error over ten bins of confidence in [0.5, 1].

    The model's confidence in the response it prefers is sigmoid(|margin|); it is right where the margin is positive.

    Source: Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    confidence = 1.0 / (1.0 + np.exp(-np.abs(margin)))
    right = np.where(margin == 0, 0.5, margin > 0)
    bins = np.minimum(((confidence - 0.5) * 2 * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    filled = counts > 0
    predicted = np.bincount(bins, weights=confidence, minlength=NUM_BINS)[filled] / counts[filled]
    observed = np.bincount(bins, weights=right, minlength=NUM_BINS)[filled] / counts[filled]
    error = float((np.abs(predicted - observed) * counts[filled]).sum() / len(margin))
    return Calibration(
        error=error, predicted=predicted.tolist(), observed=observed.tolist(), counts=counts[filled].tolist()
    )


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Correlation coefficient; None where one of the two does not vary."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if len(a) < 2 or a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def histograms(judgements: Judgements) -> dict[str, Any]:
    """Entries of histograms.json: margins, and the calibration curve."""
    margin = np.asarray(judgements.margin, dtype=np.float64)
    if not len(margin):
        return {}
    counts, edges = np.histogram(margin, bins=30)
    curve = calibration(margin)
    return {
        "margin": {"edges": edges.tolist(), "counts": counts.tolist()},
        "calibration": {"predicted": curve.predicted, "observed": curve.observed, "counts": curve.counts},
    }
