"""Receivers that respond twice: what their deliveries, the database and other relays know of it.

The relay, PostgreSQL and the network are real.
"""

from __future__ import annotations

import ipaddress
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.destinations.http.transport import HttpTransport
from outbox.network.egress import EgressPolicy
from outbox_doctor.check import Severity
from tests.destinations.servers import OK, serving
from tests.integration.test_request_runs import publish_backlog, run_deliveries
from tests.support.doctor import findings_of
from tests.support.relay import add_endpoint, all_ended, fetchval, publish, running
from tests.support.tiers import sampled
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.relay.relay import Relay
    from tests.destinations.servers import Connection, Received
    from tests.support.postgres import Database

pytestmark = pytest.mark.costly

BUSY = b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"
JOURNALLED = "SELECT count(*) FROM journal WHERE kind = 'endpoint_unsolicited_data'"
SEEN = "SELECT count(*) FROM endpoint_health WHERE unsolicited_at IS NOT NULL"


class TwiceResponding:
    """Processes odd sequence numbers and responds twice; refuses each even one once.

    The second response arrives as late as it can: after the next request on its connection.

    Args:
        shows_first: the first one of all arrives while the connection is idle.
    """

    def __init__(self, *, shows_first: bool = True) -> None:
        self._shows_first = shows_first
        self.processed: list[int] = []
        self.refused: set[int] = set()
        self.requests = 0

    async def script(self, connection: Connection) -> None:
        late = b""
        while True:
            received = await connection.request()
            self.requests += 1
            await connection.send(late)
            late = b""
            if self._accepts(received):
                await connection.send(OK)
                if self._shows_first and self.requests == 1:
                    await connection.send(OK)
                else:
                    late = OK
            else:
                await connection.send(BUSY)

    def _accepts(self, received: Received) -> bool:
        seq = int(received.headers["x-sequence"])
        if seq % 2 == 0 and seq not in self.refused:
            self.refused.add(seq)
            return False
        self.processed.append(seq)
        return True


@asynccontextmanager
async def delivering(database: Database) -> AsyncIterator[Relay]:
    """A relay with the HTTP transport."""
    transport = HttpTransport(EgressPolicy((ipaddress.ip_network("127.0.0.0/8"),)))
    try:
        async with running(database, transport) as worker:
            yield worker
    finally:
        await transport.aclose()


async def test_after_one_sight_no_late_response_acknowledges_a_refused_delivery(
    database: Database,
) -> None:
    receiver = TwiceResponding()
    async with serving(receiver.script) as server:
        await add_endpoint(database, url=server.url, lanes=1)
        async with delivering(database):
            await publish(database, 1)
            await until(lambda: fetchval(database, SEEN), what="the second response to be seen")
            await publish(database, *range(2, 11))
            await all_ended(database)
        assert receiver.processed == list(range(1, 11))
        assert server.connections == receiver.requests
    assert await fetchval(database, JOURNALLED) == 1


@pytest.mark.full
async def test_a_receiver_that_responds_late_from_the_beginning_loses_one_delivery_at_most(
    database: Database,
) -> None:
    """HTTP/1.1 cannot prevent the first one: its response arrives after the next request."""
    receiver = TwiceResponding(shows_first=False)
    retry = {"base_s": 0.02, "factor": 1.0, "cap_s": 0.02, "jitter": "none", "attempts_max": 9}
    async with serving(receiver.script) as server:
        await add_endpoint(database, url=server.url, lanes=1, retry=retry)
        await publish(database, *range(1, 21))
        async with delivering(database):
            await all_ended(database)
        assert set(range(1, 21)) - set(receiver.processed) <= {2}
    assert await fetchval(database, JOURNALLED) == 1


