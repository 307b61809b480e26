import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.config import SourceConfig
from rlhf.data.schema import Drops, Message, Record, Response
from rlhf.data.sources import content_digest, read_source

ROWS = [{"prompt": f"Question {i}", "response": f"Answer {i}"} for i in range(3)]


def read(path: Path | str, **fields: Any) -> list[Record]:
    return list(read_source(SourceConfig(path=str(path), **fields), None))


def texts(records: list[Record]) -> list[tuple[str, str]]:
    return [(record.prompt[0].content, record.responses[0].text) for record in records]


EXPECTED = [(f"Question {i}", f"Answer {i}") for i in range(3)]


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz", "json.gz", "parquet", "parquet.gz"])
def test_all_file_types_give_the_same_records(tmp_path: Path, suffix: str) -> None:
    """B11: any local file is read, whatever its name, without a network."""
    import pyarrow
    import pyarrow.parquet

    plain = tmp_path / "plain"
    if suffix.startswith("jsonl"):
        plain.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif suffix.startswith("json"):
        plain.write_text(json.dumps(ROWS, indent=2))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), plain)
    path = tmp_path / "data" / f"rm.{suffix}"
    path.parent.mkdir()
    content = plain.read_bytes()
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    assert texts(read(path)) == EXPECTED
    assert texts(read(path.parent)) == EXPECTED  # a folder with one file
    assert texts(read(path, max_rows=2)) == EXPECTED[:2]


def test_records_know_source_row_and_place(write: Callable[..., Path]) -> None:
    path = write("a.jsonl", ROWS)
    records = read(path, name="mine")
    assert [(r.source, r.row, r.where) for r in records] == [("mine", i, f"a.jsonl:{i + 1}") for i in range(3)]


def test_root_is_where_relative_paths_start(write: Callable[..., Path]) -> None:
    path = write("sub/a.jsonl", ROWS)
    source = SourceConfig(path="sub/a.jsonl")
    assert len(list(read_source(source, str(path.parents[1])))) == 3
    assert len(list(read_source(SourceConfig(path=str(path)), "/nowhere"))) == 3  # absolute paths stay


def test_a_folder_joins_files_of_different_formats_in_order_of_name(write: Callable[..., Path]) -> None:
    write("set/b.jsonl", [{"question": "Q", "answer": "A"}])
    folder = write("set/a/x.jsonl", ROWS[:1]).parents[1]
    (folder / "README.md").write_text("not data")
    records = read(folder)
    assert texts(records) == [EXPECTED[0], ("Q", "A")]
    assert [r.where for r in records] == ["a/x.jsonl:1", "b.jsonl:1"]


def test_lines_of_a_json_array_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\n[\n  {"prompt": "Hi",\n   "response": "a"},\n\n  {"prompt": "Hi", "response": ""}, 7\n]\n')
    drops = Drops()
    records = list(read_source(SourceConfig(path=str(path)), None, drops))
    assert [record.where for record in records] == ["a.json:3"]
    assert drops.examples == {"empty response": ["a.json:6"], "row is of type int, not a JSON object": ["a.json:6"]}


def test_json_lines_under_the_suffix_json_and_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("\n" + "\n\n".join(json.dumps(row) for row in ROWS), encoding="utf-8-sig")
    assert texts(read(path)) == EXPECTED
    path.write_text(" ")
    assert read(path) == []


def test_plain_text_is_one_row_for_each_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One line.\n\n  Another.  \n")
    assert [(r.text, r.where) for r in read(path)] == [("One line.", "a.txt:1"), ("Another.", "a.txt:3")]


def test_bare_json_strings_are_prompts(write: Callable[..., Path]) -> None:
    records = read(write("a.jsonl", ["Tell me"]))
    assert [r.prompt for r in records] == [(Message("user", "Tell me"),)]


def test_column_map_with_nested_columns(write: Callable[..., Path]) -> None:
    """B11: other column names need no code."""
    path = write("a.jsonl", [{"q": "Hi", "best": {"text": "good"}, "a.b": "bad", "x": 1}])
    columns = {"prompt": "q", "chosen": "best.text", "rejected": "a.b"}
    (record,) = read(path, columns=columns)
    assert record.responses == (Response("good", 1.0), Response("bad", 0.0))
    assert record.meta == {"x": 1}


