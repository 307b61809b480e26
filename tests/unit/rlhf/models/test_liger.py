"""Liger's loss against ours, on a GPU or by Triton's interpreter (TRITON_INTERPRET=1), where Liger is installed."""

import os
from typing import Any

import pytest
import torch

from rlhf.models import liger
from rlhf.models.liger import liger_stats
from rlhf.models.policy import Policy
from rlhf.models.token_stats import token_stats

CAN_RUN = liger.is_installed() and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1")
needs_liger = pytest.mark.skipif(not CAN_RUN, reason="needs liger-kernel and triton, and a GPU or TRITON_INTERPRET=1")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(*, bias: bool, num_tokens: int = 13) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_SD, weight_VD, bias_V = (torch.randn(s, generator=generator) for s in ((num_tokens, 24), (50, 24), (50,)))
    token_S = torch.randint(0, 50, (num_tokens,), generator=generator)
    token_S[: num_tokens // 2] = (hidden_SD @ weight_VD.T).argmax(-1)[: num_tokens // 2]  # some are the best
    leaves = [x.to(DEVICE).requires_grad_() for x in (hidden_SD, weight_VD, bias_V)]
    return leaves[0], leaves[1], leaves[2] if bias else None, token_S.to(DEVICE)


@needs_liger
@pytest.mark.parametrize("bias", [True, False])
def test_log_probs_and_gradients_equal_ours(*, bias: bool) -> None:
    """Each token with a weight of its own, as a loss over a global count would give it."""
    hidden_SD, weight_VD, bias_V, token_S = inputs(bias=bias)
    leaves = [x for x in (hidden_SD, weight_VD, bias_V) if x is not None]
    factor_S = torch.linspace(-0.5, 1.5, len(token_S), device=DEVICE)
    results = []
    for stats in (liger_stats, token_stats):
        logprob_S, _, greedy_S = stats(hidden_SD, weight_VD, bias_V, token_S, 1.0, 5)
        results.append([logprob_S, greedy_S, *torch.autograd.grad((logprob_S * factor_S).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert 0 < int(results[0][1].sum()) < len(token_S)


@needs_liger
def test_the_policy_says_the_same_with_either(families: dict[str, dict[str, Any]], make: Any) -> None:
    model = make.lm(families["opt"], dropout=0.0).to(DEVICE)
    batch = {name: x.to(DEVICE) for name, x in make.pad(make.rows(5, 1, 9), left=1).items()}
    results = []
    for policy in (Policy(model, closed_form=liger_stats), Policy(model)):
        model.zero_grad()
        out = policy(**batch, target_mask_BT=make.targets(batch))
        (0.3 * out.logprob_BT.sum()).backward()
        results.append([out.logprob_BT, out.greedy_BT, *(p.grad for p in model.parameters() if p.grad is not None)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_where_liger_does_not_fit_it_is_our_closed_form() -> None:
    """No gradient, no token, another temperature: entropies too, and gradients of nothing; needs no Liger."""
    hidden_SD, weight_VD, bias_V, token_S = inputs(bias=True)
    with torch.no_grad():
        entropy_S = liger_stats(hidden_SD, weight_VD, bias_V, token_S, 1.0, 5)[1]
        assert torch.equal(entropy_S, token_stats(hidden_SD, weight_VD, bias_V, token_S, 1.0, 5)[1])
    assert (liger_stats(hidden_SD, weight_VD, bias_V, token_S, 0.5, 5)[1] > 0).all()
    empty = inputs(bias=True, num_tokens=0)
    logprob_S, *_ = liger_stats(*empty, 1.0, 5)
    (grad_VD,) = torch.autograd.grad(logprob_S.sum(), [empty[1]])
    assert logprob_S.shape == (0,) and not grad_VD.any()
