"""Late bytes of lost calls, time-outs, closed connections and limits of a real Valkey server."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest

from outbox.core.brokers.port import Appended, Fenced, Position, Stop, StopKind
from outbox.network.tls import Tls
from outbox_brokers.redis.connection import _OwnStreams
from outbox_devtools.destination_suite import IN_DOUBT, cutting, open_lane
from packages.brokers.tests.test_redis import (
    LANE,
    OTHER,
    OWNER,
    connected,
    message,
    messages,
)
from tests.destinations.authority import Authority
from tests.support.brokers.valkey import valkey
from tests.support.tcp import listening
from tests.support.waiting import ends_by, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.brokers.valkey import Valkey

AGAIN = OWNER._replace(opening=OWNER.opening + 1)
"""The same owner, when it opens the lane again."""


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Valkey]:
    async with valkey(tmp_path / "valkey") as running:
        yield running


async def is_idle(server: Valkey) -> bool:
    """Whether the server has executed all that clients have sent, and they are gone."""
    clients = await server.command("CLIENT", "LIST")
    return len(clients.splitlines()) == 1


@pytest.mark.system
@pytest.mark.parametrize("side", ["requests", "responses"])
@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.full)])
async def test_an_append_cut_after_any_byte_is_stored_once_or_not_at_all(
    server: Valkey, side: str, step: int
) -> None:
    """What the lane stands at is what the stream has, and the append can go on from there."""
    async with (
        cutting(server.port) as (proxy, port),
        connected(f"redis://127.0.0.1:{port}/events") as broker,
    ):
        at, outcomes, opening = 0, set(), 0

        async def opened() -> Position | None:
            nonlocal opening
            opening += 1
            standing = await broker.open(LANE, OWNER._replace(opening=opening), at, None)
            # The proxy may still close the connection, after the last byte of the response.
            return standing if isinstance(standing, Position) else None

        for cut in range(0 if side == "responses" else 1, 900, step):
            assert await until(opened) == position(at)
            if side == "requests":
                proxy.request_bytes_max = cut
            else:
                proxy.response_bytes_max = cut
            owner = OWNER._replace(opening=opening)
            appended = await broker.append(LANE, owner, at, messages(at + 1, at + 2))
            was_cut = 0 in (proxy.request_bytes_max, proxy.response_bytes_max)
            proxy.request_bytes_max = proxy.response_bytes_max = None
            standing = await until(opened, what="the lane")
            assert standing in (position(at), position(at + 2))
            stop = appended.stop
            outcomes.add((stop and stop.kind, standing == position(at)))
            if stop is None:
                assert standing == position(at + 2)
            at = standing.sequence
            if not was_cut:
                break
        else:
            pytest.fail("the append has more bytes than the test cuts")
    assert outcomes & {(kind, side == "requests") for kind in IN_DOUBT}
    assert (None, False) in outcomes
    assert await server.sequences(LANE) == list(range(1, at + 1))


def position(sequence: int) -> Position:
    return Position(sequence, f"delivery-{sequence}" if sequence else None)


@pytest.mark.system
@pytest.mark.parametrize("reopened", [True, False])
async def test_a_lost_append_is_not_stored_after_its_owner_opened_the_lane_again(
    server: Valkey, reopened: bool
) -> None:
    """The position is final: the next delivery may be a dead letter by then."""
    async with (
        cutting(server.port) as (proxy, port),
        connected(f"redis://127.0.0.1:{port}/events", timeout_s=0.3) as broker,
        connected(server.url()) as again,
    ):
        await open_lane(broker, LANE, OWNER)
        proxy.requests_pass.clear()
        lost = await broker.append(LANE, OWNER, 0, messages(1, 2))
        assert lost.stop is not None
        assert lost.stop.kind is StopKind.UNKNOWN
        if reopened:
            assert await again.open(LANE, AGAIN, 0, None) == Position(0, None)
        proxy.requests_pass.set()
        await until(lambda: is_idle(server) if not reopened else server.command("PING"))
        if reopened:
            # On the way of the late bytes, so after them.
            await open_lane(broker, OTHER, OWNER)
    await until(lambda: is_idle(server), what="the end of all clients")
    assert await server.sequences(LANE) == ([] if reopened else [1, 2])


@pytest.mark.system
async def test_what_a_frozen_server_has_taken_is_not_stored_after_the_lane_was_opened(
    server: Valkey,
) -> None:
    """It reads the large append bit by bit, and opens the lane in between."""
    async with connected(server.url(), timeout_s=0.5) as broker:
        await open_lane(broker, LANE, OWNER)
        server.freeze()
        lost = await broker.append(LANE, OWNER, 0, [message(n, 200_000) for n in range(1, 41)])
        assert lost.stop is not None
        assert lost.stop.kind is StopKind.UNKNOWN
        server.thaw()
        position = await open_lane(broker, LANE, AGAIN)
    await until(lambda: is_idle(server), what="the end of all clients")
    stored = await server.sequences(LANE)
    assert (stored[-1] if stored else 0) == position.sequence


@pytest.mark.system
async def test_a_late_opening_does_not_end_a_later_one(server: Valkey) -> None:
    async with connected(server.url()) as broker:
        await broker.open(LANE, AGAIN, 0, None)
        late = await broker.open(LANE, OWNER, 0, None)
        assert late == Fenced(OWNER.epoch)
        assert await broker.append(LANE, AGAIN, 0, messages(1)) == Appended(1)


@pytest.mark.system
async def test_an_append_needs_the_fence_of_its_opening(server: Valkey) -> None:
    """Without the fence, what a former owner sends late could not be told apart."""
    async with connected(server.url()) as broker:
        await broker.open(LANE, OWNER, 0, None)
        await broker.append(LANE, OWNER, 0, messages(1))
        await server.command("DEL", f"events:{{{LANE}}}:owner")
        for owner in (OWNER, AGAIN):
            stop = (await broker.append(LANE, owner, 1, messages(2))).stop
            assert stop is not None
            assert stop.kind is StopKind.MOVED
        assert await broker.open(LANE, AGAIN, 1, None) == Position(1, "delivery-1")
        assert await broker.append(LANE, AGAIN, 1, messages(2)) == Appended(2)


@pytest.mark.slow
@pytest.mark.system
async def test_a_dropped_connection_sends_nothing_that_it_has_buffered(server: Valkey) -> None:
    async with connected(server.url(), timeout_s=0.5) as broker:
        await open_lane(broker, LANE, OWNER)
        server.freeze()
        await broker.append(LANE, OWNER, 0, [message(1, 40_000_000)])
        server.thaw()
    await until(lambda: is_idle(server), what="the end of all clients")
    assert await server.sequences(LANE) == []


@pytest.mark.system
async def test_every_call_ends_in_its_own_time(server: Valkey) -> None:
    """Also one that waited for a group before it."""
    loop = asyncio.get_running_loop()
    async with connected(server.url(), timeout_s=0.5) as broker:
        await open_lane(broker, LANE, OWNER)
        server.freeze()
        try:
            first = asyncio.create_task(broker.append(LANE, OWNER, 0, messages(1)))
            await asyncio.sleep(0)
            opening = asyncio.create_task(broker.open(OTHER, OWNER, 0, None))
            assert await ends_by(opening, loop.time() + 0.8)
            second, stop = await opening, (await first).stop
        finally:
            server.thaw()
    assert stop is not None
    assert stop.kind is StopKind.UNKNOWN
    assert isinstance(second, Stop)


@pytest.mark.system
async def test_a_cancelled_reader_does_not_end_the_others(server: Valkey) -> None:
    async with (
        cutting(server.port) as (proxy, port),
        connected(f"redis://127.0.0.1:{port}/events") as broker,
    ):
        await broker.open(LANE, OWNER, 0, None)
        proxy.requests_pass.clear()
        first = asyncio.create_task(broker.append(LANE, OWNER, 0, messages(1)))
        beside = asyncio.create_task(broker.open(OTHER, OWNER, 0, None))
        await until(lambda: proxy.held_bytes, what="the group")
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        proxy.requests_pass.set()
        assert await beside == Position(0, None)


@pytest.mark.system
async def test_a_call_that_waits_for_a_connection_is_not_sent_after_its_end(
    server: Valkey,
) -> None:
    async with connected(server.url(), timeout_s=0.3) as broker:
        await open_lane(broker, LANE, OWNER)
        server.freeze()
        first = asyncio.create_task(broker.open(OTHER, OWNER, 0, None))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        cancelled = asyncio.create_task(broker.append(LANE, OWNER, 0, messages(1)))
        await asyncio.sleep(0)
        cancelled.cancel()
        with suppress(asyncio.CancelledError):
            await cancelled
        assert isinstance(await first, Stop)
        server.thaw()
        assert await open_lane(broker, LANE, OWNER) == Position(0, None)


@pytest.mark.system
async def test_an_idle_connection_that_the_server_closed_is_replaced(server: Valkey) -> None:
    """Servers have a time-out for idle clients."""
    async with connected(server.url()) as broker:
        await broker.open(LANE, OWNER, 0, None)
        await server.command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await until(lambda: not broker._connection._connection.is_usable)  # type: ignore[union-attr]
        assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)


@pytest.mark.system
async def test_a_closed_broker_opens_no_connection(server: Valkey) -> None:
    async with connected(server.url()) as broker:
        await broker.open(LANE, OWNER, 0, None)
        server.freeze()
        in_flight = asyncio.create_task(broker.append(LANE, OWNER, 0, messages(1)))
        await asyncio.sleep(0.01)
        await broker.aclose()
        stop = (await in_flight).stop
        server.thaw()
        assert stop is not None
        assert stop.kind is StopKind.UNKNOWN
        closed = await broker.open(LANE, OWNER, 0, None)
        assert isinstance(closed, Stop)
        assert closed.kind is StopKind.UNAVAILABLE


@pytest.mark.system
async def test_a_primary_that_became_a_replica_is_left(server: Valkey, tmp_path: Path) -> None:
    """The address may lead to the new primary by then."""
    async with (
        valkey(tmp_path / "other") as other,
        cutting(server.port) as (proxy, port),
        connected(f"redis://127.0.0.1:{port}/events") as broker,
    ):
        await broker.open(LANE, OWNER, 0, None)
        await server.command("REPLICAOF", "127.0.0.1", other.port)
        stop = (await broker.append(LANE, OWNER, 0, messages(1))).stop
        assert stop is not None
        assert stop.kind is StopKind.UNAVAILABLE
        proxy.target_port = other.port
        assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
        assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)
        assert await other.sequences(LANE) == [1]


@pytest.mark.system
async def test_a_message_above_the_servers_limit_is_refused_alone(server: Valkey) -> None:
    await server.command("CONFIG", "SET", "proto-max-bulk-len", 1024 * 1024)
    large = message(2, 1_500_000)
    async with connected(server.url()) as broker:
        await broker.open(LANE, OWNER, 0, None)
        for after, given, through in ((0, [message(1), large, message(3)], 1), (1, [large], 1)):
            appended = await broker.append(LANE, OWNER, after, given)
            assert appended.through == through
            assert appended.stop is not None
            assert appended.stop.kind is StopKind.REFUSED
        fits = message(3, 1024 * 1024 - 100)
        assert await broker.append(LANE, OWNER, 1, [fits, message(4)]) == Appended(4)
    assert await server.sequences(LANE) == [1, 3, 4]


@pytest.mark.system
async def test_too_many_clients_are_not_a_mistake_of_the_endpoint(server: Valkey) -> None:
    async with connected(server.url()) as first, connected(server.url()) as second:
        await first.open(LANE, OWNER, 0, None)
        await server.command("CONFIG", "SET", "maxclients", 1)
        opened = await second.open(LANE, OWNER, 0, None)
        assert isinstance(opened, Stop)
        assert opened.kind is StopKind.UNAVAILABLE


@pytest.mark.system
@pytest.mark.parametrize("response", [b":5\r\n", b"*0\r\n", b"*1\r\n$5\r\nWHAT?\r\n", b"$-1\r\n"])
async def test_a_server_that_is_something_else_raises_nothing(response: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(65536):
            writer.write(response)

    async with (
        listening(serve) as port,
        connected(f"redis://127.0.0.1:{port}/events", timeout_s=2) as broker,
    ):
        opened = await broker.open(LANE, OWNER, 0, None)
        assert isinstance(opened, Stop)
        assert opened.kind is StopKind.MISCONFIGURED
        appended = await broker.append(LANE, OWNER, 0, messages(1))
        assert appended.through == 0
        assert appended.stop is not None
        assert (await broker.check([LANE]))[0].is_error


@pytest.mark.system
async def test_a_server_that_speaks_no_redis_is_no_end_of_the_broker() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with (
        listening(serve) as port,
        connected(f"redis://127.0.0.1:{port}/events", timeout_s=1) as broker,
    ):
        for _ in range(2):
            opened = await broker.open(LANE, OWNER, 0, None)
            assert isinstance(opened, Stop)
            assert opened.kind is StopKind.UNKNOWN


@asynccontextmanager
async def encrypted(server: Valkey, context: ssl.SSLContext) -> AsyncIterator[int]:
    """A TLS terminator in front of a server."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", server.port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with suppress(OSError, ssl.SSLError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, server_writer), pump(server_reader, writer))

    terminator = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield terminator.sockets[0].getsockname()[1]
    finally:
        terminator.close()


