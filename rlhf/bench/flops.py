"""FLOPs counted from a model's shape. No torch.

A multiply-add is two FLOPs. Counted are the matrix products: linear layers, attention's two products, the language head
at the positions whose next token is scored. Norms, activations, softmax and the optimiser are left out, as is usual.

"Model" FLOPs are what the algorithm needs for real tokens: no padding, the lower triangle of attention alone, nothing
computed twice. Backward is twice forward: one product for the inputs' gradient, one for the weights'.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRAINING = 3
"""Forward and backward, in units of a forward."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What decides the FLOPs of a decoder-only model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    mlp_matrices: int
    """2, or 3 with a gate."""
    embedding: int
    """Width of the token embedding; OPT-350M's differs from `hidden` and is projected in and out."""
    vocabulary: int

    @property
    def linear_per_token(self) -> int:
        """Forward FLOPs of the layers' matrices for one token."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        mlp = self.mlp_matrices * self.hidden * self.intermediate
        projections = 0 if self.embedding == self.hidden else 2 * self.embedding * self.hidden
        return 2 * (self.layers * (attention + mlp) + projections)

    @property
    def attention_per_pair(self) -> int:
        """Forward FLOPs for one query looking at one key: a score, and its share of the weighted sum."""
        return 4 * self.layers * self.heads * self.head_size

    @property
    def head_per_token(self) -> int:
        """Forward FLOPs of the language head at one position."""
        return 2 * self.embedding * self.vocabulary


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Shape from a Hugging Face config as a mapping (the content of config.json).

    Raises:
        ValueError: the family is not one of those whose FLOPs are counted here.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(f"model_type={family!r} has no FLOP count. Use one of {', '.join(_FAMILIES)}.")
    names = _FAMILIES[family]
    hidden, heads = int(config[names["hidden"]]), int(config[names["heads"]])
    intermediate = config.get(names["intermediate"])
    return Shape(
        layers=int(config[names["layers"]]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_size=int(config.get("head_dim") or hidden // heads),
        intermediate=4 * hidden if intermediate is None else int(intermediate),
        mlp_matrices=3 if family in ("llama", "qwen2") else 2,
        embedding=int(config.get("word_embed_proj_dim") or hidden),
        vocabulary=int(config["vocab_size"]),
    )


_USUAL = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
_FAMILIES: dict[str, dict[str, str]] = {
    "opt": {**_USUAL, "intermediate": "ffn_dim"},
    "gpt2": {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "intermediate": "n_inner"},
    "gpt_neox": {**_USUAL, "intermediate": "intermediate_size"},
    "llama": {**_USUAL, "intermediate": "intermediate_size"},
    "qwen2": {**_USUAL, "intermediate": "intermediate_size"},
    "bloom": {"layers": "n_layer", "hidden": "hidden_size", "heads": "n_head", "intermediate": "none"},
}


def forward(shape: Shape, length: float, *, targets: float = 0, causal: bool = True) -> float:
    """Forward FLOPs of one sequence.

    Args:
        shape: of the model.
        length: tokens that go through the layers; a mean length is allowed.
        targets: positions that go through the language head.
        causal: count the pairs at or below the diagonal, as the algorithm needs, or all that a plain kernel computes.
    """
    pairs = length * (length + 1) / 2 if causal else length * length
    return length * shape.linear_per_token + pairs * shape.attention_per_pair + targets * shape.head_per_token


def sft_row(policy: Shape, prompt: float, response: float) -> float:
    """Model FLOPs of one demonstration in an update: loss on the response."""
    return TRAINING * forward(policy, prompt + response, targets=response)


def preference_row(reward: Shape, prompt: float, chosen: float, rejected: float) -> float:
    """Model FLOPs of one pair in an update of the reward model; its head of one output is not worth counting."""
    return TRAINING * (forward(reward, prompt + chosen) + forward(reward, prompt + rejected))


def rollout_row(policy: Shape, prompt: float, response: float) -> float:
    """Model FLOPs of drawing one response: its last token is drawn and never read."""
    return forward(policy, prompt + response - 1, targets=response)


def ppo_row(policy: Shape, reward: Shape, prompt: float, response: float, *, epochs: int = 1) -> float:
    """Model FLOPs of one response in a PPO iteration.

    The rollout gives the old log-probabilities; the reference, the reward model and the critic read the row once; actor
    and critic are trained on it `epochs` times. Critic and reward model have one shape.
    """
    length = prompt + response
    scored = forward(policy, length, targets=response) + 2 * forward(reward, length)
    trained = TRAINING * (forward(policy, length, targets=response) + forward(reward, length))
    return rollout_row(policy, prompt, response) + scored + epochs * trained
