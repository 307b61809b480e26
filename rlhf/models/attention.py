"""Our attention function for transformers' models: sdpa, or what a layout says.

A model whose implementation is `rlhf` computes sdpa as transformers does, mask and kernel alike. Called with the
keyword `layout`, which transformers hands down to the attention function, it lets the layout attend instead:
`PackedLayout` for several sequences in one row, the rollout's for one token of each row against its cache. There is
then no mask to build.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from rlhf.models.backbone import base_of

Function = TypeVar("Function", bound=Callable[..., Any])

NAME = "rlhf"

# Families whose whole mixing of tokens is one call of the attention function, causal over the full length, with
# positions given as ids. Each is tested: packed rows equal padded ones. BLOOM's ALiBi attention is its own; in hybrids
# and recurrent models state would run from one sequence into the next.
FAMILIES = ("opt", "gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "mistral", "phi3")


class Layout(Protocol):
    """Which keys each query sees, and how they are found."""

    def attend(
        self, query_BHTd: Tensor, key_BKTd: Tensor, value_BKTd: Tensor, *, scaling: float | None, dropout: float
    ) -> Tensor:
        """out_BTHd of attention; scaling None is 1 / sqrt(d), K key heads are shared by H query heads."""


def takes_layout(config: Any) -> bool:
    """Whether a model of this config can be called with a layout: a known family that attends to the full length."""
    text = config.get_text_config()
    windows = set(getattr(text, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    slides = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    return text.model_type in FAMILIES and not windows and not slides


def is_installed(model: nn.Module) -> bool:
    """Whether the model was built with this attention function."""
    return bool(cast(Any, base_of(model)).config._attn_implementation == NAME)


def _outside_graphs(function: Function) -> Function:
    """Lengths of sequences are no dimension of a graph: torch.compile would build one for every micro-batch."""
    return cast(Function, cast(Any, torch.compiler).disable(function))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    layout: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    with _own_masks(module, query.device, dropout):
        if layout is None:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
            )
        return _attend(layout, query, key, value, scaling=scaling, dropout=dropout), None


@contextmanager
def _own_masks(module: nn.Module, device: torch.device, dropout: float) -> Iterator[None]:
    """Other dropout masks on each rank whose heads are a share (`models.tensor_parallel`).

    Outside, the generators of these ranks run alike, because all else that is dropped is equal on them. The seed comes
    from there too, so that a block that is computed again drops the same.
    """
    stream = getattr(module, "dropout_stream", None)
    if stream is None or not dropout:
        yield
        return
    seed = int(torch.randint(1 << 62, ()).item()) + stream
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(seed)
        yield


@_outside_graphs
def _attend(
    layout: Layout, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, dropout: float
) -> Tensor:
    return _cut(layout.attend(query, key, value, scaling=scaling, dropout=dropout))


class _Cut(torch.autograd.Function):
    """The same tensor, no longer a view: the graph that reads it would be built anew for a base of another form."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


_cut = cast(Callable[[Tensor], Tensor], _Cut.apply)


def register() -> None:
    """Make the name known to transformers; building a model does it."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
