"""How an engine lends its weights to a rollout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from rlhf.distributed import all_max, device
from rlhf.engine import FrozenEngine, TrainEngine

AllRanksRunning = Callable[[bool], bool]


@contextmanager
def lend_weights(
    engine: TrainEngine | FrozenEngine, *, gathered: bool
) -> Iterator[tuple[nn.Module, AllRanksRunning | None]]:
    """Lend the Hugging Face model of a policy for decoding; a collective under ZeRO-3.

    Args:
        engine: of a `Policy`.
        gathered: under ZeRO-3, gather all weights once for the whole rollout, after which the ranks decode
            independently; false keeps them sharded, for models that do not fit: each forward gathers layer by layer, so
            every rank has to make the same number of forwards. Without ZeRO-3 there is nothing to gather.

    Yields:
        The model, and for sharded weights a function that tells whether any rank still has rows to decode.
    """
    if gathered or not engine.is_sharded:
        with engine.generation_module() as policy:
            yield cast(nn.Module, policy.model), None
    else:
        with engine.sharded_module() as policy:
            yield cast(nn.Module, policy.model), any_rank_running


def any_rank_running(running: bool) -> bool:  # noqa: FBT001  the signature that decode calls
    """Whether `running` holds on any rank. Collective."""
    return bool(all_max(torch.tensor(int(running), device=device())).item())
