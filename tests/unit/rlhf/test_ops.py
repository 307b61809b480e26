import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlhf import ops
from rlhf.config import SamplingConfig


def zeros(n: int) -> torch.Tensor:
    return torch.zeros(n, dtype=torch.long)


def test_masked_reductions_by_hand():
    x = torch.tensor([[1.0, 2.0, 9.0], [4.0, -7.0, -7.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert ops.masked_sum(x, mask) == 7
    assert ops.masked_mean(x, mask) == pytest.approx(7 / 3)
    assert ops.masked_var(x, mask) == pytest.approx((16 + 1 + 25) / 9 / 3)


def test_masked_reductions_equal_those_of_the_selected_values():
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) < 0.4
    assert torch.allclose(ops.masked_sum(x, mask), x[mask].sum())
    assert torch.allclose(ops.masked_mean(x, mask), x[mask].mean())
    assert torch.allclose(ops.masked_var(x, mask), x[mask].var(unbiased=False))


def test_a19_what_stands_in_padding_does_not_count():
    x = torch.tensor([[0.5, 1.0, math.nan, math.inf]])
    mask = torch.tensor([[True, True, False, False]])
    for reduce in (ops.masked_sum, ops.masked_mean, ops.masked_var):
        assert reduce(x, mask) == reduce(x[:, :2], mask[:, :2])


def test_d22_sums_of_bfloat16_are_float32():
    x = torch.ones(1, 1001, dtype=torch.bfloat16)
    total = ops.masked_sum(x, torch.ones(1, 1001, dtype=torch.bool))
    assert total.dtype == torch.float32
    assert total == 1001  # bfloat16 would say 1000


def test_masked_mean_of_nothing_is_not_a_number():
    assert ops.masked_mean(torch.ones(2), torch.zeros(2, dtype=torch.bool)).isnan()


def test_whitening_gives_mean_0_and_variance_1_inside_the_mask_and_0_outside():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)) * 3 + 5
    mask = ops.response_mask(torch.tensor([4, 1, 2, 3, 4, 1]), 4)
    white = ops.whiten_with(x, mask, mean=ops.masked_mean(x, mask), var=ops.masked_var(x, mask))
    assert ops.masked_mean(white, mask).abs() < 1e-6
    assert abs(ops.masked_var(white, mask) - 1) < 1e-5
    assert white[~mask].eq(0).all()


def test_whitening_equal_values_gives_zeros():
    x = torch.full((2, 2), 3.0)
    assert ops.whiten_with(x, torch.ones(2, 2, dtype=torch.bool), mean=3.0, var=0.0).eq(0).all()


def test_whitening_by_hand():
    white = ops.whiten_with(torch.tensor([5.0, 1.0]), torch.tensor([True, True]), mean=3.0, var=4.0)
    assert torch.allclose(white, torch.tensor([1.0, -1.0]))


def test_token_logprobs_by_hand():
    # Token t is read from the logits at t - 1: softmax([ln 1, ln 3]) = [1/4, 3/4].
    logits_BTV = torch.tensor([[[0.0, math.log(3.0)], [0.0, 0.0], [9.0, 9.0]]])
    logprob_BT = ops.token_logprobs(logits_BTV, torch.tensor([[0, 1, 0]]))
    assert torch.allclose(logprob_BT, torch.tensor([[0.0, math.log(0.75), math.log(0.5)]]))


def test_token_logprobs_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(3, 6, 11, generator=generator) * 4
    token_ids_BT = torch.randint(11, (3, 6), generator=generator)
    logprob_BT = ops.token_logprobs(logits_BTV, token_ids_BT)
    for b in range(3):
        for t in range(1, 6):
            weights = [math.exp(x) for x in logits_BTV[b, t - 1].tolist()]
            expected = math.log(weights[token_ids_BT[b, t]] / sum(weights))
            assert logprob_BT[b, t].item() == pytest.approx(expected, abs=1e-5)
    assert logprob_BT[:, 0].eq(0).all()


def test_token_logprobs_of_a_single_token():
    assert ops.token_logprobs(torch.randn(1, 1, 5), torch.tensor([[2]])).tolist() == [[0.0]]


def test_entropy_of_known_distributions():
    logits_SV = torch.tensor([[0.0] * 4, [100.0, 0, 0, 0], [0.0, 0.0, -math.inf, -math.inf]])
    assert torch.allclose(ops.entropy_from_logits(logits_SV), torch.tensor([math.log(4), 0, math.log(2)]), atol=1e-6)


def test_entropy_equals_torchs_and_is_never_negative():
    logits_SV = torch.randn(50, 13, generator=torch.Generator().manual_seed(0)) * 5
    entropy_S = ops.entropy_from_logits(logits_SV)
    assert torch.allclose(entropy_S, torch.distributions.Categorical(logits=logits_SV).entropy(), atol=1e-5)
    assert entropy_S.min() >= 0


