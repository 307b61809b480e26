"""Products by oneDNN equal torch's own, values and gradients, and are used where they pay."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rlhf.models import linear
from rlhf.models.linear import FlatLinear, multiply, onednn_multiplies, product, reorder

needs_onednn = pytest.mark.skipif(not onednn_multiplies(torch.float32), reason="this torch has no oneDNN products")


@pytest.fixture
def everywhere(monkeypatch):
    """However small the product is."""
    monkeypatch.setattr(linear, "FEWEST_WEIGHTS", 1)
    monkeypatch.setattr(linear, "FEWEST_ROWS", 1)


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@needs_onednn
def test_a_product_worked_by_hand():
    """[1, 2] times rows [3, 4] and [5, 6], plus [10, 20]: 11 + 10 and 17 + 20."""
    weight_OI = torch.tensor([[3.0, 4.0], [5.0, 6.0]])
    got = product(torch.tensor([[1.0, 2.0]]), weight_OI, torch.tensor([10.0, 20.0]))
    assert got.tolist() == [[21.0, 37.0]]
    assert product(torch.tensor([[1.0, 2.0]]), weight_OI.t()).tolist() == [[13.0, 16.0]]
    assert product(torch.tensor([[1.0, 2.0]]), reorder(weight_OI, num_rows=1)).tolist() == [[11.0, 17.0]]


@needs_onednn
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("trained", ["all", "weight", "input"])
def test_values_and_gradients_are_those_of_float64(everywhere, has_bias, trained):
    inputs = [
        draw(2, 7, 12, dtype=torch.float32),
        draw(5, 12, dtype=torch.float32),
        draw(5, dtype=torch.float32) if has_bias else None,
    ]
    wanted = {"all": {0, 1, 2}, "weight": {1}, "input": {0}}[trained]
    results = []
    for to, function in ((torch.float32, multiply), (torch.float64, F.linear)):
        arguments = [None if x is None else x.to(to).requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        out = function(*arguments)
        leaves = [x for x in arguments if x is not None and x.requires_grad]
        results.append([out, *torch.autograd.grad(out, leaves, draw(2, 7, 5, dtype=torch.float32).to(to))])
    assert "_Multiply" in type(results[0][0].grad_fn).__name__
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1, 200, 16), (3, 16)])
def test_small_products_are_torchs(shape):
    """Fewer weights than pay: the very bits of F.linear."""
    weight_OI = draw(8, 16, dtype=torch.float32).requires_grad_()
    out = multiply(draw(*shape, dtype=torch.float32), weight_OI)
    assert torch.equal(out, F.linear(draw(*shape, dtype=torch.float32), weight_OI))
    assert "_Multiply" not in type(out.grad_fn).__name__


def test_16_bits_are_left_to_torch(everywhere):
    out = multiply(draw(4, 4, dtype=torch.bfloat16).requires_grad_(), draw(4, 4, dtype=torch.bfloat16))
    assert "_Multiply" not in type(out.grad_fn).__name__


def test_types_that_do_not_fit_are_torchs_to_refuse(everywhere):
    with pytest.raises(RuntimeError, match="dtype"):
        multiply(draw(4, 4, dtype=torch.bfloat16), draw(4, 4, dtype=torch.float32))


def test_a_built_model_trains_as_before(make, family, monkeypatch):
    """Every family: names and gradients stay; the head is left to its users; small layers are left alone."""
    plain = make.lm(family)
    assert not any(isinstance(module, FlatLinear) for module in plain.modules())
    monkeypatch.setattr(linear, "FEWEST_WEIGHTS", 1)
    monkeypatch.setattr(linear, "FEWEST_ROWS", 1)
    model = make.lm(family)
    has_linears = any(type(m) is nn.Linear and m is not plain.get_output_embeddings() for m in plain.modules())
    assert any(isinstance(module, FlatLinear) for module in model.modules()) == has_linears
    assert type(model.get_output_embeddings()) is nn.Linear
    assert model.state_dict().keys() == plain.state_dict().keys()
    token_ids_BT = torch.arange(20).reshape(2, 10) % plain.config.vocab_size
    for each in (plain, model):
        each(input_ids=token_ids_BT, labels=token_ids_BT).loss.backward()
    for (name, got), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_a_torch_without_the_operations_is_told_apart(monkeypatch):
    for broken in (lambda *_: torch.ones(1, 5, 40), None):
        onednn_multiplies.cache_clear()
        if broken is None:
            monkeypatch.setattr(linear.torch.ops, "mkldnn", object(), raising=False)
        else:
            monkeypatch.setattr(linear, "product", broken)
        assert not onednn_multiplies(torch.float32)
        monkeypatch.undo()
    onednn_multiplies.cache_clear()
