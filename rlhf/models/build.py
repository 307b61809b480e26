"""Tokenizers and models: from a folder or hub name, or from a Hugging Face config with random weights.

What a model is comes from its config (`model_type`, `architectures`), never from its path or name. Inside
`engine.zero3_init()` the same calls give partitioned parameters: transformers loads shard by shard, and no rank ever
holds the whole model. Random weights depend on the seed and the device type alone, not on ranks or ZeRO stage.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging as hf_logging

from rlhf.config import ModelConfig
from rlhf.distributed import device_type
from rlhf.models import attention, compiled, float8
from rlhf.models.linear import use_onednn
from rlhf.models.lora import add_lora
from rlhf.models.offload import offload_activations
from rlhf.models.recompute import recompute_blocks

logger = logging.getLogger(__name__)

HEAD_KEY = "score.weight"


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or hub name; one without a pad token pads with its eos token.

    Only this path is read, never the `_name_or_path` that a config may remember.

    Raises:
        FileNotFoundError: there is no such folder, or no tokenizer in it.
        ValueError: the tokenizer has no eos token.
    """
    check_exists(path)
    repair = "Name a folder or hub model that has tokenizer files (tokenizer.json), or set tokenizer.path to one."
    try:
        tokenizer = cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(path))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"no tokenizer could be loaded from {path}: {error}. {repair}") from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # transformers makes an empty one where the files are missing
        raise FileNotFoundError(f"the tokenizer of {path} has no vocabulary: its files are missing. {repair}")
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"the tokenizer of {path} has no eos token, and responses end with it. Add eos_token to its "
            "tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:  # masks come from lengths, so pad and eos may share an id
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that round-trips any text and puts "<bos>" first, as OPT's does.

    "<bos>", "<eos>", "<pad>" and "<unk>" are ids 0 to 3. In a text they are plain characters: only ids mean them, so a
    row cannot smuggle in a stop token. The same texts in the same order give the same tokenizer.

    Args:
        texts: what it is trained on.
        vocab_size: at most this many entries; at least 260 (256 bytes and the four special tokens).
    """
    special_tokens = ["<bos>", "<eos>", "<pad>", "<unk>"]
    if vocab_size < 256 + len(special_tokens):
        raise ValueError(f"vocab_size must be at least {256 + len(special_tokens)}, got {vocab_size}. Raise it.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", 0)]
    )
    return cast(Any, PreTrainedTokenizerFast)(  # type: ignore[no-any-return]
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
    )


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hex digest of what a tokenizer does: vocabulary, special ids, and the ids it gives to a few telling texts.

    Equal after save and load, whatever file format; different for tokenizers that number or split tokens differently.
    The pad id does not count: no model reads it.
    """
    probes = [
        "Hello world",
        " Hello  World\n\n\tx",
        "\n\nHuman: 1234567 a_b?\n\nAssistant:",
        "Caf\u00e9 \u4f60\u597d \U0001f600 \u00a0 I\u2019m",
    ]
    content = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id],
        "probes": [tokenizer(probe).input_ids for probe in probes],
    }
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()


