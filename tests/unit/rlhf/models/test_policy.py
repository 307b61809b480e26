from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rlhf.config import LoRAConfig, SamplingConfig
from rlhf.models.policy import Policy, final_logits, has_plain_logits
from rlhf.ops import entropy_from_logits, transform_logits

TOLERANCE = 1e-4  # fp32; attention sums in another order once there is padding


def test_logprob_and_entropy_equal_those_of_hugging_faces_logits(family: dict[str, Any], make: Any):
    """C8, F23: every family, on CPU; rows of different length, one of length 1, against one row at a time."""
    model = make.lm(family)
    rows = make.rows(5, 1, 9)
    batch = make.pad(rows)
    out = Policy(model)(**batch, target_mask_BT=make.targets(batch))
    for b, row in enumerate(rows):
        logits_TV = model(input_ids=row[None]).logits[0].log_softmax(-1)
        for t in range(1, len(row)):
            assert out.logprob_BT[b, t].item() == pytest.approx(logits_TV[t - 1, row[t]].item(), abs=TOLERANCE)
            assert out.entropy_BT[b, t].item() == pytest.approx(
                torch.distributions.Categorical(logits=logits_TV[t - 1]).entropy().item(), abs=TOLERANCE
            )
    assert out.logprob_BT[~make.targets(batch)].eq(0).all() and out.entropy_BT[~make.targets(batch)].eq(0).all()
    assert out.logprob_BT[2, 1:].std() > 0.1  # the weights are lively enough to tell tokens apart


def test_greedy_says_which_tokens_are_the_most_likely(families: Any, make: Any):
    model = make.lm(families["llama"])
    row = make.rows(3)[0]
    for _ in range(4):
        row = torch.cat([row, model(input_ids=row[None]).logits[0, -1:].argmax(-1)])
    row[4] = (row[4] + 1) % len(make.tokenizer)  # one of the four is not
    batch = make.pad([row[:6]], right=1)
    mask_BT = make.targets(batch)
    mask_BT[:, :3] = False
    out = Policy(model)(**batch, target_mask_BT=mask_BT)
    greedy_T = model(input_ids=row[None, :6]).logits[0].argmax(-1)
    assert out.greedy_BT.tolist() == [[False] * 3 + (greedy_T[2:5] == row[3:6]).tolist() + [False]]
    assert out.greedy_BT[0, 3:5].tolist() == [True, False]


@pytest.mark.parametrize("padding", [{"right": 6}, {"left": 7}, {"left": 3, "right": 2}])
def test_padding_and_batch_mates_change_nothing(family: dict[str, Any], make: Any, padding: dict[str, int]):
    """A8, A17, A18: the same row alone, with padding on either side, and beside longer rows."""
    policy = Policy(make.lm(family))
    rows = make.rows(6, 1, 11)
    batch = make.pad(rows, **padding)
    left = padding.get("left", 0)
    with torch.no_grad():
        together = policy(**batch, target_mask_BT=make.targets(batch))
        for b, row in enumerate(rows):
            alone = make.pad([row])
            out = policy(**alone, target_mask_BT=make.targets(alone))
            inside = slice(left, left + len(row))
            assert (together.logprob_BT[b, inside] - out.logprob_BT[0]).abs().max() < TOLERANCE
            assert (together.entropy_BT[b, inside] - out.entropy_BT[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("side", ["left", "right"])
def test_what_stands_in_padding_has_no_influence_and_no_gradient(family: dict[str, Any], make: Any, side: str):
    """A6, A17: other ids in the padding give the same values and bit-equal gradients of all weights."""
    model = make.lm(family)
    policy = Policy(model)
    results = []
    for pad_id in (2, 7):
        batch = make.pad(make.rows(6, 1, 4), **{side: 5}, pad_id=pad_id)
        model.zero_grad()
        out = policy(**batch, target_mask_BT=make.targets(batch))
        (out.logprob_BT.sum() + out.entropy_BT.sum()).backward()
        gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert gradients.isfinite().all() and gradients.abs().sum() > 0
        results.append((out.logprob_BT.detach(), gradients))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][1], results[1][1], atol=1e-6)