def test_entropy_has_a_finite_gradient_with_excluded_tokens():
    logits_SV = torch.tensor([[1.0, 2.0, -math.inf]], requires_grad=True)
    ops.entropy_from_logits(logits_SV).sum().backward()
    assert logits_SV.grad is not None and logits_SV.grad.isfinite().all() and logits_SV.grad[0, 2] == 0


def test_position_ids_count_real_tokens():
    mask_BT = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 0, 0, 1]]).bool()
    assert ops.position_ids_from_mask(mask_BT).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]


def test_columns_by_hand():
    x_BT = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 0, 0], [30, 31, 32, 33, 34]])
    # Row 1: two prompt tokens, one response token. Row 2: the response is the last column.
    first, length = torch.tensor([2, 7, 14]), torch.tensor([3, 1, 1])
    assert ops.to_columns(x_BT, first, length, 3).tolist() == [[12, 13, 14], [22, 0, 0], [34, 0, 0]]
    assert ops.to_columns(x_BT, first, length, 4)[:, 3].tolist() == [0, 0, 0]
    # The same in one packed row; an empty response has no column.
    packed = torch.tensor([[10, 11, 12, 13, 14, 20, 21, 22]])
    first, length = torch.tensor([2, 7, 8]), torch.tensor([3, 1, 0])
    assert ops.to_columns(packed, first, length, 3).tolist() == [[12, 13, 14], [22, 0, 0], [0, 0, 0]]
    assert ops.response_mask(torch.tensor([3, 1, 1]), 3).tolist() == [
        [True, True, True],
        [True, False, False],
        [True, False, False],
    ]


def test_columns_of_a_mask_stay_bool_and_of_floats_carry_gradient():
    one, two = torch.tensor([1]), torch.tensor([2])
    assert ops.to_columns(torch.ones(1, 3, dtype=torch.bool), two, one, 2).tolist() == [[True, False]]
    x_BT = torch.ones(1, 3, requires_grad=True)
    ops.to_columns(x_BT, one, two, 4).sum().backward()
    assert x_BT.grad is not None and x_BT.grad.tolist() == [[0, 1, 1]]


def kept(logits: list[float], **sampling: object) -> list[int]:
    """Ids that stay in the distribution of one row."""
    out_SV = ops.transform_logits(torch.tensor([logits]), SamplingConfig(**sampling), response_position_S=zeros(1))
    return torch.isfinite(out_SV[0]).nonzero().flatten().tolist()


def test_top_k_and_top_p_by_hand():
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert kept(logits, top_k=2) == [1, 3]
    assert kept(logits, top_k=9) == [0, 1, 2, 3]
    assert kept(logits, top_p=0.65) == [1, 3]  # 0.4 + 0.3 reaches 0.65
    assert kept(logits, top_p=0.71) == [1, 2, 3]
    assert kept(logits, top_p=0.01) == [1]
    assert kept(logits, temperature=0) == [1]
    assert kept(logits, top_k=3, top_p=0.78) == [1, 2, 3]  # of the three, 4/9 + 3/9 = 0.777 is not enough
    assert kept(logits, top_k=3, top_p=0.77) == [1, 3]


def test_stop_tokens_are_excluded_before_the_minimum_only():
    out_SV = ops.transform_logits(
        torch.zeros(3, 4),
        SamplingConfig(min_new_tokens=2),
        response_position_S=torch.tensor([0, 1, 2]),
        stop_token_ids=(1, 3),
    )
    assert torch.isfinite(out_SV).tolist() == [[True, False, True, False]] * 2 + [[True] * 4]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0.5),
        SamplingConfig(top_k=5),
        SamplingConfig(top_p=0.7),
        SamplingConfig(temperature=1.7, top_k=9, top_p=0.8, min_new_tokens=3),
    ],
)
@pytest.mark.parametrize("position", [0, 3])
def test_transforms_equal_those_of_transformers(sampling: SamplingConfig, position: int):
    logits_SV = torch.randn(40, 23, generator=torch.Generator().manual_seed(0)) * 3
    out_SV = ops.transform_logits(
        logits_SV, sampling, response_position_S=torch.full((40,), position), stop_token_ids=(4, 7)
    )
    processors = LogitsProcessorList()
    if sampling.min_new_tokens:
        processors.append(MinNewTokensLengthLogitsProcessor(2, sampling.min_new_tokens, [4, 7], device="cpu"))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    expected_SV = processors(torch.zeros(40, 2 + position, dtype=torch.long), logits_SV.clone())
    assert torch.equal(torch.isfinite(out_SV), torch.isfinite(expected_SV))
    assert torch.allclose(out_SV.softmax(-1), expected_SV.softmax(-1), atol=1e-6)


