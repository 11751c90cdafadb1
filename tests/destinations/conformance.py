"""What every transport has to do; a subclass says how one is made.

Receivers are raw sockets on 127.0.0.1.  Where a test is about running out of
time, the time is short and the receiver would hang for ever: nothing is
decided by which of two clocks is faster.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from outbox.core.model.headers import lines_of
from outbox.core.model.response import BODY_BYTES_MAX, DETAIL_CHARS_MAX, Answer, Failure, summary
from outbox.destinations.http.egress import EgressPolicy
from outbox.destinations.http.limits import HEADER_BYTES_MAX
from outbox.destinations.interface import Request, Transport
from tests.destinations.servers import OK, Connection, RawServer, answering, serving
from tests.support.waiting import until

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Mapping

    from outbox.web.proxy import Proxy
    from tests.destinations.certificates import Certificates

LOOPBACK = EgressPolicy(["127.0.0.0/8"])
SHORT_S = 0.2
EARLY_S = 0.005
"""uvloop counts milliseconds, and from when it last looked at the clock."""


class Make(Protocol):
    """Makes a transport.

    `hosts` stands in for the resolver: what a name leads to, None for never
    answering, and an absent name does not exist.
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
    return Request(**({"url": url, "lines": lines_of(headers), "body": body} | changes))


def short(server: RawServer | str, **changes: Any) -> Request:
    return to(server, **({"total_timeout_s": SHORT_S} | changes))


