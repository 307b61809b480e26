"""A trained and a frozen engine of the same bfloat16 weights say the same, to the bit. Fault row A9."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf import ds_config
from rlhf.config import OptimConfig
from rlhf.engine import FrozenEngine, TrainEngine

pytestmark = pytest.mark.usefixtures("one_rank")


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():  # buffers stay float32, as from_pretrained(dtype=...) leaves them
        parameter.data = parameter.data.bfloat16()
    return model


def test_a9_frozen_copy_of_the_actor_agrees() -> None:
    """Rotary frequencies are a buffer: in bfloat16 they are off by up to 1 / 256, which at token 300 is a radian."""
    optim = OptimConfig(lr=1e-3)
    trained = TrainEngine(tiny_llama(), ds=ds_config.load("cpu_bf16"), optim=optim, role="actor", num_steps=1)
    trained.eval()
    frozen = FrozenEngine(tiny_llama(), ds=ds_config.load("cpu_frozen_bf16"), role="reference")
    token_ids_BT = torch.randint(1, 61, (2, 300), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        one, two = (engine(input_ids=token_ids_BT).logits for engine in (trained, frozen))
    assert one.dtype == two.dtype == torch.bfloat16
    assert torch.equal(one, two)
    assert {p.dtype for p in frozen.module.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in frozen.module.buffers()} == {torch.float32}
