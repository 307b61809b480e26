"""Attention in 16 bits with a backward pass of its own: as near to float64 as torch's kernel is."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlhf.data import cpu_attention
from rlhf.data.packing import PackedLayout


def draw(shape: tuple[int, ...], *, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gradients(function, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def test_two_tokens_worked_by_hand():
    """Scores of the second token 0 and ln 3: weights 1/4 and 3/4. With gradient (0, 4) on values (2, 10):

    d value = (1, 3); d score = w (v g - mean) = 1/4 (8 - 32), 3/4 (40 - 32) = -6, 6; d query = 6 ln 3, d key = -6, 6.
    """
    query, key, value = (
        torch.tensor(x).reshape(1, 1, 2, 1).bfloat16().requires_grad_()
        for x in ([1.0, 1.0], [0.0, math.log(3)], [2.0, 10.0])
    )
    out = cpu_attention.attend(query, key, value, scaling=1.0)
    assert out.flatten().tolist() == pytest.approx([2.0, 8.0], rel=1e-2)
    query_grad, key_grad, value_grad = torch.autograd.grad(
        out, (query, key, value), torch.tensor([0.0, 4.0]).reshape(1, 1, 2, 1).bfloat16()
    )
    assert value_grad.flatten().tolist() == pytest.approx([1.0, 3.0], rel=1e-2)
    assert key_grad.flatten().tolist() == pytest.approx([-6.0, 6.0], rel=1e-2)
    assert query_grad.flatten().tolist() == pytest.approx([0.0, 6 * math.log(3)], rel=1e-2)


@pytest.mark.parametrize("length", [1, 7, 130])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_no_further_from_float64_than_torch(length, scaling):
    inputs = [draw((2, 3, length, 16), seed=i, dtype=torch.bfloat16) * (3 - i) for i in range(3)]
    grad = draw((2, 3, length, 16), seed=9, dtype=torch.bfloat16)

    def by_torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)

    exact = gradients(by_torch, [x.double() for x in inputs], grad.double())
    theirs = gradients(by_torch, inputs, grad)
    ours = gradients(lambda *x: cpu_attention.attend(*x, scaling=scaling), inputs, grad)
    for got, other, expected in zip(ours, theirs, exact, strict=True):
        error, their_error = (float((x.double() - expected).norm()) for x in (got, other))
        assert error <= 1.2 * their_error + 1e-3 * float(expected.norm())


def test_packed_rows_take_it_where_it_pays(monkeypatch):
    """In 16 bits, with gradients, without dropout, equal heads, up to a length; a call to it is seen."""
    calls = []
    attend = cpu_attention.attend
    monkeypatch.setattr(cpu_attention, "attend", lambda *x, **kw: calls.append(1) or attend(*x, **kw))

    def took(*, dtype=torch.bfloat16, key_heads=2, length=5, dropout=0.0, enabled=True) -> bool:
        calls.clear()
        shapes = [(1, heads, length, 8) for heads in (2, key_heads, key_heads)]
        tensors = [draw(shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
        with torch.set_grad_enabled(enabled):
            PackedLayout([length]).attend(*tensors, scaling=None, dropout=dropout)
        return bool(calls)

    assert took() and took(length=cpu_attention.LONGEST)
    assert not took(dtype=torch.float32) and not took(key_heads=1) and not took(dropout=0.1) and not took(enabled=False)
    assert not took(length=cpu_attention.LONGEST + 1)
