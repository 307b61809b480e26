"""Order of training rows, and each rank's share of it.

The order is a function of (seed, epoch) and the position in it one number, so a run continues at the next unseen row
after a resume, also on another number of ranks.
"""

import math
from collections.abc import Iterator
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from rlhf.data.batching import Batching
from rlhf.data.dataset import RowT_co, TokenDataset


class Loader(Generic[RowT_co]):
    """Iterates over optimiser steps; each gives this rank's micro-batches of rows.

    An epoch draws `weight` x rows of each source. Global batches run on over the end of an epoch; only the very last
    one may be smaller. Iterating goes on after the rows consumed so far.
    """

    def __init__(
        self,
        dataset: TokenDataset[RowT_co],
        *,
        global_batch_size: int,
        batching: Batching,
        rank: int,
        world_size: int,
        seed: int,
        epochs: float,
        max_steps: int = 0,
    ) -> None:
        """Plan the steps.

        Args:
            dataset: training rows.
            global_batch_size: rows of a step, over all ranks.
            batching: how a step's rows become micro-batches.
            rank: this process.
            world_size: number of processes.
            seed: of the order.
            epochs: passes over the rows; `math.inf` runs for max_steps.
            max_steps: most steps; 0 is no limit.

        Raises:
            ValueError: evaluation rows, no rows, or no end.
        """
        if dataset.part != "train":
            raise ValueError(f"a loader trains, but these rows are part {dataset.part!r}. Use eval_micro_batches.")
        if math.isinf(epochs) and not max_steps:
            raise ValueError("epochs is infinite and max_steps is 0: the run would have no end. Set max_steps.")
        self.dataset = dataset
        self.global_batch_size = global_batch_size
        self.batching = batching
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.source_rows = [np.flatnonzero(dataset.sources == s) for s in range(len(dataset.source_names))]
        self.draws = [
            max(1, round(weight * rows.size)) if rows.size else 0
            for weight, rows in zip(dataset.weights, self.source_rows, strict=True)
        ]
        self.epoch_rows = sum(self.draws)
        if not self.epoch_rows:
            raise ValueError("the data set has no training row.")
        limit = max_steps * global_batch_size if max_steps else math.inf
        self.num_rows = int(min(limit, math.inf if math.isinf(epochs) else max(1, round(epochs * self.epoch_rows))))
        self.consumed_rows = 0
        self.skipped_rows = 0
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.zeros(0, np.int64))

    def __len__(self) -> int:
        """Steps of the whole run, those before a resume included."""
        return math.ceil(self.num_rows / self.global_batch_size)

    @property
    def epoch(self) -> float:
        """Passes over the rows so far."""
        return self.consumed_rows / self.epoch_rows

    def __iter__(self) -> Iterator[list[list[RowT_co]]]:
        while self.consumed_rows < self.num_rows:
            start = self.consumed_rows
            # Before the yield: whoever saves in the loop's body has trained on this batch.
            self.consumed_rows = min(start + self.global_batch_size, self.num_rows)
            yield self.batch_at(range(start, self.consumed_rows))

    def batch_at(self, positions: range) -> list[list[RowT_co]]:
        """This rank's micro-batches of the rows at some positions of the endless order, also beyond the last step's."""
        rows = [self.row_at(position + self.skipped_rows) for position in positions]
        shares = self.batching.split(self.dataset.lengths[rows].tolist(), world_size=self.world_size)
        return [[self.dataset[rows[i]] for i in micro] for micro in shares[self.rank]]

    def row_at(self, position: int) -> int:
        """Row of the data set at a position of the endless order."""
        epoch, offset = divmod(position, self.epoch_rows)
        if self._order[0] != epoch:
            self._order = (epoch, self._epoch_order(epoch))
        return int(self._order[1][offset])

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs."""
        return {
            "consumed_rows": self.consumed_rows,
            "skipped_rows": self.skipped_rows,
            "seed": self.seed,
            "rows": self.dataset.key,
            "draws": self.draws,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the state was taken, on any number of ranks and with any batch size.

        Raises:
            ValueError: another seed, other rows or other weights, whose order would be another.
        """
        own = {"seed": self.seed, "rows": self.dataset.key, "draws": self.draws}
        changed = [f"{name}={state[name]}, this run has {value}" for name, value in own.items() if state[name] != value]
        if changed:
            raise ValueError(
                f"the saved loader had {'; '.join(changed)}: it cannot continue in the same order. Restore the data "
                "section and run.seed, or start a new run."
            )
        self.consumed_rows = int(state["consumed_rows"])
        self.skipped_rows = int(state.get("skipped_rows", 0))

    def skip_past(self, later: dict[str, Any]) -> None:
        """Go on with the rows after those that a later state had taken; as many steps as before are left.

        The order has no end, so the rows that are left out are made up for after the last one.
        """
        self.skipped_rows = later["consumed_rows"] + later["skipped_rows"] - self.consumed_rows

    def _epoch_order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Rows of one epoch, shuffled.

        Each source is an endless stream of permutations, of which an epoch takes the next `draws`: with weight 0.5, two
        epochs see every row once.
        """
        drawn = []
        for source, (rows, count) in enumerate(zip(self.source_rows, self.draws, strict=True)):
            if not count:
                continue
            first, last = epoch * count // rows.size, ((epoch + 1) * count - 1) // rows.size
            passes = [rows[self._permutation(rows.size, source, number)] for number in range(first, last + 1)]
            start = epoch * count - first * rows.size
            drawn.append(np.concatenate(passes)[start : start + count])
        order = np.concatenate(drawn)
        return order[self._permutation(order.size, len(self.draws), epoch)]

    def _permutation(self, size: int, *keys: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng([self.seed, *keys]).permutation(size)


def eval_micro_batches(
    dataset: TokenDataset[RowT_co], *, batching: Batching, rank: int, world_size: int, max_rows: int
) -> Iterator[list[RowT_co]]:
    """This rank's micro-batches of an evaluation: every row once over all ranks, equally many micro-batches per rank.

    Args:
        dataset: the rows; none gives no micro-batch.
        batching: how the rows become micro-batches; those at the end may be empty.
        rank: this process.
        world_size: number of processes.
        max_rows: most rows; they are taken evenly from the whole set, the same ones each time.
    """
    rows = evenly_spaced(len(dataset), max_rows)
    lengths = dataset.lengths[rows].tolist() if rows else []
    for micro in batching.split(lengths, world_size=world_size)[rank]:
        yield [dataset[rows[i]] for i in micro]


def evenly_spaced(num_rows: int, max_rows: int) -> list[int]:
    """At most max_rows row numbers, taken evenly from all; the same ones each time."""
    count = min(num_rows, max_rows)
    return [i * num_rows // count for i in range(count)]
