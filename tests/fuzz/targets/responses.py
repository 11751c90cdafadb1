"""Responses of a hostile receiver."""

from __future__ import annotations

import asyncio
import ssl
from typing import TYPE_CHECKING

import orjson

from outbox.core.model.response import (
    DETAIL_CHARS_MAX,
    RESPONSE_BODY_BYTES_MAX,
    AttemptResult,
    Failure,
)
from outbox.core.model.response_policy import (
    RETRY_AFTER_S_MAX,
    AttemptOutcome,
    classify,
    retry_after_s,
)
from outbox.core.model.stored_response import describe_response, stored_response, stored_success
from outbox.destinations.http.limits import HEADER_BYTES_MAX
from outbox.destinations.http.transport import HttpTransport
from outbox.destinations.interface import Recipient, Request
from outbox.network.egress import EgressPolicy
from tests.fuzz.data import Data, fields
from tests.fuzz.target import Target, hold, one_line, storable
from tests.fuzz.wire import MemoryLoop, Wire, segments

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


REQUESTS_MAX = 3
TIMEOUT_S = 15.0
SUMMARY_BYTES_MAX = 32 * 1024
NOW = 1_780_000_000.0

_LOOP = MemoryLoop()
_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_POLICY = EgressPolicy(["127.0.0.0/8"])
_REQUEST = Request(
    Recipient("http://127.0.0.1/hook", timeout_s=TIMEOUT_S),
    lines="Content-Type: application/json\r\n",
    body=b"{}",
)


def responses(raw: bytes) -> None:
    """Any bytes yield a result, made only of the bytes that arrived for this request."""
    data = Data(raw)
    drip = data.number(1) == 1
    scripts: list[list[bytes | int]] = []
    while not data.is_empty and len(scripts) < REQUESTS_MAX:
        scripts.append(segments(data.raw(), drip=drip))
    _LOOP.run(_check_all(scripts))


async def _check_all(scripts: Sequence[list[bytes | int]]) -> None:
    together = [each async for each in _asked(scripts)]
    for response in together:
        _check(response)
    # Each request by itself, over a connection without earlier bytes.
    for i, script in enumerate(scripts[1:], 1):
        (alone,) = [each async for each in _asked([script])]
        hold(
            _content(together[i]) == _content(alone),
            f"request {i} got {_content(together[i])}, and alone {_content(alone)}",
        )


async def _asked(scripts: Sequence[list[bytes | int]]) -> AsyncIterator[AttemptResult]:
    """Return the responses to several requests over one transport."""
    transport = HttpTransport(_POLICY, tls=_TLS)
    loop = asyncio.get_running_loop()
    assert isinstance(loop, MemoryLoop)
    playing: list[asyncio.Task[None]] = []
    try:
        for script in scripts:
            began_at = loop.time()

            def asked(wire: Wire, script: list[bytes | int] = script) -> None:
                playing.append(loop.create_task(wire.play(script)))

            loop.asked = asked
            response = await transport.send(_REQUEST)
            took_s = loop.time() - began_at
            hold(took_s <= TIMEOUT_S + 0.1, f"it took {took_s:.1f} s")
            yield response
            # The remaining bytes arrive before the next request, and do not belong to it.
            while playing:
                await playing.pop()
    finally:
        await transport.aclose()


def _content(response: AttemptResult) -> tuple[object, ...]:
    return response.status, response.failure, response.detail, response.headers, response.body


def _check(response: AttemptResult) -> None:
    hold(response.failure is not Failure.INTERNAL, f"a fault of the transport: {response.detail}")
    hold(response.status is None or 0 <= response.status <= 999, f"status {response.status}")
    hold(len(response.body) <= RESPONSE_BODY_BYTES_MAX, f"{len(response.body)} bytes of body")
    size = sum(len(name) + len(value) for name, value in response.headers)
    hold(size <= HEADER_BYTES_MAX, f"{size} bytes of headers")
    if response.detail or response.failure is not None:
        one_line(response.detail, "detail", DETAIL_CHARS_MAX)
    for kept in (stored_response(response), stored_success(response)):
        if kept is not None:
            storable(kept, "kept")
            hold(len(orjson.dumps(kept)) <= SUMMARY_BYTES_MAX, "what is kept is too long")
    one_line(describe_response(stored_response(response)), "in words", DETAIL_CHARS_MAX)
    delay_s = retry_after_s(response.headers, NOW)
    hold(delay_s is None or 0 <= delay_s <= RETRY_AFTER_S_MAX, f"retry after {delay_s}")
    outcome = classify(response, maybe_sent_before=False)
    is_success = response.status is not None and 200 <= response.status <= 299
    is_status = response.status is not None and 100 <= response.status <= 599
    hold(is_status or outcome is AttemptOutcome.RETRY, f"{response.status} counts as {outcome}")
    hold(
        (outcome is AttemptOutcome.DELIVERED) == is_success,
        f"{response.status} counts as {outcome}",
    )


OK = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

TARGETS = (
    Target(
        name="responses",
        short_run_modules=(
            "outbox.destinations.http.http1",
            "outbox.core.model.response",
            "outbox.core.model.response_policy",
            "outbox.core.model.stored_response",
        ),
        one=responses,
        seeds=(
            fields("0" + OK, OK, "HTTP/1.1 503 Busy\r\nRetry-After: 7\r\n\r\n\x1c"),
            fields("0HTTP/1.1 204 No Content\r\n\r\n", OK),
            fields("0" + OK + "\x1eHTTP/1.1 500 Oops\r\n\r\n", OK),
            fields("0" + OK + "\x1eHTTP/1.1 200", "OK\r\nContent-Length: 0\r\n\r\n"),
            fields("0HTTP/1.1 100 Continue\r\n\r\n" + OK, OK),
            fields(
                "1HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                "2\r\nok\r\n0\r\nTrailer: x\r\n\r\n",
                OK,
            ),
            b"0HTTP/1.1 200 OK\r\n\x1eX-Filler: " + b"a" * 200 + b"\r\n\x18\x1e\r\n\x1c",
            b"0HTTP/1.1 200 OK\r\n\r\n\x1e" + b"b" * 200 + b"\x18\x18",
            b"0HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nbody\x1e\x1amore\x1c",
            b"0HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ncut\x1b",
            b"0HTTP/1.0 200\r\n\r\n\x1a\x1a\x1a\x1a",
            b"0HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nx",
            b"0HTTP/1.1 429 x\r\nRetry-After: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n\x1c",
            b"0HTTP/1.1 302 x\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
            b"0HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x8b\x08\x00",
        ),
        words=(
            "\x18", "HTTP/1.1 ", "HTTP/1.0 ", "\r\n", "\r\n\r\n", "Content-Length: ",
            "Content-Length: 2",
            "Transfer-Encoding: chunked", "0\r\n\r\n", "Connection: close", "Connection: upgrade",
            "Connection: keep-alive", "Upgrade: h2c", "Retry-After: ", "Date: ", "Set-Cookie: ",
            "Content-Type: text/plain", "Server: ", "200 OK", "204 x", "304 x", "410 x", "100 x",
            "101 x", "103 x", "503 x", "\x1e", "\x1c", "\x1b", "\x1a", "\x1f", OK, "ffffffff\r\n",
            "1e3", "-1", "+2", ";ext=1", b"\xe2\x80\xa8", b"\xed\xa0\x80", "X-Request-Id: ",
        ),
        bytes_max=2048,
        runs=400,
    ),
)  # fmt: skip
