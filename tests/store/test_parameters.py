"""No statement takes more than a dozen positional parameters: a set of rows is one."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from inspect import getsource
from pkgutil import walk_packages
from typing import TYPE_CHECKING

import pytest

import outbox
from outbox.store.connection.message import WriteStatement, literal
from outbox.store.row_params import composite_array, composite_text, number_rows
from tests.store.test_message import TRICKY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.support.postgres import Database

PARAMETERS_MAX = 12


def highest_parameter(values: Iterable[object], source: str = "") -> int:
    """The highest positional parameter in a module's constants and in the strings of its source.

    Constants are composed of several strings, and a statement need not be a constant.
    """
    strings = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    strings += [value.sql if isinstance(value, WriteStatement) else value for value in values]
    text = "\n".join(string for string in strings if isinstance(string, str))
    return max(map(int, re.findall(r"\$(\d+)", text)), default=0)


@pytest.mark.slow
def test_no_statement_has_more_than_a_dozen_parameters() -> None:
    names = [each.name for each in walk_packages(outbox.__path__, f"{outbox.__name__}.")]
    # Django's modules need a configured project, and pass parameters by %s.
    modules = [
        import_module(name)
        for name in names
        if not name.endswith("__main__") and not name.startswith("outbox.django.")
    ]
    highest = {
        each.__name__: highest_parameter(vars(each).values(), getsource(each)) for each in modules
    }
    assert highest["outbox.store.delivery.records"] > 1
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
    assert highest_parameter(values, source) == PARAMETERS_MAX + 1


@pytest.mark.one_major
async def test_texts_in_rows_round_trip(database: Database) -> None:
    texts = [*TRICKY, None, "(,)", '"\\"', "\n\t", "NULL,"]
    rows = composite_array(f"({n},,,,,,{composite_text(text)},,,)" for n, text in enumerate(texts))
    async with database.at_hand() as db:
        found = await db.fetch(f"SELECT lane_id, error FROM unnest({literal(rows)}::attempt_row[])")
    assert [tuple(row) for row in found] == list(enumerate(texts))


@pytest.mark.one_major
@pytest.mark.parametrize(
    "rows", [[], [(1, 2, 3, None, None, None, None), (1, 2, 3, 4, 5, 6, None)]]
)
async def test_rows_of_numbers_round_trip(
    database: Database, rows: list[tuple[int | None, ...]]
) -> None:
    array = literal(number_rows(rows))
    async with database.at_hand() as db:
        found = await db.fetch(f"SELECT * FROM unnest({array}::delivery_row[])")
    assert [tuple(row) for row in found] == rows
