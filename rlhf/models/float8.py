"""Linear layers that multiply in float8 while they train or score, by torchao's recipes.

The weights stay parameters in the type that they are trained in: what is float8 is a copy of both sides of a product,
scaled to its range and thrown away after it (Micikevicius et al. 2022, arXiv:2209.05433). So optimiser, saved states,
exported folders and rollouts see plain linear layers. `tensorwise` has one scale for a tensor, whose rows then depend
on one another; `rowwise` has one for each row of a product's left side and column of its right side.
"""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlhf.config import ModelConfig
from rlhf.models.lora import linear_layers

# Of the features on both sides: a float8 product reads memory in lines of so many elements.
ALIGNMENT = 16


@dataclass(frozen=True)
class Recipe:
    """How the three products of a layer are cast."""

    config: Any
    """torchao's Float8LinearConfig."""
    products: Any
    """torchao's LinearMMConfig: which kernel serves each product."""


class Float8Linear(nn.Linear):
    """nn.Linear by float8 products. Made from one by `use_float8`, which changes the class and nothing else."""

    recipe: Recipe

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  the name of nn.Linear's argument
        """input_..I to output_..O, in the input's type."""
        if input.numel() == 0:  # an empty micro-batch has no largest value to scale by
            return super().forward(input)
        output = cast(Tensor, _Product.apply(input, self.weight, self.recipe.config, self.recipe.products))  # type: ignore[no-untyped-call]
        return output if self.bias is None else output + self.bias


def use_float8(model: PreTrainedModel, cfg: ModelConfig, *, device_type: str) -> None:
    """Let the linear layers of a model multiply in float8, all but the heads and those that `cfg` leaves out.

    Args:
        model: before adapters are added; weights may be sharded by ZeRO-3.
        cfg: `float8` is a recipe.
        device_type: where it will run; CPUs emulate.

    Raises:
        ValueError: no layer is left, or a name of float8_filter_fqns is in no layer's.
    """
    names = linear_layers(model)
    for part in cfg.float8_filter_fqns:
        if not any(part in name for name in names):
            kinds = sorted({name.rsplit(".", 1)[-1] for name in names})
            raise ValueError(
                f"model.float8_filter_fqns: {part!r} is in no name of a linear layer of {type(model).__name__}, which "
                f"end in {kinds}. Correct or remove it."
            )
    chosen = [
        module
        for name in names
        if type(module := model.get_submodule(name)) is nn.Linear
        and not any(part in name for part in cfg.float8_filter_fqns)
        and min(module.in_features, module.out_features) >= cfg.float8_min_features
        and module.in_features % ALIGNMENT == module.out_features % ALIGNMENT == 0
    ]
    if not chosen:
        raise ValueError(
            f"model.float8={cfg.float8}: of {len(names)} linear layers of {type(model).__name__} none is left. Float8 "
            f"takes nn.Linear (GPT-2 has Conv1D) with features that are multiples of {ALIGNMENT}, of "
            f"float8_min_features={cfg.float8_min_features} at least, outside of float8_filter_fqns="
            f"{cfg.float8_filter_fqns}. Change these, or set float8: none."
        )
    recipe = make_recipe(cfg.float8, emulate=cfg.float8_emulate or device_type == "cpu")
    for module in chosen:
        module.recipe = recipe  # type: ignore[assignment]
        module.__class__ = Float8Linear


def float8_layers(model: nn.Module) -> list[Float8Linear]:
    """The layers that `use_float8` changed."""
    return [module for module in model.modules() if type(module) is Float8Linear]


@contextmanager
def without_float8(model: nn.Module) -> Iterator[None]:
    """Let the layers multiply in their weights' type inside; afterwards, whatever happens, in float8."""
    layers = float8_layers(model)
    try:
        for layer in layers:
            layer.__class__ = nn.Linear  # type: ignore[assignment]
        yield
    finally:
        for layer in layers:
            layer.__class__ = Float8Linear


def check_float8(cfg: ModelConfig, device_type: str) -> None:
    """Check that this machine computes in float8 as `cfg` asks.

    Raises:
        ValueError: torchao is missing, the accelerator has no float8 products, or emulation is to be compiled for one.
    """
    if cfg.float8 == "none":
        return
    _torchao("config")
    if device_type == "cpu":
        return
    if not cfg.float8_emulate and not _has_products(device_type):
        raise ValueError(
            f"model.float8={cfg.float8} needs an accelerator with float8 products (NVIDIA from compute capability 8.9 "
            "on: Ada, Hopper, Blackwell; AMD MI300 or MI350), which this one is not. Set float8: none, or "
            "float8_emulate: true to see its numbers at a lower speed than without."
        )
    if cfg.float8_emulate and cfg.compile:
        raise ValueError(
            "model.float8_emulate is true with compile: true: fused, emulated casts round otherwise than the products "
            "that they stand for. Set one of them to false."
        )


