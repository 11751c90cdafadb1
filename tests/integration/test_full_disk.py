"""A full file system, for real: the relay waits, resumes, and loses nothing.

Deselected where no file system can be mounted.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import asyncpg
import pytest

from outbox.store.connection.connect import CONNECTION_ERRORS
from tests.support.load import under_load
from tests.support.postgres import Server
from tests.support.relay import publish
from tests.support.small_disk import small_disk
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, MutableMapping

    from tests.support.postgres import Database
    from tests.support.small_disk import SmallDisk

    Logs = list[MutableMapping[str, Any]]

pytestmark = [pytest.mark.one_major, pytest.mark.mounts]

DISK_MB = 160
FULL = "No space left on device"


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    """Space for a server and little more."""
    with small_disk(DISK_MB) as disk:
        yield disk


@pytest.fixture
async def database(disk: SmallDisk, pg_major: int) -> AsyncIterator[Database]:
    """A database on that disk."""
    server = Server(pg_major, directory=disk.directory)
    with server.embedded:
        async with server.database() as database:
            yield database
            disk.free()


def says_full(logs: Logs) -> bool:
    return any(FULL in str(each.get("reason")) for each in logs)


@pytest.mark.slow
async def test_the_relay_waits_while_there_is_no_space_for_rows(
    database: Database, disk: SmallDisk, logs: Logs
) -> None:
    async with under_load(database):
        disk.fill()
        await until(lambda: says_full(logs), what="the relay to find no room")
        with pytest.raises(asyncpg.DiskFullError):
            await publish(database, *[{"n": n} for n in range(10_000)], type="other.event")
        disk.free()
    assert all("\n" not in str(each.get("reason")) for each in logs)


async def _crashed(database: Database) -> bool:
    """Write until an error; whether the server has crashed or cannot recover."""
    try:
        async with asyncio.timeout(5), database.connection() as connection:
            while True:
                await connection.execute("SELECT pg_logical_emit_message(true, '', 'x')")
                await connection.execute("SELECT pg_switch_wal()")
    except (asyncpg.CannotConnectNowError, ConnectionError, FileNotFoundError):
        return True
    except CONNECTION_ERRORS:
        return not database.server.embedded.running


@pytest.mark.full
async def test_the_relay_waits_while_there_is_no_space_for_the_wal(
    database: Database, disk: SmallDisk, logs: Logs
) -> None:
    async with under_load(database):
        disk.fill()
        await until(lambda: _crashed(database), what="the server to crash")
        disk.free()
        await asyncio.to_thread(database.server.embedded.restart, immediate=True)
    assert any(each["event"] == "the session was lost" for each in logs)
