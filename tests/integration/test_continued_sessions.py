"""What must be proven before a lost connection of a session is replaced."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.relay.cluster.reopening import ReopeningConnection
from outbox.store.cluster.replicas import ReplicaStore
from outbox.store.cluster.sessions import continue_session, session_label
from outbox.store.cluster.timeline import read_server_fence
from outbox.store.connection.store_connection import Worker
from outbox.store.errors import Fenced, ResponseLost
from outbox.store.sql.message import WriteStatement
from tests.support.relay import fetchval, register
from tests.support.waiting import until

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

LABEL = session_label(7)
END = "SELECT pg_terminate_backend($1)"
LIVES = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1)"


async def session(database: Database) -> Worker:
    connection = await database.connect(connection_class=Worker)
    assert isinstance(connection, Worker)
    await connection.execute(f"SET search_path = relay; SET application_name = '{LABEL}'")
    return connection


async def test_a_session_continues_only_where_it_is_proven(database: Database) -> None:
    opened = [await session(database) for _ in range(3)]
    survivor, lost, new = opened
    try:
        fence = await read_server_fence(survivor)
        assert fence is not None
        lost_pid, others = lost.get_server_pid(), [survivor.get_server_pid()]
        await register(ReplicaStore(survivor, fence), label=LABEL, sequencer_pid=lost_pid)

        async def continued(fence: int | None = fence, others: list[int] = others) -> bool:
            return await continue_session(new, LABEL, fence, lost_pid, others)

        # A promotion or a restore; the registered row itself may have been restored.
        with pytest.raises(Fenced):
            await continued(fence + 1)
        # A crash may have lost renewals: no backend from before it lives.
        assert not await continued(others=[])
        assert not await continued(others=[lost_pid + 1_000_000])
        async with database.connection() as stranger:
            assert not await continued(others=[stranger.get_server_pid()]), "another's session"
        assert await fetchval(database, LIVES, lost_pid), "ended without the proof"

        assert await continued()
        # Whatever the lost connection still carries has no backend.
        assert not await fetchval(database, LIVES, lost_pid)
        registered = "SELECT sequencer_pid FROM replica WHERE label = $1"
        assert await fetchval(database, registered, LABEL) == new.get_server_pid()

        await fetchval(database, "UPDATE replica SET expires_at = clock_timestamp()")
        with pytest.raises(Fenced):
            await continued()
    finally:
        for each in opened:
            each.terminate()


async def test_what_a_lost_connection_executes_again(database: Database) -> None:
    """Reads and repeatable writes, not other writes, and nothing of a transaction."""
    await fetchval(database, "CREATE TABLE written (n int)")
    opened: list[Worker] = [await session(database)]

    async def reopen(_: int) -> Worker | None:
        opened.append(await session(database))
        return opened[-1]

    # The backend ends while the statement runs, before anything is committed.
    insert = "INSERT INTO relay.written SELECT 1 FROM pg_sleep($1)"
    once, often = WriteStatement("once", insert), WriteStatement("often", insert, repeatable=True)
    connection: Any = ReopeningConnection(opened[0], reopen)

    async def lose_during(statement: Any) -> Any:
        task = asyncio.ensure_future(statement)
        sleeping = "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = $1"
        pid = connection.get_server_pid()
        await until(lambda: fetchval(database, sleeping, pid), what="the statement to run")
        await fetchval(database, END, pid)
        return await task

    async def write_after_loss() -> None:
        async with connection.transaction():
            count = len(opened)
            await fetchval(database, END, connection.get_server_pid())
            await until(lambda: len(opened) > count, what="another connection")
            await connection.write(often, 0)

    try:
        started = connection.statements_started
        assert await lose_during(connection.fetchval("SELECT 5 FROM pg_sleep(1)")) == 5
        assert connection.statements_started > started
        with pytest.raises(ResponseLost):
            await lose_during(connection.write(once, 1))
        assert await lose_during(connection.write(often, 1)) == 1
        with pytest.raises(ResponseLost):
            async with connection.transaction():
                await lose_during(connection.fetchval("SELECT pg_sleep(1)"))
        # Neither do later statements run outside it, without its limits.
        with pytest.raises(ResponseLost):
            await write_after_loss()
        assert await fetchval(database, "SELECT count(*) FROM relay.written") == 1
        assert await connection.fetchval("SELECT 6") == 6
        assert len(opened) == 6

        # Its own end is reported once, and ends what waits.
        ends: list[object] = []
        connection.add_termination_listener(ends.append)
        connection.terminate()
        assert (len(ends), connection.is_closed()) == (1, True)
        with pytest.raises(asyncpg.InterfaceError):
            await connection.fetch("SELECT 7")
    finally:
        for each in opened:
            each.terminate()


async def test_a_connection_that_cannot_be_opened_again_ends(database: Database) -> None:
    async def refuse(_: int) -> Worker | None:
        raise Fenced

    opened = await session(database)
    connection: Any = ReopeningConnection(opened, refuse)
    ends: list[object] = []
    connection.add_termination_listener(ends.append)
    try:
        await fetchval(database, END, opened.get_server_pid())
        await until(lambda: ends, what="the end to be noticed")
        with pytest.raises(Fenced):
            await connection.fetch("SELECT 1")
        assert not connection.reconnect()
    finally:
        opened.terminate()
