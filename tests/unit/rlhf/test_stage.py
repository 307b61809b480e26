"""Whether rows are packed, and how many tokens a micro-batch may hold."""

from typing import Any

import pytest

from rlhf import stage
from rlhf.config import DataConfig, ModelConfig, ParallelConfig, SourceConfig
from rlhf.data.template import load_template
from rlhf.models.build import train_bpe
from rlhf.stage import Language, choose_batching, choose_scoring, join_group

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


LLAMA = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("config", "num_ranks", "message"),
    [
        (OPT, 3, "parallel.sp=2 does not divide the number of ranks, 3. Use a divisor of it, or start a multiple of 2"),
        (BLOOM, 4, "parallel.sp=2 shares packed rows .* model_type bloom cannot read them: .*opt.* Use parallel.sp=1"),
        ({**OPT, "num_attention_heads": 1}, 4, "parallel.sp=2: the model's 1 attention heads do not divide over 2"),
        (LLAMA, 4, "parallel.sp=2: the model's 1 key and value heads do not divide over 2 ranks"),
        ({**LLAMA, "model_type": "mistral", "sliding_window": 8}, 4, "mistral cannot read them: .*sliding window"),
    ],
)
def test_rows_that_ranks_cannot_share(
    language: Language, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], num_ranks: int, message: str
) -> None:
    monkeypatch.setattr(stage, "world_size", lambda: num_ranks)
    with pytest.raises(ValueError, match=message):
        join_group(ParallelConfig(sp=2), [ModelConfig(config=config)], language)


def test_rows_that_no_rank_shares_suit_every_model(language: Language) -> None:
    group = join_group(ParallelConfig(), [ModelConfig(config=BLOOM)], language)
    assert (group.rank, group.size, group.number, group.count) == (0, 1, 0, 1)


def scoring(language: Language, config: dict[str, Any], *, dtype: str = "float32", **data: Any) -> Any:
    model = ModelConfig(config=config)
    section = DataConfig(sources=[SourceConfig(path="x")], **data)
    training = choose_batching([model], section, language, max_rows=4, longest_row=50)
    return choose_scoring(training, {"a": model}, {"a": dtype}, section, language, longest_row=50)


def test_scoring_packs_as_training_does_with_a_budget_of_its_own(
    language: Language, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert scoring(language, OPT, micro_batch_tokens=70).max_tokens == stage.CPU_SCORE_TOKENS
    assert caplog.messages == [f"scoring: micro-batches of at most {stage.CPU_SCORE_TOKENS} tokens (on CPUs)"]
    assert scoring(language, OPT, score_micro_batch_tokens=300).max_tokens == 300
    padded = scoring(language, BLOOM, score_micro_batch_tokens=300)
    assert not padded.packed and padded.max_rows == 6
    assert scoring(language, BLOOM, score_micro_batch_tokens=10).max_rows == 1


def test_on_an_accelerator_scoring_takes_what_the_poorest_rank_has_free(
    language: Language, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OPT of width 16, MLP 16: attention is the wider, 80 + 48 + 4/3 x 80 + 16 = 250.7 numbers, 1002 bytes a token.

    Half of 20 MB less 1024 x 262 logits x 32 bytes leaves 1,414,784 bytes: 1411 tokens, 1024 as a power of two; in
    bfloat16 twice as many. BLOOM of width 32, padded: 501.3 numbers, and for each of 50 columns 2 x 16 bytes of scores
    and 4 of mask: 3805 bytes, 371 tokens, 256 as a power of two.
    """
    monkeypatch.setattr(stage, "device_type", lambda: "cuda")
    monkeypatch.setattr(stage, "free_bytes", lambda: 50_000_000)
    monkeypatch.setattr(stage, "all_gather_objects", lambda free: [free, 20_000_000])
    assert len(language.tokenizer) == 262
    assert scoring(language, OPT).max_tokens == 1024
    assert scoring(language, OPT, dtype="bfloat16").max_tokens == 2048
    assert scoring(language, BLOOM).max_rows == 256 // 50