def vocabulary_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """Rows an embedding needs for this tokenizer: its largest id and one."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def build_causal_lm(cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PreTrainedModel:
    """Load or create a causal LM that fits the tokenizer, with adapters if cfg.lora asks for them.

    The vocabulary only grows; the config follows it. Loading is strict.

    Args:
        cfg: where the model comes from and how it is set up.
        tokenizer: its pad id goes into the config; an embedding smaller than it is extended.
        seed: of random weights.

    Raises:
        FileNotFoundError: there is no such folder, or no weights in it.
        ValueError: the folder's weights are not those of the causal LM that its config describes, or cfg.compile is
            true where nothing can be compiled, or cfg.float8 asks for what this machine or model cannot do.
    """
    config = read_config(cfg, tokenizer)
    _check_machine(cfg)
    if cfg.path and _kind(config) == "reward":
        raise ValueError(
            f"{cfg.path} holds a reward model ({config.architectures}), a causal language model is needed here. "
            "Name the model folder of step 1 or a base model."
        )
    with _seeded(seed):
        if cfg.path is None:
            model = _from_config(AutoModelForCausalLM, config, cfg)
        else:
            model, info = _from_folder(AutoModelForCausalLM, cfg.path, config, cfg)
            _check_keys(cfg.path, missing=info["missing_keys"], unexpected=info["unexpected_keys"])
    model.config.pad_token_id = tokenizer.pad_token_id
    _follow_tokenizer(model, tokenizer, fresh=cfg.path is None)
    return _finish(model, cfg, tokenizer, seed=seed)


def build_reward_model(cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> PreTrainedModel:
    """Load or create an `AutoModelForSequenceClassification(num_labels=1)`: a reward model or the start of a critic.

    A folder that holds a reward model keeps its head. One that holds a causal LM, and a bare config, get a new head
    with weights from N(0, 1 / (D + 1)) (Stiennon et al. 2020, arXiv:2009.01325, app. B.1).

    Hugging Face finds a row's last token by looking for config.pad_token_id from the right. Where pad and eos share an
    id it would stop one token early, at the token before the eos that ends the response; pad_token_id is then None, and
    Hugging Face takes the last column (and refuses padded batches) instead of scoring the wrong token.

    Raises:
        FileNotFoundError, ValueError: as build_causal_lm.
    """
    config = read_config(cfg, tokenizer)
    _check_machine(cfg)
    kind = _kind(config) if cfg.path else "base"
    if kind == "reward" and config.num_labels != 1:
        raise ValueError(
            f"{cfg.path} is a classifier with {config.num_labels} labels, a reward model has one. Name another model."
        )
    config.num_labels = 1
    with _seeded(seed):
        if cfg.path is None:
            model = _from_config(AutoModelForSequenceClassification, config, cfg)
            new_head = True
        else:
            model, info = _from_folder(AutoModelForSequenceClassification, cfg.path, config, cfg)
            new_head = kind == "base" and HEAD_KEY in info["missing_keys"]
            _check_keys(
                cfg.path,
                missing=set(info["missing_keys"]) - ({HEAD_KEY} if new_head else set()),
                unexpected={
                    key for key in info["unexpected_keys"] if not new_head or key.split(".")[0] not in _LANGUAGE_HEADS
                },
            )
            if new_head:
                logger.warning(
                    "%s holds no reward head: a new one starts from random weights (seed %d)", cfg.path, seed
                )
    if new_head:
        _assign(_head_weight(model), _head_values(_head_weight(model), seed=seed))
    pad_is_distinct = tokenizer.pad_token_id != tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id if pad_is_distinct else None
    model.config.problem_type = "regression"
    return _finish(model, cfg, tokenizer, seed=seed)


def _check_machine(cfg: ModelConfig) -> None:
    if cfg.compile:
        compiled.check_compiler(device_type())
    float8.check_float8(cfg, device_type())


def check_length_fits(config: PreTrainedConfig, num_tokens: int) -> None:
    """Check that rows of `num_tokens` have a position each in this model.

    Raises:
        ValueError: they do not; positions past the last would be read out of bounds.
    """
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and num_tokens > limit:
        raise ValueError(
            f"rows of {num_tokens} tokens do not fit a {config.model_type} model with max_position_embeddings={limit}. "
            f"Lower data.max_prompt_tokens + data.max_response_tokens to {limit} or below, or take another model."
        )


def check_exists(path: str) -> None:
    """Tell a missing folder from a hub name, which has at most one slash and no dot or tilde in front.

    Raises:
        FileNotFoundError: the path can only be a folder, and there is none.
    """
    is_folder_name = path.startswith(("/", ".", "~")) or path.count("/") > 1
    if is_folder_name and not Path(path).expanduser().is_dir():
        raise FileNotFoundError(f"{path}: no such folder. Check the path, or name a hub model as owner/name.")


_LANGUAGE_HEADS = ("lm_head", "embed_out")


def _kind(config: PreTrainedConfig) -> str:
    """ "reward" for a sequence classifier, "base" for all else."""
    names = config.architectures or []
    return "reward" if any(name.endswith("ForSequenceClassification") for name in names) else "base"


def read_config(cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The model's config with what `cfg` changes in it, before any weight exists.

    Raises:
        FileNotFoundError, ValueError: as build_causal_lm.
    """
    if cfg.path is not None:
        check_exists(cfg.path)
        try:
            config = AutoConfig.from_pretrained(cfg.path)
        except (OSError, ValueError) as error:
            raise FileNotFoundError(
                f"no model config could be read from {cfg.path}: {error}. Name a folder with a config.json, or a hub "
                "model."
            ) from error
    else:
        assert cfg.config is not None, "a ModelConfig with neither path nor config"
        fields = dict(cfg.config)
        size = vocabulary_size(tokenizer)
        fields["vocab_size"] = max(size, int(fields.get("vocab_size", size)))
        # Some families zero and freeze the embedding of the pad id: not if that is the stop token.
        pad_is_distinct = tokenizer.pad_token_id != tokenizer.eos_token_id
        fields["pad_token_id"] = tokenizer.pad_token_id if pad_is_distinct else None
        fields["bos_token_id"] = tokenizer.bos_token_id
        fields["eos_token_id"] = tokenizer.eos_token_id
        config = AutoConfig.for_model(**fields)
    if cfg.dropout is not None:
        set_dropout(config, cfg.dropout)
    if _partitioned() and getattr(config, "layerdrop", None):
        raise ValueError(
            f"layerdrop={config.layerdrop} in the model's config skips layers at random on each rank, but under ZeRO-3 "
            "all ranks have to run the same layers. Set model.dropout (which sets layerdrop to 0), or use a lower ZeRO "
            "stage."
        )
    return cast(PreTrainedConfig, config)


