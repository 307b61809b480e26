"""Rows have the tokens that they are said to have, for our data code and for a plain tokenizer call; models stop."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf import artifacts
from rlhf.bench import assets
from rlhf.bench.assets import make_language, make_stop, make_tokenizer
from rlhf.bench.peers.recorder import response_length
from rlhf.bench.workload import FULL, QUICK, Lengths, mixed_lengths, rows_of, words, write_rows
from rlhf.config import DataConfig, ModelConfig, SourceConfig, SplitConfig
from rlhf.data.dataset import build_dataset
from rlhf.models.build import build_causal_lm


def test_lengths_are_within_their_limits_and_repeat() -> None:
    rows = mixed_lengths(FULL, 2000, num_answers=2, seed=3)
    prompts, answers = [row.prompt for row in rows], [n for row in rows for n in row.answers]
    assert (min(prompts), max(prompts)) == (10, 150) and (min(answers), max(answers)) == (10, 200)
    assert sum(prompts) / len(prompts) == pytest.approx(80, abs=3)
    # Log-uniform: half of the answers are below the geometric mean of the limits.
    below = sum(n < math.sqrt(10 * 201) for n in answers) / len(answers)
    assert below == pytest.approx(0.5, abs=0.03)
    assert rows == mixed_lengths(FULL, 2000, num_answers=2, seed=3) != mixed_lengths(FULL, 2000, num_answers=2, seed=4)


def test_eight_padded_rows_waste_what_the_issue_measured() -> None:
    rows = [row.prompt + row.answers[0] for row in rows_of(FULL)["sft"]]
    groups = [rows[i : i + 8] for i in range(0, len(rows), 8)]
    assert sum(8 * max(group) for group in groups) / sum(rows) == pytest.approx(1.7, abs=0.1)


def test_all_rows_fit_the_models() -> None:
    for sizes in (FULL, QUICK):
        for name, rows in rows_of(sizes).items():
            assert max(row.prompt + max(row.answers, default=0) for row in rows) <= sizes.positions, (sizes.name, name)
    assert {row.prompt + row.answers[0] for row in rows_of(FULL)["long"]} == {1000}


def test_our_data_code_reads_the_written_lengths(tmp_path: Path) -> None:
    """One row has a response of two tokens, the shortest there is: a word and the stop token."""
    lengths = [Lengths(prompt=1, answers=(2,)), Lengths(prompt=7, answers=(5,)), Lengths(prompt=3, answers=(12,))]
    write_rows(tmp_path / "rows.jsonl", lengths, vocabulary=64, seed=1)
    language = make_language(64)
    data = DataConfig(
        sources=[SourceConfig(path=str(tmp_path / "rows.jsonl"))],
        split=SplitConfig(sft=1.0, reward=0.0, ppo=0.0, eval=0.0),
        cache_dir=str(tmp_path / "cache"),
    )
    dataset = build_dataset(
        data, stage="sft", part="train", template=language.template, tokenizer=language.tokenizer
    )  # fmt: skip
    rows = [dataset[i] for i in range(len(dataset))]
    assert [len(row.token_ids) for row in rows] == [3, 12, 15]
    assert [int(row.loss_mask.sum()) for row in rows] == [2, 5, 12]
    # What a trainer of strings makes of the same file.
    texts = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    plain = [language.tokenizer(f"{t['prompt']} {t['response']}<eos>")["input_ids"] for t in texts]
    assert plain == [row.token_ids.tolist() for row in rows]


def test_a_larger_vocabulary_reads_the_same_ids() -> None:
    text = " ".join(random.Random(1).choices(words(64), k=20))
    assert make_tokenizer(64)(text)["input_ids"] == make_tokenizer(128)(text)["input_ids"]
    assert len(make_tokenizer(64)) == 64


def test_random_weights_stop_about_as_often_as_asked() -> None:
    """Answers as PPO draws them, with the model's own repetitions; some stop at once, some at the limit."""
    sizes = replace(QUICK, hidden=64, vocabulary=256)
    language = make_language(256)
    model: Any = build_causal_lm(ModelConfig(config=sizes.actor()), language.tokenizer, seed=1)
    stop_id = language.template.stop_token_id
    make_stop(model, stop_id, mean_length=12, longest=40)
    prompt_BP = torch.randint(4, 256, (64, 6), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(1)
    drawn = model.generate(
        input_ids=prompt_BP, attention_mask=torch.ones_like(prompt_BP), do_sample=True, top_k=0, max_new_tokens=40,
        pad_token_id=2,
    )[:, 6:].tolist()  # fmt: skip
    lengths = [response_length(row, stop_id) for row in drawn]
    assert 8 < sum(lengths) / len(lengths) < 17
    assert min(lengths) <= 4 and len(set(lengths)) > 10


def test_assets_are_written_once_and_again_for_other_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    tiny = replace(QUICK, hidden=64, large_vocabulary=600)
    monkeypatch.setattr(
        assets, "write_assets", lambda folder, sizes: (folder.mkdir(exist_ok=True), written.append(sizes))
    )
    for sizes in (QUICK, QUICK, tiny, tiny):
        monkeypatch.setattr(assets, "SIZES", {"quick": sizes})
        assert assets.main(["--out", str(tmp_path / "a"), "--sizes", "quick"]) == 0
    assert written == [QUICK, tiny]


def test_assets_are_what_the_stages_take(tmp_path: Path) -> None:
    """Whole folders of models that fit one another, and every file of rows."""
    tiny = replace(QUICK, hidden=16, reward_hidden=8, vocabulary=64, large_vocabulary=80, num_rows=8)
    assets.write_assets(tmp_path, tiny)
    for suffix, actors in (("", ("actor", "actor_stops")), ("_large", ("actor_large",))):
        reward = artifacts.verify(tmp_path / f"reward{suffix}")
        for name in actors:
            artifacts.check_contract(artifacts.verify(tmp_path / name), reward)
    for name, rows in rows_of(tiny).items():
        assert len((tmp_path / f"{name}.jsonl").read_text().splitlines()) == len(rows)
