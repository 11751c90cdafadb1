"""The modules and functions that docstrings name exist."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import outbox.relay.delivery

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "outbox").rglob("*.py"))
DOTTED = re.compile(r"`(\w+(?:\.\w+)+)`")


def is_module(path: list[str]) -> bool:
    where = ROOT.joinpath(*path)
    return where.is_dir() or where.with_suffix(".py").is_file()


def exists(name: str) -> bool:
    """Whether there is a module, or an attribute of one, of this name."""
    path, attributes = name.split("."), list[str]()
    while not is_module(path):
        attributes.insert(0, path.pop())
    found: object = import_module(".".join(path)) if attributes else None
    for attribute in attributes:
        if not hasattr(found, attribute):
            return False
        found = getattr(found, attribute)
    return True


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def names_in(source: str) -> Iterator[str]:
    """What docstrings name of the program.  Metrics and event types begin with `outbox.`, too."""
    for text in docstrings(source):
        for name in DOTTED.findall(text):
            package, module, *_ = name.split(".")
            if package == "outbox" and is_module([package, module]):
                yield name


def test_what_docstrings_name_exists() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in names_in(path.read_text())
        if not exists(name)
    ]
    assert not missing, "\n".join(missing)


def test_the_functions_of_the_pipeline_of_an_attempt_exist() -> None:
    package = outbox.relay.delivery
    names = DOTTED.findall(str(package.__doc__))
    assert len(names) > 10
    full = [name if name.startswith("outbox.") else f"{package.__name__}.{name}" for name in names]
    assert [name for name in full if not exists(name)] == []


@pytest.mark.parametrize(
    "name", ["outbox.relay.absent", "outbox.config.absent", "outbox.config.Settings.absent"]
)
def test_a_name_that_does_not_exist_is_found(name: str) -> None:
    assert list(names_in(f'"""See `{name}` and the metric `outbox.attempts`."""')) == [name]
    assert not exists(name)
