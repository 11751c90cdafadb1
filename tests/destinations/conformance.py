"""Tests that every transport must pass; a subclass defines how to make one.

Receivers are raw sockets on 127.0.0.1. In tests of time-outs the time-out is short and the receiver
hangs for ever, so that no result depends on which of two clocks is faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from outbox.core.model.headers import format_lines
from outbox.core.model.redaction import KEPT_BODY_BYTES, redact
from outbox.core.model.response import (
    DETAIL_CHARS_MAX,
    RESPONSE_BODY_BYTES_MAX,
    AttemptResult,
    Failure,
)
from outbox.core.model.stored_response import stored_response
from outbox.destinations.http.limits import HEADER_BYTES_MAX
from outbox.destinations.interface import Recipient, Request, Transport
from outbox.network.egress import EgressPolicy
from tests.destinations.servers import OK, Connection, RawServer, respond_with, serving
from tests.support.waiting import until

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Mapping

    from outbox.web.proxy import Proxy
    from tests.destinations.certificates import Certificates

LOOPBACK = EgressPolicy(["127.0.0.0/8"])
SHORT_S, PATIENT_S, LONG_S = 0.2, 1.5, 20.0
"""Time-outs: of what never responds; of what responds until it does not, on a machine that may stop
for a second; of what responds."""
EARLY_S = 0.005
"""uvloop counts in milliseconds from when it last read the clock."""

_RECIPIENT_FIELDS = {field.name for field in fields(Recipient)}


class Make(Protocol):
    """Makes a transport.

    `hosts` replaces the resolver: the addresses of a name, None for a name that never resolves, and
    an absent name does not exist.
    """

    def __call__(
        self,
        policy: EgressPolicy = ...,
        *,
        tls: ssl.SSLContext | None = ...,
        hosts: Mapping[str, list[str] | None] | None = ...,
        proxy: Proxy | None = ...,
    ) -> Transport: ...


def to(server: RawServer | str, body: bytes = b'{"n":1}', **changes: Any) -> Request:
    url = server if isinstance(server, str) else server.url
    headers = (("Content-Type", "application/json"), ("User-Agent", "t"), ("X-Sequence", "1"))
    settings = {name: changes.pop(name) for name in _RECIPIENT_FIELDS & changes.keys()}
    lines = changes.pop("lines", format_lines(headers))
    return Request(Recipient(**({"url": url} | settings)), lines, body, **changes)


def permission(writes: int) -> Callable[[], None]:
    """A `before_write` that permits so many writes."""
    left = iter(range(writes))

    def require() -> None:
        if next(left, None) is None:
            raise PermissionError

    return require


def short(server: RawServer | str, **changes: Any) -> Request:
    return to(server, **({"timeout_s": SHORT_S} | changes))


class TransportConformance:
    """Inherit from this class and provide the fixture `make`."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError

    @pytest.fixture
    async def transport(self, make: Make) -> AsyncIterator[Transport]:
        transport = make(LOOPBACK)
        yield transport
        await transport.aclose()

    # --------------------------------------------------------- the request

    async def test_a_request_is_sent_unchanged(self, transport: Transport) -> None:
        async with serving(respond_with(OK)) as server:
            response = await transport.send(to(f"{server.url}?a=%20b&c", body=b"\x00\xffbytes"))
        assert (response.status, response.body, response.failure) == (200, b"ok", None)
        assert ("Content-Length", "2") in response.headers
        assert 0 < response.elapsed_s < 10
        (received,) = server.received
        assert (received.method, received.target) == ("POST", "/hook?a=%20b&c")
        assert received.body == b"\x00\xffbytes"
        assert received.headers == {
            "host": f"127.0.0.1:{server.port}",
            "content-type": "application/json",
            "content-length": "7",
            "user-agent": "t",
            "x-sequence": "1",
            "accept-encoding": "identity",
        }
        assert len(received.names) == len(received.headers), "a header twice"

    @pytest.mark.parametrize("method", ["PUT", "PATCH"])
    async def test_other_methods_are_sent(self, transport: Transport, method: str) -> None:
        async with serving(respond_with(OK)) as server:
            await transport.send(to(server, method=method))
        assert server.received[0].method == method

    async def test_a_large_body_arrives_whole(self, transport: Transport) -> None:
        body = bytes(range(256)) * 1024
        async with serving(respond_with(OK)) as server:
            assert (await transport.send(to(server, body=body))).status == 200
        assert server.received[0].body == body

    async def test_cookies_are_not_stored(self, transport: Transport) -> None:
        response = OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=b; Path=/\r\n\r\n")
        async with serving(respond_with(response)) as server:
            await transport.send(to(server))
            await transport.send(to(server))
        assert "cookie" not in server.received[1].headers

    async def test_proxy_variables_of_the_environment_are_ignored(
        self, transport: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        async with serving(respond_with(OK)) as server:
            assert (await transport.send(to(server))).status == 200

    # ----------------------------------------------------------------- status

    @pytest.mark.parametrize(
        "status",
        [200, 201, 202, 204, 205, 299, 300, 304, 400, 401, 404, 409, 410, 418, 429, 500, 503],
    )
    async def test_the_status_is_returned(self, transport: Transport, status: int) -> None:
        head = f"HTTP/1.1 {status} Whatever\r\nRetry-After: 7\r\n"
        length = "" if status in (204, 304) else "Content-Length: 0\r\n"
        async with serving(respond_with(f"{head}{length}\r\n".encode())) as server:
            response = await transport.send(to(server))
        assert (response.status, response.failure, response.body) == (status, None, b"")
        assert dict(response.headers)["Retry-After"] == "7"

    @pytest.mark.parametrize("first", ["HTTP/1.1 200 ", "HTTP/1.0 200 OK", "HTTP/1.1 200 \xff"])
    async def test_unusual_but_legal_status_lines_are_accepted(
        self, transport: Transport, first: str
    ) -> None:
        head = f"{first}\r\nContent-Length: 0\r\n\r\n"
        async with serving(respond_with(head.encode("latin-1"))) as server:
            assert (await transport.send(to(server))).status == 200

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    async def test_redirects_are_not_followed(self, transport: Transport, status: int) -> None:
        async with serving(respond_with(OK)) as target:
            head = f"HTTP/1.1 {status} Go\r\nLocation: {target.url}\r\nContent-Length: 0\r\n\r\n"
            async with serving(respond_with(head.encode())) as server:
                response = await transport.send(to(server))
        assert response.status == status
        assert dict(response.headers)["Location"] == target.url
        assert target.connections == 0

    async def test_informational_responses_are_skipped(self, transport: Transport) -> None:
        early = (
            b"HTTP/1.1 100 Continue\r\n\r\n"
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
            b"HTTP/1.1 102 Processing\r\n\r\n"
        )
        async with serving(respond_with(early + OK)) as server:
            for _ in range(2):
                response = await transport.send(to(server))
                assert (response.status, response.body) == (200, b"ok")
        assert server.connections == 1

    @pytest.mark.parametrize("size", [5, 40_000])
    async def test_an_informational_response_may_have_a_body(
        self, transport: Transport, size: int
    ) -> None:
        """No part of that body is read as the response's."""
        early = f"HTTP/1.1 150 Odd\r\nContent-Length: {size}\r\n\r\n".encode() + b"x" * size
        async with serving(respond_with(early + OK)) as server:
            response = await transport.send(short(server))
        assert response.body in (b"ok", b"")
        assert response.status == 200 or response.failure is not None

    async def test_many_informational_responses_leave_room_for_the_headers(
        self, transport: Transport
    ) -> None:
        hints = b"HTTP/1.1 103 Early Hints\r\n" + b"Link: </a>\r\n" * 100 + b"\r\n"
        fields = b"".join(b"X-%d: y\r\n" % n for n in range(100))
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + fields + b"\r\n"
        async with serving(respond_with(hints + head)) as server:
            assert (await transport.send(to(server))).status == 200

    async def test_endless_informational_responses_end_the_exchange(
        self, transport: Transport
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            while True:
                await connection.send(b"HTTP/1.1 102 Processing\r\n\r\n")
                await asyncio.sleep(0)

        async with serving(script) as server:
            response = await transport.send(to(server))
        assert (response.status, response.failure) == (None, Failure.PROTOCOL)
        assert "interim responses" in response.detail

    async def test_switching_protocols_is_a_response_and_ends_the_connection(
        self, transport: Transport
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
            )
            await connection.closed_by_peer()

        async with serving(script) as server:
            assert (await transport.send(to(server))).status == 101
            await until(lambda: server.closed_by_peer == 1)

    # --------------------------------------------------------- response body

    async def test_a_chunked_body_is_read(self, transport: Transport) -> None:
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunked += b"3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
        async with serving(respond_with(chunked)) as server:
            for _ in range(2):
                assert (await transport.send(to(server))).body == b"abcde"
        assert server.connections == 1

    async def test_a_body_that_ends_with_the_connection_is_read(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(b"HTTP/1.0 200 OK\r\n\r\nall of it")

        async with serving(script) as server:
            response = await transport.send(to(server))
        assert (response.status, response.body) == (200, b"all of it")

    @pytest.mark.parametrize(
        "framing", [b"Content-Length: 999999999\r\n", b"Transfer-Encoding: chunked\r\n", b""]
    )
    async def test_an_endless_body_is_read_up_to_a_limit(
        self, transport: Transport, framing: bytes
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n")
            chunk = b"x" * 1000
            if framing.startswith(b"T"):
                chunk = b"3e8\r\n" + chunk + b"\r\n"
            try:
                while True:
                    await connection.send(chunk)
            except ConnectionError:
                server.closed_by_peer += 1

        async with serving(script) as server:
            response = await transport.send(to(server))
            assert (response.status, response.failure) == (200, None)
            assert response.body == b"x" * RESPONSE_BODY_BYTES_MAX
            assert response.detail == "", "it was not read until the time was out"
            await until(lambda: server.closed_by_peer == 1, what="the connection to be closed")

    @pytest.mark.parametrize(
        ("status", "kept"), [(200, b"(encoded: gzip)"), (503, b"x" * KEPT_BODY_BYTES)]
    )
    async def test_of_a_compression_bomb_an_excerpt_is_decoded(
        self, transport: Transport, status: int, kept: bytes
    ) -> None:
        bomb = gzip.compress(b"x" * 10_000_000)[:RESPONSE_BODY_BYTES_MAX]
        async with serving(respond_with(compressed(status, bomb))) as server:
            response = await transport.send(to(server))
        assert (response.status, response.body) == (status, kept)

    async def test_a_secret_in_a_compressed_error_can_be_redacted(
        self, transport: Transport
    ) -> None:
        """Twice: the second response is one that was parsed before."""
        error = gzip.compress(b"the key hunter2-hunter2 is unknown")
        async with serving(respond_with(compressed(401, error))) as server:
            responses = [await transport.send(to(server)) for _ in range(2)]
        assert [redact(each, ["hunter2-hunter2"]).body for each in responses] == [
            b"the key (not kept) is unknown"
        ] * 2

    @pytest.mark.parametrize("end", ["close", "reset"])
    @pytest.mark.parametrize("status", [200, 503])
    async def test_a_truncated_body_does_not_change_the_status(
        self, transport: Transport, status: int, end: str
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            head = f"HTTP/1.1 {status} X\r\nContent-Length: 100\r\n\r\n"
            await connection.send(head.encode() + b"part")
            connection.close() if end == "close" else connection.reset()

        async with serving(script) as server:
            response = await transport.send(to(server))
        assert (response.status, response.failure) == (status, None)
        assert response.body == b"part"
        assert "incomplete body" in response.detail

    @pytest.mark.parametrize(
        "rest", [b"zz\r\nnot a chunk", b"-5\r\nabc", b"3\r\nabcdef", b"ffffffffffffffffffff\r\nabc"]
    )
    @pytest.mark.parametrize("apart", [False, True])
    async def test_invalid_chunks_do_not_change_the_status(
        self, transport: Transport, rest: bytes, apart: bool
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            if apart:
                await connection.send(head)
                await drain_in_flight(transport)
                await connection.send(rest)
            else:
                await connection.send(head + rest)
            await connection.closed_by_peer()

        async with serving(script) as server:
            response = await transport.send(to(server))
            assert (response.status, response.failure) == (200, None)
            assert "incomplete body" in response.detail
            assert response.elapsed_s < 10
            await until(lambda: server.closed_by_peer == 1)

    @pytest.mark.parametrize(
        "extra", [b"HTTP/1.1 500 Forged\r\nContent-Length: 0\r\n\r\n", b"more", b"\r\n", b"\0"]
    )
    async def test_excess_body_bytes_do_not_reach_the_next_response(
        self, transport: Transport, extra: bytes
    ) -> None:
        responses = [OK + extra, OK, OK]

        async def script(connection: Connection) -> None:
            while True:
                await connection.request()
                await connection.send(responses.pop(0))

        async with serving(script) as server:
            statuses = [(await transport.send(to(server))).status for _ in range(3)]
        assert statuses == [200, 200, 200]
        assert len(server.received) == 3

    async def test_an_unsolicited_response_is_not_matched_to_the_next_request(
        self, transport: Transport
    ) -> None:
        """A 200 that arrives while the connection is idle acknowledges nothing."""
        forged = asyncio.Event()

        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(OK)
            if server.connections == 1:
                await forged.wait()
                await connection.send(b"HTTP/1.1 200 Forged\r\nContent-Length: 6\r\n\r\nforged")
                sent.set()
            await connection.request()
            await connection.send(b"HTTP/1.1 503 Real\r\nContent-Length: 4\r\n\r\nreal")

        sent = asyncio.Event()
        async with serving(script) as server:
            assert (await transport.send(to(server))).status == 200
            forged.set()
            await sent.wait()
            await drain_in_flight(transport)
            response = await transport.send(to(server))
        assert response.body != b"forged"

    # -------------------------------------------------------------- no response

    async def test_a_refused_connection_is_reported(self, transport: Transport) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            response = await transport.send(to(f"http://127.0.0.1:{port}/"))
        assert (response.status, response.failure) == (None, Failure.CONNECT)
        assert response.detail == f"connection refused at 127.0.0.1:{port}"

    @pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 20", b"HTTP/1.1 200 OK\r\nContent-Le"])
    @pytest.mark.parametrize("end", ["close", "reset"])
    async def test_a_connection_that_ends_before_the_response_is_reported(
        self, transport: Transport, sent: bytes, end: str
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(sent)
            connection.close() if end == "close" else connection.reset()

        async with serving(script) as server:
            response = await transport.send(to(server))
        assert (response.status, response.failure) == (None, Failure.RESET)
        assert response.detail
        assert len(server.received) == 1

    @pytest.mark.parametrize(
        "garbage",
        [
            b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
            b"\x00\x01\x02\x03\r\n\r\n",
            b"HTTP/1.1 abc OK\r\n\r\n",
            b"HTTP/1.1 20 OK\r\n\r\n",
            b"HTTP/9.9 200 OK\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nbad name: x\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
            b"HTTP/1.1 200 " + b"x" * 100_000 + b"\r\n\r\n",
        ],
        ids=lambda garbage: garbage[:44].decode("latin-1"),
    )
    async def test_a_response_that_is_not_http_is_reported(
        self, transport: Transport, garbage: bytes
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(garbage)
            await connection.closed_by_peer()

        async with serving(script) as server:
            response = await transport.send(to(server))
            await until(lambda: server.closed_by_peer == 1)
        assert (response.status, response.failure) == (None, Failure.PROTOCOL)
        assert len(response.detail) <= DETAIL_CHARS_MAX
        assert response.detail.isprintable()

    async def test_a_receiver_that_speaks_http_2_alone_is_named(self, transport: Transport) -> None:
        settings = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64"
        async with serving(respond_with(settings)) as server:
            response = await transport.send(to(server))
        assert (response.status, response.failure) == (None, Failure.PROTOCOL)
        assert "HTTP/2" in response.detail

    async def test_endless_headers_are_truncated(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\n")
            try:
                while True:
                    await connection.send(b"X-Header: value\r\n" * 50)
            except ConnectionError:
                server.closed_by_peer += 1

        async with serving(script) as server:
            response = await transport.send(to(server))
            await until(lambda: server.closed_by_peer == 1)
        assert (response.status, response.failure) == (None, Failure.PROTOCOL)

    async def test_large_headers_are_stored_up_to_a_limit(self, transport: Transport) -> None:
        fields = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(60))
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + fields + b"\r\n"
        async with serving(respond_with(head)) as server:
            response = await transport.send(to(server))
        assert response.status == 200
        assert 0 < sum(len(n) + len(v) for n, v in response.headers) <= HEADER_BYTES_MAX

    async def test_unusual_bytes_in_headers_can_be_stored(self, transport: Transport) -> None:
        odd = b"HTTP/1.1 200 OK\r\nServer: \xff\xfe caf\xe9\r\nContent-Length: 0\r\n\r\n"
        async with serving(respond_with(odd)) as server:
            response = await transport.send(to(server))
        assert response.status == 200
        assert stored_response(response)["headers"]["server"].encode()

    # ------------------------------------------------------------------- time

    async def test_a_hanging_receiver_times_out(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.closed_by_peer()

        async with serving(script) as server:
            response = await transport.send(short(server))
            await until(lambda: server.closed_by_peer == 1)
        assert (response.status, response.failure) == (None, Failure.TIMEOUT)
        assert f"{SHORT_S:g} s" in response.detail
        assert SHORT_S - EARLY_S <= response.elapsed_s < LONG_S

    async def test_a_receiver_that_drips_its_head_times_out(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.drip(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 7000)

        async with serving(script) as server:
            response = await transport.send(short(server))
        assert (response.status, response.failure) == (None, Failure.TIMEOUT)

    @pytest.mark.parametrize("drips", [True, False])
    async def test_a_receiver_that_stops_or_drips_in_the_body_times_out(
        self, transport: Transport, drips: bool
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
            if drips:
                await connection.drip(b"x" * 5000)
            await connection.closed_by_peer()

        async with serving(script) as server:
            response = await transport.send(short(server))
        assert (response.status, response.failure) == (200, None)
        assert "incomplete body" in response.detail
        assert SHORT_S - EARLY_S <= response.elapsed_s < LONG_S

    async def test_a_receiver_that_does_not_read_times_out(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.head()
            await asyncio.get_running_loop().create_future()

        async with serving(script) as server:
            response = await transport.send(short(server, body=b"x" * 20_000_000))
        assert response.failure is Failure.TIMEOUT

    async def test_a_response_before_the_request_body_is_read_counts(
        self, transport: Transport
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.head()
            await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
            await asyncio.get_running_loop().create_future()

        async with serving(script) as server:
            for _ in range(2):
                response = await transport.send(to(server, body=b"x" * 20_000_000))
                assert (response.status, response.body) == (413, b"big")
                assert response.elapsed_s < 10
        assert server.connections == 2, "the rest of the first body was on this connection"

    async def test_an_early_response_followed_by_a_close_counts(self, transport: Transport) -> None:
        """The reset may overtake the response; no other result is allowed."""

        async def script(connection: Connection) -> None:
            await connection.head()
            await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")

        async with serving(script) as server:
            response = await transport.send(to(server, body=b"x" * 20_000_000))
        assert response.status == 413 or response.failure is Failure.RESET

    # ------------------------------------------------------------ connections

    async def test_connections_are_reused(self, transport: Transport) -> None:
        async with serving(respond_with(OK)) as server:
            for _ in range(5):
                assert (await transport.send(to(server))).status == 200
        assert server.connections == 1

    async def test_a_connection_is_not_reused_after_connection_close(
        self, transport: Transport
    ) -> None:
        response = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        async with serving(respond_with(response)) as server:
            for _ in range(2):
                assert (await transport.send(to(server))).status == 200
        assert server.connections == 2

    async def test_an_idle_connection_that_was_closed_is_not_reused(
        self, transport: Transport
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(OK)

        async with serving(script) as server:
            assert (await transport.send(to(server))).status == 200
            await until(lambda: not server._tasks)
            await drain_in_flight(transport)
            assert (await transport.send(to(server))).status == 200
        assert server.connections == 2

    async def test_concurrent_requests_get_their_own_responses(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            while True:
                body = (await connection.request()).body
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                await connection.send(head.encode() + body)

        async with serving(script) as server:
            bodies = [str(i).encode() for i in range(200)]
            responses = await asyncio.gather(
                *(transport.send(to(server, body=body)) for body in bodies)
            )
        assert [response.body for response in responses] == bodies

    async def test_simultaneous_responses_have_individual_latencies(
        self, transport: Transport
    ) -> None:
        """Connections are reused while other requests have not read their responses yet."""
        gate = asyncio.Barrier(8)

        async def script(connection: Connection) -> None:
            for _ in range(2):
                await connection.request()
                await gate.wait()
                await connection.send(OK)
            await connection.closed_by_peer()

        async def lane() -> list[int | None]:
            patient = short(server, timeout_s=PATIENT_S)
            return [(await transport.send(patient)).status for _ in range(3)]

        async with serving(script) as server, asyncio.timeout(30):
            statuses = await asyncio.gather(*(lane() for _ in range(8)))
        assert {each[-1] for each in statuses} == {None}

    @pytest.mark.parametrize("reused", [False, True])
    async def test_a_request_is_not_written_after_its_permission_has_ended(
        self, transport: Transport, reused: bool
    ) -> None:
        async with serving(respond_with(OK)) as server:
            if reused:
                await transport.send(to(server))
            with pytest.raises(PermissionError):
                await transport.send(to(server), None, permission(0))
            assert (await transport.send(to(server, body=b"next"))).status == 200
        assert [each.body for each in server.received][reused:] == [b"next"]

    async def test_cancelling_closes_the_connection(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.closed_by_peer()

        async with serving(script) as server:
            sending = asyncio.create_task(transport.send(to(server)))
            await until(lambda: len(server.received) == 1)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await until(lambda: server.closed_by_peer == 1)

    async def test_cancelling_in_the_body_closes_the_connection(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
            await connection.closed_by_peer()

        async with serving(script) as server:
            sending = asyncio.create_task(transport.send(to(server)))
            await until(lambda: len(server.received) == 1)
            await drain_in_flight(transport)
            sending.cancel()
            # The receiver has the request, and the caller that cancelled can detect that.
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await sending
            (response,) = cancelled.value.args
            assert (response.status, response.body) == (200, b"abc")
            assert response.detail == "incomplete body: the request was cancelled"
            await until(lambda: server.closed_by_peer == 1)

    async def test_cancelling_during_a_time_out_ends_the_request(
        self, transport: Transport
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
            await connection.closed_by_peer()

        async with serving(script) as server:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await transport.send(to(server))

    async def test_closing_ends_requests_in_flight(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.closed_by_peer()

        async with serving(script) as server:
            sending = asyncio.create_task(transport.send(to(server)))
            await until(lambda: len(server.received) == 1)
            await transport.aclose()
            response = await sending
            assert response.status is None
            await until(lambda: server.closed_by_peer == 1)
            assert (await transport.send(to(server))).status is None

    async def test_closing_ends_connection_attempts(self, make: Make) -> None:
        resolving = asyncio.Event()

        class Slow(dict[str, list[str] | None]):
            def __contains__(self, name: object) -> bool:
                resolving.set()
                return True

            def __getitem__(self, name: str) -> None:
                return None

        transport = make(LOOPBACK, hosts=Slow())
        async with asyncio.timeout(30):
            sending = asyncio.create_task(
                transport.send(to("http://slow.example/", connect_timeout_s=SHORT_S))
            )
            await resolving.wait()
            await transport.aclose()
            assert (await sending).status is None

    # ------------------------------------------------------- names and egress

    async def test_an_unknown_name_is_reported(self, make: Make) -> None:
        async with closing(make(LOOPBACK, hosts={})) as transport:
            response = await transport.send(to("http://nowhere.example/"))
        assert (response.status, response.failure) == (None, Failure.DNS)
        assert "nowhere.example" in response.detail

    async def test_a_hanging_resolver_times_out(self, make: Make) -> None:
        async with closing(make(LOOPBACK, hosts={"slow.example": None})) as transport:
            response = await transport.send(
                to("http://slow.example/", connect_timeout_s=SHORT_S, timeout_s=60)
            )
        assert (response.status, response.failure) == (None, Failure.TIMEOUT)
        assert f"{SHORT_S:g} s" in response.detail
        assert response.elapsed_s < 30

    async def test_time_outs_are_not_rounded_up_to_whole_seconds(self, make: Make) -> None:
        async with closing(make(LOOPBACK, hosts={"slow.example": None})) as transport:
            response = await transport.send(
                to("http://slow.example/", connect_timeout_s=60, timeout_s=SHORT_S)
            )
        assert response.failure is Failure.TIMEOUT
        assert response.elapsed_s < 30

    async def test_the_system_resolver_is_used(self, transport: Transport) -> None:
        async with serving(respond_with(OK)) as server:
            response = await transport.send(to(f"http://localhost:{server.port}/"))
        assert response.status == 200
        assert server.received[0].headers["host"] == f"localhost:{server.port}"

    @pytest.mark.parametrize("url", ["http://127.0.0.1:{}/", "http://localhost:{}/"])
    async def test_denied_networks_are_not_connected_to(self, make: Make, url: str) -> None:
        async with closing(make(EgressPolicy())) as transport, serving(respond_with(OK)) as server:
            response = await transport.send(to(url.format(server.port)))
            assert (response.status, response.failure) == (None, Failure.EGRESS_REFUSED)
            assert "OUTBOX_ALLOW_NETWORKS" in response.detail
        assert server.connections == 0

    @pytest.mark.parametrize(
        "address",
        [
            "10.0.0.5",
            "169.254.169.254",
            "::1",
            "::ffff:10.0.0.5",
            "64:ff9b::a00:5",
            "93.184.215.14",
        ],
    )
    async def test_a_name_that_resolves_to_a_denied_address_is_refused(
        self, make: Make, address: str
    ) -> None:
        hosts = {"inside.example": [address]}
        async with closing(make(LOOPBACK, hosts=hosts)) as transport:
            response = await transport.send(to("http://inside.example:8080/"))
        assert (response.status, response.failure) == (None, Failure.EGRESS_REFUSED)

    async def test_a_name_with_only_denied_addresses_is_refused(self, make: Make) -> None:
        hosts = {"inside.example": ["10.0.0.5", "169.254.169.254", "::1"]}
        async with closing(make(LOOPBACK, hosts=hosts)) as transport:
            response = await transport.send(to("http://inside.example:8080/"))
        assert (response.status, response.failure) == (None, Failure.EGRESS_REFUSED)

    async def test_only_allowed_addresses_of_a_name_are_tried(self, make: Make) -> None:
        hosts = {"both.example": ["10.0.0.5", "::1", "127.0.0.1"]}
        transport = make(LOOPBACK, hosts=hosts)
        async with closing(transport), serving(respond_with(OK)) as server:
            url = f"http://both.example:{server.port}/"
            assert (await transport.send(to(url))).status == 200

    async def test_a_name_is_checked_on_every_connection(self, make: Make) -> None:
        hosts: dict[str, list[str] | None] = {"moving.example": ["127.0.0.1"]}
        close = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        transport = make(LOOPBACK, hosts=hosts)
        async with closing(transport), serving(respond_with(close)) as server:
            url = f"http://moving.example:{server.port}/"
            assert (await transport.send(to(url))).status == 200
            hosts["moving.example"] = ["10.0.0.5"]
            response = await transport.send(to(url))
        assert response.failure is Failure.EGRESS_REFUSED

    async def test_numeric_hosts_that_resolve_to_loopback_are_refused(self, make: Make) -> None:
        async with closing(make(EgressPolicy(["192.0.2.0/24"]))) as transport:
            for host in ("127.1", "2130706433", "0x7f.1", "017700000001"):
                response = await transport.send(to(f"http://{host}:9/"))
                assert response.failure is Failure.EGRESS_REFUSED

    @pytest.mark.parametrize(
        "url", ["http://user:pw@127.0.0.1/", "ftp://127.0.0.1/", "nonsense", ""]
    )
    async def test_invalid_urls_are_refused(self, transport: Transport, url: str) -> None:
        response = await transport.send(to(url))
        assert (response.status, response.failure) == (None, Failure.EGRESS_REFUSED)

    # -------------------------------------------------------------------- TLS

    async def test_tls_to_a_trusted_receiver_succeeds(
        self, make: Make, certificates: Certificates
    ) -> None:
        async with (
            closing(make(LOOPBACK, tls=certificates.client)) as transport,
            serving(respond_with(OK), tls=certificates.server) as server,
        ):
            for _ in range(2):
                assert (await transport.send(to(server))).status == 200
        assert server.connections == 1

    async def test_tls_to_an_untrusted_receiver_fails(
        self, transport: Transport, certificates: Certificates
    ) -> None:
        async with serving(respond_with(OK), tls=certificates.server) as server:
            response = await transport.send(to(server))
        assert (response.status, response.failure) == (None, Failure.TLS)
        assert "certificate" in response.detail
        assert server.received == []

    async def test_tls_with_a_certificate_for_another_name_fails(
        self, make: Make, certificates: Certificates
    ) -> None:
        hosts = {"other.example": ["127.0.0.1"]}
        transport = make(LOOPBACK, tls=certificates.client, hosts=hosts)
        async with (
            closing(transport),
            serving(respond_with(OK), tls=certificates.server) as server,
        ):
            response = await transport.send(to(f"https://other.example:{server.port}/"))
        assert (response.status, response.failure) == (None, Failure.TLS)
        assert server.received == []

    async def test_tls_to_a_receiver_without_tls_fails(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await connection.closed_by_peer()

        async with serving(script) as server:
            response = await transport.send(to(server.url.replace("http:", "https:")))
        assert (response.status, response.failure) == (None, Failure.TLS)

    async def test_a_hanging_handshake_times_out(self, transport: Transport) -> None:
        async with serving(Connection.closed_by_peer) as server:
            response = await transport.send(
                to(
                    server.url.replace("http:", "https:"),
                    connect_timeout_s=SHORT_S,
                    timeout_s=60,
                )
            )
            await until(lambda: server.closed_by_peer == 1)
        assert (response.status, response.failure) == (None, Failure.TIMEOUT)
        assert response.elapsed_s < 30

    # ----------------------------------------------------------------- common

    async def test_every_response_can_be_summarised(self, transport: Transport) -> None:
        responses: list[AttemptResult] = []
        for reply in (OK, b"\x00", b"HTTP/1.1 500 X\r\nServer: \x80\r\n\r\n\x00\xff"):

            async def script(connection: Connection, reply: bytes = reply) -> None:
                await connection.request()
                await connection.send(reply)

            async with serving(script) as server:
                responses.append(await transport.send(to(server)))
        for response in responses:
            assert stored_response(response)["elapsed_ms"] > 0


def compressed(status: int, body: bytes) -> bytes:
    """A response whose body is in gzip."""
    length = f"Content-Length: {len(body)}\r\n"
    return f"HTTP/1.1 {status} X\r\ncontent-Encoding: gzip\r\n{length}\r\n".encode() + body


async def drain_in_flight(transport: Transport) -> None:
    """Make other exchanges, so that everything in flight arrives."""
    async with serving(respond_with(OK)) as elsewhere:
        for _ in range(3):
            assert (await transport.send(to(elsewhere))).status == 200


@contextlib.asynccontextmanager
async def closing(transport: Transport) -> AsyncIterator[Transport]:
    try:
        yield transport
    finally:
        await transport.aclose()
