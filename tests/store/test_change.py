"""Operators' changes are made exactly once, however their connection ends."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.errors import CannotRun, Conflict, CursorBroken, DatabaseUnavailable
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.endpoints import queries as endpoints
from outbox.operations.endpoints import removal as endpoint_removal
from outbox.operations.endpoints import states as endpoint_states
from outbox.operations.tokens import fetch as fetch_tokens
from outbox.store import change as changes
from outbox.store.connection import dsn as dsns
from outbox.store.connection.connect import connect
from tests.support.operators import routing_transaction
from tests.support.relay import add_endpoint, fetchval
from tests.support.tcp import Lines, listening, through_lines
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncpg import Connection

    from outbox.operations.endpoints.changes import NewEndpoint
    from outbox.store.change import Change
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

SESSION = {"server_settings": {"search_path": "relay"}}
STORED = "SELECT array_agg(secret) FROM relay.endpoint_secret"
ENTRIES = "SELECT count(*) FROM relay.journal WHERE kind = 'endpoint_added'"


class LinesThatEndAt(Lines):
    """A proxy whose first connection hangs at its n-th message to the server."""

    def __init__(self, socket_path: str, n: int, *, forward: bool) -> None:
        super().__init__(socket_path)
        self._left = n
        self.forward_last_data = forward

    def stop_at(self, data: bytes) -> bool:
        self._left -= 1
        return self._left == 0


@asynccontextmanager
async def through(database: Database, lines: Lines) -> AsyncIterator[Connection[Any]]:
    async with listening(lines.handler) as port:
        address = f"postgresql://postgres@127.0.0.1:{port}/{database.name}?sslmode=disable"
        connection = await connect(dsns.parse(address, source="test", env={}), schema="relay")
        try:
            yield connection
        finally:
            connection.terminate()


async def add(connection: Connection[Any], name: str = "shop") -> NewEndpoint:
    settings = EndpointSettings(name=name, url="https://example.com/")
    return await endpoint_changes.add_endpoint(connection, "relay", settings, actor="test")


@pytest.mark.slow
@pytest.mark.parametrize("forward", [True, False], ids=["executed", "not executed"])
async def test_a_change_is_made_once_wherever_the_connection_hangs(
    database: Database, forward: bool, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """The last data of the client reaches the server in one case, and not in the other."""
    socket_path = str(database.server.embedded.socket_dir / ".s.PGSQL.5432")
    n, made = 2, 0
    while True:
        n += 1
        lines = LinesThatEndAt(socket_path, n, forward=forward)
        async with through(database, lines) as connection:
            with subtests.test(n=n):
                reopen = connection.reopen

                async def reopen_in_time(reopen: Any = reopen) -> Any:
                    # The machine may stop for a second, and this connection counts.
                    patched.setattr(changes, "RESPONSE_S", 60.0)
                    return await reopen()

                connection.reopen = reopen_in_time
                try:
                    with monkeypatch.context() as patched:
                        patched.setattr(changes, "RESPONSE_S", 0.3)
                        new = await add(connection)
                except DatabaseUnavailable:
                    # Before its message was sent: nothing was changed.
                    assert not await fetchval(database, "SELECT count(*) FROM relay.endpoint")
                    continue
                assert await fetchval(database, STORED) == [new.secret]
                made += 1
                assert await fetchval(database, ENTRIES) == made
                await endpoint_removal.remove_endpoint(
                    await database.connect(**SESSION), "relay", "shop", actor="test"
                )
                await fetchval(database, "DELETE FROM relay.endpoint_secret RETURNING 1")
            if len(lines.opened) == 1:
                break  # It was complete before its n-th message.
    assert made > 1, "the response to the change itself was lost"


async def test_changes_of_several_operators_are_all_made(database: Database) -> None:
    names = [f"e{n}" for n in range(8)]
    connections = [await database.connect(**SESSION) for _ in names]
    await asyncio.gather(*map(add, connections, names))
    found = await endpoints.list_endpoints(connections[0], "relay")
    assert [row.name for row in found] == names


async def test_a_conflicting_change_is_planned_again(database: Database) -> None:
    await add_endpoint(database)
    first, second = [await database.connect(**SESSION) for _ in range(2)]
    calls = 0

    def edit(old: EndpointSettings) -> EndpointSettings:
        nonlocal calls
        calls += 1
        return replace(old, method="PUT")

    async with routing_transaction(second):
        changing = asyncio.create_task(
            endpoint_changes.update_endpoint(first, "relay", "shop", edit, actor="test")
        )
        await until(lambda: calls, what="the plan")
        await second.execute("UPDATE endpoint SET url = 'https://other.test/'")
    await changing
    settings = (await endpoints.get_endpoint(second, "relay", "shop")).settings
    assert (calls, settings["url"], settings["method"]) == (2, "https://other.test/", "PUT")


async def test_a_state_changed_by_its_owner_is_read_again(database: Database) -> None:
    """An owner completes a state without a new routing version."""
    await add_endpoint(database)
    db, owner = [await database.connect(**SESSION) for _ in range(2)]
    await db.execute("UPDATE endpoint SET state = 'disabling'")
    async with owner.transaction():
        await owner.execute("UPDATE endpoint SET state = 'disabled'")
        removing = asyncio.create_task(
            endpoint_removal.remove_endpoint(db, "relay", "shop", actor="test")
        )
        waits = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
        await until(lambda: owner.fetchval(waits), what="the change to wait")
    assert (await removing).state == "removed"


async def test_a_change_that_always_conflicts_ends_with_an_error(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "PLANS_MAX", 3)
    db, other = [await database.connect(**SESSION) for _ in range(2)]
    plans = 0

    async def plan(change: Change) -> None:
        nonlocal plans
        plans += 1
        await other.execute("UPDATE cursor SET version = version + 1")
        change.journal("test", None, {})

    with pytest.raises(CannotRun, match="others change the same things all the time"):
        await changes.make_change(db, "relay", "test", plan)
    assert plans == 3
    assert await db.fetchval("SELECT count(*) FROM journal") == 0


async def test_a_lock_that_is_not_granted_is_an_error(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "CHANGE_LOCK_TIMEOUT_S", 0.1)
    holder, db = [await database.connect(**SESSION) for _ in range(2)]
    async with holder.transaction():
        await holder.execute("SELECT FROM cursor FOR UPDATE")
        with pytest.raises(CannotRun, match=r"holds a lock for over 0\.1 s; nothing was changed"):
            await add(db)
    await add(db)


async def test_an_error_of_the_plan_is_the_result(database: Database) -> None:
    await add_endpoint(database)
    db = await database.connect(**SESSION)
    with pytest.raises(Conflict, match="exists already"):
        await add(db)
    # Without a difference, too, nothing is written.
    (paused,) = await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
    version = await db.fetchval("SELECT version FROM cursor")
    (again,) = await endpoint_states.pause_endpoints(db, "relay", ["shop"], actor="test")
    assert (paused.changed, again.changed) == (True, False)
    assert await db.fetchval("SELECT version FROM cursor") == version


@pytest.mark.parametrize("table", ["cursor", "batch"])
async def test_a_truncated_table_is_named(table: str, database: Database) -> None:
    db = await database.connect(**SESSION)
    await db.execute(f"TRUNCATE {table}")
    with pytest.raises(CursorBroken, match=f"^the table {table} was emptied; restore the"):
        await add(db)


async def test_secrets_are_not_in_the_text_of_a_statement(database: Database) -> None:
    """The server logs the text of a statement that fails."""
    db = await database.connect(**SESSION)
    texts: list[str] = []
    db.add_query_logger(lambda record: texts.append(record.query))
    settings = EndpointSettings(
        name="shop", url="https://example.com/", headers={"Authorization": "Bearer hunter2"}
    )
    new = await endpoint_changes.add_endpoint(db, "relay", settings, actor="test")
    secrets = await db.fetchval(STORED)
    assert secrets == [new.secret]
    stored = await db.fetchval("SELECT headers ->> 'Authorization' FROM endpoint")
    assert stored == "Bearer hunter2"
    assert any("INSERT INTO endpoint_secret" in text for text in texts)
    assert not [text for text in texts if "hunter2" in text or new.secret in text]


async def test_a_lost_response_is_resolved_by_a_pool_connection(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost connection of a pool cannot open another one."""
    monkeypatch.setattr(changes, "RESPONSE_S", 0.3)
    async with through_lines(database.server.embedded.socket_dir, database.name) as (lines, dsn):
        address = dsns.parse(f"{dsn}?sslmode=disable", source="test", env={})

        async def open_connection(*_: Any, **__: Any) -> Connection[Any]:
            return await connect(address, schema="relay")

        async with (
            asyncpg.create_pool(min_size=0, max_size=1, connect=open_connection) as pool,
            pool.acquire() as connection,
        ):
            lines.last_words = b"INSERT INTO endpoint_secret"
            new = await add(connection)
    assert len(lines.opened) == 2
    assert await fetchval(database, STORED) == [new.secret]