class TransportConformance:
    """Inherit and give a fixture `make`."""

    @pytest.fixture
    def make(self) -> Make:
        raise NotImplementedError

    @pytest.fixture
    async def transport(self, make: Make) -> AsyncIterator[Transport]:
        transport = make(LOOPBACK)
        yield transport
        await transport.aclose()

    # -------------------------------------------------------- what is sent

    async def test_a_request_is_sent_as_it_was_given(self, transport: Transport) -> None:
        async with serving(answering(OK)) as server:
            answer = await transport.send(to(f"{server.url}?a=%20b&c", body=b"\x00\xffbytes"))
        assert (answer.status, answer.body, answer.failure) == (200, b"ok", None)
        assert ("Content-Length", "2") in answer.headers
        assert 0 < answer.elapsed_s < 10
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
    async def test_other_methods(self, transport: Transport, method: str) -> None:
        async with serving(answering(OK)) as server:
            await transport.send(to(server, method=method))
        assert server.received[0].method == method

    async def test_a_large_body_arrives_whole(self, transport: Transport) -> None:
        body = bytes(range(256)) * 1024
        async with serving(answering(OK)) as server:
            assert (await transport.send(to(server, body=body))).status == 200
        assert server.received[0].body == body

    async def test_cookies_are_not_kept(self, transport: Transport) -> None:
        answer = OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=b; Path=/\r\n\r\n")
        async with serving(answering(answer)) as server:
            await transport.send(to(server))
            await transport.send(to(server))
        assert "cookie" not in server.received[1].headers

    async def test_proxies_of_the_environment_are_not_used(
        self, transport: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        async with serving(answering(OK)) as server:
            assert (await transport.send(to(server))).status == 200

    # ----------------------------------------------------- the status decides

    @pytest.mark.parametrize(
        "status",
        [200, 201, 202, 204, 205, 299, 300, 304, 400, 401, 404, 409, 410, 418, 429, 500, 503],
    )
    async def test_a_status_is_told(self, transport: Transport, status: int) -> None:
        head = f"HTTP/1.1 {status} Whatever\r\nRetry-After: 7\r\n"
        length = "" if status in (204, 304) else "Content-Length: 0\r\n"
        async with serving(answering(f"{head}{length}\r\n".encode())) as server:
            answer = await transport.send(to(server))
        assert (answer.status, answer.failure, answer.body) == (status, None, b"")
        assert dict(answer.headers)["Retry-After"] == "7"

    @pytest.mark.parametrize("first", ["HTTP/1.1 200 ", "HTTP/1.0 200 OK", "HTTP/1.1 200 \xff"])
    async def test_odd_but_legal_status_lines(self, transport: Transport, first: str) -> None:
        head = f"{first}\r\nContent-Length: 0\r\n\r\n"
        async with serving(answering(head.encode("latin-1"))) as server:
            assert (await transport.send(to(server))).status == 200

    @pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
    async def test_redirects_are_not_followed(self, transport: Transport, status: int) -> None:
        async with serving(answering(OK)) as target:
            head = f"HTTP/1.1 {status} Go\r\nLocation: {target.url}\r\nContent-Length: 0\r\n\r\n"
            async with serving(answering(head.encode())) as server:
                answer = await transport.send(to(server))
        assert answer.status == status
        assert dict(answer.headers)["Location"] == target.url
        assert target.connections == 0

    async def test_answers_before_the_answer_are_passed_over(self, transport: Transport) -> None:
        early = (
            b"HTTP/1.1 100 Continue\r\n\r\n"
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
            b"HTTP/1.1 102 Processing\r\n\r\n"
        )
        async with serving(answering(early + OK)) as server:
            for _ in range(2):
                answer = await transport.send(to(server))
                assert (answer.status, answer.body) == (200, b"ok")
        assert server.connections == 1

    @pytest.mark.parametrize("size", [5, 40_000])
    async def test_what_comes_before_the_answer_may_have_a_body(
        self, transport: Transport, size: int
    ) -> None:
        """Of which nothing is taken for the answer's."""
        early = f"HTTP/1.1 150 Odd\r\nContent-Length: {size}\r\n\r\n".encode() + b"x" * size
        async with serving(answering(early + OK)) as server:
            answer = await transport.send(short(server))
        assert answer.body in (b"ok", b"")
        assert answer.status == 200 or answer.failure is not None

    async def test_many_heads_before_the_answer_leave_room_for_its_headers(
        self, transport: Transport
    ) -> None:
        hints = b"HTTP/1.1 103 Early Hints\r\n" + b"Link: </a>\r\n" * 100 + b"\r\n"
        fields = b"".join(b"X-%d: y\r\n" % n for n in range(100))
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + fields + b"\r\n"
        async with serving(answering(hints + head)) as server:
            assert (await transport.send(to(server))).status == 200

    async def test_endless_answers_before_the_answer_end_it(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            while True:
                await connection.send(b"HTTP/1.1 102 Processing\r\n\r\n")
                await asyncio.sleep(0)

        async with serving(script) as server:
            answer = await transport.send(to(server))
        assert (answer.status, answer.failure) == (None, Failure.PROTOCOL)
        assert "before the answer" in answer.detail

    async def test_switching_protocols_is_an_answer_and_ends_the_connection(
        self, transport: Transport
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(
                b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
            )
            await connection.closed_by_peer()

        async with serving(script) as server:
            assert (await transport.send(short(server))).status == 101
            await until(lambda: server.closed_by_peer == 1)

    # -------------------------------------------------------------- the body

    async def test_a_chunked_body(self, transport: Transport) -> None:
        chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunked += b"3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n"
        async with serving(answering(chunked)) as server:
            for _ in range(2):
                assert (await transport.send(to(server))).body == b"abcde"
        assert server.connections == 1

    async def test_a_body_that_ends_with_the_connection(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(b"HTTP/1.0 200 OK\r\n\r\nall of it")

        async with serving(script) as server:
            answer = await transport.send(to(server))
        assert (answer.status, answer.body) == (200, b"all of it")

    @pytest.mark.parametrize(
        "framing", [b"Content-Length: 999999999\r\n", b"Transfer-Encoding: chunked\r\n", b""]
    )
    async def test_of_an_endless_body_a_bounded_part_is_read(
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
            answer = await transport.send(to(server))
            assert (answer.status, answer.failure) == (200, None)
            assert answer.body == b"x" * BODY_BYTES_MAX
            assert answer.detail == "", "it was not read until the time was out"
            await until(lambda: server.closed_by_peer == 1, what="the connection to be closed")

    async def test_a_compressed_bomb_stays_compressed(self, transport: Transport) -> None:
        bomb = gzip.compress(b"\0" * 10_000_000)[:BODY_BYTES_MAX]
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(bomb)}\r\n\r\n"
        async with serving(answering(head.encode() + bomb)) as server:
            answer = await transport.send(to(server))
        assert (answer.status, answer.body) == (200, bomb[:BODY_BYTES_MAX])

    @pytest.mark.parametrize("end", ["close", "reset"])
    @pytest.mark.parametrize("status", [200, 503])
    async def test_a_body_cut_short_does_not_change_the_status(
        self, transport: Transport, status: int, end: str
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            head = f"HTTP/1.1 {status} X\r\nContent-Length: 100\r\n\r\n"
            await connection.send(head.encode() + b"part")
            connection.close() if end == "close" else connection.reset()

        async with serving(script) as server:
            answer = await transport.send(to(server))
        assert (answer.status, answer.failure) == (status, None)
        assert answer.body == b"part"
        assert "cut short" in answer.detail

    @pytest.mark.parametrize(
        "rest", [b"zz\r\nnot a chunk", b"-5\r\nabc", b"3\r\nabcdef", b"ffffffffffffffffffff\r\nabc"]
    )
    @pytest.mark.parametrize("apart", [False, True])
    async def test_chunks_of_garbage_do_not_change_the_status(
        self, transport: Transport, rest: bytes, apart: bool
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            if apart:
                await connection.send(head)
                await meanwhile(transport)
                await connection.send(rest)
            else:
                await connection.send(head + rest)
            await connection.closed_by_peer()

        async with serving(script) as server:
            answer = await transport.send(to(server))
            assert (answer.status, answer.failure) == (200, None)
            assert "cut short" in answer.detail
            assert answer.elapsed_s < 10
            await until(lambda: server.closed_by_peer == 1)

    @pytest.mark.parametrize(
        "extra", [b"HTTP/1.1 500 Forged\r\nContent-Length: 0\r\n\r\n", b"more", b"\r\n", b"\0"]
    )
    async def test_more_body_than_announced_does_not_reach_the_next_answer(
        self, transport: Transport, extra: bytes
    ) -> None:
        answers = [OK + extra, OK, OK]

        async def script(connection: Connection) -> None:
            while True:
                await connection.request()
                await connection.send(answers.pop(0))

        async with serving(script) as server:
            told = [(await transport.send(to(server))).status for _ in range(3)]
        assert told == [200, 200, 200]
        assert len(server.received) == 3

    async def test_an_answer_nobody_asked_for_is_not_taken_for_the_next_one(
        self, transport: Transport
    ) -> None:
        """A 200 that came while the connection was idle acknowledges nothing."""
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
            await meanwhile(transport)
            answer = await transport.send(to(server))
        assert answer.body != b"forged"

    # ------------------------------------------------------- no answer at all

    async def test_a_refused_connection(self, transport: Transport) -> None:
        with socket.socket() as bound:
            bound.bind(("127.0.0.1", 0))
            port = bound.getsockname()[1]
            answer = await transport.send(to(f"http://127.0.0.1:{port}/"))
        assert (answer.status, answer.failure) == (None, Failure.CONNECT)
        assert answer.detail == f"connection refused at 127.0.0.1:{port}"

    @pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 20", b"HTTP/1.1 200 OK\r\nContent-Le"])
    @pytest.mark.parametrize("end", ["close", "reset"])
    async def test_a_connection_that_ends_before_the_answer(
        self, transport: Transport, sent: bytes, end: str
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(sent)
            connection.close() if end == "close" else connection.reset()

        async with serving(script) as server:
            answer = await transport.send(to(server))
        assert (answer.status, answer.failure) == (None, Failure.RESET)
        assert answer.detail
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
    async def test_what_is_not_http(self, transport: Transport, garbage: bytes) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(garbage)
            await connection.closed_by_peer()

        async with serving(script) as server:
            answer = await transport.send(to(server))
            await until(lambda: server.closed_by_peer == 1)
        assert (answer.status, answer.failure) == (None, Failure.PROTOCOL)
        assert len(answer.detail) <= DETAIL_CHARS_MAX
        assert answer.detail.isprintable()

    async def test_endless_headers_are_cut_off(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\n")
            try:
                while True:
                    await connection.send(b"X-Header: value\r\n" * 50)
            except ConnectionError:
                server.closed_by_peer += 1

        async with serving(script) as server:
            answer = await transport.send(to(server))
            await until(lambda: server.closed_by_peer == 1)
        assert (answer.status, answer.failure) == (None, Failure.PROTOCOL)

    async def test_of_large_headers_a_bounded_part_is_kept(self, transport: Transport) -> None:
        fields = b"".join(b"X-%d: %s\r\n" % (i, b"y" * 1000) for i in range(60))
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n" + fields + b"\r\n"
        async with serving(answering(head)) as server:
            answer = await transport.send(to(server))
        assert answer.status == 200
        assert 0 < sum(len(n) + len(v) for n, v in answer.headers) <= HEADER_BYTES_MAX

    async def test_odd_bytes_in_headers_can_be_stored(self, transport: Transport) -> None:
        odd = b"HTTP/1.1 200 OK\r\nServer: \xff\xfe caf\xe9\r\nContent-Length: 0\r\n\r\n"
        async with serving(answering(odd)) as server:
            answer = await transport.send(to(server))
        assert answer.status == 200
        assert summary(answer)["headers"]["server"].encode()

    # ------------------------------------------------------------------- time

    async def test_a_receiver_that_hangs(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.closed_by_peer()

        async with serving(script) as server:
            answer = await transport.send(short(server))
            await until(lambda: server.closed_by_peer == 1)
        assert (answer.status, answer.failure) == (None, Failure.TIMEOUT)
        assert f"{SHORT_S:g} s" in answer.detail
        assert SHORT_S - EARLY_S <= answer.elapsed_s < 20 * SHORT_S

    async def test_a_receiver_that_drips_its_head(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.drip(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 7000)

        async with serving(script) as server:
            answer = await transport.send(short(server))
        assert (answer.status, answer.failure) == (None, Failure.TIMEOUT)

    @pytest.mark.parametrize("drips", [True, False])
    async def test_a_receiver_that_stops_or_drips_in_the_body(
        self, transport: Transport, drips: bool
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n")
            if drips:
                await connection.drip(b"x" * 5000)
            await connection.closed_by_peer()

        async with serving(script) as server:
            answer = await transport.send(short(server))
        assert (answer.status, answer.failure) == (200, None)
        assert "cut short" in answer.detail
        assert SHORT_S - EARLY_S <= answer.elapsed_s < 20 * SHORT_S

    async def test_a_receiver_that_does_not_read(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.head()
            await asyncio.get_running_loop().create_future()

        async with serving(script) as server:
            answer = await transport.send(short(server, body=b"x" * 20_000_000))
        assert answer.failure is Failure.TIMEOUT

    async def test_an_answer_before_the_body_was_read(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.head()
            await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
            await asyncio.get_running_loop().create_future()

        async with serving(script) as server:
            for _ in range(2):
                answer = await transport.send(to(server, body=b"x" * 20_000_000))
                assert (answer.status, answer.body) == (413, b"big")
                assert answer.elapsed_s < 10
        assert server.connections == 2, "the rest of the first body was on this connection"

    async def test_an_answer_before_the_body_was_read_and_the_end(
        self, transport: Transport
    ) -> None:
        """The reset may overtake the answer; nothing else may happen."""

        async def script(connection: Connection) -> None:
            await connection.head()
            await connection.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")

        async with serving(script) as server:
            answer = await transport.send(to(server, body=b"x" * 20_000_000))
        assert answer.status == 413 or answer.failure is Failure.RESET

    # ------------------------------------------------------------ connections

    async def test_connections_are_used_again(self, transport: Transport) -> None:
        async with serving(answering(OK)) as server:
            for _ in range(5):
                assert (await transport.send(to(server))).status == 200
        assert server.connections == 1

    async def test_but_not_when_the_receiver_says_so(self, transport: Transport) -> None:
        answer = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        async with serving(answering(answer)) as server:
            for _ in range(2):
                assert (await transport.send(to(server))).status == 200
        assert server.connections == 2

    async def test_a_kept_connection_that_was_closed_meanwhile_is_not_used(
        self, transport: Transport
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(OK)

        async with serving(script) as server:
            assert (await transport.send(to(server))).status == 200
            await until(lambda: not server._tasks)
            await meanwhile(transport)
            assert (await transport.send(to(server))).status == 200
        assert server.connections == 2

    @pytest.mark.parametrize("method", ["POST", "PUT"])
    async def test_a_kept_connection_that_ends_under_the_request_is_a_reset_not_a_second_try(
        self, transport: Transport, method: str
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(OK)
            await connection.request()

        async with serving(script) as server:
            assert (await transport.send(to(server, method=method))).status == 200
            answer = await transport.send(to(server, method=method))
        assert (answer.status, answer.failure) == (None, Failure.RESET)
        assert len(server.received) == 2

    async def test_many_at_once_get_their_own_answers(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            while True:
                body = (await connection.request()).body
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n"
                await connection.send(head.encode() + body)

        async with serving(script) as server:
            bodies = [str(i).encode() for i in range(200)]
            answers = await asyncio.gather(
                *(transport.send(to(server, body=body)) for body in bodies)
            )
        assert [answer.body for answer in answers] == bodies

    async def test_answers_that_come_together_leave_each_request_its_own_time(
        self, transport: Transport
    ) -> None:
        """Connections change hands while others have not taken their answers in yet."""
        gate = asyncio.Barrier(8)

        async def script(connection: Connection) -> None:
            for _ in range(2):
                await connection.request()
                await gate.wait()
                await connection.send(OK)
            await connection.closed_by_peer()

        async def lane() -> list[int | None]:
            return [(await transport.send(short(server))).status for _ in range(3)]

        async with serving(script) as server, asyncio.timeout(30):
            told = await asyncio.gather(*(lane() for _ in range(8)))
        assert {each[-1] for each in told} == {None}

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
            await meanwhile(transport)
            sending.cancel()
            # The receiver has it, and whoever cancelled can know.
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await sending
            (answer,) = cancelled.value.args
            assert (answer.status, answer.body) == (200, b"abc")
            assert answer.detail == "the body was cut short: the request was called off"
            await until(lambda: server.closed_by_peer == 1)

    async def test_cancelling_says_nothing_to_a_time_out_but_that_it_is_over(
        self, transport: Transport
    ) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
            await connection.closed_by_peer()

        async def limited(server: RawServer) -> None:
            async with asyncio.timeout(0.3):
                await transport.send(to(server))

        async with serving(script) as server:
            with pytest.raises(TimeoutError):
                await limited(server)

    async def test_closing_ends_what_is_in_flight(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.request()
            await connection.closed_by_peer()

        async with serving(script) as server:
            sending = asyncio.create_task(transport.send(to(server)))
            await until(lambda: len(server.received) == 1)
            await transport.aclose()
            answer = await sending
            assert answer.status is None
            await until(lambda: server.closed_by_peer == 1)
            assert (await transport.send(to(server))).status is None

    async def test_closing_ends_what_connects(self, make: Make) -> None:
        looked_up = asyncio.Event()

        class Slow(dict[str, list[str] | None]):
            def __contains__(self, name: object) -> bool:
                looked_up.set()
                return True

            def __getitem__(self, name: str) -> None:
                return None

        transport = make(LOOPBACK, hosts=Slow())
        async with asyncio.timeout(30):
            sending = asyncio.create_task(
                transport.send(to("http://slow.example/", connect_timeout_s=SHORT_S))
            )
            await looked_up.wait()
            await transport.aclose()
            assert (await sending).status is None

    # ------------------------------------------------------- names and egress

    async def test_a_name_that_does_not_exist(self, make: Make) -> None:
        async with closing(make(LOOPBACK, hosts={})) as transport:
            answer = await transport.send(to("http://nowhere.example/"))
        assert (answer.status, answer.failure) == (None, Failure.DNS)
        assert "nowhere.example" in answer.detail

    async def test_a_resolver_that_hangs(self, make: Make) -> None:
        async with closing(make(LOOPBACK, hosts={"slow.example": None})) as transport:
            answer = await transport.send(
                to("http://slow.example/", connect_timeout_s=SHORT_S, total_timeout_s=60)
            )
        assert (answer.status, answer.failure) == (None, Failure.TIMEOUT)
        assert f"{SHORT_S:g} s" in answer.detail
        assert answer.elapsed_s < 30

    async def test_time_outs_are_not_stretched_to_whole_seconds(self, make: Make) -> None:
        async with closing(make(LOOPBACK, hosts={"slow.example": None})) as transport:
            answer = await transport.send(
                to("http://slow.example/", connect_timeout_s=60, total_timeout_s=SHORT_S)
            )
        assert answer.failure is Failure.TIMEOUT
        assert answer.elapsed_s < 30

    async def test_the_systems_resolver(self, transport: Transport) -> None:
        async with serving(answering(OK)) as server:
            answer = await transport.send(to(f"http://localhost:{server.port}/"))
        assert answer.status == 200
        assert server.received[0].headers["host"] == f"localhost:{server.port}"

    @pytest.mark.parametrize("url", ["http://127.0.0.1:{}/", "http://localhost:{}/"])
    async def test_closed_networks_are_not_connected_to(self, make: Make, url: str) -> None:
        async with closing(make(EgressPolicy())) as transport, serving(answering(OK)) as server:
            answer = await transport.send(to(url.format(server.port)))
            assert (answer.status, answer.failure) == (None, Failure.EGRESS_REFUSED)
            assert "OUTBOX_ALLOW_NETWORKS" in answer.detail
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
    async def test_a_name_that_leads_where_it_may_not(self, make: Make, address: str) -> None:
        hosts = {"inside.example": [address]}
        async with closing(make(LOOPBACK, hosts=hosts)) as transport:
            answer = await transport.send(to("http://inside.example:8080/"))
        assert (answer.status, answer.failure) == (None, Failure.EGRESS_REFUSED)

    async def test_a_name_with_several_addresses_that_all_may_not(self, make: Make) -> None:
        hosts = {"inside.example": ["10.0.0.5", "169.254.169.254", "::1"]}
        async with closing(make(LOOPBACK, hosts=hosts)) as transport:
            answer = await transport.send(to("http://inside.example:8080/"))
        assert (answer.status, answer.failure) == (None, Failure.EGRESS_REFUSED)

    async def test_of_several_addresses_only_the_allowed_are_tried(self, make: Make) -> None:
        hosts = {"both.example": ["10.0.0.5", "::1", "127.0.0.1"]}
        transport = make(LOOPBACK, hosts=hosts)
        async with closing(transport), serving(answering(OK)) as server:
            url = f"http://both.example:{server.port}/"
            assert (await transport.send(to(url))).status == 200

    async def test_a_name_that_changes_its_address_is_looked_at_every_time(
        self, make: Make
    ) -> None:
        hosts: dict[str, list[str] | None] = {"moving.example": ["127.0.0.1"]}
        close = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        transport = make(LOOPBACK, hosts=hosts)
        async with closing(transport), serving(answering(close)) as server:
            url = f"http://moving.example:{server.port}/"
            assert (await transport.send(to(url))).status == 200
            hosts["moving.example"] = ["10.0.0.5"]
            answer = await transport.send(to(url))
        assert answer.failure is Failure.EGRESS_REFUSED

    async def test_numbers_that_a_resolver_takes_for_loopback(self, make: Make) -> None:
        async with closing(make(EgressPolicy(["192.0.2.0/24"]))) as transport:
            for host in ("127.1", "2130706433", "0x7f.1", "017700000001"):
                answer = await transport.send(to(f"http://{host}:9/"))
                assert answer.failure is Failure.EGRESS_REFUSED

    @pytest.mark.parametrize(
        "url", ["http://user:pw@127.0.0.1/", "ftp://127.0.0.1/", "nonsense", ""]
    )
    async def test_urls_that_were_never_right(self, transport: Transport, url: str) -> None:
        answer = await transport.send(to(url))
        assert (answer.status, answer.failure) == (None, Failure.EGRESS_REFUSED)

    # -------------------------------------------------------------------- TLS

    async def test_tls_to_a_trusted_receiver(self, make: Make, certificates: Certificates) -> None:
        async with (
            closing(make(LOOPBACK, tls=certificates.client)) as transport,
            serving(answering(OK), tls=certificates.server) as server,
        ):
            for _ in range(2):
                assert (await transport.send(to(server))).status == 200
        assert server.connections == 1

    async def test_tls_to_an_untrusted_receiver(
        self, transport: Transport, certificates: Certificates
    ) -> None:
        async with serving(answering(OK), tls=certificates.server) as server:
            answer = await transport.send(to(server))
        assert (answer.status, answer.failure) == (None, Failure.TLS)
        assert "certificate" in answer.detail
        assert server.received == []

    async def test_tls_with_a_certificate_for_another_name(
        self, make: Make, certificates: Certificates
    ) -> None:
        hosts = {"other.example": ["127.0.0.1"]}
        transport = make(LOOPBACK, tls=certificates.client, hosts=hosts)
        async with (
            closing(transport),
            serving(answering(OK), tls=certificates.server) as server,
        ):
            answer = await transport.send(to(f"https://other.example:{server.port}/"))
        assert (answer.status, answer.failure) == (None, Failure.TLS)
        assert server.received == []

    async def test_tls_to_a_receiver_without_it(self, transport: Transport) -> None:
        async def script(connection: Connection) -> None:
            await connection.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await connection.closed_by_peer()

        async with serving(script) as server:
            answer = await transport.send(to(server.url.replace("http:", "https:")))
        assert (answer.status, answer.failure) == (None, Failure.TLS)

    async def test_a_handshake_that_hangs(self, transport: Transport) -> None:
        async with serving(Connection.closed_by_peer) as server:
            answer = await transport.send(
                to(
                    server.url.replace("http:", "https:"),
                    connect_timeout_s=SHORT_S,
                    total_timeout_s=60,
                )
            )
            await until(lambda: server.closed_by_peer == 1)
        assert (answer.status, answer.failure) == (None, Failure.TIMEOUT)
        assert answer.elapsed_s < 30

    # ----------------------------------------------------------------- always

    async def test_every_answer_can_be_summed_up(self, transport: Transport) -> None:
        answers: list[Answer] = []
        for reply in (OK, b"\x00", b"HTTP/1.1 500 X\r\nServer: \x80\r\n\r\n\x00\xff"):

            async def script(connection: Connection, reply: bytes = reply) -> None:
                await connection.request()
                await connection.send(reply)

            async with serving(script) as server:
                answers.append(await transport.send(to(server)))
        for answer in answers:
            assert summary(answer)["elapsed_ms"] > 0


async def meanwhile(transport: Transport) -> None:
    """Some exchanges elsewhere, so that whatever is on its way arrives."""
    async with serving(answering(OK)) as elsewhere:
        for _ in range(3):
            assert (await transport.send(to(elsewhere))).status == 200


@contextlib.asynccontextmanager
async def closing(transport: Transport) -> AsyncIterator[Transport]:
    try:
        yield transport
    finally:
        await transport.aclose()
