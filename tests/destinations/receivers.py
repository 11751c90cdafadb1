"""What every transport has to do with receivers that mean harm; see `tests.support.hostile`."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING

import pytest

from outbox.core.model.response import BODY_BYTES_MAX, DETAIL_CHARS_MAX, Failure
from outbox.destinations.http.limits import HEADER_BYTES_MAX
from tests.destinations.conformance import LOOPBACK, Make, closing, meanwhile, to
from tests.destinations.servers import OK, Connection, serving
from tests.support.hostile import BOMB, OUTCOMES, SCRIPTS
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.destinations.interface import Transport

TOTAL_S = 0.5
PATIENT_S = 5.0
"""Of what is refused for what it says: on a busy machine that must not look like a time-out."""
LATE_S = 10.0
"""A machine that is busy with other tests may be late by so much, and no drip lasts as long."""
MEMORY_BYTES_MAX = 3_000_000


class HostileReceivers:
    """Inherit beside `TransportConformance`."""

    @pytest.mark.parametrize("kind", SCRIPTS)
    async def test_a_hostile_receiver_gets_a_bounded_answer_in_time(
        self, transport: Transport, kind: str
    ) -> None:
        expected = OUTCOMES[kind]
        refused = not isinstance(expected, int) and Failure.TIMEOUT not in expected
        total_s = PATIENT_S if refused else TOTAL_S
        tracemalloc.start()
        try:
            async with serving(SCRIPTS[kind]) as server:
                request = to(server, total_timeout_s=total_s)
                before = tracemalloc.get_traced_memory()[0]
                answer = await transport.send(request)
                taken = tracemalloc.get_traced_memory()[1] - before
        finally:
            tracemalloc.stop()
        if isinstance(expected, int):
            assert (answer.status, answer.failure) == (expected, None)
        else:
            assert answer.status is None
            assert answer.failure in expected
        assert answer.elapsed_s < total_s + LATE_S
        assert len(answer.body) <= BODY_BYTES_MAX
        assert sum(len(n) + len(v) for n, v in answer.headers) <= HEADER_BYTES_MAX
        assert len(answer.detail) <= DETAIL_CHARS_MAX
        assert answer.detail.isprintable()
        assert taken < MEMORY_BYTES_MAX, f"{taken:,} bytes for one answer"

    @pytest.mark.parametrize("kind", [kind for kind in SCRIPTS if "endless" in kind])
    async def test_what_floods_is_cut_off_and_not_waited_for(
        self, transport: Transport, kind: str
    ) -> None:
        async with serving(SCRIPTS[kind]) as server:
            answer = await transport.send(to(server, total_timeout_s=60))
            assert answer.failure is not Failure.TIMEOUT
            assert answer.elapsed_s < LATE_S
            await until(lambda: not server._tasks, what="the connection to be closed")

    @pytest.mark.parametrize("kind", ["a gzip bomb", "a bomb of chunks of gzip"])
    async def test_bombs_stay_closed(self, transport: Transport, kind: str) -> None:
        async with serving(SCRIPTS[kind]) as server:
            answer = await transport.send(to(server))
        assert answer.body == BOMB[:BODY_BYTES_MAX]

    @pytest.mark.parametrize(
        "kind",
        [
            "a second answer",
            "a body where none may be",
            "a length and chunks",
            "a flood when it is idle",
        ],
    )
    async def test_what_a_receiver_said_too_much_answers_no_other_request(
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
                # It begins some time soon; before that nobody can know.
                await until(lambda: not server._tasks, what="the connection to be closed")
            await meanwhile(transport)
            assert (await transport.send(to(server))).status == 503
        assert server.connections == 2

    async def test_a_word_on_a_quiet_connection_closes_it(self, transport: Transport) -> None:
        """It is not kept until somebody wants it, and takes in what comes meanwhile."""

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

    async def test_two_hundred_of_them_hold_up_nobody(self, make: Make) -> None:
        """A good receiver is answered while every kind of the others is under way."""
        transport = make(LOOPBACK)
        async with closing(transport), serving(SCRIPTS["hangs"]) as hanging:
            slow = [
                asyncio.ensure_future(transport.send(to(hanging, total_timeout_s=60)))
                for _ in range(200)
            ]
            await until(lambda: len(hanging.received) == 200)
            await meanwhile(transport)
            for each in slow:
                each.cancel()
            await asyncio.gather(*slow, return_exceptions=True)
