"""Which rows share a micro-batch, and on which rank."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Batching:
    """How the rows of a step become micro-batches."""

    max_rows: int
    """Most rows of a padded micro-batch."""
    max_tokens: int = 0
    """Most tokens of a packed micro-batch, unless one row alone is longer; 0: padded micro-batches."""
    hidden_size: int = 0
    """Of the model, which says from which length on attention costs; 0: tokens cost the same at any length."""

    @property
    def packed(self) -> bool:
        """Whether micro-batches are packed rows."""
        return self.max_tokens > 0

    def split(self, lengths: Sequence[int], *, world_size: int) -> list[list[list[int]]]:
        """`[rank][micro-batch][row position]`: every position once, every rank the same number of micro-batches."""
        if self.packed:
            return token_micro_batches(
                lengths, world_size=world_size, max_tokens=self.max_tokens, hidden_size=self.hidden_size
            )
        return micro_batches(lengths, world_size=world_size, micro_batch_size=self.max_rows)


def token_micro_batches(
    lengths: Sequence[int], *, world_size: int, max_tokens: int, hidden_size: int = 0
) -> list[list[list[int]]]:
    """Divide rows into micro-batches of at most `max_tokens` tokens and of near-equal cost.

    As few micro-batches as the tokens need, the same number on every rank. Rows are dealt costliest first, each to the
    micro-batch that has cost least so far and still has room (longest processing time first, Graham 1969). The result
    depends on the arguments alone.

    Args:
        lengths: tokens of each row.
        world_size: number of ranks.
        max_tokens: budget of a micro-batch; a longer row has one to itself.
        hidden_size: a row of L tokens costs L (1 + L / (6 hidden_size)): 12 hidden_size^2 multiplications of a token's
            linear layers beside 2 L hidden_size of its causal attention; 0 leaves attention out.

    Returns:
        As `micro_batches`; some may be empty.

    Raises:
        ValueError: world_size or max_tokens is below 1.
    """
    if world_size < 1 or max_tokens < 1:
        raise ValueError(f"world_size and max_tokens must be >= 1, got {world_size}, {max_tokens}.")
    costs = [length * (1 + length / (6 * hidden_size)) if hidden_size else float(length) for length in lengths]
    costliest_first = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    # With as many micro-batches as rows, each finds room.
    per_rank = max(1, math.ceil(min(sum(lengths) / max_tokens, len(lengths)) / world_size))
    while (bins := _deal(lengths, costs, costliest_first, world_size * per_rank, max_tokens)) is None:
        per_rank += 1
    bins.sort(key=lambda rows: (-sum(costs[i] for i in rows), rows))
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    total = [0.0] * world_size
    for start in range(0, len(bins), world_size):
        cheapest_first = sorted(range(world_size), key=lambda rank: (total[rank], rank))
        for rank, rows in zip(cheapest_first, bins[start : start + world_size], strict=True):
            ranks[rank].append(rows)
            total[rank] += sum(costs[i] for i in rows)
    return ranks


def _deal(
    lengths: Sequence[int], costs: Sequence[float], order: Sequence[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Rows in bins, each row to the cheapest bin with room; None if one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    tokens = [0] * num_bins
    cheapest = [(0.0, b) for b in range(num_bins)]
    for i in order:
        full = []
        while cheapest:
            cost, b = heapq.heappop(cheapest)
            if not bins[b] or tokens[b] + lengths[i] <= max_tokens:
                break
            full.append((cost, b))
        else:
            return None
        bins[b].append(i)
        tokens[b] += lengths[i]
        heapq.heappush(cheapest, (cost + costs[i], b))
        for entry in full:
            heapq.heappush(cheapest, entry)
    return bins


def micro_batches(lengths: Sequence[int], *, world_size: int, micro_batch_size: int) -> list[list[list[int]]]:
    """Divide rows over ranks and micro-batches.

    Rows are sorted by length and dealt in groups of `world_size` micro-batches, so that rows of like length share a
    micro-batch and ranks do like work at the same time. Within a group the longest micro-batch goes to the rank with
    the fewest padded tokens so far. The result depends on the arguments alone.

    Args:
        lengths: tokens of each row.
        world_size: number of ranks.
        micro_batch_size: most rows of a micro-batch.

    Returns:
        `[rank][micro-batch][row position]`: every position once, every rank the same number of micro-batches. Where
        rows run out, micro-batches are shorter or empty.

    Raises:
        ValueError: world_size or micro_batch_size is below 1.
    """
    if world_size < 1 or micro_batch_size < 1:
        raise ValueError(f"world_size and micro_batch_size must be >= 1, got {world_size}, {micro_batch_size}.")
    longest_first = sorted(range(len(lengths)), key=lambda i: (-int(lengths[i]), i))
    group_size = world_size * micro_batch_size
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    cost = [0] * world_size
    for start in range(0, len(longest_first), group_size):
        group = longest_first[start : start + group_size]
        chunks = _even_chunks(group, world_size)
        cheapest_first = sorted(range(world_size), key=lambda rank: (cost[rank], rank))
        for rank, chunk in zip(cheapest_first, chunks, strict=True):
            ranks[rank].append(chunk)
            cost[rank] += len(chunk) * int(lengths[chunk[0]]) if chunk else 0
    return ranks


def _even_chunks(items: list[int], num_chunks: int) -> list[list[int]]:
    """Consecutive chunks whose sizes differ by at most one."""
    size, longer = divmod(len(items), num_chunks)
    ends = [size * (i + 1) + min(i + 1, longer) for i in range(num_chunks)]
    return [items[a:b] for a, b in zip([0, *ends], ends, strict=False)]
