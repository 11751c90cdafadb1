"""The migration that adds payloads of any type: existing rows, producers and privileges."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from uuid import UUID

import asyncpg
import pytest

import outbox
from outbox.store.connection.migrate import migrate
from outbox.store.schema import schema_status
from outbox.store.schema.migration_files import migrations
from outbox.store.schema.migration_statements import apply_statements
from tests.support.waiting import until

if TYPE_CHECKING:
    from asyncpg import Connection

    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

BEFORE, AFTER = 7, 9
RENAMED = 16
"""The migration after which publish_text() is another function."""
SESSION = {"server_settings": {"search_path": "relay"}}

# Every statement of producers that do not know the new columns, also without named arguments.
STATEMENTS = (
    "INSERT INTO relay.outbox (type, key, payload) VALUES ('a.b', 'k', '1')",
    "SELECT relay.publish(type => 'a.b', payload => '1', key => 'k')",
    "SELECT relay.publish('a.b', '1', 'k')",
    "SELECT relay.publish_text(type => 'a.b', payload => '1', key => 'k', claimed => false)",
    "SELECT relay.publish_many('{a.b}', '{1}', keys => '{k}')",
    "SELECT relay.publish_many('{a.b}', '{1}', '{k}')",
    # Several calls in one statement, of which the second one may follow the migration's commit.
    "SELECT relay.publish(type => 'a.b', payload => '1', key => 'k') FROM generate_series(1, 3)",
    "SELECT relay.publish_text(type => 'a.b', payload => '1', key => 'k'), "
    "relay.publish_text(type => 'a.b', payload => '1', key => 'k')",
    "SELECT relay.publish(type => 'a.b', payload => '1', deliver_at => now() + interval '1 day')",
)
EVENTS = len(STATEMENTS) - 1 + 3
"""Events that the statements publish, without the delayed one."""


@pytest.fixture
async def old(empty_database: Database) -> Database:
    """The schema before the migration, with two roles that publish."""
    async with empty_database.connection() as admin:
        await admin.execute(
            "DROP ROLE IF EXISTS app; CREATE ROLE app LOGIN;"
            "DROP ROLE IF EXISTS by_hand; CREATE ROLE by_hand LOGIN"
        )
        for migration in migrations()[:BEFORE]:
            statements = apply_statements(
                "relay", [migration], creates_schema=migration.version == 1
            )
            await admin.execute(";\n".join(statements))
        await admin.execute(
            "SET search_path = relay; SELECT grant_producer('app'), set_payload_bytes_max(2000);"
            "GRANT USAGE ON SCHEMA relay TO by_hand;"
            "GRANT INSERT (type, key, payload) ON outbox TO by_hand;"
            "GRANT EXECUTE ON FUNCTION publish TO by_hand WITH GRANT OPTION;"
            "GRANT EXECUTE ON FUNCTION publish_text, publish_many, payload_bytes_max TO by_hand"
        )
    return empty_database


async def prepared(connection: Connection[Any]) -> list[Any]:
    statements = [await connection.prepare(statement) for statement in STATEMENTS]
    # Preparing leaves the session in a transaction until the next message.
    await connection.execute("SELECT")
    return statements


async def test_producers_of_the_version_before_go_on(
    old: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    granted, by_hand = await old.connect(user="app"), await old.connect(user="by_hand")
    statements = [await prepared(connection) for connection in (granted, by_hand)]
    for statement in statements[0]:
        await statement.fetch()
    async with old.connection() as admin:
        with monkeypatch.context() as newest:
            newest.setattr(schema_status, "migrations", lambda: migrations()[: RENAMED - 1])
            assert len(await migrate(admin, "relay")) == RENAMED - 1 - BEFORE
        for each in statements:
            for statement in each:
                await statement.fetch()
        rows = await admin.fetchrow(
            "SELECT count(*) FILTER (WHERE payload = '1' AND key = 'k' AND body IS NULL) AS same, "
            "count(*) AS of FROM relay.outbox"
        )
        assert rows["same"] == rows["of"] == 3 * EVENTS
        assert await admin.fetchval("SELECT count(*) FROM relay.future_event") == 3
        await migrate(admin, "relay")
        for each in statements:
            for text, statement in zip(STATEMENTS, each, strict=True):
                if "publish_text" not in text:
                    await statement.fetch()
        # What was granted by hand can still be passed on.
        grantable = "has_function_privilege('by_hand', oid, 'EXECUTE WITH GRANT OPTION')"
        functions = f"SELECT proname FROM pg_proc WHERE proname LIKE 'publish%' AND {grantable}"
        assert [row[0] for row in await admin.fetch(functions)] == ["publish"]
    bodies = "INSERT INTO relay.outbox (type, body, content_type) VALUES ('a.b', '', 'a/b')"
    await granted.execute(bodies)
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await by_hand.execute(bodies)


@pytest.mark.full
async def test_what_uses_the_functions_of_the_version_before_is_kept(old: Database) -> None:
    async with old.connection() as admin:
        await admin.execute(
            "CREATE FUNCTION paid() RETURNS uuid BEGIN ATOMIC "
            "SELECT relay.publish(type => 'a.b', payload => '1', key => 'k'); END;"
            "CREATE FUNCTION checked() RETURNS text[] BEGIN ATOMIC "
            "SELECT relay.publish_text(type => 'a.b', payload => '1', claimed => false); END;"
            "ALTER FUNCTION relay.publish SET statement_timeout = '1min'"
        )
        await migrate(admin, "relay")
        assert await admin.fetchval("SELECT paid()") is not None
        assert len(await admin.fetchval("SELECT checked()")) == 1
        before = await old.connect(user="app")
        calling = before.fetch(MANY_CALLS)
        assert len(await calling) == 3


async def test_who_could_call_publish_text_may_call_both_functions_of_today(old: Database) -> None:
    async with old.connection() as admin:
        await admin.execute(
            "SET search_path = relay;"
            "GRANT EXECUTE ON FUNCTION publish_text TO by_hand WITH GRANT OPTION;"
            "DROP ROLE IF EXISTS other; CREATE ROLE other LOGIN;"
            "GRANT USAGE ON SCHEMA relay TO other"
        )
        await migrate(admin, "relay")
        may = (
            "SELECT role, right_, array_agg(proname::text ORDER BY proname)"
            "  FROM pg_proc, unnest('{app,by_hand,other}'::text[]) role,"
            "       unnest('{EXECUTE,EXECUTE WITH GRANT OPTION}'::text[]) right_"
            " WHERE proname IN ('publish_text', 'publish_checked')"
            "   AND has_function_privilege(role, pg_proc.oid, right_) GROUP BY 1, 2"
        )
        both = ["publish_checked", "publish_text"]
        assert {tuple(row[:2]): row[2] for row in await admin.fetch(may)} == {
            ("app", "EXECUTE"): both,
            ("by_hand", "EXECUTE"): both,
            ("by_hand", "EXECUTE WITH GRANT OPTION"): both,
        }
    for user in ("app", "by_hand"):
        app = await old.connect(user=user)
        assert isinstance(await app.fetchval(TEXT), UUID)
        assert len(await app.fetchval(CHECKED)) == 1
        await outbox.publish(app, "a.b", 1, autocommit=True)
    stranger = await old.connect(user="other")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await stranger.fetchval(TEXT)


TEXT = "SELECT relay.publish_text(type => 'a.b', payload => '1')"
CHECKED = TEXT.replace("publish_text", "publish_checked")
MANY_CALLS = "SELECT relay.publish(type => 'a.b', payload => '1') FROM generate_series(1, 3)"


@pytest.mark.full
@pytest.mark.parametrize("call", [MANY_CALLS, f"{MANY_CALLS.replace('publish', 'publish_text')}"])
async def test_a_statement_that_waits_for_the_migration_goes_on(old: Database, call: str) -> None:
    """Its first call waits for the lock of the outbox, and its second one follows the commit."""
    app, admin = await old.connect(user="app"), await old.connect()
    for migration in migrations()[BEFORE : AFTER - 1]:
        statements = apply_statements("relay", [migration], creates_schema=False)
        await admin.execute(";\n".join(statements))
    transaction = admin.transaction()
    await transaction.start()
    last = apply_statements("relay", [migrations()[AFTER - 1]], creates_schema=False)
    await admin.execute(";\n".join(last))
    waiting = asyncio.create_task(app.fetch(call))
    async with old.connection() as observer:
        blocked = "SELECT count(*) = 1 FROM pg_locks WHERE NOT granted"
        await until(lambda: observer.fetchval(blocked))
    await transaction.commit()
    assert len(await waiting) == 3


async def test_an_older_program_cannot_leave_a_body_of_an_erased_event(old: Database) -> None:
    async with old.connection() as admin:
        await migrate(admin, "relay")
        await admin.execute(
            "INSERT INTO relay.outbox (type, body, content_type) VALUES ('a', 'x', 'a/b');"
            "INSERT INTO relay.outbox (type, payload) VALUES ('a', '1')"
        )
        erase = (
            "UPDATE relay.outbox SET payload = NULL, headers = NULL, erased_at = now() "
            "WHERE id = $1 AND erased_at IS NULL"
        )
        await admin.execute(erase, 2)
        with pytest.raises(asyncpg.CheckViolationError, match="either_payload_or_body"):
            await admin.execute(erase, 1)


@pytest.mark.full
async def test_the_payload_limit_remains(old: Database) -> None:
    async with old.connection() as admin:
        await migrate(admin, "relay")
    app = await old.connect(user="app")
    for values in (
        "('a', to_jsonb(repeat('x', 1999)), NULL, NULL)",
        "('a', NULL, decode(repeat('00', 2001), 'hex'), 'a/b')",
    ):
        for table in ("outbox (type, payload, body, content_type) VALUES ",):
            with pytest.raises(asyncpg.CheckViolationError) as caught:
                await app.execute(f"INSERT INTO relay.{table}{values}")
            assert caught.value.constraint_name == "payload_must_be_at_most_2000_bytes"
    async with old.connection() as admin:
        await migrate(admin, "relay", payload_bytes_max=3000)
    await app.execute(
        "INSERT INTO relay.outbox (type, body, content_type) "
        "VALUES ('a', decode(repeat('00', 3000), 'hex'), 'a/b')"
    )


async def test_no_producer_fails_while_it_is_applied(
    old: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_status, "migrations", lambda: migrations()[: RENAMED - 1])
    ended = asyncio.Event()

    async def produce(connection: Connection[Any]) -> int:
        published = 0
        statements = await prepared(connection)
        while not ended.is_set():
            for statement in statements[:-1]:
                await statement.fetch()
            # Also unprepared, and in a transaction of several statements.
            async with connection.transaction():
                for text in STATEMENTS[:-1]:
                    await connection.execute(text)
            published += 2 * EVENTS
        return published

    connections = [await old.connect(user="app") for _ in range(4)]
    async with asyncio.TaskGroup() as group:
        producers = [group.create_task(produce(each)) for each in connections]
        async with old.connection() as admin:
            await migrate(admin, "relay")
        ended.set()
    async with old.connection() as admin:
        count = await admin.fetchval("SELECT count(*) FROM relay.outbox")
    assert count == sum(task.result() for task in producers) > 0
