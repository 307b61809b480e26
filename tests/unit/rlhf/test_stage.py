"""Whether rows are packed, and how many tokens a micro-batch may hold."""

from typing import Any

import pytest

from rlhf.config import DataConfig, ModelConfig, SourceConfig
from rlhf.data.template import load_template
from rlhf.models.build import train_bpe
from rlhf.stage import Language, choose_batching

OPT = {"model_type": "opt", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "ffn_dim": 16}
BLOOM = {"model_type": "bloom", "hidden_size": 32, "n_head": 2, "n_layer": 1}


@pytest.fixture(scope="module")
def language() -> Language:
    tokenizer = train_bpe(["a b c"], vocab_size=280)
    return Language(tokenizer=tokenizer, template=load_template("plain", tokenizer))


def choose(language: Language, *models: ModelConfig, **data: Any) -> Any:
    config = DataConfig(sources=[SourceConfig(path="x")], **data)
    return choose_batching(models, config, language, max_rows=4, longest_row=50)


def test_rows_are_packed_where_every_model_reads_packed_rows(language: Language) -> None:
    opt, bloom = ModelConfig(config=OPT), ModelConfig(config=BLOOM)
    packed = choose(language, opt)
    assert packed.packed and (packed.max_tokens, packed.hidden_size) == (200, 16)
    assert choose(language, opt, micro_batch_tokens=70).max_tokens == 70
    for padded in (
        choose(language, opt, packing="off"),
        choose(language, opt, bloom),
        choose(language, ModelConfig(config=OPT, attention="eager")),
    ):
        assert not padded.packed and padded.max_rows == 4


def test_asking_for_it_with_a_model_that_cannot_names_the_family(language: Language) -> None:
    with pytest.raises(ValueError, match="packing is `on`, but bloom with attention=sdpa cannot read packed rows"):
        choose(language, ModelConfig(config=OPT), ModelConfig(config=BLOOM), packing="on")
    assert choose(language, ModelConfig(config=OPT), packing="on").packed
