"""Copies of a sharded actor's weights: cast, shared by groups of ranks, and the weights themselves untouched."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf import distributed, engine
from rlhf.config import LoRAConfig, SamplingConfig
from rlhf.data.dataset import PromptRow
from rlhf.models import attention
from rlhf.models.lora import add_lora
from rlhf.models.policy import Policy
from rlhf.rollout import copy as copying
from rlhf.rollout import packed
from rlhf.rollout.answers import Voice, draw_responses
from rlhf.rollout.decode import Response, RolloutStats, generate
from rlhf.rollout.selfcheck import check_greedy
from rlhf.rollout.weights import Lending, lend_weights
from tests.distributed.harness import Ranks
from tests.distributed.tiny import EOS, engine_of

# An odd vocabulary: the last rank's share of it is filled up.
VOCAB = 97
# Ragged, one of length 1, the eos (= pad) id among the tokens; more than the slots.
PROMPTS = [[5, 9, EOS, 7], [3], [8] * 11, [EOS, 40], [12, 13, 14], [60, 61], [9] * 6]
SHAPES: dict[str, dict[str, Any]] = {
    "opt": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64},
    # The 350M kind: norm after the block, projected embeddings.
    "opt post norm": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "word_embed_proj_dim": 16,
        "do_layer_norm_before": False,
    },
    "llama": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen2": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
    },
    "gpt_neox": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
}


def tiny_model(name: str, *, adapters: bool = False) -> nn.Module:
    """Weights large enough that tokens vary, biases too; with adapters that say something."""
    attention.register()
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "pad_token_id": None, "bos_token_id": EOS, "eos_token_id": EOS}
    config = AutoConfig.for_model(name.partition(" ")[0], max_position_embeddings=64, **shape, **SHAPES[name])
    config._attn_implementation = attention.NAME
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim == 2 else parameter.add_(0.1 * torch.randn_like(parameter))
        if adapters:
            model = add_lora(model, LoRAConfig(rank=4, alpha=6))  # type: ignore[arg-type]
            for key, parameter in model.named_parameters():
                if "lora_" in key:
                    parameter.normal_(0, 0.1)
    return model


def sample(model: nn.Module, rows: list[int], **changes: Any) -> list[Response]:
    arguments: dict[str, Any] = {
        "uids": [100 + row for row in rows],
        "sample_ids": [0] * len(rows),
        "sampling": SamplingConfig(),
        "stop_token_ids": tuple(range(20, 28)),
        "max_new_tokens": 20,
        "seed": 1,
        "step": 2,
        "pad_id": EOS,
        "batch_size": 3,
    }
    return generate(model, [PROMPTS[row] for row in rows], **{**arguments, **changes})


def sharded_state(trained: engine.TrainEngine) -> list[Tensor]:
    """This rank's part of all weights."""
    return [getattr(p, "ds_tensor", p).detach().clone() for p in trained.module.parameters()]


def group_job(names: list[str], ds_name: str, size: int, *, adapters: bool = False) -> list[dict[str, Any]]:
    """What a group draws of the rows of all its ranks, and what one rank draws of them by itself."""
    engine.setup(timeout_seconds=60)
    packed.FEWEST_WEIGHTS = 0  # every split layer is packed too
    copying.BUCKET_WEIGHTS = 2000  # many gathers, some of one weight
    group = distributed.group_of(size)
    found = []
    for name in names:
        alone = sample(tiny_model(name, adapters=adapters).eval(), list(range(len(PROMPTS))))
        trained = engine_of(Policy(tiny_model(name, adapters=adapters)), ds_name)
        before = sharded_state(trained)
        with lend_weights(trained, Lending(group=group)) as lent:
            weights = sum(p.numel() for p in lent.model.parameters())
            together = sample(lent.model, list(range(len(PROMPTS))))
            check = check_greedy(lent.model, PROMPTS[:3], stop_token_ids=(), max_new_tokens=6, pad_id=EOS)
        with pytest.raises(ZeroDivisionError), lend_weights(trained, Lending(group=group)):
            1 / 0  # noqa: B018
        after = sharded_state(trained)
        found.append(
            {
                "alone": alone,
                "together": together,
                "check": (check.ok, check.message),
                "untouched": all(torch.equal(one, two) for one, two in zip(before, after, strict=True)),
                "live": sum(p.numel() for p in trained.module.parameters()),
                "left": sum(p.numel() for p in lent.model.parameters()),
                "share": weights / sum(p.numel() for p in tiny_model(name).parameters()),
            }
        )
    return found


def assert_same(together: list[Response], alone: list[Response]) -> None:
    for one, two in zip(together, alone, strict=True):
        assert one.token_ids == two.token_ids and one.stopped == two.stopped
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(two.logprobs), atol=1e-5, rtol=0)


