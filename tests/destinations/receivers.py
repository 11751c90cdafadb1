"""Tests that every transport must pass against hostile receivers; see `tests.support.hostile`."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from outbox.core.model.response import DETAIL_CHARS_MAX, RESPONSE_BODY_BYTES_MAX, Failure
from outbox.destinations.http.limits import HEADER_BYTES_MAX
from tests.destinations.conformance import LOOPBACK, Make, closing, drain_in_flight, to
from tests.destinations.servers import OK, Connection, serving
from tests.support.hostile import OUTCOMES, SCRIPTS
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.destinations.interface import Transport

TOTAL_S = 0.5
PATIENT_S = 5.0
"""Time-out in seconds of requests that fail by content: a busy machine must not cause a time-out.
"""
LATE_S = 10.0
"""Tolerance in seconds for a busy machine; every drip lasts longer."""
MEMORY_BYTES_MAX = 3_000_000


class HostileReceivers:
    """Inherit from this class beside `TransportConformance`."""

    @pytest.mark.parametrize("kind", SCRIPTS)
    async def test_a_hostile_receiver_ends_with_a_bounded_result_in_time(
        self, transport: Transport, kind: str
    ) -> None:
        expected = OUTCOMES[kind]
        refused = not isinstance(expected, int) and Failure.TIMEOUT not in expected
        total_s = PATIENT_S if refused else TOTAL_S
        tracemalloc.start()
        try:
            async with serving(SCRIPTS[kind]) as server:
                request = to(server, timeout_s=total_s)
                before = tracemalloc.get_traced_memory()[0]
                response = await transport.send(request)
                taken = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        if isinstance(expected, int):
            assert (response.status, response.failure) == (expected, None)
        else:
            assert response.status is None
            assert response.failure in expected
        assert response.elapsed_s < total_s + LATE_S
        assert len(response.body) <= RESPONSE_BODY_BYTES_MAX
        assert sum(len(n) + len(v) for n, v in response.headers) <= HEADER_BYTES_MAX
        assert len(response.detail) <= DETAIL_CHARS_MAX
        assert response.detail.isprintable()
        assert taken < MEMORY_BYTES_MAX, f"{taken:,} bytes for one response"

    @pytest.mark.parametrize("kind", [kind for kind in SCRIPTS if "endless" in kind])
    async def test_a_flood_is_cut_off_without_waiting(
        self, transport: Transport, kind: str
    ) -> None:
        async with serving(SCRIPTS[kind]) as server:
            response = await transport.send(to(server, timeout_s=60))
            assert response.failure is not Failure.TIMEOUT
            assert response.elapsed_s < LATE_S
            await until(lambda: not server._tasks, what="the connection to be closed")

    @pytest.mark.parametrize("kind", ["a gzip bomb", "a bomb of chunks of gzip"])
    async def test_compression_bombs_of_successes_are_not_decoded(
        self, transport: Transport, kind: str
    ) -> None:
        async with serving(SCRIPTS[kind]) as server:
            response = await transport.send(to(server))
        assert response.body == b"(encoded: gzip)"

    @pytest.mark.parametrize(
        "kind",
        [
            "a second response",
            "a body where none may be",
            "a length and chunks",
            "a flood when it is idle",
        ],
    )
    async def test_excess_response_bytes_are_not_matched_to_another_request(
        self, transport: Transport, kind: str
    ) -> None:
        hostile = True

        async def script(connection: Connection) -> None:
            if hostile:
                await SCRIPTS[kind](connection)
            else:
                await connection.request()
                await connection.send(b"HTTP/1.1 503 Real\r\nContent-Length: 0\r\n\r\n")

        async with serving(script) as server:
            await transport.send(to(server))
            hostile = False
            if kind == "a flood when it is idle":
                # The drip begins at an unknown time.
                await until(lambda: not server._tasks, what="the connection to be closed")
            await drain_in_flight(transport)
            assert (await transport.send(to(server))).status == 503
        assert server.connections == 2

    async def test_unsolicited_bytes_on_an_idle_connection_close_it(
        self, transport: Transport
    ) -> None:
        """An idle connection is not kept to read unsolicited bytes."""

        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(OK)
            await asked.wait()
            await connection.send(b"HTTP/1.1 200 Forged\r\nContent-Length: 99\r\n\r\n")
            await connection.closed_by_peer()

        asked = asyncio.Event()
        async with serving(script) as server:
            assert (await transport.send(to(server))).status == 200
            asked.set()
            await until(lambda: server.closed_by_peer == 1)

    async def test_two_hundred_hostile_receivers_delay_no_others(self, make: Make) -> None:
        """A good receiver responds while exchanges with every hostile kind are in progress."""
        transport = make(LOOPBACK)
        async with closing(transport), serving(SCRIPTS["hangs"]) as hanging:
            slow = [
                asyncio.ensure_future(transport.send(to(hanging, timeout_s=60))) for _ in range(200)
            ]
            await until(lambda: len(hanging.received) == 200)
            await drain_in_flight(transport)
            for each in slow:
                each.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
