"""Sources: files, folders, hub names and built-in tasks, read row by row into records. No torch.

Nothing here keeps more than one row (JSON arrays: one file) in memory.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, cast

from rlhf import strict
from rlhf.config import SourceConfig
from rlhf.data.formats import FORMATS, Format, format_named, recognise
from rlhf.data.schema import Drops, Record, RowError, check_record

HUB, BUILTIN = "hub:", "builtin:"
BUILTINS = ("politeness",)
SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")

RawRow = tuple[str, Any]  # (place, what the file holds there)


def read_source(source: SourceConfig, root: str | None, drops: Drops | None = None) -> Iterator[Record]:
    """Records of one source, in file order, with source, row and place filled in.

    Args:
        source: what to read and how.
        root: folder that relative paths start from; None is the working directory.
        drops: counts rows that cannot be used; without it they are left out uncounted.

    Raises:
        FileNotFoundError: no such path, or a folder without data files.
        ValueError: a broken file, a format that cannot be recognised, an unknown built-in task or hub name.
    """
    drops = Drops() if drops is None else drops
    if source.path.startswith(BUILTIN):
        yield from _read_builtin(source)
        return
    formats: dict[str, Format] = {}
    if source.format is not None:
        format_named(source.format)
    for number, (place, raw) in enumerate(itertools.islice(_raw_rows(source, root), source.max_rows)):
        try:
            row = _named_columns(raw, source.columns)
            # Files of one folder may differ in format, rows of one file may not.
            file_name = place.rpartition(":")[0]
            if file_name not in formats:
                formats[file_name] = _format_of(row, source, place)
            for record in _records(row, formats[file_name]):
                checked = dataclasses.replace(record, source=source.label, row=number, where=place)
                yield check_record(checked)
        except RowError as error:
            drops.add(error.reason, place)


def content_digest(source: SourceConfig, root: str | None) -> str:
    """Digest of what a source holds: it changes when a byte of a file, a hub revision or an argument does.

    Raises:
        FileNotFoundError: no such path.
    """
    digest = hashlib.sha256()
    if source.path.startswith(BUILTIN):
        from rlhf.data import toy  # noqa: PLC0415  only this source needs it

        digest.update(Path(toy.__file__).read_bytes())
        digest.update(json.dumps([source.path, source.split, source.options], sort_keys=True).encode())
    elif source.path.startswith(HUB):
        digest.update(str(_load_hub(source)._fingerprint).encode())
    else:
        folder = _resolve(source.path, root)
        for file in data_files(folder):
            digest.update(_display_name(file, folder).encode() + b"\x00")
            of_file = hashlib.sha256()
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    of_file.update(block)
            digest.update(of_file.digest())
    return digest.hexdigest()


def data_files(path: Path) -> list[Path]:
    """The data files of a path: itself, or all files under a folder with a known suffix, in order of name.

    Raises:
        FileNotFoundError: no such path, or none in the folder.
        ValueError: a file with an unknown suffix.
    """
    try:
        is_file, exists = path.is_file(), path.exists()
    except OSError as error:
        raise FileNotFoundError(
            f"data.sources[].path={path} cannot be looked at ({error.strerror}). Mend the path."
        ) from error
    if is_file:
        _suffix(path)
        return [path]
    if not exists:
        raise FileNotFoundError(
            f"data.sources[].path={path} does not exist. Give a file or folder, `hub:owner/name` for a data set of the "
            f"Hugging Face hub, or one of {', '.join(BUILTIN + name for name in BUILTINS)}."
        )
    files = sorted(file for file in path.rglob("*") if file.is_file() and _has_known_suffix(file))
    if not files:
        raise FileNotFoundError(
            f"data.sources[].path={path} has no file that ends in {', '.join(SUFFIXES)} (or these with .gz)."
        )
    return files


def _raw_rows(source: SourceConfig, root: str | None) -> Iterator[RawRow]:
    if source.path.startswith(HUB):
        for number, row in enumerate(_load_hub(source)):
            yield f"{source.path}:{number + 1}", row
        return
    path = _resolve(source.path, root)
    for file in data_files(path):
        readers = {".jsonl": _read_json, ".json": _read_json, ".parquet": _read_parquet, ".txt": _read_text}
        yield from readers[_suffix(file)](file, _display_name(file, path))


def _read_json(file: Path, name: str) -> Iterator[RawRow]:
    """Rows of JSON Lines, or of one JSON array, whatever the suffix says: both are common under `.json`."""
    with _opened(file, name) as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig")
        is_array = False
        while character := text.read(1):
            if not character.isspace():
                is_array = character == "["
                break
        text.seek(0)
        yield from _json_array(text.read(), name) if is_array else _json_lines(text, name)


def _json_lines(text: IO[str], name: str) -> Iterator[RawRow]:
    for number, line in enumerate(text, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=strict.unique)
        except (ValueError, RecursionError) as error:
            raise _not_json(f"{name}:{number}", error) from error
        yield f"{name}:{number}", row


def _json_array(text: str, name: str) -> Iterator[RawRow]:
    """Elements of an array one by one, so that each has its line."""
    decoder = json.JSONDecoder(object_pairs_hook=strict.unique)
    # Strict about elements, lenient about the commas between them.
    after_space = re.compile(r"[^\s,]|\Z")
    position, line = text.index("[") + 1, 1
    counted = 0
    while True:
        found = after_space.search(text, position)
        assert found is not None  # the end of the text matches
        position = found.start()
        line += text.count("\n", counted, position)
        counted = position
        if text[position : position + 1] == "]":
            return
        try:
            row, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            raise _not_json(f"{name}:{error.lineno}", error) from error
        except (ValueError, RecursionError) as error:
            raise _not_json(f"{name}:{line}", error) from error
        yield f"{name}:{line}", row


def _not_json(place: str, error: ValueError | RecursionError) -> ValueError:
    return ValueError(
        f"{place}: {strict.json_fault(error)}. Mend or remove the row; an end like this is often an interrupted "
        "download."
    )


def _read_text(file: Path, name: str) -> Iterator[RawRow]:
    """Each line that is not empty is one text."""
    with _opened(file, name) as stream:
        for number, line in enumerate(io.TextIOWrapper(stream, encoding="utf-8-sig"), start=1):
            if line.strip():
                yield f"{name}:{number}", {"text": line}


def _read_parquet(file: Path, name: str) -> Iterator[RawRow]:
    import pyarrow  # type: ignore[import-untyped]  # noqa: PLC0415  0.3 s that other sources need not pay
    import pyarrow.parquet  # type: ignore[import-untyped]  # noqa: PLC0415

    try:
        # A Parquet file is read from its end, so a compressed one has to be unpacked first.
        table = pyarrow.parquet.ParquetFile(_unpacked(file, name) if file.suffix == ".gz" else file)
        number = 0
        for batch in table.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{name}:{number}", {key: value for key, value in row.items() if value is not None}
    except pyarrow.ArrowException as error:
        raise ValueError(f"{name}: not a Parquet file that can be read ({error}). Fetch it again.") from error


def _unpacked(file: Path, name: str) -> io.BytesIO:
    with _opened(file, name) as stream:
        return io.BytesIO(stream.read())


@contextlib.contextmanager
def _opened(file: Path, name: str) -> Iterator[IO[bytes]]:
    """The bytes of a file, unpacked; what is wrong with them becomes an error that names the file."""
    try:
        with cast(IO[bytes], gzip.open(file, "rb") if file.suffix == ".gz" else file.open("rb")) as stream:
            yield stream
    except UnicodeDecodeError as error:
        raise ValueError(f"{name}: not UTF-8 text ({error.reason}). Convert the file.") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{name}: not a complete gzip file ({error}). Fetch it again.") from error


def _load_hub(source: SourceConfig) -> Any:
    import datasets  # noqa: PLC0415  seconds that local sources need not pay

    name = source.path.removeprefix(HUB)
    try:
        return datasets.load_dataset(name, split=source.split, **source.options)
    except Exception as error:  # every kind of network, cache and name error of three libraries
        raise ValueError(
            f"data.sources[].path={source.path}: the split {source.split!r} cannot be loaded ({type(error).__name__}: "
            f"{error}). Check owner/name, split and options; without a network, name a local file instead."
        ) from error


def _read_builtin(source: SourceConfig) -> Iterator[Record]:
    from rlhf.data import toy  # noqa: PLC0415  only this source needs it

    name = source.path.removeprefix(BUILTIN)
    if name not in BUILTINS:
        raise ValueError(f"data.sources[].path={source.path} is unknown. Use one of: {BUILTIN + ', '.join(BUILTINS)}.")
    options = dict(source.options)
    rows, seed = options.pop("rows", source.max_rows), options.pop("seed", 0)
    if rows is None:
        raise ValueError(f"data.sources[].options of {source.path} has no `rows`. Add for example rows: 4096.")
    if source.max_rows is not None:
        rows = min(rows, source.max_rows)
    for number, record in enumerate(toy.generate(source.split, rows=rows, seed=seed, **options)):
        place = f"{source.path}:{number + 1}"
        yield check_record(dataclasses.replace(record, source=source.label, row=number, where=place))


def _named_columns(raw: Any, columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under our column names. `a.b` in the column map is field b of column a."""
    if isinstance(raw, str):  # a JSON file of bare strings is a list of prompts
        raw = {"prompt": raw}
    if not isinstance(raw, Mapping):
        raise RowError(f"row is of type {type(raw).__name__}, not a JSON object")
    row = {key: value for key, value in raw.items() if key not in columns.values()}
    for ours, theirs in columns.items():
        value: Any = raw
        for key in [theirs] if theirs in raw else theirs.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            row[ours] = value
    return row


