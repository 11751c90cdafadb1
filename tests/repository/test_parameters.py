"""No statement takes more than a dozen positional parameters: a set of rows is one."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import TYPE_CHECKING

import pytest

import outbox
import outbox_doctor
from outbox.store.sql.message import WriteStatement
from tests.repository.sources import nodes, nodes_of

if TYPE_CHECKING:
    from collections.abc import Iterable

PARAMETERS_MAX = 12


def highest_parameter(values: Iterable[object], source: Iterable[ast.AST] = ()) -> int:
    """The highest positional parameter in a module's constants and in the strings of its source.

    Constants are composed of several strings, and a statement need not be a constant.
    """
    strings = [node.value for node in source if isinstance(node, ast.Constant)]
    strings += [value.sql if isinstance(value, WriteStatement) else value for value in values]
    text = "\n".join(string for string in strings if isinstance(string, str))
    return max(map(int, re.findall(r"\$(\d+)", text)), default=0)


@pytest.mark.slow
def test_no_statement_has_more_than_a_dozen_parameters() -> None:
    names = [
        each.name
        for package in (outbox, outbox_doctor)
        for each in walk_packages(package.__path__, f"{package.__name__}.")
    ]
    # Django's modules need a configured project, and pass parameters by %s.
    modules = [
        import_module(name)
        for name in names
        if not name.endswith("__main__") and not name.startswith("outbox.django.")
    ]
    highest = {
        each.__name__: highest_parameter(vars(each).values(), nodes(Path(str(each.__file__))))
        for each in modules
    }
    assert highest["outbox.store.delivery.attempt_runs"] > 1
    assert {name for name, number in highest.items() if number > PARAMETERS_MAX} == set()


@pytest.mark.parametrize(
    ("values", "source"),
    [
        (["SELECT $1, $13"], ""),
        ([WriteStatement("write", "SELECT $13")], ""),
        ([], "async def read(db):\n    return await db.fetch(f'SELECT {column}, $13', *arguments)"),
        ([], "WRITE = f'{fence(\"$13\")} SELECT $1'"),
    ],
)
def test_a_thirteenth_parameter_is_found(values: list[object], source: str) -> None:
    assert highest_parameter(values, nodes_of(source)) == PARAMETERS_MAX + 1
