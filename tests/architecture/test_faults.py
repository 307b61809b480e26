"""docs/faults.md: every row is there, and every test that it names exists and carries the row."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = {
    "A": "1 2 4 5 6 8 9 10 11 12 13 14 16 17 18 19 21 23 24 27",
    "B": "1 3 4 5 6 8 9 10 11 13 15 17 19 21 22",
    "C": "1 2 3 4 5 6 8 10 11 12 13 14 15 17 19 21 23",
    "D": "1 2 3 4 5 6 7 8 9 11 12 13 15 17 18 19 20 21 22 25 26 27 29 30 31 32",
    "E": "1 2 3 4 5 6 7 9 10 12 15 16 17 18 19 20 22",
    "F": "1 2 5 9 10 11 12 13 14 18 19 20 23 24 26 27 29 30 31 32",
}
ROWS = [f"{letter}{number}" for letter, numbers in NUMBERS.items() for number in numbers.split()]


def entries() -> dict[str, str]:
    """Last cell of each row of the table."""
    lines = (ROOT / "docs/faults.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| [A-F]\d", line)]
    assert len({row[0] for row in cells}) == len(cells), "a row stands twice"
    return {row[0]: row[-1] for row in cells}


def description_of(file: str, name: str) -> str:
    """Name and docstring of a test function."""
    assert (ROOT / file).is_file(), f"{file} does not exist"
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return f"{name} {ast.get_docstring(node) or ''}"
    raise AssertionError(f"{file} has no test {name}")


def test_all_rows_are_listed_in_order() -> None:
    assert list(entries()) == ROWS


@pytest.mark.parametrize("row", ROWS)
def test_named_tests_exist_and_carry_the_row(row: str) -> None:
    entry = entries()[row]
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", entry)
    assert named or re.match(r"(does not apply|not tested): \w", entry), entry
    for file, name in named:
        assert name.startswith("test_")
        description = description_of(file, name).replace("_", " ")
        assert re.search(rf"(?<![A-Za-z0-9]){row}(?![A-Za-z0-9])", description, re.IGNORECASE), (row, description)
