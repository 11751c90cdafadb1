"""Fixtures live for one test or for the whole session.

Slow tests are spread over the run, so two tests of one module seldom follow each other: a fixture
of the scope of a module, class or package would be made again for nearly each of them.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.repository.sources import ROOT, TESTS, nodes, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterable

SCOPES = {"function", "session"}
FILES = [each for each in TESTS if each.is_relative_to(ROOT / "tests")]


def other_scopes(tree: Iterable[ast.AST]) -> list[int]:
    """Return the lines of fixtures with another scope."""
    return [
        keyword.value.lineno
        for node in tree
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("fixture")
        for keyword in node.keywords
        if keyword.arg == "scope"
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value in SCOPES)
    ]


def test_no_fixture_is_made_again_for_each_test_of_a_module() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}" for path in FILES for line in other_scopes(nodes(path))
    ]
    assert found == []


@pytest.mark.parametrize("scope", ["module", "class", "package"])
@pytest.mark.parametrize("decorator", ["pytest.fixture", "pytest_asyncio.fixture", "fixture"])
def test_such_a_fixture_is_found(decorator: str, scope: str) -> None:
    source = f"import x\n@{decorator}(scope={scope!r}, params=[1])\ndef made(): ...\n"
    assert other_scopes(nodes_of(source)) == [2]