def test_a1_loss_of_a_padded_row_equals_the_unpadded_rows(families: Any, make: Any):
    policy = Policy(make.lm(families["opt"]))
    losses = []
    for right in (0, 50):
        batch = make.pad(make.rows(3), right=right)
        mask_BT = make.targets(batch)
        losses.append((-policy(**batch, target_mask_BT=mask_BT).logprob_BT.sum() / mask_BT.sum()).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_a6_the_stop_token_has_a_logprob_and_gradient_where_pad_is_eos(families: Any, make: Any):
    """Response [a, b, eos], then padding that is eos too: three log-probabilities, and the eos trains the policy."""
    eos = 1
    model = make.lm(families["opt"])
    batch = make.pad([torch.tensor([10, 11, 20, 21, eos])], right=3, pad_id=eos)
    mask_BT = make.targets(batch)
    mask_BT[:, :2] = False
    out = Policy(model)(**batch, target_mask_BT=mask_BT)
    assert out.logprob_BT.ne(0).tolist() == [[False, False, True, True, True, False, False, False]]
    out.logprob_BT[0, 4].backward()
    assert model.get_output_embeddings().weight.grad[eos].abs().sum() > 0


def test_a6_the_embedding_of_a_shared_pad_and_eos_trains(families: Any, make: Any):
    """Families that freeze the pad id's embedding must not freeze the stop token's."""
    for config in (families["gpt_neox"], {**families["opt"], "tie_word_embeddings": False}):
        model = make.lm(config)
        batch = make.pad([torch.tensor([10, 2, 11])], pad_id=2)  # 2 is this tokenizer's pad id
        Policy(model)(**batch, target_mask_BT=make.targets(batch)).logprob_BT.sum().backward()
        assert model.get_input_embeddings().weight.grad[2].abs().sum() > 0


@pytest.mark.parametrize("name", ["opt", "bloom", "llama"])
def test_a10_generations_own_logprobs_equal_the_scoring_pass(families: Any, make: Any, name: str):
    """Left-padded prompts (one of them with bos first) through generate; the same rows scored right-padded."""
    model = make.lm(families[name])
    prompts = [torch.cat([torch.tensor([0]), row]) for row in make.rows(3, 7)]
    width = max(len(p) for p in prompts)
    token_ids_BP = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0), value=2) for p in prompts])
    mask_BP = torch.stack([torch.arange(width) >= width - len(p) for p in prompts])
    out = model.generate(
        input_ids=token_ids_BP,
        attention_mask=mask_BP.long(),
        max_new_tokens=5,
        min_new_tokens=5,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    new_BR = out.sequences[:, width:]
    sampled_BR = torch.stack(out.logits, 1).log_softmax(-1).gather(-1, new_BR[..., None]).squeeze(-1)
    batch = make.pad([torch.cat([p, new]) for p, new in zip(prompts, new_BR, strict=True)])
    scored_BT = Policy(model)(**batch, target_mask_BT=make.targets(batch)).logprob_BT
    for b, prompt in enumerate(prompts):
        assert (scored_BT[b, len(prompt) : len(prompt) + 5] - sampled_BR[b]).abs().max() < 1e-3


@pytest.mark.parametrize("chunk_tokens", [1, 3, 5])
def test_chunks_change_neither_value_nor_gradient(family: dict[str, Any], make: Any, chunk_tokens: int):
    model = make.lm(family)
    batch = make.pad(make.rows(5, 1, 9))
    sampling = SamplingConfig(temperature=0.7, top_k=50)
    results = []
    for size in (10_000, chunk_tokens):
        model.zero_grad()
        out = Policy(model, chunk_tokens=size)(**batch, target_mask_BT=make.targets(batch), sampling=sampling)
        (out.logprob_BT.sum() + 0.3 * out.entropy_BT.square().sum()).backward()
        results.append([out.logprob_BT, out.entropy_BT, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for whole, chunked in zip(*results, strict=True):
        assert torch.allclose(whole, chunked, atol=1e-4, rtol=1e-4)


def test_the_head_is_called_once_however_many_chunks_and_never_sees_more_than_a_chunk(families: Any, make: Any):
    """Under ZeRO-3 each call gathers weights over all ranks, so their number cannot depend on a rank's tokens."""
    model = make.lm(families["opt"])
    head = model.get_output_embeddings()
    calls: list[int] = []
    head.register_forward_hook(lambda module, args, out: calls.append(1))
    policy = Policy(model, chunk_tokens=2)
    for lengths in ((9, 9), (1, 1)):  # eight chunks, and no target at all
        batch = make.pad(make.rows(*lengths))
        policy(**batch, target_mask_BT=make.targets(batch))
    assert len(calls) == 2


def test_a_batch_without_targets_gives_zeros_and_a_zero_gradient(families: Any, make: Any):
    model = make.lm(families["opt"])
    batch = make.pad(make.rows(1))
    out = Policy(model)(**batch, target_mask_BT=make.targets(batch))
    assert out.logprob_BT.tolist() == [[0.0]]
    (out.logprob_BT.sum() + out.entropy_BT.sum()).backward()
    assert all(p.grad is None or p.grad.eq(0).all() for p in model.parameters())
    assert model.get_output_embeddings().weight.grad is not None  # the graph reaches every weight, as on other ranks


def test_the_heads_own_forward_is_back_after_an_error(families: Any, make: Any, monkeypatch: pytest.MonkeyPatch):
    model = make.lm(families["opt"])
    batch = make.pad(make.rows(4))
    bad = {**batch, "target_mask_BT": make.targets(batch), "response_position_BT": torch.zeros(1, 4)}
    with pytest.raises(IndexError):
        Policy(model)(**bad, sampling=SamplingConfig(min_new_tokens=1), stop_token_ids=(10_000,))
    assert "forward" not in vars(model.get_output_embeddings())
    assert model(input_ids=batch["token_ids_BT"]).logits.shape == (1, 4, len(make.tokenizer))


def test_d22_bfloat16_gives_float32_statistics_computed_in_float32(family: dict[str, Any], make: Any):
    model = make.lm(family, dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    rows = make.rows(6)
    batch = make.pad(rows)
    out = Policy(model)(**batch, target_mask_BT=make.targets(batch))
    assert out.logprob_BT.dtype == out.entropy_BT.dtype == torch.float32
    logits_TV = model(**{"input_ids": rows[0][None]}).logits[0].float()
    expected_T = logits_TV.log_softmax(-1)[:-1].gather(-1, rows[0][1:, None]).squeeze(-1)
    # Mask and positions may take another kernel, which in bfloat16 shows in the third digit of a hidden state.
    assert (out.logprob_BT[0, 1:] - expected_T).abs().max() < 0.15
    out.logprob_BT.sum().backward()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.5),
        SamplingConfig(temperature=1.3, top_k=40, top_p=0.9, min_new_tokens=2),
    ],
)
def test_d9_scores_under_the_distribution_that_sampling_draws_from(families: Any, make: Any, sampling: SamplingConfig):
    """The prompt is two tokens; response positions count from the third."""
    model = make.lm(families["llama"])
    rows = make.rows(7)
    batch = make.pad(rows, right=2)
    mask_BT = make.targets(batch) & (torch.arange(9) >= 2)
    position_BT = (torch.arange(9) - 2).expand(1, 9)
    out = Policy(model, chunk_tokens=2)(
        **batch,
        target_mask_BT=mask_BT,
        sampling=sampling,
        response_position_BT=position_BT,
        stop_token_ids=(1, int(rows[0][6])),
    )
    logits_SV = model(input_ids=rows[0][None]).logits[0, 1:6]
    expected_SV = transform_logits(
        logits_SV,
        sampling,
        response_position_S=torch.arange(5),
        stop_token_ids=(1, int(rows[0][6])),
        keep_token_S=rows[0][2:],
    )
    assert torch.isinf(expected_SV).any() == (sampling.top_k > 0)
    expected_S = expected_SV.log_softmax(-1).gather(-1, rows[0][2:, None]).squeeze(-1)
    assert (out.logprob_BT[0, 2:7] - expected_S).abs().max() < TOLERANCE
    assert (out.entropy_BT[0, 2:7] - entropy_from_logits(expected_SV)).abs().max() < TOLERANCE
    assert (
        out.logprob_BT[0, 2:7] - logits_SV.log_softmax(-1).gather(-1, rows[0][2:, None]).squeeze(-1)
    ).abs().max() > 0.1


@pytest.mark.parametrize(
    "extra",
    [
        {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0},
        {"model_type": "cohere", "logit_scale": 0.25},
        {"model_type": "granite", "logits_scaling": 4.0},
    ],
)
def test_families_that_scale_or_cap_their_logits(families: Any, make: Any, extra: dict[str, Any]):
    model = make.lm({**families["llama"], **extra})
    rows = make.rows(6)
    batch = make.pad(rows)
    out = Policy(model)(**batch, target_mask_BT=make.targets(batch))
    expected_TV = model(input_ids=rows[0][None]).logits[0].log_softmax(-1)
    expected_T = expected_TV[:-1].gather(-1, rows[0][1:, None]).squeeze(-1)
    assert (out.logprob_BT[0, 1:] - expected_T).abs().max() < TOLERANCE


def test_adapters_take_part(families: Any, make: Any):
    model = make.lm(families["llama"], lora=LoRAConfig(rank=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
    rows = make.rows(6)
    batch = make.pad(rows)
    out = Policy(model, chunk_tokens=2)(**batch, target_mask_BT=make.targets(batch))
    expected_TV = model(input_ids=rows[0][None]).logits[0].log_softmax(-1)
    expected_T = expected_TV[:-1].gather(-1, rows[0][1:, None]).squeeze(-1)
    assert (out.logprob_BT[0, 1:] - expected_T).abs().max() < TOLERANCE
    out.logprob_BT.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "name", ["logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_softcapping", "hidden_size", None]
)
def test_logits_are_plain_where_nothing_changes_them(name: str | None) -> None:
    """The closed form is taken where, and only where, final_logits leaves the head's output as it is."""
    config = SimpleNamespace(**{name: 2.0} if name else {})
    logits_SV = torch.tensor([[0.5, 3.0]])
    assert has_plain_logits(config) == torch.equal(final_logits(config, logits_SV), logits_SV)