def set_dropout(config: PreTrainedConfig, probability: float) -> None:
    """Set every dropout probability that a config names (dropout, attention_dropout, resid_pdrop, ...).

    `layerdrop`, which skips whole layers, becomes 0: ranks that skip different layers hang under ZeRO-3.
    """
    for name, value in vars(config).items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            if "layerdrop" in name or "layer_drop" in name:
                setattr(config, name, 0.0)
            elif "dropout" in name or name.endswith("pdrop"):
                setattr(config, name, probability)


def _attention(auto_class: Any, config: PreTrainedConfig, cfg: ModelConfig) -> str:
    """The attention implementation asked for: sdpa as `attention.NAME` where the model takes layouts.

    A family without sdpa (BLOOM) gets `eager`, the same mathematics.
    """
    model_class = auto_class._model_mapping.get(type(config), None)
    if model_class is None:
        raise ValueError(
            f"model_type={config.model_type} has no {auto_class.__name__} in transformers. Use a decoder-only "
            "language model."
        )
    if cfg.attention == "sdpa" and not model_class._supports_sdpa:
        logger.info("%s has no sdpa attention, eager is used", config.model_type)
        return "eager"
    if cfg.attention == "sdpa" and attention.takes_layout(config):
        attention.register()
        return attention.NAME
    return cfg.attention


def _from_config(auto_class: Any, config: PreTrainedConfig, cfg: ModelConfig) -> PreTrainedModel:
    """A model with random weights. They are drawn after the constructor, as ZeRO-3 has to, so both draw the same."""
    with no_init_weights():
        model = auto_class.from_config(
            config, dtype=getattr(torch, cfg.dtype), attn_implementation=_attention(auto_class, config, cfg)
        )
    if not _partitioned():
        model.init_weights()
    return cast(PreTrainedModel, model)


def _from_folder(
    auto_class: Any, path: str, config: PreTrainedConfig, cfg: ModelConfig
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model with loaded weights, and transformers' account of the keys."""
    implementation = _attention(auto_class, config, cfg)
    try:
        with _quiet_loading():
            model, info = auto_class.from_pretrained(
                path,
                config=config,
                dtype=getattr(torch, cfg.dtype),
                attn_implementation=implementation,
                output_loading_info=True,
            )
    except OSError as error:
        raise FileNotFoundError(
            f"no weights could be loaded from {path}: {error}. Name a folder that save_pretrained wrote "
            "(model.safetensors)."
        ) from error
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} do not fit its config.json: {error}") from error
    return model, info


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """No table of keys for each rank and model: what is wrong with the keys is our error, in one line."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        hf_logging.set_verbosity(verbosity)


def _check_keys(path: str, *, missing: Iterable[str], unexpected: Iterable[str]) -> None:
    missing, unexpected = sorted(missing), sorted(unexpected)
    if missing or unexpected:
        raise ValueError(
            f"the weights in {path} do not fit its config.json: missing {missing or 'none'}, unexpected "
            f"{unexpected or 'none'}. The folder is incomplete or holds another kind of model: save it again."
        )


def _follow_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, fresh: bool) -> None:
    """Make Hugging Face's generate stop and pad as the tokenizer says; more eos ids of a loaded model are kept."""
    generation = model.generation_config
    assert generation is not None, "a causal LM can generate"
    generation.pad_token_id = tokenizer.pad_token_id
    known = generation.eos_token_id
    known_ids = [known] if isinstance(known, int) else list(known or [])
    if fresh or tokenizer.eos_token_id not in known_ids:
        generation.eos_token_id = model.config.eos_token_id = tokenizer.eos_token_id
        generation.bos_token_id = model.config.bos_token_id = tokenizer.bos_token_id


