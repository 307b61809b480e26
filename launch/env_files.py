"""Files of environment variables for kinds of machines: launch/env/*.env by name, others by path. No torch."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from launch.command import CommandError, assignments
from launch.recipe import Recipe

FOLDER = Path(__file__).parent / "env"
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_VALUES: Mapping[str, Callable[[], str]] = {"uid": lambda: str(os.getuid())}


def environment_names() -> list[str]:
    """Names of the files that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.env"))


def read_environment(names: Sequence[str]) -> dict[str, str]:
    """Variables of some files together.

    Args:
        names: of packaged files, or paths; a path holds a `/` or ends in `.env`.

    Raises:
        CommandError: there is no such file, a line of it is no assignment, or two lines set one variable.
    """
    variables: dict[str, str] = {}
    places: dict[str, str] = {}
    for name in names:
        path = _find(name)
        for number, variable, value in assignments(path):
            place = f"{path}:{number}"
            if variable in places:
                raise CommandError(f"{place}: {variable} is set in {places[variable]} already. Keep one of them.")
            variables[variable], places[variable] = _fill(value, place), place
    return variables


def with_environment_files(recipe: Recipe, names: Sequence[str] | None) -> Recipe:
    """The recipe with the variables of its files in its `environment`, whose own ones take precedence.

    Args:
        recipe: as read.
        names: files in place of the recipe's; None: the recipe's.

    Raises:
        CommandError: as for `read_environment`.
    """
    chosen = recipe.environment_files if names is None else list(names)
    return replace(
        recipe, environment={**read_environment(chosen), **recipe.environment}, environment_files=list(chosen)
    )


def _find(name: str) -> Path:
    is_path = "/" in name or name.endswith(".env")
    path = Path(name) if is_path else FOLDER / f"{name}.env"
    if not path.is_file():
        raise CommandError(
            f"--environment {name}: is neither one of {', '.join(environment_names())} nor a file. Name one of them, "
            "or give a path that ends in .env."
        )
    return path


def _fill(value: str, place: str) -> str:
    for name in _PLACEHOLDER.findall(value):
        if name not in _VALUES:
            raise CommandError(f"{place}: {{{name}}} has no meaning here. Use {{uid}}, or write the value out.")
    return _PLACEHOLDER.sub(lambda match: _VALUES[match.group(1)](), value)
