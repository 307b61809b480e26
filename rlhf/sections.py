"""Parts of a page that a command writes, between two markers. No torch."""

from collections.abc import Sequence
from pathlib import Path


def write_section(path: Path, text: str, *, begin: str, end: str) -> None:
    """Replace what stands between two markers of a page.

    Raises:
        ValueError: the page does not have both markers, once and in order.
    """
    page = path.read_text(encoding="utf-8")
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"{path} does not hold the lines {begin} and {end} once and in this order. Add them.")
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the head."""
    head, *body = rows
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)])
