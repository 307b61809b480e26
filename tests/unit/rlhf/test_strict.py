"""Text, JSON and YAML from a person: read, or refused in one line with the place."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf import strict

quietly = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
PLAIN = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False) | st.text(max_size=6)
NESTED = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@quietly
@given(value=NESTED)
def test_what_is_written_is_read(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "value"
    path.write_text(json.dumps(value), encoding="utf-8")
    assert strict.read_json(path) == value
    path.write_text("\ufeff" + yaml.safe_dump(value), encoding="utf-8")
    assert strict.read_yaml(path) == value


@quietly
@given(content=st.binary(max_size=80))
def test_any_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "value"
    path.write_bytes(content)
    for read in (strict.read_json, strict.read_yaml):
        try:
            read(path)
        except ValueError as error:
            assert type(error) is ValueError and str(path) in str(error) and "\n" not in str(error), repr(error)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' stands twice"),
        (b'{"x": {"a": 1, "b": 2, "a": 3}}', "the key 'a' stands twice"),
        (b'{"a": \n 1,', "value:2: not valid JSON.*column"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "4300 digits"),
        (b"\xff\xfe{}", "byte 0 is not UTF-8 text. Convert the file"),
        (b"", "not valid JSON"),
    ],
)
def test_json_that_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "value"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        strict.read_json(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "value:3: not valid YAML: the key 'a' stands twice"),
        ("x:\n  a: 1\n  a: 2\n", "value:3: .*twice"),
        ("a: [1, 2\n", "value:2: not valid YAML"),
        ("a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor"),
        ("[1]: 2\n", "a key is not a plain value"),
        ("a: \0\n", "not valid YAML"),
        ("- " * 3000 + "1", "nested too deeply"),
    ],
)
def test_yaml_that_is_refused(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "value"
    path.write_text(content)
    with pytest.raises(ValueError, match=said):
        strict.read_yaml(path)


def test_yaml_merges_are_no_duplicates(tmp_path: Path) -> None:
    path = tmp_path / "value"
    path.write_text("base: &base {a: 1, b: 2}\nmine:\n  <<: *base\n  b: 3\n")
    assert strict.read_yaml(path)["mine"] == {"a": 1, "b": 3}


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name, error, said in (
        ("pipe", ValueError, "is not a file"),
        (".", ValueError, "is not a file"),
        ("none", FileNotFoundError, "none does not exist. Correct the path"),
        ("loop", OSError, "loop"),
        ("x" * 300, OSError, "cannot be read: File name too long"),
    ):
        with pytest.raises(error, match=said):
            strict.read_text(tmp_path / name)


def test_numbers_that_are_none() -> None:
    value = {"a": [1.0, float("nan")], "b": {"c": float("inf"), "d": "nan"}, "e": 2}
    assert list(strict.not_finite(value)) == ["a[1]", "b.c"]
