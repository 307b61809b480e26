"""Rollouts on two ranks with real ZeRO-3: sharded weights keep the ranks in step, gathered ones set them free."""

from typing import Any

import pytest
import torch
from torch import nn

from rlhf import distributed, engine
from rlhf.config import SamplingConfig
from rlhf.models.policy import Policy
from rlhf.rollout.decode import Response, generate
from rlhf.rollout.selfcheck import check_greedy
from rlhf.rollout.weights import Lending, lend_weights
from tests.distributed.harness import Ranks
from tests.distributed.tiny import EOS, VOCAB, engine_of, tiny_opt

# Ragged, one of length 1, the eos (= pad) id among the tokens.
PROMPTS = [[5, 9, EOS, 7], [3], [8] * 11, [EOS, 40], [12, 13, 14], [60, 61], [9] * 6]
MAX_NEW_TOKENS = 20


def spread_tiny_opt(**changes: Any) -> nn.Module:
    """Weights large enough that tokens vary; dropout that sampling must not see."""
    model = tiny_opt(dropout=0.2, attention_dropout=0.2, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return model


def sample(model: nn.Module, rows: list[int], **changes: Any) -> list[Response]:
    arguments: dict[str, Any] = {
        "uids": [100 + row for row in rows],
        "sample_ids": [0] * len(rows),
        "sampling": SamplingConfig(),
        "stop_token_ids": tuple(range(20, 28)),
        "max_new_tokens": MAX_NEW_TOKENS,
        "seed": 1,
        "step": 2,
        "pad_id": EOS,
        "batch_size": 2,
    }
    return generate(model, [PROMPTS[row] for row in rows], **{**arguments, **changes})


def train_step(trained: engine.TrainEngine) -> None:
    """One update on the log-probability of a fixed row; the same on every rank."""
    token_ids_BT = torch.tensor([PROMPTS[2]])
    mask_BT = torch.ones_like(token_ids_BT, dtype=torch.bool)
    target_BT = mask_BT.clone()
    target_BT[:, 0] = False
    output = trained(token_ids_BT, mask_BT, torch.arange(token_ids_BT.shape[1])[None], target_BT)
    trained.accumulate(-output.logprob_BT.sum(), count=int(target_BT.sum()) * distributed.world_size(), last=True)
    trained.step()


def rollout_job(name: str) -> list[dict[str, Any]]:
    """What each way of lending the weights gives on this rank, before and after an update."""
    engine.setup(timeout_seconds=60)
    rank, world_size = distributed.rank(), distributed.world_size()
    trained = engine_of(Policy(spread_tiny_opt()), name, lr=3e-2)
    mine = list(range(len(PROMPTS)))[rank::world_size]
    found = []
    for _ in range(2):
        state = trained.full_state_dict()
        for gathered in (True, False):
            with lend_weights(trained, Lending(layerwise=not gathered)) as lent:
                model = lent.model
                forwards: list[int] = []
                counter = model.register_forward_pre_hook(lambda *_, seen=forwards: seen.append(1))
                common = {"all_ranks_running": lent.all_ranks_running}
                responses = sample(model, mine, **common)
                forwards.clear()
                # Rank 0 stops at its first token; rank 1 has no stop token; afterwards rank 0 has no row at all.
                uneven = sample(model, [rank], stop_token_ids=range(VOCAB) if rank == 0 else (), **common)
                num_forwards = len(forwards)
                idle = sample(model, [] if rank == 0 else [1, 2, 3], **common)
                check = check_greedy(
                    model, PROMPTS[rank : rank + 3], stop_token_ids=(), max_new_tokens=8, pad_id=EOS, **common
                )
                counter.remove()
            found.append(
                {
                    "gathered": gathered,
                    "state": state,
                    "responses": dict(zip(mine, responses, strict=True)),
                    "uneven": len(uneven[0].token_ids),
                    "num_forwards": num_forwards,
                    "idle": len(idle),
                    "check": (check.ok, check.message),
                }
            )
        assert trained.module.training
        train_step(trained)
    return found


@pytest.mark.parametrize("name", ["cpu_zero3", "cpu_zero2"])
def test_ranks_of_different_length(ranks: Ranks, name: str) -> None:
    """E1, E4, D31: rank 0 stops at its first token, rank 1 at its 20th; fresh weights each time; training goes on.

    On gathered weights rank 0 makes 1 forward and rank 1 20: no token of these waits for a gather.
    """
    first, second = ranks(rollout_job, timeout=100, name=name)
    sharded_forwards = {False: [MAX_NEW_TOKENS] * 2, True: [1, MAX_NEW_TOKENS]}
    all_tokens = []
    for on_first, on_second in zip(first, second, strict=True):
        gathered = on_first["gathered"] or name != "cpu_zero3"
        assert [on_first["num_forwards"], on_second["num_forwards"]] == sharded_forwards[gathered]
        assert (on_first["uneven"], on_second["uneven"]) == (1, MAX_NEW_TOKENS)
        assert (on_first["idle"], on_second["idle"]) == (0, 3)
        for on_rank in (on_first, on_second):
            ok, message = on_rank["check"]
            assert ok, message
        # The same rows on one rank, all in one batch, by a plain model with the exported weights.
        alone = tiny_opt()
        alone.load_state_dict({key.removeprefix("model."): value for key, value in on_first["state"].items()})
        expected = sample(alone, list(range(len(PROMPTS))), batch_size=len(PROMPTS))
        together = {**on_first["responses"], **on_second["responses"]}
        for row, response in enumerate(expected):
            assert together[row].token_ids == response.token_ids
            assert together[row].stopped == response.stopped
            torch.testing.assert_close(
                torch.tensor(together[row].logprobs), torch.tensor(response.logprobs), atol=1e-5, rtol=0
            )
        all_tokens.append([response.token_ids for response in expected])
    before, _, after, _ = all_tokens
    assert len({len(row) for row in before}) > 2 and before != after
