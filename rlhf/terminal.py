"""Tables for the terminal. No torch."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 120
"""Columns where there is no terminal."""


def console() -> Console:
    """Of standard output."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def make_table(*columns: str, title: str | None = None) -> Table:
    """A table whose first column is words and whose others are numbers."""
    made = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return made
