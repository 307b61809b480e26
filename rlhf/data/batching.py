"""Which rows share a micro-batch, and on which rank."""

from collections.abc import Sequence


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
