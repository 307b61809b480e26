"""What decides the size, FLOPs and caches of a decoder-only model: by name, or of a Hugging Face config. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlhf import strict


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder-only model. `parameters` is exact, as Hugging Face builds the causal model."""

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
    positions: int = 0
    """Rows of the learned position embedding."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm_vectors: int = 1
    """Vectors of a norm: 1 (RMS), 2 with a shift."""
    final_norm: bool = True
    embedding_norm: bool = False
    """BLOOM norms what the embedding gives."""
    tied: bool = True
    """The language head is the embedding."""

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_size", "intermediate", "embedding", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"a model's {name} must be >= 1, got {getattr(self, name)}.")

    @property
    def attention_matrices(self) -> int:
        """Weights of a layer's query, key, value and output matrices."""
        return self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Weights of a layer's MLP matrices."""
        return self.mlp_matrices * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_size
        mlp_bias = (self.mlp_matrices - 1) * self.intermediate + self.hidden
        biases = qkv * self.qkv_bias + self.hidden * self.out_bias + mlp_bias * self.mlp_bias
        return self.attention_matrices + self.mlp_weights + biases + 2 * self.norm_vectors * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters in front of the first layer: tokens, positions, projection, norm."""
        projection = 0 if self.embedding == self.hidden else self.embedding * self.hidden
        norm = self.norm_vectors * self.hidden * self.embedding_norm
        return self.vocabulary * self.embedding + self.positions * self.hidden + projection + norm

    @property
    def final_parameters(self) -> int:
        """Parameters behind the last layer, the language head excepted."""
        projection = 0 if self.embedding == self.hidden else self.embedding * self.hidden
        return projection + self.norm_vectors * self.hidden * self.final_norm

    @property
    def head_parameters(self) -> int:
        """Parameters of the language head that are not the embedding's."""
        return 0 if self.tied else self.vocabulary * self.embedding

    @property
    def backbone_parameters(self) -> int:
        """All but the language head: a reward model or critic, but for its one output."""
        return self.embedding_parameters + self.layers * self.layer_parameters + self.final_parameters

    @property
    def parameters(self) -> int:
        """All parameters, a tied head once."""
        return self.backbone_parameters + self.head_parameters

    @property
    def linear_per_token(self) -> int:
        """Forward FLOPs of the layers' matrices for one token."""
        projections = 0 if self.embedding == self.hidden else 2 * self.embedding * self.hidden
        return 2 * (self.layers * (self.attention_matrices + self.mlp_weights) + projections)

    @property
    def attention_per_pair(self) -> int:
        """Forward FLOPs for one query looking at one key: a score, and its share of the weighted sum."""
        return 4 * self.layers * self.heads * self.head_size

    @property
    def head_per_token(self) -> int:
        """Forward FLOPs of the language head at one position."""
        return 2 * self.embedding * self.vocabulary

    @property
    def cache_elements(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size

    def lora_parameters(self, rank: int) -> int:
        """Adapter weights with LoRA of this rank on every matrix of the layers."""
        heads, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = 2 * (self.hidden + heads) + 2 * (self.hidden + kv)
        return self.layers * rank * (attention + self.mlp_matrices * (self.hidden + self.intermediate))


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Shape from a Hugging Face config as a mapping (the content of config.json).

    Raises:
        ValueError: the family is not one of those counted here, or the config lacks a size.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ValueError(f"model_type={family!r} has no FLOP count. Use one of {', '.join(_FAMILIES)}.")
    names = _FAMILIES[family]
    missing = [name for name in (names["layers"], names["hidden"], names["heads"], "vocab_size") if name not in config]
    if missing:
        raise ValueError(f"the {family} config lacks {', '.join(missing)}.")
    hidden, heads = int(config[names["hidden"]]), int(config[names["heads"]])
    intermediate = config.get(names["intermediate"])
    shape = Shape(
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
    return replace(shape, **_DETAILS[family](config))


_USUAL = {"layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads"}
_FAMILIES: dict[str, dict[str, str]] = {
    "opt": {**_USUAL, "intermediate": "ffn_dim"},
    "gpt2": {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "intermediate": "n_inner"},
    "gpt_neox": {**_USUAL, "intermediate": "intermediate_size"},
    "llama": {**_USUAL, "intermediate": "intermediate_size"},
    "qwen2": {**_USUAL, "intermediate": "intermediate_size"},
    "bloom": {"layers": "n_layer", "hidden": "hidden_size", "heads": "n_head", "intermediate": "none"},
}


def _biased(*, biases: bool = True) -> dict[str, Any]:
    return {"qkv_bias": biases, "out_bias": biases, "mlp_bias": biases}


def _tied(config: Mapping[str, Any], *, default: bool) -> bool:
    value = config.get("tie_word_embeddings")
    return default if value is None else bool(value)


def _opt(config: Mapping[str, Any]) -> dict[str, Any]:
    norm_first = config.get("do_layer_norm_before", True) and not config.get("_remove_final_layer_norm", False)
    positions = int(config.get("max_position_embeddings", 2048)) + 2  # two rows in front that are never used
    return {
        **_biased(biases=config.get("enable_bias", True)), "norm_vectors": 2, "positions": positions,
        "final_norm": bool(norm_first), "tied": _tied(config, default=True),
    }  # fmt: skip


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    positions = int(config.get("n_positions", 1024))
    return {**_biased(), "norm_vectors": 2, "positions": positions, "tied": _tied(config, default=True)}


def _gpt_neox(config: Mapping[str, Any]) -> dict[str, Any]:
    attention = bool(config.get("attention_bias", True))
    tied = _tied(config, default=False)
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": True, "norm_vectors": 2, "tied": tied}


def _llama(config: Mapping[str, Any]) -> dict[str, Any]:
    attention = bool(config.get("attention_bias", False))
    mlp = bool(config.get("mlp_bias", False))
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": mlp, "tied": _tied(config, default=False)}


def _qwen2(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, "tied": _tied(config, default=False)}


def _bloom(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**_biased(), "norm_vectors": 2, "embedding_norm": True, "tied": _tied(config, default=True)}


_DETAILS = {
    "opt": _opt, "gpt2": _gpt2, "gpt_neox": _gpt_neox, "llama": _llama, "qwen2": _qwen2, "bloom": _bloom
}  # fmt: skip


def gpt(layers: int, hidden: int, heads: int, *, vocabulary: int = 51200, positions: int = 2048) -> Shape:
    """Megatron's GPT: learned positions, biases, a four times wider MLP, a tied head."""
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_size=hidden // heads, intermediate=4 * hidden,
        mlp_matrices=2, embedding=hidden, vocabulary=vocabulary, positions=positions, norm_vectors=2, **_biased(),
    )  # fmt: skip


def _named_opt(layers: int, hidden: int, heads: int) -> Shape:
    """Of Zhang et al. 2022, table 1; vocabulary as published on the hub, a multiple of 8."""
    small = hidden == 1024
    return shape_of({
        "model_type": "opt", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "ffn_dim": 4 * hidden, "vocab_size": 50272, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 512 if small else hidden, "do_layer_norm_before": not small,
    })  # fmt: skip


def _named_llama(layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocabulary: int) -> Shape:
    return shape_of({
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": intermediate, "vocab_size": vocabulary,
    })  # fmt: skip


MODELS: dict[str, Shape] = {
    "opt-125m": _named_opt(12, 768, 12),
    "opt-350m": _named_opt(24, 1024, 16),
    "opt-1.3b": _named_opt(24, 2048, 32),
    "opt-2.7b": _named_opt(32, 2560, 32),
    "opt-6.7b": _named_opt(32, 4096, 32),
    "opt-13b": _named_opt(40, 5120, 40),
    "opt-30b": _named_opt(48, 7168, 56),
    "opt-66b": _named_opt(64, 9216, 72),
    "opt-175b": _named_opt(96, 12288, 96),
    # Touvron et al. 2023 (Llama 2), and the configs of the hub.
    "llama2-7b": _named_llama(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": _named_llama(40, 5120, 40, 40, 13824, 32000),
    "llama2-34b": _named_llama(48, 8192, 64, 8, 22016, 32000),
    "llama2-70b": _named_llama(80, 8192, 64, 8, 28672, 32000),
    # Grattafiori et al. 2024 (Llama 3), table 3.
    "llama3-8b": _named_llama(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": _named_llama(80, 8192, 64, 8, 28672, 128256),
    "llama3-405b": _named_llama(126, 16384, 128, 8, 53248, 128256),
    # Dash et al. 2023 (Frontier), arXiv:2312.12705.
    "gpt-22b": gpt(48, 6144, 48),
    "gpt-175b": gpt(96, 12288, 96),
    "gpt-1t": gpt(128, 25600, 128),
}
"""Models by name."""


def find_shape(name: str) -> Shape:
    """Shape by name, or of a folder with a config.json, or of a JSON file.

    Raises:
        ValueError: nothing of that name, or the config's family is not known.
    """
    short = name.lower().rsplit("/", 1)[-1].replace("llama-2-", "llama2-").replace("llama-3", "llama3")
    short = short.replace("llama3.1-", "llama3-").replace("meta-llama3", "llama3").removesuffix("-hf")
    if short in MODELS:
        return MODELS[short]
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"model {name!r} is neither a folder with a config.json nor one of {', '.join(MODELS)}.")
    config = strict.read_json(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path}: holds a {type(config).__name__}, not a model's config. Pass its config.json.")
    return shape_of(config)