def test_no_transform_leaves_the_logits():
    logits_SV = torch.randn(2, 5)
    assert torch.equal(ops.transform_logits(logits_SV, SamplingConfig(), response_position_S=zeros(2)), logits_SV)


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(top_k=1), SamplingConfig(top_p=0.1), SamplingConfig(temperature=0)]
)
def test_a_kept_token_stays_whatever_the_transforms_say(sampling: SamplingConfig):
    logits_SV = torch.tensor([[5.0, 1.0, 0.0, 3.0]])
    original_SV = logits_SV.clone()
    out_SV = ops.transform_logits(
        logits_SV, sampling, response_position_S=zeros(1), keep_token_S=torch.tensor([2]), stop_token_ids=(2,)
    )
    assert torch.isfinite(out_SV[0]).tolist() == [True, False, True, False]
    assert torch.equal(logits_SV, original_SV)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12), st.floats(0.05, 0.999), st.integers(0, 12))
def test_top_p_keeps_the_smallest_set_that_reaches_it(logits: list[float], top_p: float, top_k: int):
    """Property: the kept tokens reach top_p, and without the least likely of them they would not."""
    ids = kept(logits, top_p=top_p, top_k=top_k)
    assert ids
    inside = torch.isfinite(
        ops.transform_logits(torch.tensor([logits]), SamplingConfig(top_k=top_k), response_position_S=zeros(1))
    )
    prob = torch.tensor([logits]).masked_fill(~inside, -math.inf).double().softmax(-1)[0]
    assert prob[ids].sum() >= top_p - 1e-5
    assert prob[ids].sum() - prob[ids].min() < top_p + 1e-5
    assert prob[ids].min() >= max([p for i, p in enumerate(prob.tolist()) if i not in ids], default=0) - 1e-7


def test_d9_scored_distribution_is_the_sampled_one():
    """Sampled at temperature 0.5, the empirical frequencies match the transformed log-probabilities, not the plain."""
    logits_SV = torch.tensor([[0.0, 1.0, 2.0]])
    out_SV = ops.transform_logits(logits_SV, SamplingConfig(temperature=0.5), response_position_S=zeros(1))
    draws = torch.multinomial(
        out_SV.softmax(-1)[0], 200_000, replacement=True, generator=torch.Generator().manual_seed(0)
    )
    frequency = draws.bincount(minlength=3) / len(draws)
    assert torch.allclose(frequency.log(), (2 * logits_SV).log_softmax(-1)[0], atol=0.05)
    assert not torch.allclose(frequency.log(), logits_SV.log_softmax(-1)[0], atol=0.3)


@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary(monkeypatch, spread, top_p):
    """Oracle: Hugging Face's. The end lies among the most likely tokens, or all have to be sorted; row by row."""
    logits_SV = torch.randn(9, 700, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 9)[:, None]
    logits_SV = logits_SV * spread
    expected_SV = TopPLogitsWarper(top_p)(None, logits_SV.clone())
    sampling = SamplingConfig(top_p=top_p)
    for prefix in (1, 16, 256, 1000):
        monkeypatch.setattr(ops, "TOP_P_PREFIX", prefix)
        out_SV = ops.transform_logits(logits_SV, sampling, response_position_S=zeros(9))
        assert torch.equal(out_SV.isfinite(), expected_SV.isfinite())


def test_top_p_ends_among_equals_at_the_lower_id():
    """Four tokens of 1/5 and many small ones: 0.55 is reached by the three lowest ids, however they are found."""
    prob_V = torch.full((600,), 0.2 / 596)
    prob_V[[500, 20, 300, 7]] = 0.2
    out_SV = ops.transform_logits(prob_V.log()[None], SamplingConfig(top_p=0.55), response_position_S=zeros(1))
    assert out_SV[0].isfinite().nonzero().flatten().tolist() == [7, 20, 300]


def test_stop_tokens_are_excluded_row_by_row_and_kept_where_they_were_drawn():
    logits_SV = torch.zeros(4, 5, requires_grad=True)
    out_SV = ops.transform_logits(
        logits_SV,
        SamplingConfig(min_new_tokens=2),
        response_position_S=torch.tensor([0, 1, 2, 1]),
        stop_token_ids=(4, 1, 4),
        keep_token_S=torch.tensor([0, 3, 0, 1]),
    )
    excluded = [row.isinf().nonzero().flatten().tolist() for row in out_SV]
    assert excluded == [[1, 4], [1, 4], [], [4]]
    out_SV[out_SV.isfinite()].sum().backward()
    assert logits_SV.grad is not None and torch.equal(logits_SV.grad, out_SV.isfinite().float())
