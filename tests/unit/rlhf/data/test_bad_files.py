"""Whatever bytes a data file holds, it is read, or refused by one error that names it."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf.config import SourceConfig
from rlhf.data.schema import Drops
from rlhf.data.sources import SUFFIXES, read_source

quietly = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
COLUMNS = ("prompt", "response", "chosen", "rejected", "messages", "conversations", "text", "instruction", "output",
           "instances", "question", "answer", "responses", "ranks", "scores", "turns", "replies", "role", "system",
           "meta", "margin", "completion", "input", "history")  # fmt: skip
ROWS = st.dictionaries(st.sampled_from(COLUMNS) | st.text(max_size=4), VALUES, max_size=5)


def outcome(path: Path, **changes: Any) -> tuple[int, Drops]:
    """Rows read and left out; an error has to be one line with the file's name and a repair or reason."""
    drops = Drops()
    try:
        return sum(1 for _ in read_source(SourceConfig(path=str(path), **changes), None, drops)), drops
    except (ValueError, FileNotFoundError) as error:
        assert type(error) in (ValueError, FileNotFoundError), f"{type(error).__name__} is not ours: {error}"
        text = str(error)
        assert path.name in text and "\n" not in text and len(text) < 2000, text
        return -1, drops


@quietly
@given(content=st.binary(max_size=200), suffix=st.sampled_from([*SUFFIXES, ".jsonl.gz", ".parquet.gz"]))
def test_any_bytes(tmp_path: Path, content: bytes, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    outcome(path)


@quietly
@given(text=st.text(max_size=200), suffix=st.sampled_from((".jsonl", ".json", ".txt")))
def test_any_text(tmp_path: Path, text: str, suffix: str) -> None:
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    outcome(path)


@quietly
@given(rows=st.lists(ROWS | VALUES, max_size=4), array=st.booleans())
def test_any_json(tmp_path: Path, rows: list[Any], array: bool) -> None:  # noqa: FBT001
    """Right JSON with the names of our columns and wrong values: every row is read or counted as left out."""
    path = tmp_path / ("rows.json" if array else "rows.jsonl")
    path.write_text(json.dumps(rows) if array else "\n".join(map(json.dumps, rows)), encoding="utf-8")
    read, drops = outcome(path)
    if read == 0:
        assert sum(drops.counts.values()) >= 0


@quietly
@given(data=st.data())
def test_a_good_file_with_one_byte_changed_or_its_end_missing(tmp_path: Path, data: st.DataObject) -> None:
    good = b"".join(json.dumps({"prompt": f"q {i}", "response": f"a {i}"}).encode() + b"\n" for i in range(4))
    suffix = data.draw(st.sampled_from((".jsonl", ".jsonl.gz")))
    content = bytearray(gzip.compress(good, mtime=0) if suffix.endswith("gz") else good)
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] = data.draw(st.integers(0, 255))
    else:
        del content[at:]
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(bytes(content))
    read, _ = outcome(path)
    assert read <= 4


GOOD = '{"prompt": "a", "response": "b"}\n'


@pytest.mark.parametrize(
    ("content", "rows", "said"),
    [
        (b"", 0, ""),
        (b"\xef\xbb\xbf" + GOOD.encode(), 1, ""),
        (GOOD.replace("\n", "\r\n").encode() * 2, 2, ""),
        (b"\x00" * 40, -1, "not valid JSON"),
        (GOOD.encode("utf-16"), -1, "not UTF-8"),
        (GOOD.encode() + b'{"prompt": "a", "resp', -1, ":2: not valid JSON.*interrupted download"),
        (b'{"prompt": "a", "prompt": "b", "response": "c"}\n', -1, ":1: the key 'prompt' stands twice"),
        (b"[" * 100_000, -1, ":1: nested too deeply"),
        (b'{"prompt": "a", "response": ' + b"9" * 5000 + b"}\n", -1, ":1: .*digits"),
        (b'{"prompt": "a", "response": "\\ud800"}\n', 0, ""),
        (b'{"prompt": "a", "response": NaN}\n', 0, ""),
        (json.dumps({"prompt": "a", "response": "x" * 10_000_000}).encode(), 1, ""),
    ],
)
def test_a_corpus_of_broken_files(tmp_path: Path, content: bytes, rows: int, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    if said:
        with pytest.raises(ValueError, match=f"rows.jsonl.*{said}"):
            list(read_source(SourceConfig(path=str(path)), None))
    assert outcome(path)[0] == rows


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "up").symlink_to(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name in ("loop", "folder", "pipe.jsonl", "none.jsonl", "nul\0.jsonl", "x" * 300 + ".jsonl"):
        with pytest.raises((FileNotFoundError, ValueError), match="data.sources"):
            list(read_source(SourceConfig(path=str(tmp_path / name)), None))
    (tmp_path / "folder" / "rows.jsonl").write_text(GOOD)
    assert outcome(tmp_path / "folder")[0] == 1
