"""Built-in types are queried once per process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from outbox.store.connection.connect import connect
from outbox.store.connection.dsn import parse
from outbox.store.connection.type_cache import TypeCachingConnection, load_types

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg.connection import LoggedQuery

    from tests.support.postgres import Database

pytestmark = pytest.mark.system

VALUES = "SELECT ARRAY[1, 2]::bigint[] AS numbers, '{[1,3), [7,9)}'::int8multirange AS ranges"


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TypeCachingConnection, "_known", {})


async def _asked(database: Database, *statements: str) -> tuple[int, list[Any]]:
    """The type queries of a new connection, and their results."""
    asked: list[str] = []

    def note(query: LoggedQuery) -> None:
        asked.append(query.query)

    dsn = parse(database.dsn, source="a test", env={})
    connection: Connection[Any] = await connect(dsn, schema=database.schema)
    try:
        with connection.query_logger(note):
            await load_types(connection)
            responses = [await connection.fetchrow(each) for each in statements]
    finally:
        connection.terminate()
    return sum("typeinfo_tree" in each for each in asked), responses


@pytest.mark.usefixtures("nothing_known")
async def test_the_second_connection_queries_no_built_in_type(database: Database) -> None:
    first, (read,) = await _asked(database, VALUES)
    second, (again,) = await _asked(database, VALUES)
    assert (first > 0, second) == (True, 0)
    assert again == read
    assert (read["numbers"], len(read["ranges"])) == ([1, 2], 2)


@pytest.mark.usefixtures("nothing_known")
async def test_types_of_one_database_are_not_used_for_another(database: Database) -> None:
    """Its OID may be that of another type in another database."""
    async with database.connection() as setting_up:
        await setting_up.execute(f"CREATE TYPE {database.schema}.mood AS ENUM ('good', 'bad')")
    query = "SELECT ARRAY['good', 'bad']::mood[] AS moods"
    for _ in range(2):
        asked, (_, read) = await _asked(database, VALUES, query)
        assert asked > 0
        assert read["moods"] == ["good", "bad"]
