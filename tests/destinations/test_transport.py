from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox.core.model.response import Failure
from outbox.destinations.http.http1 import pool
from outbox.destinations.http.http1.response_parser import PIECE_BYTES, ResponseReader
from outbox.destinations.http.limits import BODY_RAW_BYTES_MAX, HEADER_COUNT_MAX, INTERIM_MAX
from outbox.destinations.http.transport import HttpTransport
from outbox.destinations.interface import KEEP_ALIVE_S
from outbox.network import descriptors
from outbox.network.dns import Unresolved
from tests.destinations.conformance import LOOPBACK, Make, TransportConformance, closing, to
from tests.destinations.egress_suite import Guarding, authority, connected
from tests.destinations.receivers import HostileReceivers
from tests.destinations.request_runs import RequestRuns
from tests.destinations.reused_connections import ReusedConnections
from tests.destinations.servers import OK, Connection, respond_with, serving
from tests.destinations.unsolicited import UnsolicitedData
from tests.support.waiting import until

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from outbox.network.egress import EgressPolicy
    from outbox.web.proxy import Proxy
    from tests.destinations.certificates import Certificates


__all__ = ("authority", "connected")  # Fixtures.

CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Hosts:
    """A resolver: None for a name that never resolves; an absent name does not exist."""

    def __init__(self, hosts: Mapping[str, list[str] | None]) -> None:
        self._hosts = hosts

    async def resolve(self, host: str) -> list[str]:
        if host not in self._hosts:
            raise Unresolved("name not known")
        addresses = self._hosts[host]
        if addresses is None:
            await asyncio.get_running_loop().create_future()
            raise AssertionError
        return addresses

    def current(self, host: str) -> list[str] | None:
        return self._hosts.get(host)

    async def aclose(self) -> None:
        pass


class _Making:
    @pytest.fixture
    def make(self) -> Make:
        def make(
            policy: EgressPolicy = LOOPBACK,
            *,
            tls: ssl.SSLContext | None = None,
            hosts: Mapping[str, list[str] | None] | None = None,
            proxy: Proxy | None = None,
        ) -> HttpTransport:
            resolver = None if hosts is None else Hosts(hosts)
            return HttpTransport(policy, proxy=proxy, tls=tls, resolver=resolver)

        return make


@pytest.mark.system
class TestOnUvloop(
    _Making,
    TransportConformance,
    RequestRuns,
    ReusedConnections,
    UnsolicitedData,
    HostileReceivers,
):
    """The production event loop."""


@pytest.mark.full
class TestOnAsyncio(
    _Making,
    TransportConformance,
    RequestRuns,
    ReusedConnections,
    UnsolicitedData,
    HostileReceivers,
):
    """The guarantees do not depend on the event loop."""


@pytest.mark.system
class TestEgressOnUvloop(_Making, Guarding):
    """Which addresses are connected to, directly and through a proxy."""


@pytest.mark.full
class TestEgressOnAsyncio(_Making, Guarding):
    """The same without uvloop."""


@pytest.mark.system
async def test_a_request_cancelled_at_its_response_completes_and_affects_no_other() -> None:
    async def script(connection: Connection) -> None:
        if (await connection.request()).body != b"hangs":
            await connection.send(OK)
        await connection.closed_by_peer()

    async with serving(script) as server, closing(HttpTransport(LOOPBACK)) as transport:
        hanging = asyncio.create_task(transport.send(to(server, body=b"hangs")))
        await until(lambda: len(server.received) == 1)
        (connection,) = transport._client._in_flight
        other = asyncio.create_task(transport.send(to(server, timeout_s=5)))
        hanging.cancel()
        connection.data_received(OK)
        with pytest.raises(asyncio.CancelledError) as cancelled:
            await hanging
        assert [response.body for response in cancelled.value.args] == [b"ok"]
        assert cancelled.value.args[0].detail == ""
        assert (await other).status == 200
    assert server.connections == 2


@pytest.mark.system
async def test_a_connection_with_an_unsolicited_response_is_used_once() -> None:
    """Otherwise its next response would be matched to the request after it."""

    async def script(connection: Connection) -> None:
        await connection.send(OK)
        await spoken.wait()
        while True:
            await connection.request()
            await connection.send(OK)

    spoken = asyncio.Event()
    async with serving(script) as server, closing(HttpTransport(LOOPBACK)) as transport:
        connecting = transport._client._opener
        opened = connecting.open

        async def late(*args: Any) -> Any:
            connection = await opened(*args)
            await until(lambda: connection._early == OK)
            return connection

        connecting.open = late  # type: ignore[method-assign]
        for _ in range(2):
            assert (await transport.send(to(server))).status == 200
        spoken.set()
    assert server.connections == 2


@pytest.mark.system
async def test_idle_connections_are_limited_to_a_bounded_number_of_targets() -> None:
    """Connections of the least recently used target are closed; those in use stay open."""
    made = HttpTransport(LOOPBACK, idle_bytes_max=2 * pool.PLAIN_BYTES)
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(closing(made))
        servers = [await stack.enter_async_context(serving(respond_with(OK))) for _ in range(3)]
        for n in (0, 1, 0, 2):
            assert (await transport.send(to(servers[n]))).status == 200
        await servers[1].ended()
        assert [bool(server._tasks) for server in servers] == [True, False, True]
        for n in (0, 1, 2):
            assert (await transport.send(to(servers[n]))).status == 200
        assert [server.connections for server in servers] == [1, 2, 2]