def _finish(
    model: PreTrainedModel, cfg: ModelConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int
) -> PreTrainedModel:
    """Vocabulary, checkpointing, adapters, compilation: what follows once weights exist."""
    with _seeded(seed):
        grow_vocabulary(model, vocabulary_size(tokenizer))
    embedding = model.get_input_embeddings()
    if isinstance(embedding, nn.Embedding):
        # A padding_idx keeps gradients from that row, which may be the stop token's; masks keep padding out already.
        embedding.padding_idx = None
    if cfg.float8 != "none":
        float8.use_float8(model, cfg, device_type=device_type())
    if cfg.recompute != "none":
        recompute_blocks(model, cfg.recompute, every=cfg.recompute_every, budget=cfg.recompute_budget)
    if device_type() == "cpu":
        use_onednn(model)
    if cfg.lora.rank:
        with _seeded(seed):
            model = cast(PreTrainedModel, add_lora(model, cfg.lora))
    if cfg.offload_activations:
        offload_activations(model)
    if cfg.compile:
        compiled.compile_blocks(model)
    return model


def grow_vocabulary(model: PreTrainedModel, size: int) -> None:
    """Extend the embeddings (and an untied output layer) to at least `size` rows; config.vocab_size follows.

    New rows are drawn around the mean of the old ones, so that they hardly take probability from known tokens
    (Hewitt 2021, nlp.stanford.edu/~johnhew/vocab-expansion.html).

    Raises:
        ValueError: the model cannot be resized, or did not follow.
    """
    config = model.config.get_text_config()
    if config.vocab_size >= size:
        return
    try:
        model.resize_token_embeddings(size)
    except NotImplementedError as error:
        raise ValueError(
            f"the tokenizer has {size} entries, the {config.model_type} model {config.vocab_size}, and its embeddings "
            "cannot be resized. Use the model's own tokenizer."
        ) from error
    layers = {"input embedding": model.get_input_embeddings(), "output layer": cast(Any, model).get_output_embeddings()}
    sizes = {name: _shape(cast(Tensor, layer.weight))[0] for name, layer in layers.items() if layer is not None}
    if set(sizes.values()) != {size} or config.vocab_size != size:
        raise ValueError(
            f"after resizing to the tokenizer's {size} entries the model has {sizes} and config.vocab_size="
            f"{config.vocab_size}. Use the model's own tokenizer."
        )


def _partitioned() -> bool:
    """Inside engine.zero3_init() of a stage-3 config."""
    return bool(cast(Any, is_deepspeed_zero3_enabled)())


def _head_weight(model: PreTrainedModel) -> nn.Parameter:
    return cast(nn.Parameter, cast(Any, model).score.weight)


def _head_values(weight: nn.Parameter, *, seed: int) -> Tensor:
    """N(0, 1 / (D + 1)) from a CPU generator of its own: the same on every device, rank and ZeRO stage."""
    shape = _shape(weight)
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return normal / math.sqrt(shape[-1] + 1)


def _shape(weight: Tensor) -> tuple[int, ...]:
    """Shape of a parameter, of its whole if ZeRO-3 has partitioned it."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def _assign(weight: nn.Parameter, values: Tensor) -> None:
    """Copy values, equal on all ranks, into a parameter that ZeRO-3 may have partitioned (then all ranks call this)."""
    partitioned = hasattr(weight, "ds_id")
    if partitioned:
        cast(Any, weight).all_gather()
    with torch.no_grad():
        weight.data.copy_(values)
    if partitioned:
        cast(Any, weight).partition(has_been_updated=True)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's generators and put them back afterwards."""
    kind = device_type()
    devices = [] if kind == "cpu" else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(seed)
        yield