class Surplus:
    """Sends data beyond the response to one request, and refuses the following number once.

    Args:
        data: the surplus data.
        segments: 2: it follows the response without a pause, before the next request was sent.
    """

    AT = 20
    """In the middle of a run."""

    def __init__(self, data: bytes, segments: int) -> None:
        self._data = data
        self._segments = segments
        self._refused = False
        self.processed: list[int] = []
        self.connections_until = 0
        """Connections before the surplus data."""
        self.requests = 0

    async def script(self, connection: Connection) -> None:
        self.connections_until += not self.processed or self.processed[-1] < self.AT
        while True:
            received = await connection.request()
            self.requests += 1
            seq = int(received.headers["x-sequence"])
            if seq == self.AT + 1 and not self._refused:
                self._refused = True
                await connection.send(BUSY)
                continue
            self.processed.append(seq)
            if seq != self.AT:
                await connection.send(OK)
            elif self._segments == 1:
                await connection.send(OK + self._data)
            else:
                await connection.send(OK)
                await connection.send(self._data)


@pytest.mark.parametrize("data", [OK, OK[:10], b"\n"], ids=["response", "part", "line end"])
@pytest.mark.parametrize("segments", sampled([1, 2]))
async def test_surplus_data_in_a_run_acknowledges_nothing_and_ends_runs(
    database: Database, data: bytes, segments: int
) -> None:
    receiver = Surplus(data, segments)
    async with serving(receiver.script) as server:
        await add_endpoint(database, url=server.url, lanes=1)
        await publish_backlog(database, 60)
        async with delivering(database) as worker:
            await all_ended(database)
        assert receiver.processed == list(range(1, 61))
        # One connection for those before, and one for each request after it.
        assert receiver.connections_until == 1
        assert server.connections == 1 + receiver.requests - receiver.AT
        assert 0 < run_deliveries(worker) < receiver.AT
    assert await fetchval(database, JOURNALLED) == 1
    async with database.at_hand() as connection:
        (finding,) = await findings_of(connection, "keep-alive")
    assert finding.severity is Severity.WARNING


@pytest.mark.full
async def test_another_relay_and_the_doctor_know_it(database: Database) -> None:
    receiver = TwiceResponding()
    async with serving(receiver.script) as server:
        await add_endpoint(database, url=server.url, lanes=1)
        async with delivering(database):
            await publish(database, 1)
            await until(lambda: fetchval(database, SEEN), what="the second response to be seen")
        async with delivering(database):
            await publish(database, *range(2, 11))
            await all_ended(database)
        assert receiver.processed == list(range(1, 11))
        assert server.connections == receiver.requests
    assert await fetchval(database, JOURNALLED) == 1
    async with database.at_hand() as connection:
        (finding,) = await findings_of(connection, "keep-alive")
    assert finding.severity is Severity.WARNING
    assert 'the receiver of endpoint "shop" sent data that belongs to no request' in finding.message
    assert "outbox endpoint update shop --no-keep-alive" in str(finding.action)


@pytest.mark.full
async def test_connections_are_reused_again_after_a_day(database: Database) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.send(OK)

    async with serving(script) as server:
        await add_endpoint(database, url=server.url, lanes=1)
        day = "UPDATE endpoint_health SET unsolicited_at = clock_timestamp() - interval '24 hours'"
        await fetchval(database, day)
        async with delivering(database):
            await publish(database, *range(5))
            await all_ended(database)
        assert (len(server.received), server.connections) == (5, 1)
    async with database.at_hand() as connection:
        (finding,) = await findings_of(connection, "keep-alive")
    assert finding.severity is Severity.OK


@pytest.mark.full
async def test_the_setting_keep_alive_off_gives_each_request_its_own_connection(
    database: Database,
) -> None:
    receiver = TwiceResponding()
    async with serving(receiver.script) as server:
        await add_endpoint(database, url=server.url, lanes=1, keep_alive=False)
        await publish_backlog(database, 40)
        async with delivering(database) as worker:
            await all_ended(database)
        assert run_deliveries(worker) == 0
        assert receiver.processed == list(range(1, 41))
        assert server.connections == receiver.requests
        assert {each.headers["connection"] for each in server.received} == {"close"}
        bodies = [orjson.loads(each.body)["sequence"] for each in server.received]
    assert bodies == sorted(bodies)
