"""Invalid responses of a relay raise the documented errors."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import orjson
import pytest

from outbox.receiver import CannotFetch, FetchClient

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.system

LANE = {"lane": "a-1-0", "generation": 1, "acknowledged": 7}


@contextmanager
def relay_response(response: bytes) -> Iterator[FetchClient]:
    """Serve this response to every request."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond_to_all() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(response)

        thread = threading.Thread(target=respond_to_all)
        thread.start()
        try:
            yield FetchClient(f"http://127.0.0.1:{listener.getsockname()[1]}", "obf_" + "A" * 43)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def as_json(value: object, status: str = "200 OK") -> bytes:
    body = orjson.dumps(value)
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


@pytest.mark.parametrize(
    "response",
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
def test_an_invalid_lane_list_raises_cannot_fetch(response: bytes) -> None:
    with relay_response(response) as fetch, pytest.raises(CannotFetch) as message:
        list(fetch.lanes())
    assert "\n" not in str(message.value)


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
def test_an_invalid_page_raises_cannot_fetch(change: dict[str, object]) -> None:
    page = {"kept_from": 1, "items": [], "acknowledged": 7, "next": None}
    with (
        relay_response(as_json(page | change)) as fetch,
        pytest.raises(CannotFetch, match="not from a relay"),
    ):
        fetch.page("a-1-0", 0)
    with relay_response(as_json(page)) as fetch:
        assert fetch.page("a-1-0", 0).acknowledged == 7


def test_the_reason_of_an_error_response_is_reported() -> None:
    with (
        relay_response(as_json({"detail": "a\nb"}, "404 Not Found")) as fetch,
        pytest.raises(CannotFetch, match="responded: 404, a b"),
    ):
        fetch.page("a-1-0", 0)


@pytest.mark.parametrize("field", ["erased", "missing"])
def test_an_item_without_an_event_has_one_of_two_fields(field: str) -> None:
    item = {"sequence": 4, "previous_sequence": 3, field: True}
    with relay_response(as_json(item)) as fetch:
        fetched = fetch.delivery("a-1-0", 4)
    assert (fetched.request, fetched.missing) == (None, field == "missing")
