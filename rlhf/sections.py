"""Parts of a page that a command writes, between two markers. No torch."""

from collections.abc import Sequence
from pathlib import Path


def read_page(path: Path, *, begin: str, end: str) -> str:
    """A page that has a section; to be called before the work whose result goes there.

    Raises:
        ValueError: there is no such page, or it does not have both markers, once and in order.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}. Name a page that is there.") from error
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"{path} does not hold the lines {begin} and {end} once and in this order. Add them.")
    return page


def write_section(path: Path, text: str, *, begin: str, end: str) -> None:
    """Replace what stands between two markers of a page.

    Raises:
        ValueError: as `read_page`.
    """
    page = read_page(path, begin=begin, end=end)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is the head."""
    head, *body = rows
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)])
