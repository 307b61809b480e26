import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from rlhf.config import DataConfig, SourceConfig, SplitConfig
from rlhf.data.dataset import TokenDataset, build_dataset, cache_key, report_lines, training_texts
from rlhf.data.schema import Message
from rlhf.data.template import load_template
from rlhf.models.build import train_bpe

ALL_SFT = SplitConfig(sft=1, reward=0, ppo=0, eval=0)
ALL_REWARD = SplitConfig(sft=0, reward=1, ppo=0, eval=0)
ALL_PPO = SplitConfig(sft=0, reward=0, ppo=1, eval=0)

Write = Callable[..., Path]
MakeConfig = Callable[..., DataConfig]


@pytest.fixture
def build(tokenizer: PreTrainedTokenizerBase) -> Callable[..., TokenDataset[Any]]:
    def build_it(cfg: DataConfig, stage: Any, part: Any = "train", template: str = "auto") -> TokenDataset[Any]:
        return build_dataset(
            cfg, stage=stage, part=part, template=load_template(template, tokenizer), tokenizer=tokenizer
        )

    return build_it


def pairs(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"Question {i}", "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(count)]


def test_rows_of_step_1_are_conversations_with_their_masks(
    write: Write, data_config: MakeConfig, build: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """B22: earlier assistant turns are trained on too, user turns never. Of ranked responses the best is taken."""
    path = write(
        "a.jsonl",
        [
            {
                "messages": [
                    {"role": r, "content": c}
                    for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
                ]
            },
            {"messages": [{"role": r, "content": c} for r, c in (("user", "e"), ("assistant", "f"), ("user", "g"))]},
        ],
    )
    ranked = write("b.jsonl", [{"prompt": "h", "responses": ["worst", "best", "best too"], "ranks": [0, 2, 2]}])
    dataset = build(data_config(path, ranked, split=ALL_SFT), "sft")
    template = load_template("auto", tokenizer)
    expected = [
        [Message("user", "a"), Message("assistant", "b"), Message("user", "c"), Message("assistant", "d")],
        [Message("user", "e"), Message("assistant", "f")],
        [Message("user", "h"), Message("assistant", "best")],
    ]
    assert len(dataset) == 3
    for i, turns in enumerate(expected):
        ids, mask = template.encode_conversation(turns)
        assert dataset[i].token_ids.tolist() == ids
        assert dataset[i].loss_mask.tolist() == mask
        assert dataset[i].token_ids.dtype == np.int32 and dataset[i].loss_mask.dtype == np.bool_
        assert dataset.lengths[i] == len(ids)
    assert [dataset[i].source for i in range(3)] == [0, 0, 1]
    assert [dataset[i].index for i in range(3)] == [0, 1, 2]
    assert dataset.source_names == ["a", "b"]
    assert dataset.where(2) == "b.jsonl:1"
    assert dataset[-1].index == 2
    with pytest.raises(IndexError):
        dataset[3]
    assert dataset.report["sources"]["a"]["cut"] == {"last user turn without a response": 1}
    assert dataset.report["tokens"] == sum(dataset.lengths)


def test_rows_of_step_2_hold_all_ranked_responses(
    write: Write, data_config: MakeConfig, build: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [
        {"prompt": "a", "responses": ["x", "y", "z"], "ranks": [1, 0, 1]},
        {"prompt": "b", "chosen": "good", "rejected": "bad", "margin": 0.5},
    ]
    folder = write("set/a.jsonl", rows[:1]).parent
    write("set/b.jsonl", rows[1:])
    dataset = build(data_config(folder, split=ALL_REWARD), "reward")
    template = load_template("auto", tokenizer)
    prompt = template.encode_prompt([Message("user", "a")])
    assert dataset[0].prompt_ids.tolist() == prompt
    assert [r.tolist() for r in dataset[0].responses] == [template.encode_response(text) for text in "xyz"]
    assert dataset[0].ranks == [1.0, 0.0, 1.0]
    assert (dataset[0].margin, dataset[1].margin) == (0.0, 0.5)
    assert dataset.lengths[0] == 3 * len(prompt) + sum(len(r) for r in dataset[0].responses)


def test_rows_of_step_3_are_prompts_with_meta_and_a_stable_identity(
    write: Write, data_config: MakeConfig, build: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [{"question": "How many?", "answer": "#### 7"}, {"question": "Caf\u00e9?", "answer": "#### 8"}]
    path = write("a.jsonl", [*rows, rows[0]])
    dataset = build(data_config(path, split=ALL_PPO), "ppo")
    template = load_template("auto", tokenizer)
    assert dataset[1].prompt_ids.tolist() == template.encode_prompt([Message("user", "Caf\u00e9?")])
    assert dataset[1].text == "Caf\u00e9?"
    assert dataset[1].meta == {"answer": "8"}
    uids = [dataset[i].uid for i in range(3)]
    assert len(set(uids)) == 3  # a repeated prompt is sampled anew
    assert all(0 <= uid < 2**62 for uid in uids)
    reversed_rows = write("again/a.jsonl", rows[::-1])
    again = build(data_config(reversed_rows, split=ALL_PPO), "ppo")
    assert [again[i].uid for i in range(2)] == [uids[1], uids[0]]
    other = build(data_config(sources=[SourceConfig(path=str(path), name="other")], split=ALL_PPO), "ppo")
    assert other[0].uid != uids[0]


def test_uids_do_not_change_with_the_code(write: Write, data_config: MakeConfig, build: Any) -> None:
    """A number of record: runs are sampled by it, so it may not move."""
    dataset = build(data_config(write("a.jsonl", [{"prompt": "Hi"}]), split=ALL_PPO), "ppo")
    assert dataset[0].uid == 1641625268730360905


def test_plain_text_is_divided_into_rows_of_full_length(
    write: Write, data_config: MakeConfig, build: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write("a.jsonl", [{"text": "abcdefghijklmnopqrst " * 3}, {"text": "x"}])
    cfg = data_config(path, split=ALL_SFT, max_prompt_tokens=10, max_response_tokens=15)
    dataset = build(cfg, "sft")
    ids = np.concatenate([dataset[i].token_ids for i in range(len(dataset) - 1)]).tolist()
    assert tokenizer.decode(ids) == "<bos>" + ("abcdefghijklmnopqrst " * 3).strip() + "<eos>"
    assert max(dataset.lengths) == 25
    assert [dataset[0].loss_mask[0], dataset[0].loss_mask[1]] == [False, True]
    assert dataset.report["sources"]["a"]["cut"] == {"text divided into several rows": 1}
    with pytest.raises(ValueError, match="a.jsonl:1: a text has"):
        build(
            data_config(path, split=ALL_SFT, max_prompt_tokens=10, overlong_response="error", max_response_tokens=15),
            "sft",
        )


PROMPT_OVERHEAD = len("\n\nHuman: \n\nAssistant:") + 1  # bytes and bos, as the tokenizer merges nothing in these rows


@pytest.fixture
def bytewise() -> PreTrainedTokenizerBase:
    return train_bpe(["a"], vocab_size=260)


@pytest.mark.parametrize(
    ("policy", "rows", "cut", "dropped"),
    [
        ("drop", 2, {}, {"prompt over max_prompt_tokens": 2}),
        ("truncate_left", 4, {"prompt over max_prompt_tokens": 2}, {}),
    ],
)
def test_overlong_prompts_follow_the_policy(
    write: Write, data_config: MakeConfig, bytewise: Any, policy: str, rows: int, cut: Any, dropped: Any
) -> None:
    """A13, A14: lengths of max, max + 1 and 10 max among short ones; bos and role headers stay, nothing crashes."""
    limit = PROMPT_OVERHEAD + 10
    prompts = ["q" * 3, "q" * 9 + "r", "p" + "q" * 10, "q" * 10 * limit]
    path = write("a.jsonl", [{"prompt": prompt} for prompt in prompts])
    cfg = data_config(path, split=ALL_PPO, max_prompt_tokens=limit, overlong_prompt=policy)
    template = load_template("auto", bytewise)
    dataset = build_dataset(cfg, stage="ppo", part="train", template=template, tokenizer=bytewise)
    assert len(dataset) == rows
    assert max(dataset.lengths) == limit
    counts = dataset.report["sources"]["a"]
    assert (counts["kept"], counts["cut"], counts["dropped"]) == (rows, cut, dropped)
    for i in range(rows):
        text = bytewise.decode(dataset[i].prompt_ids.tolist())
        assert (
            text.startswith("<bos>\n\nHuman:") and text.endswith("q\n\nAssistant:") or text.endswith("r\n\nAssistant:")
        )
    if policy == "drop":
        assert counts["examples"] == {"prompt over max_prompt_tokens": ["a.jsonl:3", "a.jsonl:4"]}


def test_policy_error_names_the_row(write: Write, data_config: MakeConfig, build: Any) -> None:
    path = write("a.jsonl", [{"prompt": "short", "response": "a"}, {"prompt": "x" * 400, "response": "a" * 400}])
    with pytest.raises(
        ValueError, match=r"a.jsonl:2: the prompt has \d+ tokens, data.max_prompt_tokens=64.*truncate_left"
    ):
        build(data_config(path, split=ALL_SFT, max_prompt_tokens=64, overlong_prompt="error"), "sft")
    with pytest.raises(ValueError, match=r"a.jsonl:2: a response has \d+ tokens, data.max_response_tokens=64"):
        build(
            data_config(path, split=ALL_SFT, max_prompt_tokens=512, max_response_tokens=64, overlong_response="error"),
            "sft",
        )


def test_overlong_responses_are_cut_without_a_stop_token_or_dropped(
    write: Write, data_config: MakeConfig, build: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write("a.jsonl", [{"prompt": "a", "response": "z" * 100}, {"prompt": "b", "response": "y"}])
    cut = build(data_config(path, split=ALL_SFT, max_response_tokens=20), "sft")
    assert cut[0].loss_mask.sum() == 20
    assert cut[0].token_ids[-1] != tokenizer.eos_token_id
    assert cut[1].token_ids[-1] == tokenizer.eos_token_id
    assert cut.report["sources"]["a"]["cut"] == {"response over max_response_tokens": 1}
    dropped = build(data_config(path, split=ALL_SFT, max_response_tokens=20, overlong_response="drop"), "sft")
    assert len(dropped) == 1
    assert dropped.report["sources"]["a"]["dropped"] == {"response over max_response_tokens": 1}


def test_ties_and_pairs_equal_after_truncation_are_counted_apart(
    write: Write, data_config: MakeConfig, build: Any
) -> None:
    rows = [
        {"prompt": "a", "responses": ["x", "y"], "ranks": [1, 0]},
        {"prompt": "b", "responses": ["x", "x"], "ranks": [1, 0]},
        {"prompt": "c", "responses": ["x", "y", "z"], "ranks": [1, 1, 1]},
        {"prompt": "d", "responses": ["z" * 60 + "x", "z" * 60 + "y"], "ranks": [1, 0]},
        {"prompt": "e", "responses": ["z" * 60 + "x", "z" * 60 + "y", "ok"], "ranks": [2, 1, 0]},
    ]
    dataset = build(data_config(write("a.jsonl", rows), split=ALL_REWARD, max_response_tokens=30), "reward")
    counts = dataset.report["sources"]["a"]
    assert [dataset.where(i) for i in range(len(dataset))] == ["a.jsonl:1", "a.jsonl:5"]
    assert counts["ties"] == 3
    assert counts["dropped"] == {
        "tie: all responses are identical": 1,
        "tie: all responses have the same rank": 1,
        "tie: responses are identical within max_response_tokens": 1,
    }
    cfg = data_config(write("a.jsonl", rows), split=ALL_REWARD, max_response_tokens=30, overlong_response="drop")
    dropped = build(cfg, "reward")
    assert [dropped.where(i) for i in range(len(dropped))] == ["a.jsonl:1"]
    assert dropped.report["sources"]["a"]["dropped"]["fewer than two ranks within max_response_tokens"] == 1


def test_sources_that_cannot_serve_a_stage_are_named(write: Write, data_config: MakeConfig, build: Any) -> None:
    """B17: data without rejected answers stops step 2 before training, and says which set."""
    good = write("good.jsonl", pairs(20))
    demonstrations = write("demos.jsonl", [{"prompt": "a", "response": "b"}])
    text = write("text.jsonl", [{"text": "b"}])
    prompts = write("prompts.jsonl", [{"prompt": "a"}])
    message = "data set demos has no rejected answers, cannot be used in step 2"
    for part in ("train", "eval"):
        with pytest.raises(ValueError, match=message):
            build(data_config(good, demonstrations), "reward", part)
    with pytest.raises(ValueError, match="data set text has no prompts, cannot be used in step 3"):
        build(data_config(text), "ppo")
    with pytest.raises(ValueError, match="data set prompts has no responses, cannot be used in step 1"):
        build(data_config(prompts), "sft")
    empty = write("empty.jsonl", [{"prompt": "a", "chosen": "b", "rejected": []}])
    with pytest.raises(
        ValueError, match=r"data set empty has no usable row. 1 rows: empty `rejected` \(empty.jsonl:1\)"
    ):
        build(data_config(empty), "reward")


def test_rows_without_what_the_stage_needs_are_dropped_among_others(
    write: Write, data_config: MakeConfig, build: Any
) -> None:
    """B9: one row without a rejected answer among good ones is counted, not an IndexError."""
    rows = [*pairs(2), {"prompt": "a", "chosen": "b", "rejected": []}]
    folder = write("set/a.jsonl", rows).parent
    write("set/b.jsonl", [{"prompt": "a", "response": "b"}])
    dataset = build(data_config(folder, split=ALL_REWARD), "reward")
    assert len(dataset) == 2
    assert dataset.report["sources"]["set"]["dropped"] == {"empty `rejected`": 1, "no rejected answer": 1}
    assert "dropped 1: empty `rejected` (a.jsonl:3)" in report_lines(dataset.report)[0]


def test_nothing_left_to_train_on_is_an_error_with_the_reasons(
    write: Write, data_config: MakeConfig, build: Any
) -> None:
    """B13, A13: all rows too long."""
    path = write("a.jsonl", [{"prompt": "x" * 500, "response": "y"}] * 3)
    with pytest.raises(
        ValueError, match="no training row remains for step 1.*dropped 3: prompt over max_prompt_tokens"
    ):
        build(data_config(path, split=ALL_SFT, max_prompt_tokens=32), "sft")
    with pytest.raises(ValueError, match="no training row remains for step 3.*3 in other parts"):
        build(data_config(path, split=ALL_SFT), "ppo")


def test_empty_evaluation_is_a_notice(
    write: Write, data_config: MakeConfig, build: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """B8: an evaluation part of 0 rows."""
    cfg = data_config(write("a.jsonl", pairs(3)), split=SplitConfig(sft=1, reward=0, ppo=0, eval=0))
    with caplog.at_level(logging.WARNING):
        dataset = build(cfg, "sft", "eval")
    assert len(dataset) == 0
    assert dataset.lengths.size == 0
    assert "no evaluation rows for step 1: evaluation is skipped" in caplog.text


def test_parts_are_disjoint_and_complete(
    write: Write, data_config: MakeConfig, build: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    """No prompt stands in two parts, also when it stands in two sources or differs in case and space alone."""
    rows = pairs(300)
    changed = [{**row, "prompt": f"  {row['prompt'].upper()}\n"} for row in rows]
    cfg = data_config(write("a.jsonl", rows), write("b.jsonl", changed), split=SplitConfig(eval=0.2))

    def prompts(stage: str, part: str) -> set[str]:
        dataset = build(cfg, stage, part)
        rows = [dataset[i] for i in range(len(dataset))]
        ids = [row.token_ids if stage == "sft" else row.prompt_ids for row in rows]
        texts = [tokenizer.decode(row.tolist()) for row in ids]
        return {text.split("Human:")[1].split("\n")[0].strip().lower() for text in texts}

    parts = {stage: prompts(stage, "train") for stage in ("sft", "reward", "ppo")}
    evals = [prompts(stage, "eval") for stage in ("sft", "reward", "ppo")]
    assert evals[0] == evals[1] == evals[2]
    every = [*parts.values(), evals[0]]
    assert sum(len(part) for part in every) == len(set.union(*every)) == 300


def test_leaks_are_reported(write: Write, data_config: MakeConfig, build: Any) -> None:
    rows = pairs(100)
    near = [{**row, "prompt": row["prompt"] + "?"} for row in rows]
    dataset = build(data_config(write("a.jsonl", [*rows, rows[0]]), write("b.jsonl", [*near, rows[1]])), "reward")
    leaks = dataset.report["leaks"]
    assert leaks["across_parts"] == 0
    assert leaks["near_across_parts"] > 20  # the question mark makes another prompt of it
    assert leaks["across_sources"] == {"a + b": 1}
    assert leaks["repeated_in_source"] == {"a": 1}
    assert "in two sources: {'a + b': 1}" in report_lines(dataset.report)[-1]


def test_a_changed_row_is_seen(write: Write, data_config: MakeConfig, build: Any) -> None:
    """B4: same path, same arguments, edited data: the row changes. Moved data is not tokenised again."""
    path = write("a.jsonl", [{"prompt": "a", "response": "old"}])
    first = build(data_config(path, split=ALL_SFT), "sft")
    write("a.jsonl", [{"prompt": "a", "response": "new"}])
    second = build(data_config(path, split=ALL_SFT), "sft")
    assert first[0].token_ids.tolist() != second[0].token_ids.tolist()
    moved = path.rename(path.parent / "moved.jsonl")
    third = build(data_config(sources=[SourceConfig(path=str(moved), name="a")], split=ALL_SFT), "sft")
    assert third[0].token_ids.tolist() == second[0].token_ids.tolist()


def test_key_follows_everything_that_decides_the_rows(
    write: Write, data_config: MakeConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """B5: tokenizer, terminator and template count by what they do; weights, folders and micro-batches do not count."""
    path = write("a.jsonl", pairs(3))
    base = data_config(path)

    def key(
        cfg: DataConfig, tok: Any = tokenizer, template: str = "auto", stage: Any = "sft", part: Any = "train"
    ) -> str:
        return cache_key(cfg, stage=stage, part=part, template=load_template(template, tok), tokenizer=tok)

    other_terminator = train_bpe(["\n\nHuman: What is two and two?"], vocab_size=300)
    other_terminator.eos_token = "<unk>"
    different = {
        key(base),
        key(base, stage="reward"),
        key(base, part="eval"),
        key(base, template="plain"),
        key(base, tok=train_bpe(["other words"], vocab_size=270)),
        key(base, tok=other_terminator),
        key(data_config(path, max_prompt_tokens=9)),
        key(data_config(path, max_response_tokens=9)),
        key(data_config(path, overlong_prompt="truncate_left")),
        key(data_config(path, overlong_response="drop")),
        key(data_config(path, split=SplitConfig(seed=1))),
        key(data_config(sources=[SourceConfig(path=str(path), max_rows=2)])),
        key(data_config(sources=[SourceConfig(path=str(path), columns={"prompt": "chosen"})])),
    }
    assert len(different) == 13
    same = {
        key(base),
        key(data_config(path, cache_dir="/elsewhere")),
        key(data_config(sources=[SourceConfig(path=str(path), weight=3.0)])),
        key(data_config("a.jsonl", root=str(path.parent))),
        key(data_config(path, packing="off", micro_batch_tokens=100, score_micro_batch_tokens=100)),
    }
    assert len(same) == 1


def test_damaged_rows_are_tokenised_again(write: Write, data_config: MakeConfig, build: Any, tmp_path: Path) -> None:
    cfg = data_config(write("a.jsonl", pairs(3)), split=ALL_SFT)
    before = build(cfg, "sft")[1].token_ids.tolist()
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    with (folder / "tokens.bin").open("r+b") as file:
        file.seek(4)
        file.write(b"\x7f")
    assert build(cfg, "sft")[1].token_ids.tolist() == before


LEADER = """
import json, sys
from rlhf.config import DataConfig, SourceConfig, SplitConfig
from rlhf.data.dataset import build_dataset
from rlhf.data.template import load_template
from rlhf.models.build import train_bpe
tokenizer = train_bpe(["some words"], vocab_size=270)
split = SplitConfig(sft=1, reward=0, ppo=0)
cfg = DataConfig(sources=[SourceConfig(path=sys.argv[1])], cache_dir=sys.argv[2], split=split)
dataset = build_dataset(cfg, stage="sft", part="train", template=load_template("auto", tokenizer), tokenizer=tokenizer)
print(json.dumps([dataset.key, len(dataset), [row.token_ids.tolist() for row in map(dataset.__getitem__, range(5))]]))
"""


def test_two_processes_with_different_hash_seeds_share_one_cache(write: Write, tmp_path: Path) -> None:
    """B1: the name of the cache is a digest, not Python's salted hash."""
    path = write("a.jsonl", pairs(40))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LEADER, str(path), str(tmp_path / "cache")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    outputs = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert outputs[0] == outputs[1]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_training_texts_are_those_of_the_stages_training_rows(write: Write, data_config: MakeConfig) -> None:
    path = write("a.jsonl", pairs(50))
    cfg = data_config(path, split=SplitConfig(eval=0.3))
    texts = {stage: "".join(training_texts(cfg, stage)) for stage in ("sft", "reward", "ppo")}  # type: ignore[arg-type]
    assert "\n\nHuman: Question " in texts["sft"] and "\n\nAssistant: good " in texts["sft"]
    prompts = [line for text in texts.values() for line in text.split("\n\n") if line.startswith("Human:")]
    assert len(prompts) == len(set(prompts)) < 50  # disjoint, and the held-out ones in none


def test_only_maps_of_files_are_held(write: Write, data_config: MakeConfig, build: Any) -> None:
    """B6: token arrays are not in memory, and not padded."""
    rows = [{"prompt": "a", "response": "b" * (i % 7 + 1)} for i in range(2500)]  # more than two chunks
    dataset = build(data_config(write("a.jsonl", rows), split=ALL_SFT), "sft")
    assert isinstance(dataset._store["tokens"], np.memmap)
    assert dataset._store["tokens"].size == sum(dataset.lengths) == dataset.report["tokens"]
    assert len(dataset) == 2500
    assert dataset.where(2499) == "a.jsonl:2500"


def test_real_sets_in_all_stages(
    shared_data: Path, opt_tokenizer: PreTrainedTokenizerBase, data_config: MakeConfig
) -> None:
    """Counts add up for each real set and stage, and the row is what the tokenizer says it is."""
    template = load_template("auto", opt_tokenizer)
    plan = [
        ("sft", "llama-factory-demo/alpaca_en_demo.json"),
        ("sft", "self-instruct/seed_tasks.jsonl"),
        ("reward", "llama-factory-demo/dpo_en_demo.json"),
        ("reward", "open-assistant/en_100_tree.jsonl"),
        ("ppo", "open-assistant"),
        ("ppo", "fastchat/mt_bench_question.jsonl"),
    ]
    for stage, path in plan:
        sources = [SourceConfig(path=path, max_rows=100)]
        cfg = data_config(sources=sources, root=str(shared_data), split=SplitConfig(eval=0.2))
        sizes = {}
        for part in ("train", "eval"):
            dataset = build_dataset(cfg, stage=stage, part=part, template=template, tokenizer=opt_tokenizer)  # type: ignore[call-overload]
            (counts,) = dataset.report["sources"].values()
            assert counts["read"] == counts["other_parts"] + counts["kept"] + sum(counts["dropped"].values())
            sizes[part] = len(dataset)
        assert sizes["train"] > 0 and sizes["eval"] > 0, (stage, path)
        row = dataset[0]
        ids = row.token_ids if stage == "sft" else row.prompt_ids
        assert ids[0] == opt_tokenizer.bos_token_id
        assert opt_tokenizer.decode(ids.tolist()).count("\n\nHuman: ") >= 1


def test_ten_thousand_rows_take_seconds(
    opt_tokenizer: PreTrainedTokenizerBase, write: Write, data_config: MakeConfig
) -> None:
    """Rows are tokenised in batches: measured 2 s on one core, the limit leaves room for a busy machine."""
    import time

    rows = [
        {"prompt": f"What is {i} times {i + 1}, and why?", "response": f"It is {i * (i + 1)}. " * 8}
        for i in range(10_000)
    ]
    cfg = data_config(write("a.jsonl", rows), split=ALL_SFT)
    template = load_template("auto", opt_tokenizer)
    start = time.process_time()
    dataset = build_dataset(cfg, stage="sft", part="train", template=template, tokenizer=opt_tokenizer)
    assert len(dataset) == 10_000
    assert time.process_time() - start < 20
