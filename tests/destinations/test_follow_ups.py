"""Between a response of a request run and the request that follows it, in the same pass of the
event loop, anything may happen to the connection: then the response is the result, and no request
follows it.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest

from outbox.core.model.response import Failure
from outbox.destinations.http.http1.connection import Connection, FollowUps
from outbox.destinations.http.targets import DestinationCache
from outbox.network.egress import EgressPolicy
from tests.destinations.conformance import permission
from tests.destinations.request_runs import Run
from tests.destinations.servers import OK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox.destinations.interface import Request
    from tests.destinations.servers import RawServer


class Server:
    """An address where no receiver listens."""

    url = "http://127.0.0.1:1/"


class Wire:
    """A transport that records; its socket has a peer."""

    def __init__(self) -> None:
        self.socket, self.peer = socket.socketpair()
        self.written: list[bytes] = []
        self.closed = False

    def get_extra_info(self, name: str) -> socket.socket | None:
        return self.socket if name == "socket" else None

    def write(self, data: bytes) -> None:
        if self.closed:
            raise RuntimeError("a fault")
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        assert not self.closed, "asyncio's TLS transport fails here"
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close


class Sending:
    """A connection with the first request of a run in flight."""

    def __init__(
        self, follow_ups: FollowUps, before_write: Callable[[], object] | None = None
    ) -> None:
        self.run = Run(cast("RawServer", Server()))
        self.wire = Wire()
        request = self.run.request(0)
        destination = DestinationCache(EgressPolicy(["127.0.0.0/8"])).resolve(request.recipient)
        loop = asyncio.get_running_loop()
        self.connection = Connection(destination.target, loop, {}, follow_ups)
        self.connection.connection_made(cast("asyncio.Transport", self.wire))
        self.result = self.connection.send_request(
            destination, request, 0.0, loop.time() + 60, self.run, before_write
        )


@contextmanager
def sending(
    count: int, before_write: Callable[[], object] | None = None
) -> Iterator[list[Sending]]:
    follow_ups = FollowUps(asyncio.get_running_loop())
    those = [Sending(follow_ups, before_write) for _ in range(count)]
    try:
        yield those
    finally:
        for each in those:
            each.wire.socket.close()
            each.wire.peer.close()


EVENTS: dict[str, Callable[[Sending], object]] = {
    "unsolicited data": lambda each: each.connection.data_received(OK),
    "unread unsolicited data": lambda each: each.wire.peer.send(OK),
    "the end of data": lambda each: each.connection.eof_received(),
    "an unread end": lambda each: each.wire.peer.close(),
    "the end of the connection": lambda each: each.connection.connection_lost(None),
    "a reset": lambda each: each.connection.connection_lost(ConnectionResetError()),
    "its time-out": lambda each: each.connection.expire(),
    "a closed client": lambda each: each.connection.shut_down(),
    "unsolicited data and its time-out": lambda each: (
        each.connection.data_received(OK), each.connection.expire()
    ),
}  # fmt: skip


@pytest.mark.parametrize("event", EVENTS)
async def test_no_request_follows_a_response_after(event: str) -> None:
    with sending(1) as (each,):
        each.connection.data_received(OK)
        EVENTS[event](each)
        response = await asyncio.wait_for(each.result, 20)
        assert (response.status, response.body, response.detail) == (200, b"ok", "")
        assert (each.run.responses, len(each.wire.written)) == ([], 1)
        assert each.run.reports == ("unsolicited" in event and "unread" not in event)


@pytest.mark.parametrize("before", [True, False])
async def test_a_cancelled_request_keeps_its_response_and_nothing_follows(before: bool) -> None:
    """The future is cancelled at once, and the task wakes before or after the connections that
    received a response are served.
    """
    with sending(1) as (each,):
        each.connection.data_received(OK)
        each.result.cancel()
        if not before:
            await asyncio.sleep(0)
        response = each.connection.cancel()
        assert response is not None
        assert (response.status, response.body, response.detail) == (200, b"ok", "")
        await asyncio.sleep(0)
        assert (each.run.responses, len(each.wire.written)) == ([], 1)


async def test_a_response_after_the_next_request_is_the_next_result() -> None:
    with sending(1) as (each,):
        for number in range(1, 4):
            each.connection.data_received(OK)
            await asyncio.sleep(0)
            assert (len(each.wire.written), each.run.prepared) == (number + 1, number)
        each.connection.data_received(OK.replace(b"200", b"503"))
        assert (await asyncio.wait_for(each.result, 20)).status == 503
        assert [body.rpartition(b"\r\n\r\n")[2] for body in each.wire.written] == [
            b"%d" % n for n in range(4)
        ]


async def test_connections_decide_then_send_then_prepare() -> None:
    log: list[tuple[str, int]] = []
    with sending(3) as those:
        for n, each in enumerate(those):
            _log_steps(each, n, log)
            each.connection.data_received(OK)
        assert log == []
        await asyncio.sleep(0)
    steps = ("follow", "write", "sent")
    assert log == [(step, n) for step in steps for n in range(3)]


def _log_steps(each: Sending, n: int, log: list[tuple[str, int]]) -> None:
    def logged(step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            log.append((step, n))
            return function(*arguments)

        return call

    cast("Any", each.run).follow = logged("follow", each.run.follow)
    cast("Any", each.run).sent = logged("sent", each.run.sent)
    cast("Any", each.wire).write = logged("write", each.wire.write)


@pytest.mark.parametrize("step", ["follow", "write", "sent"])
async def test_a_fault_of_one_connection_is_its_own(step: str) -> None:
    def fail(*_: object) -> Request | None:
        raise RuntimeError("a fault")

    with sending(3) as those:
        setattr(those[1].wire if step == "write" else those[1].run, step, fail)
        for each in those:
            each.connection.data_received(OK)
        response = await asyncio.wait_for(those[1].result, 20)
        assert (response.status, response.failure) == (None, Failure.INTERNAL)
        assert "a fault" in response.detail
        assert those[1].wire.closed
        assert those[1].run.prepared == 0
        assert [len(each.wire.written) for each in those] == [2, 1 + (step == "sent"), 2]
        for each in (those[0], those[2]):
            assert not each.result.done()
            each.connection.data_received(OK)
        await asyncio.sleep(0)
        assert [len(each.wire.written) for each in (those[0], those[2])] == [3, 3]


async def test_what_was_decided_before_the_process_was_frozen_is_not_sent() -> None:
    """It is frozen after the first of three writes, and its lease ends meanwhile."""
    with sending(3, permission(4)) as those:
        for each in those:
            each.connection.data_received(OK)
        await asyncio.sleep(0)
        assert [len(each.wire.written) for each in those] == [2, 1, 1]
        assert [each.run.prepared for each in those] == [1, 0, 0]
        assert not those[0].result.done()
        for each in those[1:]:
            with pytest.raises(PermissionError):
                await asyncio.wait_for(each.result, 20)
            assert each.wire.closed
