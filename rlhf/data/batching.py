"""Which rows share a micro-batch, and on which rank."""

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

# What a prompt's token counts for each further sequence that shares it: attention alone holds it again (query, key,
# value and output), beside all that a layer holds of a token. Measured in training: 0.40 of it in OPT, 0.19 in Llama,
# 0.18 in GPT-2.
SHARED_TOKEN = 0.4

Prompts = Sequence[tuple[Hashable, int]]
"""Identity and tokens of each row's prompt: a packed micro-batch holds the prompt of rows with one identity once."""


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

    def split(
        self, lengths: Sequence[int], *, world_size: int, prompts: Prompts | None = None
    ) -> list[list[list[int]]]:
        """`[rank][micro-batch][row position]`: every position once, every rank the same number of micro-batches."""
        if self.packed:
            return token_micro_batches(
                lengths,
                world_size=world_size,
                max_tokens=self.max_tokens,
                hidden_size=self.hidden_size,
                prompts=prompts,
            )
        return micro_batches(lengths, world_size=world_size, micro_batch_size=self.max_rows)


def token_micro_batches(
    lengths: Sequence[int],
    *,
    world_size: int,
    max_tokens: int,
    hidden_size: int = 0,
    prompts: Prompts | None = None,
) -> list[list[list[int]]]:
    """Divide rows into micro-batches of at most `max_tokens` tokens and of near-equal cost.

    As few micro-batches as the tokens need, the same number on every rank. Rows are dealt costliest first, each to the
    micro-batch that has cost least so far and still has room (longest processing time first, Graham 1969). The result
    depends on the arguments alone.

    Rows that share a prompt are dealt together, so that it is computed once; by halves, quarters and so on, down to
    single rows, where the ranks are then done earlier, all waiting for the slowest in each micro-batch.

    Args:
        lengths: tokens of each row, prompt included.
        world_size: number of ranks.
        max_tokens: budget of a micro-batch, a shared prompt counted once and SHARED_TOKEN for each further row; a
            longer row has one to itself.
        hidden_size: a row of L tokens costs L (1 + L / (6 hidden_size)): 12 hidden_size^2 multiplications of a token's
            linear layers beside 2 L hidden_size of its causal attention; 0 leaves attention out.
        prompts: of each row; None shares nothing.

    Returns:
        As `micro_batches`; some may be empty.

    Raises:
        ValueError: world_size or max_tokens is below 1.
    """
    if world_size < 1 or max_tokens < 1:
        raise ValueError(f"world_size and max_tokens must be >= 1, got {world_size}, {max_tokens}.")
    rows = _Rows(lengths, hidden_size, prompts or [(i, 0) for i in range(len(lengths))])
    families = rows.by_prompt()
    size = max(map(len, families), default=1)
    plans = [_plan(rows, families, size=size, world_size=world_size, max_tokens=max_tokens)]
    while size > 1 and world_size > 1:
        size = (size + 1) // 2
        plans.append(_plan(rows, families, size=size, world_size=world_size, max_tokens=max_tokens))
    return min(plans, key=rows.makespan)  # of equals the first, which shares most


@dataclass(frozen=True)
class _Rows:
    """Rows, and what some of them take together in one micro-batch."""

    lengths: Sequence[int]
    hidden_size: int
    prompts: Prompts

    def tokens(self, rows: Sequence[int]) -> float:
        """Against the budget."""
        repeated = self._repeated(rows)
        return sum(self.lengths[i] for i in rows) - repeated + SHARED_TOKEN * repeated

    def cost(self, rows: Sequence[int]) -> float:
        """In tokens of the linear layers; attention is computed anew for each row."""
        tokens = sum(self.lengths[i] for i in rows) - self._repeated(rows)
        attention = sum(self.lengths[i] ** 2 for i in rows) / (6 * self.hidden_size) if self.hidden_size else 0.0
        return tokens + attention

    def makespan(self, ranks: list[list[list[int]]]) -> float:
        """Cost of a plan, in which every rank waits for the slowest."""
        return sum(max(map(self.cost, micros)) for micros in zip(*ranks, strict=True))

    def by_prompt(self) -> list[list[int]]:
        """Rows of each prompt, longest first."""
        found: dict[Hashable, list[int]] = {}
        for i in sorted(range(len(self.lengths)), key=lambda i: (-self.lengths[i], i)):
            found.setdefault(self.prompts[i][0], []).append(i)
        return list(found.values())

    def _repeated(self, rows: Sequence[int]) -> int:
        """Prompt tokens of the rows whose prompt another of them has brought."""
        return sum(self.prompts[i][1] for i in rows) - sum(dict(self.prompts[i] for i in rows).values())


def _plan(
    rows: _Rows, families: list[list[int]], *, size: int, world_size: int, max_tokens: int
) -> list[list[list[int]]]:
    """Micro-batches of all ranks, with up to `size` rows of a prompt dealt as one."""
    parts: list[list[int]] = []
    for family in families:
        open_part: list[int] = []
        for i in family:
            if open_part and (len(open_part) == size or rows.tokens([*open_part, i]) > max_tokens):
                parts.append(open_part)
                open_part = []
            open_part.append(i)
        parts.append(open_part)
    tokens, costs = [rows.tokens(part) for part in parts], [rows.cost(part) for part in parts]
    # With as many micro-batches as parts, each part finds room.
    per_rank = max(1, math.ceil(min(sum(tokens) / max_tokens, len(parts)) / world_size))
    while (bins := _deal(tokens, costs, world_size * per_rank, max_tokens)) is None:
        per_rank += 1
    merged = [[i for k in members for i in parts[k]] for members in bins]
    merged.sort(key=lambda members: (-rows.cost(members), members))
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    total = [0.0] * world_size
    for start in range(0, len(merged), world_size):
        cheapest_first = sorted(range(world_size), key=lambda rank: (total[rank], rank))
        for rank, members in zip(cheapest_first, merged[start : start + world_size], strict=True):
            ranks[rank].append(members)
            total[rank] += rows.cost(members)
    return ranks


def _deal(tokens: Sequence[float], costs: Sequence[float], num_bins: int, max_tokens: int) -> list[list[int]] | None:
    """Parts in bins, costliest first, each to the cheapest bin with room; None if one finds no room."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    filled = [0.0] * num_bins
    cheapest = [(0.0, b) for b in range(num_bins)]
    for k in sorted(range(len(tokens)), key=lambda k: (-costs[k], k)):
        full = []
        while cheapest:
            cost, b = heapq.heappop(cheapest)
            if not bins[b] or filled[b] + tokens[k] <= max_tokens:
                break
            full.append((cost, b))
        else:
            return None
        bins[b].append(k)
        filled[b] += tokens[k]
        heapq.heappush(cheapest, (cost + costs[k], b))
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
