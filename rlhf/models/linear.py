"""Products with float32 weights on a CPU by oneDNN, in training too.

torch multiplies float32 matrices on CPUs by another library, 10 to 20 % slower than oneDNN for the rows of a packed
micro-batch on the processors measured (docs/performance.md). oneDNN takes weights as they lie, and their transpose, so
nothing is copied. Wherever it cannot be had, or would not pay, the product is torch's own.
"""

import functools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Below so many weights setting up oneDNN's call takes longer than it saves in float32.
FEWEST_WEIGHTS = 1 << 17
# The same for rows: a step of decoding has its own products (`rollout.packed`).
FEWEST_ROWS = 128


class FlatLinear(nn.Linear):
    """nn.Linear by `multiply`. Made from one by `use_onednn` and by `models.recompute`."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name of nn.Linear's argument
        """input_..I to output_..O."""
        return multiply(input, self.weight, self.bias)


def use_onednn(model: nn.Module) -> None:
    """Let the linear layers of a model on a CPU multiply by oneDNN, all but the head, whose users call `multiply`.

    Only the class of a layer changes: names, weights, hooks and adapters around it are what they were.
    """
    head = cast(Any, model).get_output_embeddings()
    for module in model.modules():
        if (
            type(module) is nn.Linear
            and module is not head
            and module.in_features * module.out_features >= FEWEST_WEIGHTS
        ):
            module.__class__ = FlatLinear


def multiply(input: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:  # noqa: A002
    """`F.linear`, by oneDNN where that is faster: input_..I to output_..O, with gradients.

    Otherwise as a matrix: for inputs of more dimensions DeepSpeed's product under ZeRO-3 adds the bias in place, to a
    tensor that selective recomputation has kept.
    """
    num_rows = input.numel() // max(input.shape[-1], 1)
    is_float32 = input.dtype == weight_OI.dtype == torch.float32  # torch's own product in 16 bits is oneDNN's already
    pays = num_rows >= FEWEST_ROWS and weight_OI.numel() >= FEWEST_WEIGHTS
    if input.device.type == "cpu" and is_float32 and pays and onednn_multiplies(torch.float32):
        return cast(Tensor, _Multiply.apply(input, weight_OI, bias_O))  # type: ignore[no-untyped-call]
    output = F.linear(input.reshape(num_rows, input.shape[-1]), weight_OI, bias_O)
    return output.view(*input.shape[:-1], len(weight_OI))


class _Multiply(torch.autograd.Function):
    # Weights are saved as they are, not as a view: ZeRO-3 releases them after the forward pass and fills the same
    # tensor again before the backward pass.
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:  # noqa: A002
        ctx.save_for_backward(input if weight_OI.requires_grad else None, weight_OI)
        ctx.has_bias = bias_O is not None
        return product(input, weight_OI, bias_O)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight_OI = ctx.saved_tensors  # noqa: A001
        input_grad = weight_grad_OI = bias_grad_O = None
        if ctx.needs_input_grad[0]:
            input_grad = product(grad, weight_OI.t())
        grad_RO = grad.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            weight_grad_OI = grad_RO.t() @ input.flatten(0, -2)  # here torch's is as fast
        if ctx.has_bias and ctx.needs_input_grad[2]:
            bias_grad_O = grad_RO.sum(0)
        return input_grad, weight_grad_OI, bias_grad_O


def product(input: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:  # noqa: A002
    """OneDNN's product, without gradients; the weights may be in its own order (`reorder`), or a transposed view."""
    return cast(Tensor, cast(Any, torch.ops.mkldnn)._linear_pointwise(input, weight_OI, bias_O, "none", [], ""))


def reorder(weight_OI: Tensor, *, num_rows: int) -> Tensor:
    """A copy of weights in oneDNN's own order, chosen for so many rows of input; only `product` reads it."""
    return cast(Tensor, cast(Any, torch.ops.mkldnn)._reorder_linear_weight(weight_OI.contiguous(), num_rows))


@functools.cache
def onednn_multiplies(dtype: torch.dtype) -> bool:
    """Whether this torch and this CPU multiply by oneDNN in a type, and rightly: tried once.

    A torch without the operations, or a type without instructions for it, keeps `F.linear`.
    """
    operations = torch.ops.mkldnn
    if not (hasattr(operations, "_reorder_linear_weight") and hasattr(operations, "_linear_pointwise")):
        return False
    generator = torch.Generator().manual_seed(0)
    input_1SI, weight_OI, weight_IO, bias_O = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((1, 5, 48), (40, 48), (48, 40), (40,))
    )
    try:
        results = [
            (product(input_1SI, weight_OI, bias_O), weight_OI),
            (product(input_1SI, weight_IO.t(), bias_O), weight_IO.t()),
            (product(input_1SI, reorder(weight_OI, num_rows=32), bias_O), weight_OI),
        ]
    except RuntimeError:
        return False
    for got, weight in results:
        expected = F.linear(input_1SI.double(), weight.double(), bias_O.double())
        close = (got.double() - expected).abs() <= 8 * torch.finfo(dtype).eps * 48**0.5
        if got.shape != expected.shape or not bool(close.all()):
            return False
    return True