def _format_of(row: Mapping[str, Any], source: SourceConfig, place: str) -> Format:
    if source.format is not None:
        return format_named(source.format)
    found = recognise(row)
    if found is None:
        known = "; ".join(f"{item.name}: {' + '.join(item.columns)}" for item in FORMATS.values())
        raise ValueError(
            f"{place}: the columns {_shown(sorted(row))} are no known format. Name them in "
            f"data.sources[].columns, for example {{prompt: my_question, response: my_answer}}. Known: {known}."
        )
    return found


def _shown(names: list[str], most: int = 12) -> str:
    """Names from a file in one line, however odd or many they are."""
    plain = [name if name.isidentifier() else repr(name) for name in names[:most]]
    short = [name if len(name) <= 40 else f"{name[:40]}..." for name in plain]
    return ", ".join(short + ["..."] * (len(names) > most)) or "(none)"


def _records(row: Mapping[str, Any], row_format: Format) -> Iterator[Record]:
    for column in row_format.columns:
        if row.get(column) is None:
            raise RowError(f"no `{column}`")
    # A row is one unit: if its third record is bad, the first two are not kept either.
    yield from list(row_format.read(row))


def _resolve(path: str, root: str | None) -> Path:
    return Path(root or ".").expanduser() / Path(path).expanduser()


def _display_name(file: Path, path: Path) -> str:
    """Name in messages: the file's, with its folders where the source is a folder. No absolute path, because places are
    part of the cache and the cache outlives a move of the files."""
    return file.name if file == path else str(file.relative_to(path))


def _has_known_suffix(file: Path) -> bool:
    return file.name.removesuffix(".gz").endswith(SUFFIXES)


def _suffix(file: Path) -> str:
    suffix = Path(file.name.removesuffix(".gz")).suffix
    if suffix not in SUFFIXES:
        raise ValueError(
            f"{file}: the suffix {suffix or '(none)'} is unknown. Use {', '.join(SUFFIXES)} or these with .gz."
        )
    return suffix
