"""A copy of a policy's weights to generate with: plain tensors under the model's own code, no hooks, adapters merged.

It is made for a rollout and thrown away after it. The weights arrive some at a time: gathered where they are sharded,
merged, cut to the rank's share, cast and copied, released. So no rank ever holds more than the copy and one bucket of
weights as they are trained.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from rlhf.distributed import Group, device
from rlhf.engine import FrozenEngine, TrainEngine
from rlhf.models.backbone import base_of
from rlhf.models.lora import adapter_weights, merged_weight
from rlhf.models.tensor_parallel import Shares, is_share

# Weights that are gathered at a time, unless one alone has more: enough for collectives at full speed.
BUCKET_WEIGHTS = 1 << 26


@dataclass(frozen=True)
class _Source:
    """Where a weight of the copy comes from."""

    names: list[str]
    """In the copy; a tied weight has several."""
    module: nn.Module
    """Of the policy that is trained."""
    weight: nn.Parameter

    @property
    def parts(self) -> list[nn.Parameter]:
        """All parameters that it is made of."""
        return [self.weight, *(p for lora_A, lora_B, _ in self._adapters for p in (lora_A, lora_B))]

    @property
    def _adapters(self) -> list[tuple[nn.Parameter, nn.Parameter, float]]:
        return adapter_weights(self.module) if self.names[0].endswith(".weight") else []

    @property
    def num_weights(self) -> int:
        """Of all parts, whole."""
        return sum(whole_shape(part).numel() for part in self.parts)

    def value(self) -> Tensor:
        """The weight with adapters added; while the parts are whole."""
        return merged_weight(self.module) if self._adapters else self.weight.detach()


class GenerationCopy:
    """Shapes of a copy first, on no device; then, while `filled`, its weights."""

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype | None = None, group: Group | None = None, num_ranks: int = 1
    ) -> None:
        """Lay the copy out. Nothing is gathered, so that its size can be known before it is made.

        Args:
            model: Hugging Face causal LM, adapters and shards included.
            dtype: of all weights; None: each weight's own.
            group: of ranks that share the copy; None: each rank has all of it.
            num_ranks: that will share it, as long as only its size is asked for.
        """
        self.group = group
        source = base_of(model)
        self.sources = list(_sources(source))
        self.dtype = dtype
        with torch.device("meta"), no_init_weights():
            self.model = type(source)(copy.deepcopy(cast(Any, source).config)).eval()
        cast(Any, self.model).generation_config = cast(Any, source).generation_config
        rank, num_ranks = (0, num_ranks) if group is None else (group.rank, group.size)
        self._shares = Shares(self.model, rank, num_ranks) if num_ranks > 1 else None
        self._cuts = not any(is_share(entry.weight) for entry in self.sources)
        """Whether shares are cut here; the weights may be shares of the same group as they are trained."""
        for entry in self.sources:
            self._set(entry, self._cut(entry, torch.empty(whole_shape(entry.weight), device="meta")))
        _take_buffers(self.model, source)

    @property
    def gathered_bytes(self) -> int:
        """Most bytes of sharded weights that are whole at a time while it is filled."""
        if not any(hasattr(part, "ds_id") for entry in self.sources for part in entry.parts):
            return 0
        return max(sum(_bytes(part) for entry in bucket for part in entry.parts) for bucket in self._buckets())

    def fill(self, engine: TrainEngine | FrozenEngine) -> nn.Module:
        """Fetch the weights; the model to generate with, in eval mode. Collective under ZeRO-3."""
        for bucket in self._buckets():
            with engine.gathered([part for entry in bucket for part in entry.parts]):
                for entry in bucket:
                    value = self._cut(entry, entry.value())
                    weight = torch.empty(value.shape, dtype=self._dtype(entry), device=device())
                    self._set(entry, weight.copy_(value))
        if self._shares is not None:
            assert self.group is not None, "a copy of shares is filled by a group"
            self._shares.install(self.group)
        return self.model

    def clear(self) -> None:
        """Free the weights, whoever still holds the model."""
        for parameter in self.model.parameters():
            parameter.data = torch.empty(0)

    def _cut(self, entry: _Source, value: Tensor) -> Tensor:
        return value if self._shares is None or not self._cuts else self._shares.cut(entry.names[0], value)

    def _dtype(self, entry: _Source) -> torch.dtype:
        return self.dtype or entry.weight.dtype

    def _set(self, entry: _Source, value: Tensor) -> None:
        parameter = nn.Parameter(value.to(self._dtype(entry)), requires_grad=False)
        for name in entry.names:
            path, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(path), leaf, parameter)

    def _buckets(self) -> Iterator[Sequence[_Source]]:
        bucket: list[_Source] = []
        size = 0
        for entry in self.sources:
            size += entry.num_weights
            if bucket and size > BUCKET_WEIGHTS:
                yield bucket
                bucket, size = [], entry.num_weights
            bucket.append(entry)
        yield bucket


def whole_shape(weight: Tensor) -> torch.Size:
    """Shape of a weight, of its whole where ZeRO-3 has sharded it."""
    return torch.Size(getattr(weight, "ds_shape", weight.shape))


def _bytes(weight: Tensor) -> int:
    return whole_shape(weight).numel() * weight.element_size()


def _sources(source: nn.Module) -> Iterator[_Source]:
    """The weights of a Hugging Face model under the names they have without adapters, in the order of its modules."""
    found: dict[int, _Source] = {}
    for name, parameter in source.named_parameters(remove_duplicate=False):
        if ".lora_" in name:
            continue
        plain = name.replace(".base_layer.", ".")
        if id(parameter) in found:
            found[id(parameter)].names.append(plain)
        else:
            found[id(parameter)] = _Source([plain], source.get_submodule(plain.rpartition(".")[0]), parameter)
    yield from found.values()


def _take_buffers(model: nn.Module, source: nn.Module) -> None:
    """Use the source's tensors that are not weights, such as rotary frequencies, in the type they have there."""
    for path, module in model.named_modules():
        theirs = source.get_submodule(path)
        theirs = cast(nn.Module, getattr(theirs, "base_layer", theirs))
        for name in module._buffers:
            module._buffers[name] = theirs._buffers[name]
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                setattr(module, name, getattr(theirs, name))