async def test_a_change_that_was_executed_while_it_was_planned_again_has_its_first_result(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second plan finds nothing to change, because the first message has changed it."""
    address = dsns.parse(database.dsn, source="test", env={})
    connection = await connect(address, schema="relay")
    other = await database.connect(**SESSION)
    send = changes._Execution._send
    messages: list[Any] = []

    async def lose(self: Any, _: Any, calls: Any, result: Any) -> bool:
        monkeypatch.setattr(changes._Execution, "_send", send)
        messages.append(calls)
        self.sent.append(result)
        raise asyncpg.ConnectionDoesNotExistError("lost")

    monkeypatch.setattr(changes._Execution, "_send", lose)
    plans = 0

    async def plan(change: Change) -> int:
        nonlocal plans
        plans += 1
        if plans == 1:
            change.journal("test", None, {})
        else:
            # The server executes the first message now.
            await other.write_together(*messages[0])
        return plans

    assert await changes.make_change(connection, "relay", "test", plan) == 1
    assert (plans, await other.fetchval("SELECT count(*) FROM journal")) == (2, 1)
    await connection.close()


BLOCK_LANE = """
INSERT INTO lane_block (lane_id, seq) SELECT id, 1 FROM lane ORDER BY id LIMIT 1 RETURNING lane_id
"""
ADD_TOKEN = """
INSERT INTO fetch_token (endpoint_id, hash, created_by)
SELECT id, sha256('other'), 'other' FROM endpoint RETURNING id
"""
WAITS = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"


async def test_a_lane_that_is_blocked_after_the_plan_is_among_those_unblocked(
    database: Database,
) -> None:
    await add_endpoint(database, lanes=2)
    db, holder = [await database.connect(**SESSION) for _ in range(2)]
    async with holder.transaction():
        await holder.execute("SELECT FROM cursor FOR UPDATE")
        resuming = asyncio.create_task(
            endpoint_states.resume_endpoints(db, "relay", ["shop"], actor="test")
        )
        await until(lambda: holder.fetchval(WAITS), what="the change to wait")
        await fetchval(database, BLOCK_LANE)
    (resumed,) = await resuming
    assert resumed.unblocked == 1
    entry = "SELECT data ->> 'unblocked' FROM journal WHERE kind = 'endpoint_resumed'"
    assert await fetchval(database, entry) == "1"
    assert await fetchval(database, "SELECT count(*) FROM lane_block") == 0


@pytest.mark.parametrize("revoke", [True, False], ids=["revoke", "add"])
async def test_a_fetch_token_that_is_added_after_the_plan_is_among_the_old_ones(
    database: Database, revoke: bool
) -> None:
    await add_endpoint(database)
    db, holder = [await database.connect(**SESSION) for _ in range(2)]
    if revoke:
        await fetch_tokens.add_fetch_token(db, "relay", "shop", actor="test")
    async with holder.transaction():
        await holder.execute("LOCK TABLE fetch_token IN SHARE ROW EXCLUSIVE MODE")
        change = fetch_tokens.revoke_fetch_tokens if revoke else fetch_tokens.add_fetch_token
        changing: asyncio.Task[Any] = asyncio.create_task(change(db, "relay", "shop", actor="test"))
        await until(lambda: holder.fetchval(WAITS), what="the change to wait")
        await holder.execute(ADD_TOKEN)
    changed = await changing
    if revoke:
        assert changed.revoked == 2
        assert await fetchval(database, "SELECT count(*) FROM fetch_token") == 0
    else:
        until_at = "SELECT expires_at FROM fetch_token WHERE created_by = 'other'"
        assert changed.old_until is not None
        assert changed.old_until == await fetchval(database, until_at)
