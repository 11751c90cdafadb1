"""Docstrings have a subject, and what they name exists."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from typing import TYPE_CHECKING

import pytest

import outbox.relay.delivery
from tests.repository.sources import PACKAGES, PROGRAM, ROOT, nodes, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HEADLESS = re.compile(
    r"(of|none|true|false|null|by|for|from|with|without|as|to|instead|besides|the same)\b",
    re.IGNORECASE,
)
"""The beginning of a sentence that lacks its noun: "Of the last append", "None: there is none"."""
ARGUMENTS = re.compile(r"^ *Args:\n(.*?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)
DOTTED = re.compile(r"`(\w+(?:\.\w+)+)`")
PARENTS = {each.name: each.parent for each in PACKAGES}
"""Where each root package is."""


def is_module(path: list[str]) -> bool:
    where = PARENTS[path[0]].joinpath(*path)
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


def docstrings(tree: Sequence[ast.AST]) -> Iterator[str]:
    """The docstrings of modules, classes, functions and attributes."""
    for node in tree:
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield text


def names_in(tree: Sequence[ast.AST]) -> Iterator[str]:
    """What docstrings name of the program.  Metrics and event types begin with `outbox.`, too."""
    for text in docstrings(tree):
        for name in DOTTED.findall(text):
            package, module, *_ = name.split(".")
            if package in PARENTS and is_module([package, module]):
                yield name


def sentences(tree: Sequence[ast.AST]) -> Iterator[str]:
    """The beginnings of docstrings, and of what they say about arguments."""
    for text in docstrings(tree):
        yield text
        for block in ARGUMENTS.findall(inspect.cleandoc(text)):
            for entry in re.split(r"\n(?! {5})", block):
                yield entry.partition(": ")[2]


@pytest.mark.slow
def test_docstrings_have_a_subject() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {sentence[:60]!r}"
        for path in PROGRAM
        for sentence in sentences(nodes(path))
        if HEADLESS.match(sentence)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""Of the last append whose result is known."""',
        'delivery = None\n"""None: there is none."""',
        'def send(request):\n    """Send it.\n\n    Args:\n        request: of the lane.\n    """',
        'def send(a, b):\n    """Send.\n\n    Args:\n        a: the lane,\n            if any.\n'
        '        b: None: no batch.\n\n    Raises:\n        Fenced: by another one.\n    """',
    ],
)
def test_a_docstring_without_a_subject_is_found(source: str) -> None:
    assert any(HEADLESS.match(sentence) for sentence in sentences(nodes_of(source)))


@pytest.mark.slow
def test_what_docstrings_name_exists() -> None:
    missing = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in PROGRAM
        for name in names_in(nodes(path))
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
    assert list(names_in(nodes_of(f'"""See `{name}` and the metric `outbox.attempts`."""'))) == [
        name
    ]
    assert not exists(name)
