"""Tests of delivery runs: requests that follow one another on a connection; see `Following`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.response import Failure
from tests.destinations.conformance import LONG_S, PATIENT_S, closing, permission, to
from tests.destinations.servers import OK, Connection, RawServer, respond_with, serving
from tests.support.waiting import until

if TYPE_CHECKING:
    from outbox.core.model.response import AttemptResult
    from outbox.destinations.interface import Request, Transport
    from tests.destinations.conformance import Make


class Run:
    """A run of requests with numbered bodies.

    Args:
        length: requests, with the first one.
        changes: of each request.
    """

    def __init__(self, server: RawServer, length: int = 1_000_000, **changes: Any) -> None:
        self.server = server
        self.length = length
        self.responses: list[AttemptResult] = []
        self.in_flight = 0
        """Its number."""
        self.prepared = 0
        self.reports = 0
        """Of unsolicited data."""
        self.fails = False
        self._changes = {"timeout_s": LONG_S, "on_unsolicited": self.report, **changes}

    def report(self) -> None:
        self.reports += 1

    def request(self, number: int) -> Request:
        self.in_flight = number
        return to(self.server, body=b"%d" % number, **self._changes)

    def follow(self, response: AttemptResult) -> Request | None:
        if response.status != 200 or self.in_flight + 1 >= self.length:
            return None
        self.responses.append(response)
        if self.fails:
            raise RuntimeError("a fault")
        return self.request(self.in_flight + 1)

    def sent(self) -> None:
        self.prepared += 1

    async def send(self, transport: Transport) -> AttemptResult:
        return await transport.send(self.request(0), self)

    @property
    def bodies(self) -> list[bytes]:
        """What arrived."""
        return [each.body for each in self.server.received]


def numbers(count: int) -> list[bytes]:
    return [b"%d" % n for n in range(count)]


def then(*responses: bytes) -> object:
    """Send these responses, one to each request, then wait."""

    async def script(connection: Connection) -> None:
        for response in responses:
            await connection.request()
            await connection.send(response)
        await connection.closed_by_peer()

    return script


BUSY = b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"
ODD = {
    "a failure": BUSY,
    "a refusal": b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    "a duplicate": b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    "a last one": b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n",
}
SURPLUS = {
    "a second response": OK,
    "a part of one": OK[:10],
    "another one": BUSY,
    "a byte": b"x",
    "an empty line": b"\r\n",
    "an interim response": b"HTTP/1.1 100 Continue\r\n\r\n",
    "many responses": OK * 20,
}


class RequestRuns:
    """Inherit from this class beside `TransportConformance`, for a transport that has runs."""

    async def test_requests_follow_on_the_same_connection(self, transport: Transport) -> None:
        async with serving(respond_with(OK)) as server:
            run = Run(server, 50)
            response = await run.send(transport)
            again = await transport.send(to(server, body=b"single"))
        assert (response.status, again.status) == (200, 200)
        assert [each.body for each in run.responses] == [b"ok"] * 49
        assert all(0 < each.elapsed_s < LONG_S for each in [*run.responses, response])
        assert run.bodies == [*numbers(50), b"single"]
        assert (server.connections, run.prepared) == (1, 49)

    async def test_one_request_is_in_flight_at_a_time(self, transport: Transport) -> None:
        early: list[bytes] = []

        async def script(connection: Connection) -> None:
            while True:
                await connection.request()
                try:
                    early.append(await asyncio.wait_for(connection.read(), 0.01))
                except TimeoutError:
                    await connection.send(OK)

        async with serving(script) as server:
            await Run(server, 6).send(transport)
        assert early == []

    @pytest.mark.parametrize("odd", ODD)
    async def test_any_response_that_is_not_plain_ends_the_run(
        self, transport: Transport, odd: str
    ) -> None:
        async with serving(then(OK, OK, ODD[odd])) as server:  # type: ignore[arg-type]
            run = Run(server)
            response = await run.send(transport)
            status = int(ODD[odd][9:12])
            assert (response.status, response.failure) == (status, None)
            assert (len(run.responses), run.in_flight) == (2, 2)
            assert run.bodies == numbers(3)
            assert run.reports == 0

    @pytest.mark.parametrize("surplus", SURPLUS)
    @pytest.mark.parametrize("segments", [1, 2])
    async def test_data_beyond_a_response_ends_the_run_and_is_no_response(
        self, transport: Transport, surplus: str, segments: int
    ) -> None:
        """With two segments, the next response is early: its request was not written yet."""

        async def script(connection: Connection) -> None:
            for _ in range(2):
                await connection.request()
                await connection.send(OK)
            await connection.request()
            if segments == 1:
                await connection.send(OK + SURPLUS[surplus])
            else:
                # Without a pause: both arrive before the sender's event loop reads.
                await connection.send(OK)
                await connection.send(SURPLUS[surplus])
            await connection.closed_by_peer()

        async with serving(script) as server:
            run = Run(server)
            response = await run.send(transport)
            assert (response.status, response.body, response.failure) == (200, b"ok", None)
            assert (len(run.responses), run.in_flight, run.reports) == (2, 2, 1)
            server.script = then(BUSY)  # type: ignore[assignment]
            assert (await transport.send(run.request(3))).status == 503
            assert (server.connections, run.bodies, run.reports) == (2, numbers(4), 1)

    async def test_a_late_second_response_is_noticed_at_the_end_of_the_run(
        self, transport: Transport
    ) -> None:
        """It arrives after the next request, whose response it seems to be: HTTP/1.1 cannot
        prevent that.  From then on each response is taken for that of the next request, and the
        last one is left over.
        """

        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(OK)
            await connection.request()
            await connection.send(OK)
            for _ in range(4):
                await connection.request()
                await connection.send(OK)
            await done.wait()
            await connection.send(OK)
            await connection.closed_by_peer()

        done = asyncio.Event()
        async with serving(script) as server:
            run = Run(server, 6)
            assert (await run.send(transport)).status == 200
            assert (len(run.responses), run.reports) == (5, 0)
            done.set()
            await until(lambda: run.reports, what="the report")
            server.script = then(BUSY)  # type: ignore[assignment]
            assert (await transport.send(run.request(6))).status == 503
            assert (server.connections, run.reports) == (2, 1)

    async def test_without_keep_alive_no_request_follows(self, transport: Transport) -> None:
        async with serving(respond_with(OK)) as server:
            run = Run(server, 5, keep_alive=False)
            for _ in range(3):
                assert (await run.send(transport)).status == 200
            assert (run.responses, run.prepared, run.reports) == ([], 0, 0)
            assert (server.connections, run.bodies) == (3, [b"0"] * 3)
            assert {each.headers["connection"] for each in server.received} == {"close"}

    @pytest.mark.parametrize(
        ("last", "failure"),
        [
            (b"", Failure.TIMEOUT),
            (OK[:20], Failure.TIMEOUT),
            (b"nonsense\r\n\r\n", Failure.PROTOCOL),
        ],
    )
    async def test_a_failure_is_the_result_of_its_own_request(
        self, transport: Transport, last: bytes, failure: Failure
    ) -> None:
        async with serving(then(OK, OK, last)) as server:  # type: ignore[arg-type]
            run = Run(server, timeout_s=PATIENT_S)
            response = await run.send(transport)
        assert (response.status, response.failure) == (None, failure)
        assert run.bodies == numbers(3)
        assert len(run.responses) == 2

    async def test_a_reset_is_the_result_of_its_own_request(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            for _ in range(2 if server.connections == 1 else 0):
                await connection.request()
                await connection.send(OK)
            await connection.request()
            connection.reset()

        async with serving(script) as server:
            run = Run(server)
            response = await run.send(transport)
        assert response.failure is Failure.RESET
        assert len(run.responses) == 2

    async def test_each_request_has_its_own_time_out(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            while True:
                await connection.request()
                await asyncio.sleep(0.3 * PATIENT_S)
                await connection.send(OK)

        async with serving(script) as server:
            run = Run(server, 5, timeout_s=PATIENT_S)
            response = await run.send(transport)
        assert response.status == 200
        assert len(run.responses) == 4

    async def test_a_response_in_pieces_is_followed(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            while True:
                await connection.request()
                await connection.send(OK[:25])
                await asyncio.sleep(0.001)
                await connection.send(OK[25:])

        async with serving(script) as server:
            run = Run(server, 5)
            assert (await run.send(transport)).body == b"ok"
        assert run.bodies == numbers(5)

    async def test_a_cancelled_run_sends_nothing_more(self, transport: Transport) -> None:
        async with serving(respond_with(OK)) as server:
            run = Run(server)
            sending = asyncio.create_task(run.send(transport))
            follow = run.follow

            def cancel_then_follow(response: AttemptResult) -> Request | None:
                if run.in_flight == 5:
                    sending.cancel()
                return follow(response)

            run.follow = cancel_then_follow  # type: ignore[method-assign]
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert run.in_flight <= 6
        assert run.bodies == numbers(run.in_flight + 1)[: len(run.bodies)]

    async def test_a_fault_in_the_run_fails_the_request(self, transport: Transport) -> None:
        async with serving(respond_with(OK)) as server:
            run = Run(server)
            run.fails = True
            response = await run.send(transport)
            assert (response.status, response.failure) == (None, Failure.INTERNAL)
            assert "a fault" in response.detail
            assert (await transport.send(to(server))).status == 200
        assert server.connections == 2

    async def test_each_request_of_a_run_needs_permission(self, transport: Transport) -> None:
        async with serving(respond_with(OK)) as server:
            run = Run(server)
            with pytest.raises(PermissionError):
                await transport.send(run.request(0), run, permission(5))
            assert len(run.responses) == 5
            assert (await transport.send(to(server, body=b"next"))).status == 200
        assert run.bodies == [*numbers(5), b"next"]

    async def test_a_closed_transport_ends_the_run(self, make: Make) -> None:
        async with serving(respond_with(OK)) as server, closing(make()) as transport:
            run = Run(server)
            sending = asyncio.create_task(run.send(transport))
            await until(lambda: run.in_flight >= 5, what="some requests")
            await transport.aclose()
            assert (await sending).failure is Failure.RESET
