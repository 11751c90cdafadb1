"""The influence of endpoints, events and lanes on a request on the wire."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING
from uuid import UUID

import h11
import orjson

from outbox.core.messages.message import prepare
from outbox.core.model.delivery import Delivery
from outbox.core.model.event import encode_headers
from outbox.core.model.headers import parse_lines, valid_headers
from outbox.destinations.http.transport import HttpTransport
from outbox.destinations.interface import Recipient, Request
from outbox.errors import UsageError
from outbox.network.egress import EgressPolicy
from tests.fuzz.data import Data, fields, is_text
from tests.fuzz.target import Broken, Target, hold
from tests.fuzz.wire import MemoryLoop, Wire

if TYPE_CHECKING:
    from outbox.core.model.response import Failure

_LOOP = MemoryLoop()
_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_POLICY = EgressPolicy(["0.0.0.0/0", "::/0"])
_ID = UUID("0198c0de-0000-7000-8000-000000000001")
_OURS = (
    "x-delivery",
    "x-event",
    "x-event-id",
    "x-lane",
    "x-sequence",
    "x-previous-sequence",
    "x-attempt",
)
_ONCE = (*_OURS, "host", "content-length", "content-type", "webhook-id", "webhook-signature")


class _Anywhere:
    """Resolves every name."""

    async def resolve(self, host: str) -> list[str]:
        return ["127.0.0.1"]

    def current(self, host: str) -> list[str]:
        return ["127.0.0.1"]

    async def aclose(self) -> None:
        pass


def requests(raw: bytes) -> None:
    """The written bytes are one request, with each relay header exactly once and unchanged."""
    data = Data(raw)
    method = data.pick(("POST", "PUT", "PATCH"))
    url = "http://127.0.0.1" + data.text()
    key = data.maybe()
    mine = {data.text(): data.text() for _ in range(data.number(3))}
    is_good = _POLICY.refusal_of_url(url) is None
    try:
        # Validated as for a setting, and without that validation.
        events = encode_headers(mine)
    except UsageError:
        events = (
            orjson.dumps(mine, default=str).decode()
            if is_text("".join([*mine, *mine.values()]))
            else None
        )
    if not is_text(key or ""):
        return
    delivery = Delivery(
        endpoint_id=_ID, outbox_id=1, event_id=_ID, type="order.paid", tenant=None, key=key,
        lane="shop.1", seq=7, batch=1, published_at=1_769_817_600.0,
        expires_at=None, payload=data.rest() or b"{}",
        headers=None if events is None else events.encode(),
    )  # fmt: skip
    prepared = prepare(delivery, 6, headers=valid_headers(mine))
    lines = prepared.attempt(2, 1_780_000_000, [bytes(32)])
    wires: list[Wire] = []
    result = _send(Request(Recipient(url, method), lines, prepared.body), wires)
    hold(is_good == (result is None), f"{url!r} is good: {is_good}, and ended as {result!r}")
    hold(is_good == bool(wires), f"{url!r} is good: {is_good}, and was asked: {bool(wires)}")
    if not is_good:
        return
    _check_request(bytes(wires[0].written), method, parse_lines(lines), prepared.body)


def _send(request: Request, wires: list[Wire]) -> Failure | None:
    """Return why the request was not sent; None: it was sent."""
    failures: list[Failure | None] = []

    def asked(wire: Wire) -> None:
        wires.append(wire)
        _LOOP.call_soon(wire.feed, b"HTTP/1.1 204 No Content\r\n\r\n")

    async def send() -> None:
        transport = HttpTransport(_POLICY, tls=_TLS, resolver=_Anywhere())
        try:
            failures.append((await transport.send(request)).failure)
        finally:
            await transport.aclose()

    _LOOP.asked = asked
    _LOOP.run(send())
    return failures[0]


def _check_request(
    written: bytes, method: str, headers: tuple[tuple[str, str], ...], body: bytes
) -> None:
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    reader.receive_data(written)
    request = reader.next_event()
    if not isinstance(request, h11.Request):
        raise Broken(f"no request: {written[:200]!r}")
    hold(request.method.decode() == method, f"{request.method!r}")
    hold(request.target.startswith(b"/"), f"target {request.target!r}")
    there = [name.decode() for name, _ in request.headers]
    for name in _ONCE:
        hold(there.count(name) == 1, f"{name} is there {there.count(name)} times")
    found = [(name.decode(), value.decode()) for name, value in request.headers]
    for name, value in headers:
        hold((name.lower(), value.strip()) in found, f"{name} is not there as {value!r}")
    came = b""
    while not isinstance(event := reader.next_event(), h11.EndOfMessage):
        if not isinstance(event, h11.Data):
            raise Broken(f"no body: {event}")
        came += event.data
    hold(came == body, "another body")
    hold(reader.trailing_data[0] == b"", f"behind the request: {reader.trailing_data[0][:100]!r}")


TARGETS = (
    Target(
        name="requests",
        short_run_modules=("outbox.destinations", "outbox.core.model.headers"),
        one=requests,
        seeds=(
            fields("0/hook?a=%20b&c", "order-7", '1X-Api-Key', "secret", '{"a":1}'),
            fields("1/", "", "1traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7-01", "{}"),
            fields("2:8080/a/../b/%2e%2e/", "", "1X-A", "a\r\nX-Sequence: 9", "{}"),
        ),
        words=(
            "\r\n", "\n", "Host", "X-Sequence", "Content-Length", "Transfer-Encoding", "x-lane",
            "webhook-id", "?", "#", "@", ":", "//", "%0d%0a", "%2f", "%", "..", "\t", " ", "\x00",
            "\u2028", "é", "Connection", "Upgrade", "Expect", ":99999", "[::1]", "\\",
        ),
        runs=250,
    ),
)  # fmt: skip