@pytest.mark.system
async def test_tls_verifies_the_name_with_the_endpoints_authority(server: Valkey) -> None:
    ours, other = Authority("ours"), Authority("other")
    async with encrypted(server, ours.server("127.0.0.1")) as port:
        url = f"rediss://127.0.0.1:{port}/events"
        async with connected(url, tls=Tls(ca=ours.pem)) as broker:
            assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
            assert await broker.append(LANE, OWNER, 0, messages(1)) == Appended(1)
        for tls in (Tls(ca=other.pem), None):
            async with connected(url, tls=tls) as broker:
                opened = await broker.open(LANE, OWNER, 0, None)
                assert isinstance(opened, Stop)
                assert opened.kind is StopKind.MISCONFIGURED
                assert "certificate verify failed" in opened.detail
    async with (
        encrypted(server, ours.server("another.example")) as port,
        connected(f"rediss://127.0.0.1:{port}/events", tls=Tls(ca=ours.pem)) as broker,
    ):
        opened = await broker.open(LANE, OWNER, 0, None)
        assert isinstance(opened, Stop)
        assert opened.kind is StopKind.MISCONFIGURED


@pytest.mark.system
async def test_a_client_certificate_is_shown(server: Valkey) -> None:
    ours = Authority("ours")
    chain, key = ours.identity()
    async with encrypted(server, ours.server("127.0.0.1", clients=ours)) as port:
        url = f"rediss://127.0.0.1:{port}/events"
        async with connected(url, tls=Tls(ca=ours.pem, identity=chain + key)) as broker:
            assert await broker.open(LANE, OWNER, 0, None) == Position(0, None)
        async with connected(url, tls=Tls(ca=ours.pem), timeout_s=2) as broker:
            assert isinstance(await broker.open(LANE, OWNER, 0, None), Stop)


@pytest.mark.system
async def test_a_missing_right_and_a_wrong_key_are_found_by_the_check(server: Valkey) -> None:
    await server.command("ACL", "SETUSER", "relay", "on", ">secret", "~*", "+@all", "-xadd")
    async with connected(server.url(), credentials="relay:secret") as broker:
        (finding,) = await broker.check([LANE, OTHER])
        assert finding.is_error
        assert finding.what == "no right to run XADD"
    await server.command("ACL", "SETUSER", "relay", "+@all", "-info")
    async with connected(server.url(), credentials="relay:secret") as broker:
        (finding,) = await broker.check([LANE])
        assert not finding.is_error
    await server.command("SET", f"events:{{{LANE}}}", "text")
    async with connected(server.url()) as broker:
        (finding,) = await broker.check([LANE, OTHER])
        assert finding.is_error
        assert f"events:{{{LANE}}} is no stream" in finding.what
    # The check wrote nothing.
    assert await server.command("DBSIZE") == 1


def test_the_client_library_still_opens_connections_by_one_method() -> None:
    """`_OwnStreams` replaces it; another way around it would avoid the egress policy."""
    assert "_connect" in vars(_OwnStreams)
    assert "_connect" in vars(_OwnStreams.__mro__[1])
