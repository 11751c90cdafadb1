"""What answers in the place of a relay is no reason to fall over."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.receiver import AlreadyAsked, CannotFetch, Fetch

if TYPE_CHECKING:
    from collections.abc import Iterator

LANE = {"lane": "a-1-0", "generation": 1, "acknowledged": 7}


@contextmanager
def answering(answer: bytes) -> Iterator[Fetch]:
    """Somebody who says this to whatever is asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_all() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=answer_all)
        thread.start()
        try:
            yield Fetch(f"http://127.0.0.1:{listener.getsockname()[1]}", "obf_" + "A" * 43)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def as_json(value: object, status: str = "200 OK") -> bytes:
    body = orjson.dumps(value)
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 " + b"x" * 70_000,
        as_json([]),
        as_json("x"),
        as_json({"items": None, "next": None}),
        as_json({"items": [1], "next": None}),
        as_json({"items": [LANE | {"acknowledged": "7"}], "next": None}),
        as_json({"items": [LANE | {"generation": True}], "next": None}),
        as_json({"items": [LANE], "next": 7}),
        as_json({"detail": ["\x1b[2J"]}, "500 Oops"),
        b"HTTP/1.1 500 Oops\r\nContent-Length: 99\r\n\r\n{",
        b"HTTP/1.1 302 x\r\nLocation: http://127.0.0.1:9/\r\n\r\n",
    ],
)
def test_lanes_that_cannot_be_read_are_an_error_of_ours(answer: bytes) -> None:
    with answering(answer) as fetch, pytest.raises(CannotFetch) as told:
        list(fetch.lanes())
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    "change",
    [
        {"items": {}},
        {"kept_from": None},
        {"next": "2"},
        {"items": [{"sequence": "1"}]},
        {"items": [{"sequence": 1, "body": 5, "headers": {}}]},
        {"items": [{"sequence": 1, "body": "{}"}]},
        {"items": [{"sequence": 1, "body": "{}", "headers": {"X-Lane": 1}}]},
    ],
)
def test_a_page_that_cannot_be_read_is_an_error_of_ours(change: dict[str, object]) -> None:
    page = {"kept_from": 1, "items": [], "acknowledged": 7, "next": None}
    with answering(as_json(page | change)) as fetch, pytest.raises(CannotFetch, match="no relay"):
        fetch.page("a-1-0", 0)
    with answering(as_json(page)) as fetch:
        assert fetch.page("a-1-0", 0).acknowledged == 7


def test_a_replay_that_cannot_be_read_is_an_error_of_ours() -> None:
    good = {"lane": "a", "job": None, "from": None, "to": None, "acknowledged": 0}
    with answering(as_json(good)) as fetch:
        assert fetch.replay("a", 0).job is None
    with answering(as_json(good | {"job": "1"})) as fetch, pytest.raises(CannotFetch):
        fetch.replay("a", 0)
    with (
        answering(as_json({"detail": "a\nb"}, "409 Conflict")) as fetch,
        pytest.raises(AlreadyAsked, match="answers: 409, a b"),
    ):
        fetch.replay("a", 0)
