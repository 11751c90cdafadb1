"""The way of one delivery through the modules, counted while a relay delivers."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import pytest

from outbox.destinations.http.transport import HttpTransport
from outbox.network.egress import EgressPolicy
from tests.destinations.servers import OK, Connection, serving
from tests.support.recorded_calls import recorded_calls
from tests.support.relay import add_endpoint, all_ended, publish, running

if TYPE_CHECKING:
    from tests.support.postgres import Database

pytestmark = pytest.mark.one_major

MODULES_MAX = 30
EVENTS = 100


@pytest.mark.full
async def test_a_delivery_of_a_run_passes_few_modules(database: Database) -> None:
    ways: list[frozenset[str]] = []

    async def script(connection: Connection) -> None:
        """Count from one request to the next, which is built after the response to this one."""
        while True:
            await connection.request()
            ways.append(frozenset(call.module for call in calls))
            calls.clear()
            await connection.send(OK)

    async with serving(script) as server:
        await add_endpoint(database, "shop", url=server.url, lanes=1)
        await publish(database, *range(EVENTS))
        transport = HttpTransport(EgressPolicy(["127.0.0.0/8"]))
        with recorded_calls() as calls:
            async with aclosing(transport), running(database, transport):
                await all_ended(database)
    # Runs begin and end, and buffers are read meanwhile: the median delivery is within a run.
    way = sorted(ways, key=len)[len(ways) // 2]
    print(*sorted(way), sep="\n")
    assert "core/delivery/request_run.py" in way
    assert len(way) <= MODULES_MAX