def _has_products(device_type: str) -> bool:
    if device_type != "cuda":  # AMD's too
        return False
    if torch.version.hip:
        return any(name in torch.cuda.get_device_properties().gcnArchName for name in ("gfx942", "gfx950"))
    return torch.cuda.get_device_capability() >= (8, 9)


@functools.cache
def make_recipe(name: str, *, emulate: bool) -> Recipe:
    """A recipe of torchao's.

    Args:
        name: tensorwise or rowwise.
        emulate: dequantise and multiply in float32 instead of calling float8 kernels: the same rounding of both sides.
    """
    # Without it, kernels that Triton compiles store some float8 values wrongly (torchao's account is in that module).
    _torchao("_inductor_patch")._patch_inductor_min_max_codegen()
    config = _torchao("config").Float8LinearConfig.from_recipe_name(name)
    tensors = _torchao("float8_training_tensor")
    gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
    # A weight's gradient sums over the tokens of a micro-batch, whose number is anything; kernels take multiples of 16,
    # so zeros are added there.
    products = [
        tensors.ScaledMMConfig(emulate=emulate, use_fast_accum=gemm.use_fast_accum, pad_inner_dim=True)
        for gemm in gemms
    ]
    return Recipe(config=config, products=tensors.LinearMMConfig(*products))


@cast(Any, torch._dynamo).allow_in_graph
class _Product(torch.autograd.Function):
    # Weights are saved as they are, not as the transpose that torchao's own layer saves: ZeRO-3 releases them after the
    # forward pass and fills the same tensor again before the backward pass. A view would keep what was gathered.
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight_OI: Tensor, config: Any, products: Any) -> Tensor:  # noqa: A002
        ctx.save_for_backward(input if weight_OI.requires_grad else None, weight_OI)
        ctx.config, ctx.products = config, products
        input_RI = input.reshape(-1, input.shape[-1])
        left = _cast(input_RI, config.cast_config_input, ctx, role="INPUT", axis=-1)
        right = _cast(weight_OI.t(), config.cast_config_weight, ctx, role="WEIGHT", axis=0)
        return torch.mm(left, right).view(*input.shape[:-1], len(weight_OI))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight_OI = ctx.saved_tensors  # noqa: A001
        (grad,) = grads
        grad_RO = grad.reshape(-1, grad.shape[-1])
        input_grad = weight_grad_OI = None
        if ctx.needs_input_grad[0]:
            left = _cast(grad_RO, ctx.config.cast_config_grad_output, ctx, role="GRAD_OUTPUT", axis=-1)
            right = _cast(weight_OI.t(), ctx.config.cast_config_weight_for_grad_input, ctx, role="WEIGHT", axis=-1)
            input_grad = torch.mm(left, right.t()).view(*grad.shape[:-1], weight_OI.shape[1])
        if ctx.needs_input_grad[1]:
            input_RI = input.reshape(-1, input.shape[-1])
            left = _cast(grad_RO, ctx.config.cast_config_grad_output_for_grad_weight, ctx, role="GRAD_OUTPUT", axis=0)
            right = _cast(input_RI, ctx.config.cast_config_input_for_grad_weight, ctx, role="INPUT", axis=0)
            weight_grad_OI = torch.mm(left.t(), right)
        return input_grad, weight_grad_OI, None, None


def _cast(matrix: Tensor, config: Any, ctx: Any, *, role: str, axis: int) -> Tensor:
    """A float8 copy; where the recipe scales by rows, the numbers along `axis` share a scale, else all do."""
    scaling, tensors = _torchao("float8_scaling_utils"), _torchao("float8_training_tensor")
    return cast(
        Tensor,
        scaling.hp_tensor_to_float8_dynamic(
            matrix,
            config.target_dtype,
            ctx.products,
            gemm_input_role=tensors.GemmInputRole[role],
            scaling_granularity=config.scaling_granularity,
            axiswise_dim=scaling.get_maybe_axiswise_dim(axis, config.scaling_granularity),
            round_scales_to_power_of_2=ctx.config.round_scales_to_power_of_2,
        ),
    )


@functools.cache
def _torchao(module: str) -> Any:
    """A module of torchao's float8, which is an extra."""
    try:
        return importlib.import_module(f"torchao.float8.{module}")
    except ImportError as error:
        raise ValueError(
            f"model.float8 needs torchao, which cannot be imported ({error}). Run `pip install "
            "'rlhf-deepspeed[float8]'`, or set float8: none."
        ) from error
