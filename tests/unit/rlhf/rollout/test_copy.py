"""A copy to generate with is the model, in the type that was asked for, adapters merged, and nothing of the model."""

from contextlib import contextmanager

import pytest
import torch

from rlhf.config import LoRAConfig
from rlhf.models.lora import add_lora
from rlhf.rollout import copy as copying
from rlhf.rollout.copy import GenerationCopy

TOKENS = torch.tensor([[5, 6, 7, 8, 9], [1, 1, 3, 2, 0]])


class Engine:
    """Counts what it is asked to gather."""

    def __init__(self):
        self.gathers = []

    @contextmanager
    def gathered(self, weights):
        self.gathers.append(list(weights))
        yield


def logits(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def test_a_copy_computes_what_the_model_computes(tiny_model, family):
    """Rotary frequencies and other buffers included; training mode, checkpointing and hooks stay behind."""
    model = tiny_model(family)
    model.gradient_checkpointing_enable()
    model.train()
    copied = GenerationCopy(model).fill(Engine())
    assert not copied.training and model.training and not copied.is_gradient_checkpointing
    assert torch.equal(logits(copied), logits(model.eval()))
    storage = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not storage & {p.untyped_storage().data_ptr() for p in copied.parameters()}
    assert not any(p.requires_grad for p in copied.parameters())
    assert len(list(copied.parameters())) == len(list(model.parameters())), "tied weights are one"


def test_another_type(tiny_model, family):
    """Oracle: the model itself cast. Buffers keep theirs: rotary frequencies in bfloat16 are other positions."""
    model = tiny_model(family).eval()
    copied = GenerationCopy(model, dtype=torch.bfloat16).fill(Engine())
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert {n: b.dtype for n, b in copied.named_buffers()} == {n: b.dtype for n, b in model.named_buffers()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(logits(copied), logits(model))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_adapters_are_merged(tiny_model, family, dtype):
    """Oracle: peft's own merge."""
    model = add_lora(tiny_model(family), LoRAConfig(rank=4, alpha=6)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    copied = GenerationCopy(model, dtype=dtype).fill(Engine())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters()), "nothing to unmerge"
    assert not any("lora" in name for name, _ in copied.named_modules())
    merged = model.merge_and_unload()
    if dtype is None:
        torch.testing.assert_close(logits(copied), logits(merged), atol=1e-5, rtol=1e-5)
    else:
        torch.testing.assert_close(logits(copied), logits(merged.to(dtype)), atol=0.1, rtol=0.1)


def test_weights_are_gathered_by_buckets(tiny_model, monkeypatch):
    """Every weight once, tied ones too, none over the limit but alone."""
    monkeypatch.setattr(copying, "BUCKET_WEIGHTS", 2500)
    model, engine = tiny_model("opt"), Engine()
    GenerationCopy(model).fill(engine)
    gathered = [id(weight) for bucket in engine.gathers for weight in bucket]
    assert sorted(gathered) == sorted(id(weight) for weight in model.parameters())
    sizes = [sum(weight.numel() for weight in bucket) for bucket in engine.gathers]
    assert all(size <= 2500 or len(bucket) == 1 for size, bucket in zip(sizes, engine.gathers, strict=True))
    assert 3 < len(sizes) < len(gathered)