@pytest.mark.parametrize("ds_name", ["cpu_zero0", "cpu_zero3"])
@pytest.mark.parametrize("adapters", [False, True], ids=["plain", "adapters"])
def test_a_group_draws_what_one_rank_draws(ranks: Ranks, ds_name: str, *, adapters: bool) -> None:
    """E2, E10. Each family: tokens, log-probs, the same bytes on both ranks; half of the weights on each."""
    first, second = ranks(
        group_job, timeout=150, names=list(SHAPES), ds_name=ds_name, size=2, adapters=adapters
    )  # fmt: skip
    for name, one, two in zip(SHAPES, first, second, strict=True):
        assert one["together"] == two["together"], name
        assert_same(one["together"], one["alone"])
        assert len({len(response.token_ids) for response in one["alone"]}) > 2, name
        for found in (one, two):
            assert found["check"][0], (name, found["check"][1])
            assert found["untouched"] and found["left"] == 0, name
            assert 0.5 < found["share"] < 0.65, (name, found["share"])  # norms, positions, some biases are whole
            assert ds_name != "cpu_zero3" or found["live"] == 0, name


def voice_of(lending: Lending) -> Voice:
    return Voice(
        tokenizer=SimpleNamespace(pad_token_id=EOS),  # type: ignore[arg-type]
        template=SimpleNamespace(stop_token_id=20),  # type: ignore[arg-type]
        sampling=SamplingConfig(stop_token_ids=list(range(21, 28))),
        max_new_tokens=20,
        batch_size=1,
        lending=lending,
    )


def rows_of(numbers: list[int]) -> list[PromptRow]:
    return [
        PromptRow(prompt_ids=np.array(PROMPTS[row]), meta={}, text="", source=0, index=row, uid=100 + row)
        for row in numbers
    ]


def four_ranks_job() -> dict[str, Any]:
    """Two groups of two ranks, each with rows of its own; one rank has none, the groups' lengths differ."""
    engine.setup(timeout_seconds=60)
    group, rank = distributed.group_of(2), distributed.rank()
    assert distributed.group_of(2) is group, "made once"
    trained = engine_of(Policy(tiny_model("llama", adapters=True)), "cpu_zero3")
    mine = [[0, 1], [], [2, 3, 4], [5, 6]][rank]
    voice, rows = voice_of(Lending(group=group)), rows_of(mine)
    stats: list[RolloutStats] = []
    found: dict[str, Any] = {"rank": (group.rank, group.size)}
    for dtype in (None, torch.bfloat16):
        spoken = replace(voice, lending=Lending(group=group, dtype=dtype))
        named: dict[str, Any] = {"sample_ids": [0] * len(rows), "seed": 1, "step": 2, "on_stats": stats.append}
        drawn = draw_responses(trained, spoken, rows, **named)
        plain = draw_responses(trained, replace(spoken, plain=True), rows, **named)
        if dtype is None:
            assert [response.token_ids for response in plain] == [response.token_ids for response in drawn]
        found[str(dtype)] = dict(zip(mine, drawn, strict=True))
    found["tokens counted"] = [s.tokens for s in stats]
    if rank == 0:
        model = tiny_model("llama", adapters=True).eval()
        found["alone"] = sample(model, list(range(len(PROMPTS))))
    return found


def test_two_groups_of_two_ranks(ranks: Ranks) -> None:
    """Each rank gets its own rows' answers; the groups do not wait for one another; one rank of a group counts."""
    found = ranks(four_ranks_job, world_size=4, timeout=120)
    assert [entry["rank"] for entry in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    together = {row: response for entry in found for row, response in entry["None"].items()}
    alone = found[0]["alone"]
    assert_same([together[row] for row in range(len(PROMPTS))], alone)
    lengths = [len(response.token_ids) for response in alone]
    assert sum(lengths[:2]) != sum(lengths[2:])
    assert [entry["tokens counted"][:1] for entry in found] == [[sum(lengths[:2])], [], [sum(lengths[2:])], []]
    in_bfloat16 = [response for entry in found for response in entry["torch.bfloat16"].values()]
    assert len(in_bfloat16) == len(PROMPTS) and in_bfloat16 != alone


def non_finite_job() -> list[tuple[str, int]]:
    """Token 60 breaks the logits of rank 0 alone; what each rank is told, and how many responses it then gets."""
    engine.setup(timeout_seconds=60)
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[60] = math.nan  # type: ignore[operator]
    trained = engine_of(Policy(model), "cpu_zero3")
    named: dict[str, Any] = {"sample_ids": [0], "seed": 1, "step": 2}
    found = []
    for lending, plain in ((Lending(layerwise=True), False), (Lending(), False), (Lending(), True)):
        voice = replace(voice_of(lending), plain=plain)
        with pytest.raises(engine.NonFiniteError) as caught:
            draw_responses(trained, voice, rows_of([5 if distributed.rank() == 0 else 2]), **named)
        found.append((str(caught.value), len(draw_responses(trained, voice, rows_of([0]), **named))))
    return found


def test_logits_that_are_not_finite_are_known_to_all_ranks(ranks: Ranks) -> None:
    """D20. Under layerwise lending rank 1's forwards need rank 0's shards to their end; all ranks can go on."""
    first, second = ranks(non_finite_job, timeout=90)
    assert first == second and len(first) == 3
    for text, num_responses in first:
        assert text.startswith("policy: the logits of a rollout are not finite at step 0 on rank 0"), text
        assert num_responses == 1
