"""Tests of reused connections: a receiver closes an idle one while a request is on its way, and a
steady stream of requests does not stay on one connection for ever.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

import pytest

from outbox.core.model.response import Failure
from outbox.destinations.http.http1 import connection as connection_module
from outbox.network import reuse_limits
from tests.destinations.conformance import LONG_S, LOOPBACK, SHORT_S, closing, permission, to
from tests.destinations.request_runs import Run, numbers
from tests.destinations.servers import OK, Connection, RawServer, respond_with, serving
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from outbox.destinations.interface import Transport
    from tests.destinations.certificates import Certificates
    from tests.destinations.conformance import Make

NAME = "moving.example"


def closing_after(
    responses: int, *, sent: bytes = b"", end: str = "close"
) -> Callable[[Connection], Awaitable[None]]:
    """Close each connection at the request after so many responses, when these bytes are sent."""

    async def script(connection: Connection) -> None:
        for _ in range(responses):
            await connection.request()
            await connection.send(OK)
        await connection.request()
        await connection.send(sent)
        connection.close() if end == "close" else connection.reset()

    return script


def bodies(server: RawServer) -> list[bytes]:
    return [each.body for each in server.received]


class ReusedConnections:
    """Inherit from this class beside `TransportConformance`, for a transport that has runs."""

    @pytest.mark.parametrize("end", ["close", "reset"])
    @pytest.mark.parametrize("method", ["POST", "PUT"])
    async def test_a_request_that_meets_the_close_of_an_idle_connection_is_sent_again(
        self, transport: Transport, method: str, end: str
    ) -> None:
        async with serving(closing_after(1, end=end)) as server:
            responses = [
                await transport.send(to(server, body=b"%d" % n, method=method)) for n in range(3)
            ]
        assert [each.status for each in responses] == [200, 200, 200]
        assert bodies(server) == [b"0", b"1", b"1", b"2", b"2"]
        assert server.connections == 3

    async def test_tls_changes_nothing(self, make: Make, certificates: Certificates) -> None:
        async with (
            closing(make(LOOPBACK, tls=certificates.client)) as transport,
            serving(closing_after(1), tls=certificates.server) as server,
        ):
            statuses = [(await transport.send(to(server))).status for _ in range(3)]
        assert statuses == [200, 200, 200]

    @pytest.mark.parametrize("sent", [b"H", b"HTTP/1.1 100 Continue\r\n\r\n"])
    async def test_after_a_byte_of_the_response_a_request_is_not_sent_again(
        self, transport: Transport, sent: bytes
    ) -> None:
        async with serving(closing_after(1, sent=sent)) as server:
            assert (await transport.send(to(server))).status == 200
            response = await transport.send(to(server))
        assert (response.status, response.failure) == (None, Failure.RESET)
        assert len(server.received) == 2

    async def test_a_request_is_sent_again_once(self, transport: Transport) -> None:
        served = iter([1, 0, 0])

        async def script(connection: Connection) -> None:
            await closing_after(next(served))(connection)

        async with serving(script) as server:
            assert (await transport.send(to(server))).status == 200
            response = await transport.send(to(server, body=b"second"))
        assert (response.status, response.failure) == (None, Failure.RESET)
        assert bodies(server)[1:] == [b"second", b"second"]

    async def test_a_response_to_the_second_copy_is_marked(self, transport: Transport) -> None:
        """A 409 to it is not a refusal: the receiver has processed the first copy."""
        conflict = b"HTTP/1.1 409 Conflict\r\nContent-Length: 0\r\n\r\n"

        async def script(connection: Connection) -> None:
            if server.connections == 1:
                await closing_after(1)(connection)
            else:
                await connection.request()
                await connection.send(conflict)
                await connection.request()
                await connection.send(OK)

        async with serving(script) as server:
            responses = [await transport.send(to(server)) for _ in range(3)]
        assert [(each.status, each.resent) for each in responses] == [
            (200, False), (409, True), (200, False),
        ]  # fmt: skip
        assert server.connections == 2

    async def test_the_marks_of_a_run_are_those_of_its_requests(self, transport: Transport) -> None:
        async with serving(closing_after(2)) as server:
            run = Run(server, 5)
            last = await run.send(transport)
        assert [each.resent for each in [*run.responses, last]] == [
            False, False, True, False, True,
        ]  # fmt: skip

    async def test_a_request_that_took_longer_is_not_sent_again(
        self, transport: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The receiver may be processing it: the end is not the close of an idle connection."""
        monkeypatch.setattr(connection_module, "RESEND_WITHIN_S", 0.0)
        async with serving(closing_after(1)) as server:
            assert (await transport.send(to(server))).status == 200
            response = await transport.send(to(server))
        assert (response.status, response.failure) == (None, Failure.RESET)
        assert len(server.received) == 2

    async def test_an_idle_connection_keeps_no_request(self, transport: Any) -> None:
        async with serving(respond_with(OK)) as server:
            await transport.send(to(server, body=b"x" * 100_000))
            ((connection,),) = transport._client._pools._idle.values()
            assert connection._request == b""

    async def test_a_run_goes_on_after_each_close(self, transport: Transport) -> None:
        async with serving(closing_after(3)) as server:
            run = Run(server, 10)
            response = await run.send(transport)
        assert (response.status, len(run.responses)) == (200, 9)
        assert list(dict.fromkeys(run.bodies)) == numbers(10)
        assert run.bodies == [b"%d" % n for n in (0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8, 9, 9)]
        assert server.connections == 4

    async def test_sending_again_needs_permission(self, transport: Transport) -> None:
        async with serving(closing_after(1)) as server:
            before_write = permission(2)
            await transport.send(to(server), None, before_write)
            with pytest.raises(PermissionError):
                await transport.send(to(server), None, before_write)
        assert len(server.received) == 2

    async def test_a_receiver_that_accepts_no_other_connection_is_reported(
        self, transport: Transport
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(OK)
            await connection.request()
            listener.close()

        server = RawServer(script)
        listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        assert (await transport.send(to(server))).status == 200
        response = await transport.send(to(server))
        await server.stop()
        assert (response.status, response.failure) == (None, Failure.CONNECT)

    async def test_a_failed_second_copy_has_the_duration_of_its_request(
        self, transport: Transport
    ) -> None:
        """Not that of the run, although the run began long before."""

        async def script(connection: Connection) -> None:
            for _ in range(2):
                await connection.request()
                await connection.send(OK)
            await connection.request()
            listener.close()

        server = RawServer(script)
        listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        started_at = monotonic()
        run = Run(server)
        response = await run.send(transport)
        elapsed_s = monotonic() - started_at
        await server.stop()
        assert (response.failure, len(run.responses)) == (Failure.CONNECT, 2)
        assert response.elapsed_s <= elapsed_s - sum(each.elapsed_s for each in run.responses)

    async def test_both_times_share_one_time_out(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            if server.connections == 1:
                await closing_after(1)(connection)
            else:
                await connection.closed_by_peer()

        async with serving(script) as server:
            assert (await transport.send(to(server))).status == 200
            response = await transport.send(to(server, timeout_s=SHORT_S))
            await until(lambda: server.closed_by_peer == 1)
        assert response.failure is Failure.TIMEOUT

    async def test_cancelling_the_second_time_reports_no_response(
        self, transport: Transport
    ) -> None:
        async def script(connection: Connection) -> None:
            if server.connections == 1:
                await closing_after(1)(connection)
            else:
                await connection.request()
                await connection.closed_by_peer()

        async with serving(script) as server:
            assert (await transport.send(to(server))).status == 200
            sending = asyncio.create_task(transport.send(to(server, timeout_s=LONG_S)))
            await until(lambda: len(server.received) == 3)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await sending
            await until(lambda: server.closed_by_peer == 1)
        assert cancelled.value.args == ()

    async def test_an_old_connection_carries_no_further_request(
        self, transport: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reuse_limits, "AGE_MAX_S", 0.0)
        async with serving(respond_with(OK)) as server:
            run = Run(server, 3)
            assert (await run.send(transport)).status == 200
            assert run.responses == [], "the run went on with an old connection"
            assert (await transport.send(to(server))).status == 200
            await until(lambda: server.connections == 2)

    async def test_a_steady_stream_follows_a_changed_name(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reuse_limits, "ADDRESS_CHECK_S", 0.0)
        hosts: dict[str, list[str] | None] = {NAME: ["127.0.0.1"]}
        async with (
            closing(make(LOOPBACK, hosts=hosts)) as transport,
            serving(respond_with(OK)) as old,
            serving(respond_with(OK), host="127.0.0.2", port=old.port) as new,
        ):
            url = f"http://{NAME}:{old.port}/"
            for _ in range(3):
                assert (await transport.send(to(url))).status == 200
            # While the name does not resolve, the connection that works is kept.
            del hosts[NAME]
            assert (await transport.send(to(url))).status == 200
            assert (old.connections, len(old.received)) == (1, 4)
            hosts[NAME] = ["127.0.0.2"]
            assert (await transport.send(to(url))).status == 200
            assert (len(old.received), len(new.received)) == (4, 1)
            # It stays there, although the name has more addresses.
            hosts[NAME] = ["127.0.0.1", "127.0.0.2"]
            assert (await transport.send(to(url))).status == 200
            assert (new.connections, len(new.received)) == (1, 2)

    async def test_a_run_ends_where_its_name_changes(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reuse_limits, "ADDRESS_CHECK_S", 0.0)
        hosts: dict[str, list[str] | None] = {NAME: ["127.0.0.1"]}

        async def script(connection: Connection) -> None:
            for _ in range(2):
                await connection.request()
                await connection.send(OK)
            await connection.request()
            hosts[NAME] = ["127.0.0.2"]
            await connection.send(OK)
            await connection.closed_by_peer()

        async with closing(make(LOOPBACK, hosts=hosts)) as transport, serving(script) as server:
            run = Run(server, 10, url=f"http://{NAME}:{server.port}/")
            assert (await run.send(transport)).status == 200
        assert run.bodies == numbers(3)

    async def test_a_response_in_two_packets_takes_no_delayed_acknowledgement(
        self, transport: Transport
    ) -> None:
        """With one of 40 ms for each response, 600 take 25 seconds."""

        async def script(connection: Connection) -> None:
            connection.delay_packets()
            while True:
                await connection.request()
                connection.write_at_once(OK[:-2])
                connection.write_at_once(OK[-2:])

        async with serving(script) as server, asyncio.timeout(LONG_S):
            for _ in range(600):
                assert (await transport.send(to(server))).status == 200
        assert server.connections == 1
