"""How a model is split over the ranks of a group: which layers, by family. No torch.

Each rank holds an equal share of the attention heads and of the hidden units between a block's two products
(Shoeybi et al. 2019, arXiv:1909.08053, sec. 3): the layers in front are split by outputs, the layers behind by inputs,
so that a block needs one sum over the group. Embedding and head are split over the vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Family:
    """Names of layers in each block, as transformers gives them."""

    columns: tuple[str, ...]
    """Split by outputs; those of a head lie together."""
    rows: tuple[str, ...]
    """Split by inputs; their outputs are summed over the group."""
    thirds: tuple[str, ...] = ()
    """Split by outputs inside each of three equal parts: queries, keys and values of all heads, one after another."""
    entries: tuple[str, ...]
    """Modules that each rank calls with the whole input; behind it, all is computed by shares."""
    divided: tuple[str, ...] = ()
    """Numbers of the attention module that become the rank's share."""


_LLAMA = Family(
    columns=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
    rows=("o_proj", "down_proj"),
    entries=("self_attn", "mlp"),
)
FAMILIES = {
    "opt": Family(
        columns=("q_proj", "k_proj", "v_proj", "fc1"),
        rows=("out_proj", "fc2"),
        entries=("self_attn", "fc1"),
        divided=("num_heads",),
    ),
    "gpt2": Family(
        columns=("c_fc",),
        thirds=("c_attn",),
        rows=("c_proj",),
        entries=("attn", "mlp"),
        divided=("num_heads", "split_size"),
    ),
    # Its fused layer holds query, key and value of one head together.
    "gpt_neox": Family(
        columns=("query_key_value", "dense_h_to_4h"), rows=("dense", "dense_4h_to_h"), entries=("attention", "mlp")
    ),
    "llama": _LLAMA,
    "qwen2": _LLAMA,
}

_HEADS = ("num_attention_heads", "n_head")
_KEY_HEADS = ("num_key_value_heads", *_HEADS)
_INNER = ("ffn_dim", "intermediate_size", "n_inner")


def check_split(shape: Mapping[str, Any], num_ranks: int, *, said: str, repair: str) -> None:
    """Check that a model can be split over so many ranks.

    Args:
        shape: what its config.json holds.
        num_ranks: of a group.
        said: the setting and its value.
        repair: what else can be done for a family that cannot be split.

    Raises:
        ValueError: the family is not known, or its heads or hidden units do not divide.
    """
    family = shape.get("model_type")
    if family not in FAMILIES:
        raise ValueError(
            f"{said}: models of model_type {family} cannot be split over ranks, only {', '.join(FAMILIES)}. {repair}"
        )
    check_heads(shape, num_ranks, said=said)
    _check_divides(shape, "hidden units", _INNER, num_ranks, said=said)


def check_rollout_split(shape: Mapping[str, Any], num_ranks: int) -> None:
    """`check_split` for the copy of the weights that a rollout's ranks share."""
    check_split(
        shape,
        num_ranks,
        said=f"rollout.tensor_parallel={num_ranks}",
        repair="Set it to 1; if the weights do not fit one rank, set rollout.weights=layerwise.",
    )


def check_training_split(shape: Mapping[str, Any], num_ranks: int, *, name: str) -> None:
    """`check_split` for a model that the ranks of a group train together.

    Raises:
        ValueError: as `check_split`; or its attention would have windows, which has not been tried.
    """
    if num_ranks == 1:
        return
    said = f"parallel.tp={num_ranks} for {name}"
    check_split(shape, num_ranks, said=said, repair="Set parallel.tp=1, or use another model.")
    if shape.get("use_sliding_window"):
        raise ValueError(f"{said}: its attention has a sliding window, which has not been tried. Set parallel.tp=1.")


def check_heads(shape: Mapping[str, Any], num_ranks: int, *, said: str) -> None:
    """Check that each of so many ranks can have its share of a model's heads.

    Args:
        shape: what its config.json holds.
        num_ranks: of a group.
        said: the setting and its value.

    Raises:
        ValueError: the heads, or the key and value heads, do not divide.
    """
    _check_divides(shape, "attention heads", _HEADS, num_ranks, said=said)
    _check_divides(shape, "key and value heads", _KEY_HEADS, num_ranks, said=said)


def _check_divides(shape: Mapping[str, Any], what: str, names: Sequence[str], num_ranks: int, *, said: str) -> None:
    number = next((shape[name] for name in names if isinstance(shape.get(name), int)), None)
    if number is not None and number % num_ranks:
        raise ValueError(
            f"{said}: the model's {number} {what} do not divide over {num_ranks} ranks, and each rank needs whole "
            f"ones. Use a divisor of {number}."
        )
