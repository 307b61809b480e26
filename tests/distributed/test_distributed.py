import pytest
import torch

from rlhf import distributed
from tests.distributed.harness import Ranks


def collectives_job() -> dict[str, object]:
    distributed.init(timeout_seconds=30)
    rank = distributed.rank()
    x = torch.tensor([rank + 1.0, 2.0])
    seen: dict[str, object] = {
        "sum": distributed.all_sum(x).tolist(),
        "unchanged": x.tolist() == [rank + 1.0, 2.0],
        "bool": distributed.all_sum(torch.tensor(rank == 0)).item(),
        "max": distributed.all_max(torch.tensor([rank, -rank])).tolist(),
        "gather": distributed.all_gather(torch.tensor([rank])).tolist(),
        "objects": distributed.all_gather_objects({"rank": rank}),
        "broadcast": distributed.broadcast_object(f"from {rank}"),
    }
    with pytest.raises(ValueError, match=r"no good 1 \[rank 1 of 2\]"):
        distributed.same_on_all(rank == 0, f"no good {rank}", error=ValueError)
    # The failing rank raises its own error, the other one quotes it.
    expected, match = (KeyError, "x") if rank == 1 else (RuntimeError, r"writing failed on rank 1: KeyError: 'x'")
    with pytest.raises(expected, match=match), distributed.together("writing"):
        if rank == 1:
            raise KeyError("x")
    return seen


def test_collectives(ranks: Ranks) -> None:
    for seen in ranks(collectives_job):
        assert seen == {
            "sum": [3.0, 4.0],
            "unchanged": True,
            "bool": 1,
            "max": [1, 0],
            "gather": [[0], [1]],
            "objects": [{"rank": 0}, {"rank": 1}],
            "broadcast": "from 0",
        }
