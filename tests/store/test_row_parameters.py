"""A set of rows is one parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from outbox.store.sql.message import literal
from outbox.store.sql.row_params import (
    composite_array,
    composite_numbers,
    composite_text,
    number_rows,
)
from tests.store.test_message import TRICKY

if TYPE_CHECKING:
    from tests.support.postgres import Database


@pytest.mark.one_major
async def test_texts_in_rows_round_trip(database: Database) -> None:
    texts = [*TRICKY, None, "(,)", '"\\"', "\n\t", "NULL,"]
    rows = composite_array(
        f"({n},,,,,,,{composite_text(text)},,,,,)" for n, text in enumerate(texts)
    )
    async with database.at_hand() as db:
        found = await db.fetch(
            f"SELECT lane_id, error FROM unnest({literal(rows)}::attempt_run_row[])"
        )
    assert [tuple(row) for row in found] == list(enumerate(texts))


@pytest.mark.one_major
@pytest.mark.parametrize("rows", [[], [(1, 2, 3), (4, None, 6)]])
async def test_rows_of_numbers_round_trip(
    database: Database, rows: list[tuple[int | None, ...]]
) -> None:
    array = literal(number_rows(rows))
    async with database.at_hand() as db:
        found = await db.fetch(f"SELECT * FROM unnest({array}::counter_row[])")
    assert [tuple(row) for row in found] == rows


@pytest.mark.one_major
async def test_arrays_of_numbers_in_rows_round_trip(database: Database) -> None:
    rows = composite_array(
        f"({n},,,,,,,,,,{composite_numbers(list(range(n)))},"
        f"{composite_numbers([each / 8 for each in range(n)])},)"
        for n in range(2, 5)
    )
    async with database.at_hand() as db:
        found = await db.fetch(
            f"SELECT lane_id, starts_us, elapses_ms FROM unnest({literal(rows)}::attempt_run_row[])"
        )
    assert [tuple(row) for row in found] == [
        (n, list(range(n)), [each / 8 for each in range(n)]) for n in range(2, 5)
    ]