def test_bad_rows_are_counted_with_reason_and_place(write: Callable[..., Path]) -> None:
    """B9: a row with an empty or missing rejected answer is dropped and counted, not an IndexError."""
    rows = [
        {"prompt": "Hi", "chosen": "a", "rejected": "b"},
        {"prompt": "Hi", "chosen": "a", "rejected": []},
        {"prompt": "Hi", "chosen": "a", "rejected": None},
        {"prompt": "Hi", "chosen": "a", "rejected": ""},
        {"prompt": 5, "chosen": "a", "rejected": "b"},
        {"prompt": "Hi", "chosen": "a", "rejected": []},
    ]
    drops = Drops()
    records = list(read_source(SourceConfig(path=str(write("a.jsonl", rows))), None, drops))
    assert len(records) == 1
    assert drops.counts == {
        "empty `rejected`": 2,
        "no `rejected`": 1,
        "empty response": 1,
        "`prompt` is of type int, not a list of turns": 1,
    }
    assert drops.examples["empty `rejected`"] == ["a.jsonl:2", "a.jsonl:6"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"prompt": "x", "response": "y"}\n{"prompt": ',
            "a.jsonl:2: not valid JSON.*interrupted download",
        ),
        ("a.json", b'[{"prompt": "x", "response": "y"},\n{"prompt"', "a.json:2: not valid JSON"),
        ("a.json", b'[{"prompt": "x", "response": "y"}\n', "a.json:2: not valid JSON"),
        ("a.jsonl", b'{"prompt": "\xff"}', "a.jsonl: not UTF-8"),
        ("a.txt", b"ok\n\xff", "a.txt: not UTF-8"),
        ("a.parquet", b"PAR1 no", "a.parquet: not a Parquet file"),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz: not a complete gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99)[:-9], "a.jsonl.gz: not a complete gzip file"),
        (
            "a.jsonl",
            b'{"foo": 1, "bar": 2}',
            r"a.jsonl:1: the columns bar, foo are no known format.*data.sources\[\].columns",
        ),
        ("a.csv", b"a,b", "the suffix .csv is unknown. Use .jsonl"),
    ],
)
def test_broken_files_name_file_and_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read(path)


def test_missing_paths_say_what_can_be_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="hub:owner/name.*builtin:politeness"):
        read(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match=r"has no file that ends in \.jsonl"):
        read(tmp_path)
    with pytest.raises(ValueError, match="builtin:rudeness is unknown. Use one of: builtin:politeness"):
        read("builtin:rudeness")  # B10


def test_hub_names_go_through_datasets(
    write: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` also loads a local folder by name, which needs no network."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    folder = write("set/train.jsonl", ROWS).parent
    source = SourceConfig(path=f"hub:{folder}", options={"cache_dir": str(tmp_path / "hf")})
    records = list(read_source(source, None))
    assert texts(records) == EXPECTED
    assert records[2].where == f"hub:{folder}:3"
    assert content_digest(source, None) == content_digest(source, None)
    with pytest.raises(ValueError, match="hub:nobody/no-such-set.*name a local file instead"):
        read("hub:nobody/no-such-set")


def test_builtin_task_gives_rows_of_its_source() -> None:
    options = {"rows": 5, "seed": 3}
    records = read("builtin:politeness", options=options)
    assert len(records) == 5
    assert [r.where for r in records] == [f"builtin:politeness:{i + 1}" for i in range(5)]
    assert records == read("builtin:politeness", options=options)
    assert len(read("builtin:politeness", options=options, max_rows=2)) == 2
    assert content_digest(SourceConfig(path="builtin:politeness", options=options), None) != content_digest(
        SourceConfig(path="builtin:politeness", options={**options, "seed": 4}), None
    )
    with pytest.raises(ValueError, match="has no `rows`"):
        read("builtin:politeness")


def test_digest_follows_content_and_not_place(write: Callable[..., Path], tmp_path: Path) -> None:
    """B4: one changed row changes the digest; a moved file does not."""
    path = write("one/a.jsonl", ROWS)
    digest = content_digest(SourceConfig(path=str(path)), None)
    shutil.copytree(path.parent, tmp_path / "two")
    assert content_digest(SourceConfig(path="two/a.jsonl"), str(tmp_path)) == digest
    write("one/a.jsonl", [*ROWS[:2], {"prompt": "Question 2", "response": "Answer 3"}])
    assert content_digest(SourceConfig(path=str(path)), None) != digest


def test_real_files_are_read_without_a_format(shared_data: Path) -> None:
    """Row counts are those of the folder's SOURCES.md."""
    expected = {
        "gsm8k/train.jsonl": 7473,
        "gsm8k/test.jsonl": 1319,
        "llama-factory-demo/dpo_en_demo.json": 300,
        "llama-factory-demo/alpaca_en_demo.json": 999,
        "llama-factory-demo/c4_demo.jsonl": 300,
        "llama-factory-demo/wiki_demo.txt": 30,
        "self-instruct/seed_tasks.jsonl": 175,
        "fastchat/mt_bench_question.jsonl": 80,
        "open-assistant/prompt_lottery_en_250_text.jsonl": 250,
    }
    for path, rows in expected.items():
        drops = Drops()
        records = list(read_source(SourceConfig(path=path), str(shared_data), drops))
        assert (len(records), drops.counts) == (rows, {}), path
    answers = read(shared_data / "gsm8k/test.jsonl", max_rows=1)
    assert answers[0].meta["answer"] == "18"
    (pair,) = read(shared_data / "llama-factory-demo/dpo_en_demo.json", max_rows=1)
    assert [response.rank for response in pair.responses] == [1.0, 0.0]


def test_real_trees_give_ranked_replies(shared_data: Path) -> None:
    """100 trees; 214 prompter messages have two or more replies, of which two have none that is ranked."""
    records = read(shared_data / "open-assistant/en_100_tree.jsonl")
    assert len({r.row for r in records}) == 100
    several = [r for r in records if len(r.responses) > 1]
    assert sum(len({x.rank for x in r.responses}) == len(r.responses) for r in several) == 212
    assert sum(len({x.rank for x in r.responses}) == 1 for r in several) == 2
    assert max(len(r.responses) for r in records) == 9
