"""Statements sent as one message: their values round-trip."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import pytest
from asyncpg import Range
from hypothesis import given
from hypothesis import strategies as st

from outbox.store.connection.store_connection import StoreConnection, Worker
from outbox.store.sql.message import WriteStatement, literal, rows_of
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

TABLE = """
CREATE TABLE written (
    one bigint, flag boolean, share double precision, id uuid, at timestamptz, word text, doc jsonb,
    numbers bigint[], words text[], docs jsonb[], ids uuid[], times timestamptz[], flags boolean[],
    ranges int8multirange)
"""
INSERT = WriteStatement(
    "insert_written",
    "INSERT INTO written VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
)
AT = datetime(2026, 2, 28, 23, 59, 59, 999_999, UTC)
TRICKY = [
    "",
    "NULL",
    "null",
    "'",
    "''",
    '"',
    "\\",
    "\\'",
    "{}",
    "{,}",
    "a,b",
    "$1",
    ";--",
    "é🙂",
    " ",
]
COUNT = WriteStatement("count_written", "UPDATE written SET one = one")


@pytest.fixture(params=[StoreConnection, Worker])
async def db(database: Database, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(
        database.dsn, connection_class=request.param, server_settings={"search_path": "relay"}
    )
    yield connection
    await connection.close()


@pytest.mark.parametrize("conforming", ["on", "off"])
async def test_every_value_round_trips(db: Any, conforming: str) -> None:
    await db.execute(f"SET standard_conforming_strings = {conforming}; {TABLE}")
    for word in TRICKY:
        row = (
            *(2**63 - 1, True, 0.1, UUID(int=7), AT, word, '{"a": "\\\\\\"\'"}'),
            *([-1, None, 2], [*TRICKY, None], ['"\\\\"', None], [UUID(int=1)], [AT, None]),
            *([True, False, None], [Range(1, 3), Range(5, 6)]),
        )
        assert await db.write(INSERT, *row) == 1
        (found,) = await db.fetch("DELETE FROM written RETURNING *")
        assert tuple(found.values()) == row
    assert await db.write(INSERT, *[None] * 14) == 1
    assert await db.write(INSERT, *[None] * 7, *[[]] * 7) == 1
    assert await db.write(COUNT) == 2


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_no_text_ends_its_literal(text: str) -> None:
    quoted = literal(text)
    inner = quoted.removeprefix(" E")[1:-1].replace("''", "")
    if quoted.startswith(" E"):
        inner = inner.replace("\\\\", "")
    assert not set(inner) & {"'", "\\"}


async def test_text_that_postgresql_cannot_store_is_rejected_and_the_session_continues(
    db: Any,
) -> None:
    await db.execute(TABLE)
    for text, error in (
        ("\ud800", asyncpg.DataError),
        ("a\0b", asyncpg.CharacterNotInRepertoireError),
    ):
        with pytest.raises(error):
            await db.write(INSERT, *[None] * 5, text, *[None] * 8)
        with pytest.raises(error):
            await db.write(INSERT, *[None] * 8, [text], *[None] * 5)
    assert await db.fetchval("SELECT count(*) FROM written") == 0


async def test_a_message_is_atomic(db: Any) -> None:
    await db.execute(TABLE)
    insert = (INSERT, *[None] * 14)
    broken = WriteStatement("broken", "SELECT 1 / ($1::bigint - 1)")
    with pytest.raises(asyncpg.DivisionByZeroError):
        await db.write_together(insert, insert, (broken, 1))
    assert await db.write_together(insert, (broken, 2), (COUNT,)) == 1
    require = WriteStatement("require", "SELECT abort_unless($1)")
    assert await db.write_unless_aborted(insert, (require, False)) == 0
    assert await db.write_unless_aborted(insert, (require, True), (COUNT,)) == 2
    assert await db.fetchval("SELECT count(*) FROM written") == 2


async def test_each_statement_of_a_message_has_its_own_snapshot(
    database: Database, db: Any
) -> None:
    """Under any default isolation level the second statement sees what the first one waited for."""
    await db.execute(TABLE)
    await db.execute("SET default_transaction_isolation = 'repeatable read'")
    other = await database.connect(server_settings={"search_path": "relay"})
    transaction = other.transaction()
    await transaction.start()
    await other.execute("SELECT FROM cursor FOR UPDATE; INSERT INTO written (one) VALUES (1)")
    hold = WriteStatement("hold", "SELECT FROM cursor FOR UPDATE")
    with pytest.raises(asyncpg.LockNotAvailableError):
        await db.write_together((hold,), (COUNT,), lock_timeout_s=0.05)
    writing = asyncio.create_task(db.write_together((hold,), (COUNT,)))
    waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock')"
    await until(lambda: other.fetchval(waits), what="it to wait")
    await transaction.commit()
    assert await writing == 1


def test_the_row_count_is_parsed_from_a_command_tag() -> None:
    assert [rows_of(tag) for tag in ("INSERT 0 3", "UPDATE 2", "SELECT 0", "NOTIFY")] == [
        3,
        2,
        0,
        0,
    ]
