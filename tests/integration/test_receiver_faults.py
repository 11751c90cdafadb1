"""Faulty receivers, through a whole relay on the real transport: the others are not delayed, the
log names the fault, and no resources leak.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import defaultdict
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.destinations.http.transport import HttpTransport
from outbox.network.egress import EgressPolicy
from tests.destinations.servers import OK, Connection, RawServer, serving
from tests.support.ports import free_port
from tests.support.relay import add_endpoint, all_ended, exceptions, fetchval, publish, running
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from tests.support.postgres import Database

    Script = Callable[["Receiver", Connection], Awaitable[None]]

pytestmark = pytest.mark.one_major

LANES = 2
EVENTS = 12
TIMEOUT_S = 0.3
IN_FLIGHT_MAX = 24
SHARE = IN_FLIGHT_MAX // 8
"""For a new endpoint without a success, while all slots are free."""
ENDLESS_BYTES_MAX = 8 << 20
"""The bytes of an endless response that may be sent before the connection is closed; most of them
are in the kernel's buffers.
"""


class Receiver:
    """Misbehaves until it is repaired, and then accepts everything."""

    def __init__(self, misbehave: Script | None) -> None:
        self.misbehave = misbehave
        self.cured = misbehave is None
        self.got: dict[str, list[int]] = defaultdict(list)
        self.sent_bytes_max = 0
        self.opened = 0
        self.closed = 0

    async def script(self, connection: Connection) -> None:
        self.opened += 1
        try:
            while True:
                if not self.cured:
                    assert self.misbehave is not None
                    await self.misbehave(self, connection)
                    return
                body = orjson.loads((await connection.request()).body)
                if self.cured:
                    self.accept(body)
                    await connection.send(OK)
        finally:
            self.closed += 1

    def accept(self, body: Mapping[str, object]) -> None:
        sequences = self.got[str(body["lane"])]
        if body["sequence"] not in sequences:
            sequences.append(int(str(body["sequence"])))


async def hang(_: Receiver, connection: Connection) -> None:
    await connection.request()
    await connection.closed_by_peer()


async def drip(_: Receiver, connection: Connection) -> None:
    await connection.request()
    while True:
        await connection.drip(b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 200)


async def reset(_: Receiver, connection: Connection) -> None:
    await connection.request()
    connection.reset()


async def reset_at_once(_: Receiver, connection: Connection) -> None:
    connection.reset()


async def garbage(_: Receiver, connection: Connection) -> None:
    await connection.request()
    await connection.send(b"\x00\xff" * 500 + b"\r\n\r\n")


async def half(_: Receiver, connection: Connection) -> None:
    await connection.request()
    await connection.send(b"HTTP/1.1 200 OK\r\nContent-Le")


async def endless_head(_: Receiver, connection: Connection) -> None:
    await connection.request()
    await connection.send(b"HTTP/1.1 200 OK\r\n")
    while True:
        await connection.send(b"X-A: " + b"a" * 1000 + b"\r\n")


async def endless(receiver: Receiver, connection: Connection) -> None:
    """A success: the status line decides."""
    receiver.accept(orjson.loads((await connection.request()).body))
    await connection.send(b"HTTP/1.1 200 OK\r\n\r\n")
    sent = 0
    try:
        while True:
            await connection.send(b"x" * 65536)
            sent += 65536
    finally:
        receiver.sent_bytes_max = max(receiver.sent_bytes_max, sent)


MISBEHAVIOUR: dict[str, Script] = {
    "hangs": hang,
    "drips": drip,
    "resets": reset,
    "resets at once": reset_at_once,
    "garbage": garbage,
    "half": half,
    "endless head": endless_head,
}
SUCCESSFUL: dict[str, Script] = {"endless": endless}

LATE = "within 0.3 s"
LOGGED = {
    "refuses": "onnection refused at ",
    "hangs": LATE,
    "drips": LATE,
    "resets": "reset",
    "resets at once": "reset",
    "garbage": "not an HTTP response",
    "half": "closed before a response",
    "endless head": "response head larger than 65536 bytes",
}


@asynccontextmanager
async def delivering(database: Database) -> AsyncIterator[None]:
    """A relay with the HTTP transport."""
    policy = EgressPolicy((ipaddress.ip_network("127.0.0.0/8"),))
    transport = HttpTransport(policy)
    try:
        async with running(database, transport, in_flight_max=IN_FLIGHT_MAX):
            yield
    finally:
        await transport.aclose()


async def _logged(database: Database, name: str) -> bool:
    """Whether the attempt log of an endpoint contains only its fault, and timeouts: on a busy
    machine every receiver may be late.
    """
    found = await fetchval(
        database,
        """SELECT bool_or(said) AND bool_and(said OR late)
             FROM (SELECT position($2 IN coalesce(a.error, '')) > 0 AS said,
                          position($3 IN coalesce(a.error, '')) > 0 AS late
                     FROM attempt a
                     JOIN lane l ON l.id = a.lane_id JOIN endpoint e ON e.id = l.endpoint_id
                    WHERE e.name = $1) AS attempts""",
        name,
        LOGGED[name],
        LATE,
    )
    return found is True


async def test_faulty_receivers_do_not_delay_others_and_leak_no_resources(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MIN_S", 0.02)
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MAX_S", 0.1)
    bad = {name: Receiver(script) for name, script in (MISBEHAVIOUR | SUCCESSFUL).items()}
    good = {f"good {n}": Receiver(None) for n in range(3)}
    late = Receiver(None)
    retry = {"base_s": 0.02, "factor": 1.5, "cap_s": 0.1, "attempts_max": 10_000}
    late_port = free_port()
    async with AsyncExitStack() as stack:
        urls = {"refuses": f"http://127.0.0.1:{late_port}/"}
        for name, receiver in (bad | good).items():
            server = await stack.enter_async_context(serving(receiver.script))
            urls[name] = server.url
        for name, url in urls.items():
            await add_endpoint(database, name, url=url, lanes=LANES, retry=retry)
        await fetchval(
            database, "UPDATE endpoint SET timeout_s = $1, connect_timeout_s = $1", TIMEOUT_S
        )
        async with delivering(database):
            for n in range(EVENTS):
                await publish(database, n, key=f"key-{n}")

            def complete(receiver: Receiver) -> bool:
                return sum(map(len, receiver.got.values())) == EVENTS

            # The healthy receivers get everything while all others misbehave.
            await until(
                lambda: all(map(complete, good.values())), what="the good ones to be served"
            )
            for name in LOGGED:
                await until(
                    lambda name=name: _logged(database, name),
                    what=f"{name}: {LOGGED[name]} in the log",
                )
            # An endless response is a response.
            await until(lambda: complete(bad["endless"]), what="the endless one to be served")
            assert bad["endless"].sent_bytes_max < ENDLESS_BYTES_MAX
            for receiver in bad.values():
                receiver.cured = True
            begun = RawServer(late.script)
            listener = await asyncio.start_server(begun.accept, "127.0.0.1", late_port)
            await all_ended(database, 30)
            listener.close()
            await begun.stop()
        for receiver in (*bad.values(), *good.values(), late):
            await until(lambda each=receiver: each.opened == each.closed, what="no connection left")
            assert all(each == sorted(each) for each in receiver.got.values())
            assert complete(receiver)
    assert await fetchval(database, "SELECT count(*) FROM dead_letter") == 0
    assert await exceptions(database) == {}


@pytest.mark.full
@pytest.mark.slow
async def test_failed_requests_release_their_slots(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MIN_S", 0.02)
    monkeypatch.setattr("outbox.core.delivery.circuit_breaker.PROBE_MAX_S", 0.1)
    at_once = 0
    full = asyncio.Event()

    async def wait_for_all(connection: Connection) -> None:
        """Respond only when the concurrency limit of a new endpoint is reached."""
        nonlocal at_once
        while True:
            await connection.request()
            at_once += 1
            if at_once == SHARE:
                full.set()
            await full.wait()
            await connection.send(OK)

    retry = {"base_s": 0.02, "factor": 1.5, "cap_s": 0.1, "attempts_max": 2}
    async with AsyncExitStack() as stack:
        for name, script in MISBEHAVIOUR.items():
            server = await stack.enter_async_context(serving(Receiver(script).script))
            await add_endpoint(database, name, url=server.url, types=["bad"], retry=retry)
        await fetchval(
            database, "UPDATE endpoint SET timeout_s = $1, connect_timeout_s = $1", TIMEOUT_S
        )
        async with delivering(database):
            for n in range(4):
                await publish(database, n, type="bad")
            await all_ended(database, 60)
            server = await stack.enter_async_context(serving(wait_for_all))
            await add_endpoint(
                database, "wide", url=server.url, types=["good"], lanes=4 * IN_FLIGHT_MAX
            )
            for n in range(4 * IN_FLIGHT_MAX):
                await publish(database, n, type="good", key=f"key-{n}")
            await asyncio.wait_for(full.wait(), 20)
            await all_ended(database, 30)
    assert await exceptions(database) == {}
