"""Tests that every transport must pass: unsolicited data and connection reuse.

The receiver is a plain socket that the test writes to without a pause, so that the sender's event
loop has no chance to read before the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from tests.destinations.conformance import to
from tests.destinations.servers import OK
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from outbox.core.model.response import AttemptResult
    from outbox.destinations.interface import Request, Transport

REFUSED = b"HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
SHOP, BILLING = UUID(int=1), UUID(int=2)


class Receiver:
    """A listening socket, and the requests that arrive at it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/hook"
        self._peers: list[socket.socket] = []

    async def accept(self) -> socket.socket:
        async with asyncio.timeout(20):
            peer, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        peer.setblocking(False)
        self._peers.append(peer)
        return peer

    async def request(self, peer: socket.socket) -> bytes:
        """Read one request, whose body is `{"n":1}`."""
        data = b""
        async with asyncio.timeout(20):
            while not data.endswith(b'{"n":1}'):
                received = await asyncio.get_running_loop().sock_recv(peer, 65536)
                assert received, "the sender has closed the connection"
                data += received
        return data

    def close(self) -> None:
        for each in (self._listener, *self._peers):
            each.close()


class UnsolicitedData:
    """Inherit from this class and provide the fixtures `transport` and `make`."""

    @pytest.fixture
    async def receiver(self) -> AsyncIterator[Receiver]:
        receiver = Receiver()
        yield receiver
        receiver.close()

    @pytest.fixture
    def seen(self) -> list[str]:
        """A mark for each report of unsolicited data."""
        return []

    @pytest.fixture
    def request_of_shop(self, receiver: Receiver, seen: list[str]) -> Request:
        return to(receiver.url, endpoint=SHOP, on_unsolicited=lambda: seen.append("shop"))

    async def _exchange(
        self, transport: Transport, receiver: Receiver, request: Request, response: bytes = OK
    ) -> tuple[AttemptResult, socket.socket]:
        """Send a request on a new connection, respond in one segment, and return both ends."""
        sending = asyncio.create_task(transport.send(request))
        peer = await receiver.accept()
        await receiver.request(peer)
        peer.send(response)
        return await sending, peer

    @pytest.mark.parametrize(
        "unread", [OK, b"HTTP/1.1 2", b"x", None], ids=["response", "part", "byte", "eof"]
    )
    async def test_a_connection_with_anything_unread_is_not_used(
        self,
        transport: Transport,
        receiver: Receiver,
        request_of_shop: Request,
        seen: list[str],
        unread: bytes | None,
    ) -> None:
        """A late second response would acknowledge the next request, which is refused."""
        first, peer = await self._exchange(transport, receiver, request_of_shop)
        assert (first.status, seen) == (200, [])

        async def second() -> AttemptResult:
            if unread is None:
                peer.shutdown(socket.SHUT_WR)
            else:
                peer.send(unread)
            return await transport.send(request_of_shop)

        sending = asyncio.create_task(second())
        other = await receiver.accept()
        await receiver.request(other)
        other.send(REFUSED)
        assert (await sending).status == 503
        if unread is None:
            assert seen == []
        else:
            await until(lambda: seen == ["shop"])

    async def test_data_between_requests_is_reported_and_closes_the_connection(
        self, transport: Transport, receiver: Receiver, request_of_shop: Request, seen: list[str]
    ) -> None:
        _, peer = await self._exchange(transport, receiver, request_of_shop)
        peer.send(OK)
        await until(lambda: seen == ["shop"])
        response, _ = await self._exchange(transport, receiver, request_of_shop, REFUSED)
        assert response.status == 503

    async def test_a_second_response_in_two_segments_acknowledges_nothing(
        self, transport: Transport, receiver: Receiver, request_of_shop: Request, seen: list[str]
    ) -> None:
        """The first part arrives with the first response, the rest after the next request."""
        first, peer = await self._exchange(transport, receiver, request_of_shop, OK + OK[:10])
        assert (first.status, seen) == (200, ["shop"])
        sending = asyncio.create_task(transport.send(request_of_shop))
        other = await receiver.accept()
        await receiver.request(other)
        with contextlib.suppress(ConnectionError):
            peer.send(OK[10:])
        other.send(REFUSED)
        assert (await sending).status == 503

    @pytest.mark.parametrize(
        "response",
        [
            OK + OK,
            OK + b"x",
            OK + b"\n",
            CHUNKED + b"\r\n",
            OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + OK,
            CHUNKED + OK,
            b"HTTP/1.1 204 No\r\n\r\n" + OK,
            OK + b"HTTP/1.1 100 Continue\r\n\r\n",
        ],
        ids=[
            "response",
            "byte",
            "line end",
            "empty line",
            "after close",
            "after chunks",
            "after 204",
            "interim",
        ],
    )
    async def test_data_after_a_complete_response_is_reported(
        self,
        transport: Transport,
        receiver: Receiver,
        request_of_shop: Request,
        seen: list[str],
        response: bytes,
    ) -> None:
        first, _ = await self._exchange(transport, receiver, request_of_shop, response)
        assert first.status in (200, 204)
        assert seen == ["shop"]
        second, _ = await self._exchange(transport, receiver, request_of_shop, REFUSED)
        assert (second.status, seen) == (503, ["shop"])

    async def test_data_before_the_request_is_reported(
        self, transport: Any, receiver: Receiver, request_of_shop: Request, seen: list[str]
    ) -> None:
        opener = transport._client._opener
        open_connection = opener.open

        async def late(*args: Any) -> Any:
            """Open a connection, and wait until the receiver's data has been read."""
            connection = await open_connection(*args)
            await until(lambda: connection._early)
            return connection

        opener.open = late
        sending = asyncio.create_task(transport.send(request_of_shop))
        peer = await receiver.accept()
        peer.send(OK)
        assert (await sending).status == 200
        assert seen == ["shop"]
        opener.open = open_connection
        second, _ = await self._exchange(transport, receiver, request_of_shop, REFUSED)
        assert second.status == 503

    @pytest.mark.parametrize(
        "response",
        [
            OK,
            CHUNKED,
            OK.replace(b"ok", b"\r\n"),
            b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            CHUNKED.replace(b"0\r\n\r\n", b"0\r\nX: y\r\n\r\n"),
            b"HTTP/1.1 204 No\r\n\r\n",
            b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + OK,
            OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
            OK.replace(b": 2", b": 40002") + b"x" * 40_000,
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n",
            b"not HTTP",
        ],
    )
    async def test_ordinary_and_malformed_responses_are_not_reported(
        self,
        transport: Transport,
        receiver: Receiver,
        request_of_shop: Request,
        seen: list[str],
        response: bytes,
    ) -> None:
        request = request_of_shop._replace(
            recipient=replace(request_of_shop.recipient, timeout_s=0.2)
        )
        _, peer = await self._exchange(transport, receiver, request, response)
        peer.shutdown(socket.SHUT_WR)
        await self._exchange(transport, receiver, request)
        assert seen == []

    async def test_the_response_to_a_cancelled_request_is_not_reported(
        self, transport: Transport, receiver: Receiver, request_of_shop: Request, seen: list[str]
    ) -> None:
        sending = asyncio.create_task(transport.send(request_of_shop))
        peer = await receiver.accept()
        await receiver.request(peer)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with contextlib.suppress(ConnectionError):
            peer.send(OK)
        await self._exchange(transport, receiver, request_of_shop)
        assert seen == []

    async def test_endpoints_of_one_host_share_no_connection(
        self, transport: Transport, receiver: Receiver, request_of_shop: Request, seen: list[str]
    ) -> None:
        """A late second response of one endpoint acknowledges nothing of the other one."""
        _, peer = await self._exchange(transport, receiver, request_of_shop)
        of_billing = to(
            receiver.url, endpoint=BILLING, on_unsolicited=lambda: seen.append("billing")
        )
        sending = asyncio.create_task(transport.send(of_billing))
        other = await receiver.accept()
        await receiver.request(other)
        peer.send(OK)
        await until(lambda: seen == ["shop"])
        other.send(REFUSED)
        assert (await sending).status == 503
        # Each endpoint reuses its own connection.
        sending = asyncio.create_task(transport.send(of_billing))
        await receiver.request(other)
        other.send(OK)
        assert (await sending).status == 200

    async def test_without_keep_alive_each_request_has_a_connection_of_its_own(
        self, transport: Transport, receiver: Receiver, request_of_shop: Request
    ) -> None:
        await self._exchange(transport, receiver, request_of_shop)
        alone = request_of_shop._replace(keep_alive=False)
        for _ in range(2):
            sending = asyncio.create_task(transport.send(alone))
            peer = await receiver.accept()
            assert b"\r\nConnection: close\r\n" in await receiver.request(peer)
            peer.send(OK)
            assert (await sending).status == 200
            async with asyncio.timeout(20):
                assert await asyncio.get_running_loop().sock_recv(peer, 1) == b""