@pytest.mark.system
async def test_an_idle_connection_counts_with_the_memory_that_it_takes(
    certificates: Certificates,
) -> None:
    made = HttpTransport(
        LOOPBACK,
        tls=certificates.client,
        idle_bytes_max=pool.ASYNCIO_TLS_BYTES + 2 * pool.PLAIN_BYTES,
    )
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(closing(made))
        tls = (None, certificates.server, None, certificates.server)
        servers = [await stack.enter_async_context(serving(respond_with(OK), s)) for s in tls]
        for server in servers:
            assert (await transport.send(to(server))).status == 200
        for server in servers[:2]:
            await server.ended()
        assert [bool(server._tasks) for server in servers] == [False, False, True, True]


@pytest.mark.system
@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
async def test_idle_connections_are_closed_for_a_new_one(
    certificates: Certificates, monkeypatch: pytest.MonkeyPatch, encrypted: bool
) -> None:
    """No request fails for want of a descriptor that an idle connection has."""
    tls = certificates.server if encrypted else None
    async with AsyncExitStack() as stack:
        servers = [
            await stack.enter_async_context(serving(respond_with(OK), tls)) for _ in "123456"
        ]
        limit_descriptors(monkeypatch, 5)
        made = HttpTransport(LOOPBACK, tls=certificates.client)
        transport = await stack.enter_async_context(closing(made))
        for server in servers * 2:
            assert (await transport.send(to(server))).status == 200
        # One of them closes what the other one needs, too.
        both = await asyncio.gather(*(transport.send(to(server)) for server in servers[:2]))
        assert [each.status for each in both] == [200, 200]
        assert sum(server.connections for server in servers) > len(servers)


@pytest.mark.system
async def test_some_descriptors_are_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that have no descriptor fail before those of the database and of listeners do."""

    async def script(connection: Connection) -> None:
        await connection.request()
        await respond.wait()
        await connection.send(OK)

    respond = asyncio.Event()
    async with serving(script) as server:
        limit_descriptors(monkeypatch, 5)
        async with closing(HttpTransport(LOOPBACK)) as transport:
            sending = [asyncio.create_task(transport.send(to(server))) for _ in range(8)]
            await until(lambda: any(each.done() for each in sending))
            respond.set()
            results = await asyncio.gather(*sending)
            failed = {each.detail for each in results if each.failure is Failure.LOCAL}
            assert failed == {"too many open files"}
            assert any(each.status == 200 for each in results)
            # Nothing is left behind by those that failed.
            assert (await transport.send(to(server))).status == 200


def limit_descriptors(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Let transports open sockets only as this number of the lowest free descriptors."""
    taken = [os.dup(0) for _ in range(free)]
    for each in taken:
        os.close(each)
    monkeypatch.setattr(descriptors, "_descriptors_max", lambda: (max(taken) + 1) * 8 / 7)


ANNOUNCED = {
    "timeout=5": 4,
    "timeout=5, max=100": 4,
    "max=100,timeout = 60": 59,
    "TIMEOUT=2": 1,
    "max=100": None,
    "timeout=": None,
    "timeout=-5": None,
    "timeout=1e3": None,
    "timeout=99999999999": None,
    "mytimeout=9": None,
}
"""Idle seconds by what a receiver announces in `Keep-Alive`; None: as without it."""


@pytest.mark.system
@pytest.mark.parametrize("value", ANNOUNCED)
async def test_an_idle_connection_ends_a_second_before_the_receiver_closes_it(value: str) -> None:
    response = OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: %s\r\n\r\n" % value.encode())
    async with serving(respond_with(response)) as server, closing(HttpTransport(LOOPBACK)) as it:
        for _ in range(2):  # The second one is a cached response.
            assert (await it.send(to(server))).status == 200
            ((connection,),) = it._client._pools._idle.values()
            idle_s = connection.idle_until - asyncio.get_running_loop().time()
            expected_s = ANNOUNCED[value] or KEEP_ALIVE_S
            assert expected_s - 1 < idle_s <= expected_s + 0.01
        connection.idle_until = 0.0
        assert (await it.send(to(server))).status == 200
    assert server.connections == 2


@pytest.mark.system
async def test_a_connection_is_not_kept_for_less_than_a_second() -> None:
    response = OK.replace(b"\r\n\r\n", b"\r\nKeep-Alive: timeout=1\r\n\r\n")
    async with serving(respond_with(response)) as server, closing(HttpTransport(LOOPBACK)) as it:
        assert (await it.send(to(server))).status == 200
        assert it._client._pools._idle == {}


@pytest.mark.parametrize(
    ("flood", "limit_bytes"),
    [
        (b"HTTP/1.1 200 OK\r\n" + b"a:b\r\n" * 13_000, HEADER_COUNT_MAX * 5),
        (b"HTTP/1.1 103 Hints\r\n\r\n" * 3_000, INTERIM_MAX * 22),
        (CHUNKED_HEAD + b"1\r\nx\r\n" * 20_000, BODY_RAW_BYTES_MAX),
    ],
    ids=["headers", "interim responses", "chunks"],
)
def test_little_is_parsed_beyond_a_limit(flood: bytes, limit_bytes: int) -> None:
    """The parser calls back for each header and chunk of what it is fed, which takes its time."""
    reader, parsed = ResponseReader({}), 0
    parser: Any = reader._parser

    class Counting:
        def feed_data(self, data: bytes) -> None:
            nonlocal parsed
            parsed += len(data)
            parser.feed_data(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(parser, name)

    reader._parser = cast("Any", Counting())
    assert reader.feed(flood)
    assert reader.broken
    assert parsed <= limit_bytes + 2 * PIECE_BYTES
