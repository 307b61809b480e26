"""The estimate against numbers worked by hand, and against what forwards on a CPU allocate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

from rlhf.data.collate import collate_responses
from rlhf.models.forward_memory import MOST_TOKENS, fitting_tokens, forward_bytes_per_token, head_bytes
from rlhf.models.policy import Policy

LENGTHS = (150, 40, 90, 150, 10, 120, 64, 100, 33, 143)


def test_hand_worked() -> None:
    """OPT of width 8, MLP 32: the MLP is the wider, 6 x 8 + 4 x 32 = 176 numbers a token, attention 40 + 24 + 53.3 + 8.

    Llama of width 8, 4 query heads and 1 key head of 2, MLP 8: attention is, 40 + 12 + 4/3 x 28 + 8 = 97.3 numbers.
    Scores of a row of 10: with 2 heads, in 2 bytes each, 2 x 10 x 10 bytes, beside the row of the mask.
    """
    opt = AutoConfig.for_model("opt", hidden_size=8, ffn_dim=32, num_attention_heads=2, vocab_size=100)
    assert forward_bytes_per_token(opt, dtype_bytes=4) == 4 * 176
    assert forward_bytes_per_token(opt, dtype_bytes=2, padded_row=10) == 2 * 176 + 2 * 10
    assert forward_bytes_per_token(opt, dtype_bytes=2, padded_row=10, fused=False) == 250 + 200 + 20
    llama = AutoConfig.for_model(
        "llama", hidden_size=8, num_attention_heads=4, num_key_value_heads=1, intermediate_size=8
    )
    assert forward_bytes_per_token(llama, dtype_bytes=4) == 389
    assert head_bytes(opt, chunk_tokens=10) == 10 * 100 * 32


def test_fitting_tokens() -> None:
    """Half of what is free, less what is fixed, in whole powers of two."""
    assert fitting_tokens(20_000, bytes_per_token=4, fixed_bytes=2000) == 1024  # 2000 fit
    assert fitting_tokens(20_384, bytes_per_token=4, fixed_bytes=2000) == 2048
    assert fitting_tokens(1 << 60, bytes_per_token=4, fixed_bytes=0) == MOST_TOKENS
    assert fitting_tokens(100, bytes_per_token=1, fixed_bytes=5000) == 1
    assert fitting_tokens(2, bytes_per_token=1, fixed_bytes=0) == 1


def peak_bytes(trace: Path, run: Any) -> int:
    """Most bytes of tensors that `run` held at once, beside those from before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    profiler.export_chrome_trace(str(trace))
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("packed", [True, False])
def test_one_to_two_times_what_forwards_allocate(
    families: dict[str, dict[str, Any]], make: Any, tmp_path: Path, *, packed: bool
) -> None:
    """In every family, on one target a row, so that logits count little; in GPT-2 packed, all but a few bytes."""
    sizes = {
        "max_position_embeddings": 256, "n_positions": 256, "hidden_size": 128, "n_embd": 128, "ffn_dim": 512,
        "intermediate_size": 512,
    }  # fmt: skip
    for name, config in families.items():
        if packed and name == "bloom":
            continue
        policy = Policy(make.lm({**config, **sizes}))
        batch = collate_responses(
            [[9, n] * (n // 2) for n in LENGTHS], [[7]] * len(LENGTHS), pad_id=1, device="cpu", packed=packed
        )

        def forward(policy: Policy = policy, batch: Any = batch) -> None:
            with torch.no_grad():
                policy(**batch.sequences.inputs, target_mask_BT=batch.response_mask_BT)

        forward()
        estimate = batch.sequences.num_columns * forward_bytes_per_token(
            policy.config, dtype_bytes=4, padded_row=0 if packed else 151, fused=name != "bloom"
        )
        assert 0.99 <= estimate / peak_bytes(tmp_path / "trace.json", forward) <= 2, name
