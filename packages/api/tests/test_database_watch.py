"""Whether the API can use its database, without waiting for a request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from outbox_api import database as connections
from outbox_api.database import Database
from tests.support.relay import current, settings_for
from tests.support.tcp import through_lines
from tests.support.waiting import LIVE_S, until

if TYPE_CHECKING:
    from tests.support import postgres

pytestmark = pytest.mark.one_major


async def test_a_connection_that_hangs_is_noticed_and_opened_again(
    database: postgres.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WATCH_EVERY_S", "CONNECTION_WAIT_S", "RELEASE_S"):
        monkeypatch.setattr(connections, name, 1.0)
    sockets = database.server.embedded.socket_dir
    async with through_lines(sockets, database.name) as (lines, dsn):
        settings = settings_for(database, dsn=SecretStr(dsn), dsn_source="test")
        watched = Database(current(settings))
        async with watched.opened():
            with capture_logs() as logs:
                watching = asyncio.create_task(watched.watch())
                await until(lambda: lines.opened, LIVE_S, "a connection")
                for line in lines.opened:
                    line.hangs = True

                def says(message: str) -> bool:
                    return any(each["event"] == message for each in logs)

                await until(lambda: says("the database is unavailable"), LIVE_S)
                await until(lambda: says("the database is available again"), LIVE_S)
                assert watched.problem is None
                watching.cancel()
                await asyncio.wait([watching])


async def test_a_connection_that_hangs_at_its_first_use_is_noticed(
    database: postgres.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one of a process asks for its privileges."""
    require = connections.require_privileges
    hangs = True

    async def require_or_hang(*arguments: Any) -> None:
        if hangs:
            await asyncio.Event().wait()
        await require(*arguments)

    monkeypatch.setattr(connections, "require_privileges", require_or_hang)
    for name in ("WATCH_EVERY_S", "CONNECTION_WAIT_S"):
        monkeypatch.setattr(connections, name, 0.2)
    watched = Database(current(settings_for(database, dsn_source="test")))
    async with watched.opened():
        watching = asyncio.create_task(watched.watch())
        await until(lambda: watched.problem, LIVE_S, "the problem")
        hangs = False
        await until(lambda: watched.problem is None, LIVE_S, "its end")
        watching.cancel()
        await asyncio.wait([watching])
