import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from rlhf.config import DataConfig, SourceConfig
from rlhf.models.build import train_bpe

SHARED_DATA = Path(__file__).resolve().parents[4].parent / "shared" / "data"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    """bos, eos and pad differ; a bos is put before every text."""
    texts = ["\n\nHuman: What is two and two? Please say it.\n\nAssistant: It is four, thank you."] * 3
    return train_bpe(texts, vocab_size=300)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"the real data is not at {SHARED_DATA}")
    return SHARED_DATA


@pytest.fixture(scope="session")
def opt_tokenizer(shared_data: Path) -> PreTrainedTokenizerBase:
    """bos and eos are one id, as in every OPT model."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(shared_data / "opt-tokenizer")
    return tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, Iterable[Any]], Path]:
    """Write rows as JSON Lines."""

    def write_rows(name: str, rows: Iterable[Any]) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write_rows


@pytest.fixture
def data_config(tmp_path: Path) -> Callable[..., DataConfig]:
    """A data section with one source for each path and a cache of its own."""

    def config(*paths: Path | str, **fields: Any) -> DataConfig:
        fields.setdefault("sources", [SourceConfig(path=str(path)) for path in paths])
        fields.setdefault("cache_dir", str(tmp_path / "cache"))
        return DataConfig(**fields)

    return config
