"""torch.compile on a model's blocks (its decoder layers), in place: names, weights and saved folders stay as they are.

Each block's `forward` is compiled and its hooks stay outside of the graph. All layers of a model share their graphs,
with the number of tokens as a dynamic dimension. Attention by a layout is a call between two graphs
(`models.attention`), since its shapes differ with each micro-batch: a packed block is four graphs, a padded one a
single graph. Besides its lengths, a graph depends on mode (training or not, with gradients or not), type and sizes.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.callback import callback_handler

from rlhf import heartbeat
from rlhf.models.backbone import blocks_of, known_blocks

# Variants of one graph that are kept, over all roles of a process, before torch goes on uncompiled; its default of 8 is
# made for one model. Four roles of one family, each with and without gradients, are 8 at least.
RECOMPILE_LIMIT = 64


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks of a model, each at its first call; before or after DeepSpeed wraps the model.

    Raises:
        ValueError: the model has no blocks that are known as such.
    """
    blocks = known_blocks(model, setting="compile is true", off="compile: false")
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    _CLOCK.listen()
    for block in blocks:
        # The instance's attribute hides the class's method; it is no parameter, buffer or module, so it is not saved.
        vars(block)["forward"] = torch.compile(block.forward, dynamic=True)


def compiled_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks that `compile_blocks` compiled."""
    return [block for block in blocks_of(model) if "forward" in vars(block)]


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Let the blocks compute without their graphs inside; afterwards, whatever happens, with them."""
    forwards = [(block, vars(block).pop("forward")) for block in compiled_blocks(model)]
    try:
        yield
    finally:
        for block, forward in forwards:
            vars(block)["forward"] = forward


def check_compiler(device_type: str) -> None:
    """Check that this machine can compile for a device.

    Raises:
        ValueError: it lacks a C++ compiler (CPU) or Triton (GPU).
    """
    if device_type == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415  takes a second
        from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise ValueError(
                "compile is true, but there is no C++ compiler, which torch.compile needs on a CPU. Install g++ "
                "(build-essential), name a compiler in the environment variable CXX, or set compile: false."
            ) from error
        return
    from torch.utils._triton import has_triton  # noqa: PLC0415

    if not has_triton():
        raise ValueError(
            f"compile is true, but Triton, which torch.compile needs on {device_type}, is missing or does not know the "
            "device. Install the triton that belongs to this torch, or set compile: false."
        )


def compile_seconds() -> float:
    """Wall seconds that this process has spent on compiling since its first `compile_blocks`."""
    return _CLOCK.seconds


class _Clock:
    """Told by torch when it starts to compile and when it is done; what is compiled inside counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = 0.0

    def listen(self) -> None:
        """Be told from here on; a second call does nothing."""
        if self._start not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._stop)

    def _start(self, *_: Any) -> None:
        heartbeat.tick()
        self._since = time.perf_counter()

    def _stop(self, *_: Any) -> None:
        self.seconds += time.perf_counter() - self._since


_CLOCK = _Clock()
