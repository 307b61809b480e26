"""Files that a person hands over: text, JSON, YAML. What is wrong with one is said in one line. No torch."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml


def read_text(path: str | Path) -> str:
    """UTF-8 text, a byte-order mark left out.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no file, or not UTF-8.
        OSError: it cannot be read.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # reading a pipe would wait for ever
            raise ValueError(f"{path} is not a file. Give the path of one.")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} does not exist. Correct the path.") from None
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8 text. Convert the file.") from None


def read_json(path: str | Path) -> Any:
    """Content of a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8, not JSON, or has a key twice.
        OSError: it cannot be read.
    """
    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ValueError(f"{path}{line}: {json_fault(error)}. Mend the file.") from None


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON (`object_pairs_hook`).

    Raises:
        ValueError: a key stands twice: a reader would take one of the two and not say so.
    """
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice")
        found[key] = value
    return found


def json_fault(error: ValueError | RecursionError) -> str:
    """Why JSON was not read, in a few words."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at column {error.colno}"
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(error).partition(";")[0]  # Python's own of a number with thousands of digits has advice behind it


def read_yaml(path: str | Path) -> Any:
    """Content of a YAML file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not UTF-8, not YAML, or has a key twice.
        OSError: it cannot be read.
    """
    text = read_text(path)
    try:
        return yaml.load(text, Loader=_UniqueKeys)  # noqa: S506  a SafeLoader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
        raise ValueError(f"{path}{line}: not valid YAML: {what}. Mend the file.") from None
    except (ValueError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else json_fault(error)
        raise ValueError(f"{path}: {what}. Mend the file.") from None


class _UniqueKeys(yaml.SafeLoader):
    """Safe YAML in which no key stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002
        seen = set()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key, deep=True)
            if not isinstance(name, (str, int, float, bool)):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a plain value", key.start_mark)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} stands twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


def not_finite(value: Any, name: str = "") -> Iterator[str]:
    """Dotted names of the numbers in a nested value that are NaN or infinite."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from not_finite(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from not_finite(item, f"{name}[{number}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield name
