import time

import pytest
import torch

from rlhf import distributed, engine
from tests.distributed.harness import Ranks, RanksFailed


def sum_of_ranks(offset: int) -> tuple[int, int, float]:
    engine.setup(timeout_seconds=30)
    total = distributed.all_sum(torch.tensor([distributed.rank() + offset], dtype=torch.float32))
    return distributed.rank(), distributed.world_size(), total.item()


def fails_on_rank_1() -> None:
    engine.setup(timeout_seconds=30)
    if distributed.rank() == 1:
        raise ValueError("the reason")
    distributed.barrier()


def sleeps_on_rank_1() -> None:
    if distributed.rank() == 1:
        time.sleep(60)


def test_results_come_back_in_rank_order(ranks: Ranks) -> None:
    assert ranks(sum_of_ranks, offset=10) == [(0, 2, 21.0), (1, 2, 21.0)]
    assert ranks(sum_of_ranks, world_size=1, offset=3) == [(0, 1, 3.0)]


def test_the_failing_rank_and_its_reason_are_reported_at_once(ranks: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"(?s)fails_on_rank_1: rank 1 of 2, exit code 1.*ValueError: the reason"):
        ranks(fails_on_rank_1, timeout=50)
    assert time.monotonic() - start < 25
    assert ranks(sum_of_ranks, offset=0)[0][2] == 1.0  # the server is still good


def test_a_job_over_its_limit_is_ended_with_stacks(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 of 2, was ended while it waited.*in sleeps_on_rank_1"):
        ranks(sleeps_on_rank_1, timeout=4)
