"""Run a stage on an accelerator that is neither CUDA nor the CPU: torch's and DeepSpeed's accelerator APIs answer
`npu`, and what is put there lies in the CPU's memory.

    python -m tests.stand_in_accelerator RECORD MODULE --config FILE ...

RECORD gets, as JSON, how often the device and each function of the API were asked for. A request for a CUDA device, by
name or by `.cuda()`, ends the program. Tensors say `cpu` when asked where they are, so code that looks at a tensor's
device takes its CPU branch; code that asks the API does not.
"""

import atexit
import functools
import json
import os
import runpy
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist  # noqa: TID251

NAME = "npu"
asked: Counter[str] = Counter()


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "tril_indices", "zeros",
    "zeros_like",
)  # fmt: skip
METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


def in_host_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the CPU in place of the stand-in's device."""

    @functools.wraps(function)
    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        return function(*map(moved, args), **{key: moved(value) for key, value in kwargs.items()})

    return on_cpu


def install_tensors() -> None:
    """Whatever makes or moves tensors, in all threads and in a backward pass's hooks, where modes do not reach."""
    for name in FACTORIES:
        setattr(torch, name, in_host_memory(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, in_host_memory(getattr(torch.Tensor, name)))

    def refuse(*_args: Any, **_kwargs: Any) -> None:
        raise AssertionError("a tensor or module was sent to CUDA")

    torch.Tensor.cuda = refuse  # type: ignore[assignment, method-assign]
    torch.nn.Module.cuda = refuse  # type: ignore[assignment, method-assign]


def moved(value: Any) -> Any:
    """The CPU in place of the stand-in, which is counted."""
    is_name = isinstance(value, str) and value.partition(":")[0] in (NAME, "cuda")
    device = torch.device(value) if is_name else value
    if not isinstance(device, torch.device):
        return value
    assert device.type != "cuda", f"device {device} was asked for"
    if device.type != NAME:
        return value
    asked[str(device)] += 1
    return torch.device("cpu")


def answer(name: str, value: Any) -> Callable[..., Any]:
    """A function of the API that is counted and gives the value."""

    def function(*_args: Any, **_kwargs: Any) -> Any:
        asked[name] += 1
        return value() if callable(value) else value

    return function


def install_torch() -> None:
    """torch.accelerator, and process groups over gloo."""
    torch.utils.rename_privateuse1_backend(NAME)
    answers = {
        "current_accelerator": torch.device(NAME), "is_available": True, "device_count": 8,
        "current_device_index": local_rank, "set_device_index": None, "synchronize": None,
    }  # fmt: skip
    memory = {
        "get_memory_info": (8 << 30, 16 << 30), "memory_reserved": 0, "memory_allocated": 0, "max_memory_allocated": 1,
        "reset_peak_memory_stats": None, "empty_cache": None,
    }  # fmt: skip
    for module, functions in ((torch.accelerator, answers), (torch.accelerator.memory, memory)):
        for name, value in functions.items():
            assert hasattr(module, name), name
            setattr(module, name, answer(name, value))
    module = type(sys)(f"torch.{NAME}")
    no_state = torch.zeros(0, dtype=torch.uint8)
    own = {"is_available": True, "device_count": 8, "current_device": local_rank, "_is_in_bad_fork": False,
           "get_rng_state": no_state, "set_rng_state": None, "manual_seed_all": None,
           "get_amp_supported_dtype": [torch.bfloat16]}  # fmt: skip
    for name, value in own.items():
        setattr(module, name, answer(f"{NAME}.{name}", (lambda v=value: v)))
    torch._register_device_module(NAME, module)
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    torch._C._get_accelerator = lambda *_: torch.device("cpu")  # barriers of gloo ask below the API


def install_deepspeed() -> None:
    """DeepSpeed's accelerator: the CPU's, under the other name."""
    import deepspeed.accelerator as accelerators  # noqa: TID251
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator  # noqa: TID251

    class StandIn(CPU_Accelerator):
        def __init__(self) -> None:
            super().__init__()
            self._name = NAME

        def device_name(self, device_index: int | None = None) -> str:
            asked["deepspeed.device_name"] += 1
            return NAME if device_index is None else f"{NAME}:{device_index}"

        def current_device(self) -> int:
            return local_rank()

        def current_device_name(self) -> str:
            asked["deepspeed.current_device_name"] += 1
            return f"{NAME}:{local_rank()}"

        def device_count(self) -> int:
            return 8

    accelerators.set_accelerator(StandIn())


def main(record: str, module: str, *arguments: str) -> None:
    """Run the module with everything in place."""
    os.environ.pop("DS_ACCELERATOR", None)
    install_torch()
    install_tensors()
    install_deepspeed()
    atexit.register(lambda: Path(record).write_text(json.dumps(asked)))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
