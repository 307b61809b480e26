"""The plain path says what our decoder says: same tokens, same log-probs, under every transform."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rlhf.config import SamplingConfig
from rlhf.models.build import train_bpe
from rlhf.rollout.decode import Response, generate
from rlhf.rollout.plain import generate_plain

EOS = 1
# Ragged, one of length 1, eos (= pad) inside a prompt.
PROMPTS = [[5, 9, EOS, 7], [3], [8] * 11, [EOS, 40], [12, 13, 14]]
STOPS = (EOS, *range(20, 30))


def both(model: PreTrainedModel, **changes: Any) -> tuple[list[Response], list[Response]]:
    arguments: dict[str, Any] = {
        "uids": [100 + i for i in range(len(PROMPTS))],
        "sample_ids": [0, 1, 0, 2, 0],
        "sampling": SamplingConfig(),
        "stop_token_ids": STOPS,
        "max_new_tokens": 16,
        "seed": 3,
        "step": 4,
        "pad_id": EOS,
        "batch_size": 2,
        **changes,
    }
    return generate(model, PROMPTS, **arguments), generate_plain(model, PROMPTS, **arguments)


def assert_equal(ours: list[Response], plain: list[Response]) -> None:
    assert [r.token_ids for r in plain] == [r.token_ids for r in ours]
    assert [r.stopped for r in plain] == [r.stopped for r in ours]
    for one, two in zip(ours, plain, strict=True):
        assert len(two.logprobs) == len(two.token_ids)
        # Batches of other rows, and padding of another width.
        torch.testing.assert_close(torch.tensor(two.logprobs), torch.tensor(one.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(temperature=0.0),
        SamplingConfig(temperature=1.3, top_k=9, top_p=0.8, min_new_tokens=3),
    ],
    ids=["plain", "greedy", "all_transforms"],
)
def test_equals_our_decoder(tiny_model: Callable[..., PreTrainedModel], family: str, sampling: SamplingConfig) -> None:
    """E4: token for token, in every family; rows that stop early and rows that run into the limit."""
    model = tiny_model(family).train()
    ours, plain = both(model, sampling=sampling)
    assert_equal(ours, plain)
    assert model.training, "the mode comes back"
    assert all(len(r.token_ids) >= sampling.min_new_tokens for r in plain)
    if sampling.temperature > 0:
        assert len({len(r.token_ids) for r in plain}) > 1


def test_other_coordinates_give_other_responses(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("llama")
    first = both(model)[1]
    for changes in ({"seed": 5}, {"step": 5}, {"sample_ids": [1, 0, 1, 1, 1]}):
        ours, plain = both(model, **changes)
        assert_equal(ours, plain)
        assert [r.token_ids for r in plain] != [r.token_ids for r in first], changes
    assert_equal(both(model, batch_size=5)[1], first)


def test_stop_strings(tiny_model: Callable[..., PreTrainedModel]) -> None:
    """Their tokens stay part of the response; the row ends there on both paths."""
    tokenizer = train_bpe(["abc"], vocab_size=260)
    model = tiny_model("llama", vocab_size=260)
    stops = list("abcdefghijklm")
    sampling = SamplingConfig(stop_strings=stops)
    ours, plain = both(model, sampling=sampling, stop_token_ids=(EOS,), tokenizer=tokenizer, max_new_tokens=30)
    assert_equal(ours, plain)
    ended = [r.token_ids for r in plain if r.stopped and r.token_ids[-1] != EOS]
    assert ended
    for ids in ended:
        assert any(stop in tokenizer.decode(ids) for stop in stops)
        assert not any(stop in tokenizer.decode(ids[:-1]) for stop in stops)


def test_sharded_weights_are_refused(tiny_model: Callable[..., PreTrainedModel]) -> None:
    with pytest.raises(ValueError, match="cannot decode on sharded weights. Set rollout.weights=gathered"):
        generate_plain(
            tiny_model("opt"), PROMPTS, uids=[0] * 5, sample_ids=[0] * 5, sampling=SamplingConfig(),
            stop_token_ids=STOPS, max_new_tokens=2, seed=0, step=0, pad_id=EOS, batch_size=2,
            all_ranks_running=lambda running: running,
        )  # fmt: skip
