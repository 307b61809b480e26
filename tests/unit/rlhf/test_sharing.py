"""Which ranks work on the same rows, and which models can be read so."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from rlhf import ds_config, sharing
from rlhf.combinations import Role
from rlhf.config import ModelConfig, OptimConfig, ParallelConfig
from rlhf.models.build import train_bpe
from rlhf.sharing import join_groups
from tests.unit.rlhf.test_stage import BLOOM, OPT

LLAMA = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 1}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_bpe(["a b c"], vocab_size=280)


def role(config: dict[str, Any], **parallel: int) -> dict[str, Role]:
    model, optim = ModelConfig(config=config), OptimConfig(lr=1e-3)
    ds = ds_config.load("cpu_zero0")
    return {"model": Role(ds=ds, model=model, optim=optim, parallel=ParallelConfig(**parallel))}


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
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any],
    num_ranks: int,
    message: str,
) -> None:
    monkeypatch.setattr(sharing, "world_size", lambda: num_ranks)
    with pytest.raises(ValueError, match=message):
        join_groups(role(config, sp=2), tokenizer)


def test_rows_that_no_rank_shares_suit_every_model(tokenizer: PreTrainedTokenizerBase) -> None:
    group = join_groups(role(BLOOM), tokenizer).rows
    assert (group.rank, group.size, group.number, group.count) == (0, 1, 0, 1)
