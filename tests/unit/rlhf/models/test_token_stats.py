"""Statistics of tokens in closed form, against autograd through torch's own log_softmax."""

import math

import pytest
import torch
from torch import Tensor

from rlhf.models.token_stats import token_stats


def reference(
    hidden_SD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, token_S: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    logits_SV = torch.nn.functional.linear(hidden_SD, weight_VD, bias_V) / temperature
    log_SV = logits_SV.log_softmax(-1)
    return (
        log_SV.gather(-1, token_S[:, None]).squeeze(-1),
        -(log_SV.exp() * log_SV).sum(-1),
        logits_SV.argmax(-1) == token_S,
    )


def inputs(num_tokens: int, *, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_SD = torch.randn(num_tokens, 8, generator=generator)
    weight_VD = torch.randn(13, 8, generator=generator)
    bias_V = torch.randn(13, generator=generator) if bias else None
    token_S = torch.randint(13, (num_tokens,), generator=generator)
    if num_tokens:
        token_S[0] = int(torch.nn.functional.linear(hidden_SD[0], weight_VD, bias_V).argmax())
    return hidden_SD, weight_VD, bias_V, token_S


def test_by_hand() -> None:
    """Logits (ln 1, ln 2, ln 5) and token 1: p = 1/8, 2/8, 5/8. The gradient of ln p_1 is onehot - p."""
    hidden_SD = torch.ones(1, 1, requires_grad=True)
    weight_VD = torch.tensor([[0.0], [math.log(2)], [math.log(5)]], requires_grad=True)
    logprob_S, entropy_S, greedy_S = token_stats(hidden_SD, weight_VD, None, torch.tensor([1]), 1.0, 4)
    assert logprob_S.item() == pytest.approx(math.log(2 / 8), abs=1e-6)
    expected = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    assert entropy_S.item() == pytest.approx(expected, abs=1e-6) and greedy_S.tolist() == [False]
    logprob_S.sum().backward()
    assert weight_VD.grad is not None
    assert weight_VD.grad.flatten().tolist() == pytest.approx([-1 / 8, 1 - 2 / 8, -5 / 8], abs=1e-6)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", ["bias", ""])
@pytest.mark.parametrize("of", ["logprob", "entropy", "both"])
def test_values_and_gradients_equal_autograds(chunk_tokens: int, temperature: float, with_bias: str, of: str) -> None:
    results = []
    for compute in ("closed", "autograd"):
        hidden_SD, weight_VD, bias_V, token_S = inputs(7, bias=bool(with_bias))
        leaves = [x.requires_grad_() for x in (hidden_SD, weight_VD, bias_V) if x is not None]
        if compute == "closed":
            found = token_stats(hidden_SD, weight_VD, bias_V, token_S, temperature, chunk_tokens)
        else:
            found = reference(hidden_SD, weight_VD, bias_V, token_S, temperature)
        weights = torch.linspace(-1, 2, 7)
        loss = (found[0] * weights).sum() * (of != "entropy") + (found[1] * weights.flip(0)).sum() * (of != "logprob")
        if of == "logprob":
            loss = (found[0] * weights).sum()
        results.append((found, torch.autograd.grad(loss, leaves)))
    (closed, closed_grads), (expected, expected_grads) = results
    assert torch.equal(closed[2], expected[2]) and closed[2][0]
    for one, two in zip((*closed[:2], *closed_grads), (*expected[:2], *expected_grads), strict=True):
        torch.testing.assert_close(one, two, atol=2e-6, rtol=1e-5)


def test_no_token_and_frozen_weights() -> None:
    hidden_SD, weight_VD, _, token_S = inputs(0, bias=False)
    weight_VD.requires_grad_()
    logprob_S, _, _ = token_stats(hidden_SD.requires_grad_(), weight_VD, None, token_S, 1.0, 4)
    logprob_S.sum().backward()
    assert logprob_S.shape == (0,) and weight_VD.grad is not None and weight_VD.grad.abs().sum() == 0
    hidden_SD, weight_VD, _, token_S = inputs(5, bias=False)
    logprob_S, _, _ = token_stats(hidden_SD.requires_grad_(), weight_VD, None, token_S, 1.0, 2)
    logprob_S.sum().backward()
    assert hidden_SD.grad is not None and hidden_SD.grad.abs().sum() > 0 and weight_VD.grad is None


def test_extreme_logits_stay_finite() -> None:
    """A token 200 nats below the best one: a finite log-probability and gradient, an entropy of 0."""
    hidden_SD = torch.tensor([[1.0]], requires_grad=True)
    weight_VD = torch.tensor([[200.0], [0.0]])
    logprob_S, entropy_S, greedy_S = token_stats(hidden_SD, weight_VD, None, torch.tensor([1]), 1.0, 1)
    (logprob_S + entropy_S).sum().backward()
    assert logprob_S.tolist() == [-200.0] and entropy_S.tolist() == [0.0] and not greedy_S.any()
    assert hidden_SD.grad is not None and hidden_SD.grad.tolist() == [[-200.0]]


def test_at_most_one_chunk_of_logits_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved for the backward pass: the last chunk's probabilities, and nothing else with a vocabulary's width."""
    widths: list[int] = []
    hidden_SD, weight_VD, _, token_S = inputs(10, bias=False)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.ndim == 2 and tensor.shape[1] == 13:
            widths.append(len(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_stats(hidden_SD.requires_grad_(), weight_VD.requires_grad_(), None, token_S, 1.0, 4)
    assert widths == [2]
