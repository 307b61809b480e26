"""How many tokens fit into a forward without gradients, estimated from a model's shape."""

from typing import Any

# Largest part of the free memory that is planned for: the rest is the optimiser's, whose states appear at its first
# step, ZeRO-3's, which gathers layers, and what the allocator cannot use.
PLANNED_SHARE = 0.5
# Products are at full speed long before, and rows of one micro-batch wait for one another on no rank.
MOST_TOKENS = 1 << 16
# Sequences of like length share a group whose shortest has at least three quarters of its longest (`data.packing`).
GROUP_PADDING = 4 / 3


def forward_bytes_per_token(config: Any, *, dtype_bytes: int, padded_row: int = 0, fused: bool = True) -> int:
    """Bytes that a token takes at the widest point of a forward without gradients; only one layer is alive at a time.

    Around attention five tensors of the hidden width are held (two embeddings, their sum, residual, norm), query, key
    and value, the same in groups, the output in groups, as parts and joined, and as tokens. Around the MLP six, and
    four of its inner width: gate, activation, second branch and product, or the steps of a GELU written out.

    Args:
        config: of a Hugging Face decoder.
        dtype_bytes: of the type that the model computes in.
        padded_row: tokens of the longest row, if rows are padded; each token then has a row of the mask.
        fused: no attention scores are held; else each token holds a padded row of them for each head, three in the
            model's type and one in float32.
    """
    text = config.get_text_config()
    hidden, heads = int(text.hidden_size), int(text.num_attention_heads)
    head_size = int(getattr(text, "head_dim", None) or hidden // heads)
    query = heads * head_size
    key = int(getattr(text, "num_key_value_heads", None) or heads) * head_size
    names = ("intermediate_size", "ffn_dim", "n_inner")
    inner = max((int(getattr(text, name, None) or 0) for name in names), default=0) or 4 * hidden
    qkv = query + 2 * key
    attention = dtype_bytes * (5 * hidden + qkv + GROUP_PADDING * (qkv + 2 * query) + query)
    if not fused:
        attention += heads * padded_row * (3 * dtype_bytes + 4)
    mlp = dtype_bytes * (6 * hidden + 4 * inner)
    return int(max(attention, mlp)) + padded_row * dtype_bytes


def head_bytes(config: Any, *, chunk_tokens: int) -> int:
    """Bytes of a chunk of logits with all that sampling's transforms make of them: float32, sorted, with indices."""
    return chunk_tokens * int(config.get_text_config().vocab_size) * 32


def fitting_tokens(free_bytes: int, *, bytes_per_token: int, fixed_bytes: int) -> int:
    """Tokens of a micro-batch: a power of two, so that a little more or less free memory gives the same, at least 1."""
    tokens = int((PLANNED_SHARE * free_bytes - fixed_bytes) / bytes_per_token)
    return min(MOST_TOKENS, 1 << max(0, tokens.bit_length() - 1)) if tokens > 0 else 1
