"""Requests to a receiver, and relay responses to a fetching receiver."""

from __future__ import annotations

import base64
import hmac
import http.client
import io
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from outbox.core.messages.ed25519 import parse_private_key
from outbox.core.messages.message import prepare
from outbox.core.messages.signature import SIGNATURES_MAX, SignatureError, format_secret, sign
from outbox.core.model.delivery import Delivery
from outbox.core.model.headers import parse_lines
from outbox.errors import OutboxError
from outbox.receiver.adapters.asgi import ASGI
from outbox.receiver.adapters.wsgi import WSGI
from outbox.receiver.asynchronous import AsyncReceiver
from outbox.receiver.decisions import ReceiverRules
from outbox.receiver.fetch import CannotFetch, FetchClient, LanePage
from outbox.receiver.message import BadMessage, Message
from outbox.receiver.requests import Request, RequestOutcome, Response
from outbox.receiver.synchronous import Receiver
from outbox.receiver.verification import Verified, Verifier, verify
from tests.fuzz.data import Data, fields
from tests.fuzz.target import Target, hold, one_line, refused

if TYPE_CHECKING:
    from collections.abc import Sequence

NOW = 1_780_000_000
SECRET = bytes(range(32))
_ID = UUID("0198c0de-0000-7000-8000-000000000001")
_PRIVATE = parse_private_key("whsk_" + base64.b64encode(SECRET).decode())
_ED25519 = Ed25519PrivateKey.from_private_bytes(SECRET)
_VERIFIER = Verifier([format_secret(SECRET), _PRIVATE.public_text], clock=lambda: NOW)
_NAMES = (
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
    "X-Delivery",
    "X-Lane",
    "X-Sequence",
    "X-Event",
    "X-Event-Id",
    "X-Previous-Sequence",
    "X-Attempt",
)
_FIELDS = (
    ("X-Event", "type"),
    ("X-Event-Id", "id"),
    ("X-Lane", "lane"),
    ("X-Sequence", "sequence"),
    ("X-Previous-Sequence", "previous_sequence"),
)


def _good() -> tuple[list[tuple[str, str]], bytes]:
    delivery = Delivery(
        endpoint_id=_ID, lane="0198c0de0000-1-0", seq=7, batch=1, outbox_id=9, event_id=_ID,
        type="order.paid", tenant=None, key="order-7", expires_at=None, headers=None,
        published_at=1_769_817_600.0, payload=b'{"order":7}',
    )  # fmt: skip
    prepared = prepare(delivery, 6)
    return list(parse_lines(prepared.attempt(1, NOW, [SECRET]))), prepared.body


GOOD_HEADERS, GOOD_BODY = _good()


# ------------------------------------------------------------- signatures


def signatures(raw: bytes) -> None:
    """Only bytes that were signed with the secret are accepted."""
    data = Data(raw)
    headers, body = list(GOOD_HEADERS), GOOD_BODY
    if data.number(1):
        headers, body = [], b""
    while data.number(3):
        match data.number(4):
            case 0:
                body = data.raw()
            case 1:
                at = data.number(255) % (len(body) + 1)
                body = body[:at] + data.raw() + body[at + data.number(3) :]
            case 2:
                headers.append((data.pick(_NAMES), data.text()))
            case 3 if headers:
                name, value = headers.pop(data.number(len(headers) - 1))
                at = data.number(255) % (len(value) + 1)
                headers.append((name, value[:at] + data.text() + value[at + data.number(3) :]))
            case 4 if headers:
                name, value = headers.pop(data.number(len(headers) - 1))
                headers.append((data.maybe() or name.upper(), value))
    try:
        verified = _VERIFIER.verify(headers, body)
    except SignatureError as error:
        refused(error, "signature", 300)
        return
    except BadMessage as error:
        refused(error, "message", 300)
        _hold_signed(headers, body)
        return
    _hold_signed(headers, body)
    hold(verified.message_id == str(UUID(int=0)) or verified.messages, "it is a delivery")


def _hold_signed(headers: Sequence[tuple[str, str]], body: bytes) -> None:
    """Accepted bytes must be the signed ones, whatever the other headers are."""
    there = {name.lower(): value for name, value in headers}
    good = {name.lower(): value for name, value in GOOD_HEADERS}
    for name in ("webhook-id", "webhook-timestamp"):
        hold(there.get(name) == good[name], f"{name} is {there.get(name)!r}, and was not signed")
    hold(body == GOOD_BODY, "another body is believed")
    names = [name.lower() for name, _ in headers if name.lower().startswith("webhook-")]
    hold(len(names) == len(set(names)), "one of two headers was believed")


# ------------------------------------------------------------- deliveries


def deliveries(raw: bytes) -> None:
    """A signed body becomes a delivery that can be stored, or a documented error."""
    data = Data(raw)
    message_id, timestamp = data.text(), str(NOW)
    agrees = data.number(1) == 0
    headers = (
        [] if agrees else [(data.pick(_NAMES[3:]), data.text()) for _ in range(data.number(6))]
    )
    body = data.rest()
    if agrees:
        headers = [("X-Delivery", message_id), *_matching_headers(body)]
    try:
        signed = sign(SECRET, message_id, NOW, body)
    except UnicodeEncodeError:
        return
    if len(body) % 2:
        signature = _ED25519.sign(f"{message_id}.{timestamp}.".encode() + body)
        signed = "v1a," + base64.b64encode(signature).decode()
    headers += [
        ("Webhook-Id", message_id), ("Webhook-Timestamp", timestamp), ("Webhook-Signature", signed),
    ]  # fmt: skip
    try:
        verified = _VERIFIER.verify(headers, body)
    except (SignatureError, BadMessage) as error:
        refused(error, "delivery", 500)
        return
    hold(verified.message_id == message_id and verified.timestamp == NOW, "another id or time")
    for message in verified.messages:
        _require_storable(message)


def _matching_headers(body: bytes) -> list[tuple[str, str]]:
    """Return headers that match the body."""
    try:
        content = orjson.loads(body)
        if isinstance(content, list):
            output = [(header, str(content[0][name])) for header, name in _FIELDS[1:]]
            return [*output, ("X-Last-Sequence", str(content[-1]["sequence"]))]
        return [(header, str(content[name])) for header, name in _FIELDS]
    except (ValueError, TypeError, KeyError, IndexError):
        return []


def _require_storable(message: Message) -> None:
    """Require that an inbox in any database can store it."""
    texts = (message.delivery_id, message.event_id, message.type, message.lane)
    for text in (*texts, message.tenant, message.key, *(message.replay_of or ())[:1]):
        if text is not None:
            text.encode()
            hold("\0" not in text, f"{text!r} cannot be kept")
    numbers = (message.sequence, message.previous_sequence, message.backfill or 0)
    for number in (*numbers, *(message.replay_of or ("", 0))[1:]):
        hold(isinstance(number, int) and 0 <= number < 2**63, f"{number} cannot be kept")
    hold(message.previous_sequence < message.sequence, f"{message}")


# --------------------------------------------------------------- adapters


class _ValidatingReceiver(AsyncReceiver):
    """Validates requests like a receiver, and processes nothing."""

    def __init__(self) -> None:
        self.rules = ReceiverRules(format_secret(SECRET), body_bytes_max=4096)
        self.came: list[Request] = []

    @property
    def body_bytes_max(self) -> int:
        return self.rules.body_bytes_max

    async def handle(self, request: Request) -> Response:
        return self.respond(request)

    def respond(self, request: Request) -> Response:
        self.came.append(request)
        read = self.rules.read(request)
        hold(not isinstance(read, Verified), "somebody without the secret is believed")
        assert isinstance(read, Response)
        return read


class _ThreadedValidatingReceiver(Receiver):
    def __init__(self, taken: _ValidatingReceiver) -> None:
        self._taken = taken

    @property
    def body_bytes_max(self) -> int:
        return self._taken.body_bytes_max

    def handle(self, request: Request) -> Response:
        return self._taken.respond(request)


_TAKEN = _ValidatingReceiver()
_ASGI, _WSGI = ASGI(_TAKEN), WSGI(_ThreadedValidatingReceiver(_TAKEN))


def adapters(raw: bytes) -> None:
    """Any request gets a response, the same through ASGI and WSGI."""
    data = Data(raw)
    method = data.pick(("POST", "GET", "PUT"))
    headers = [(data.raw(), data.raw()) for _ in range(data.number(6))]
    length, body = data.text(), data.rest()
    _TAKEN.came.clear()
    _through_asgi(method, headers, body)
    _through_wsgi(method, headers, length, body)
    hold(
        all(len(each.body) <= _TAKEN.body_bytes_max for each in _TAKEN.came), "a body is too large"
    )


def _through_asgi(method: str, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    sent: list[Any] = []
    pieces = [body[i : i + 700] for i in range(0, len(body), 700)] or [b""]
    left = [
        {"type": "http.request", "body": piece, "more_body": i < len(pieces)}
        for i, piece in enumerate(pieces, 1)
    ]

    async def receive() -> Any:
        return left.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "/", "headers": headers}
    # No code in it waits.
    running = _ASGI(scope, receive, send)
    try:
        running.send(None)
    except StopIteration:
        pass
    else:
        hold(False, "it waits for something")
    begin, end = sent
    hold(400 <= begin["status"] <= 499, f"status {begin['status']}")
    one_line(end["body"].decode().strip() or "-", "response")


def _through_wsgi(
    method: str, headers: list[tuple[bytes, bytes]], length: str, body: bytes
) -> None:
    began: list[str] = []
    environ: dict[str, Any] = {
        "REQUEST_METHOD": method,
        "CONTENT_LENGTH": length,
        "wsgi.input": io.BytesIO(body),
        **{
            "HTTP_" + name.decode("latin-1").upper().replace("-", "_"): value.decode("latin-1")
            for name, value in headers
        },
    }
    (response,) = _WSGI(environ, lambda status, _: began.append(status))
    hold(began[0][:1] == "4", f"status {began[0]}")
    one_line(response.decode().strip() or "-", "response")


# ---------------------------------------------------------- fetched pages


class _Socket:
    """The response of a relay, or of a server in its place."""

    response: ClassVar[bytes] = b""

    def sendall(self, _: bytes) -> None:
        pass

    def makefile(self, *_: Any, **__: Any) -> io.BufferedIOBase:
        return io.BytesIO(self.response)

    def close(self) -> None:
        pass

    def setsockopt(self, *_: Any) -> None:
        pass


def _without_network() -> None:
    made: Any = http.client.HTTPConnection
    made.connect = _connect


def _connect(connection: http.client.HTTPConnection) -> None:
    connection.sock = _Socket()


_FETCH = FetchClient("http://127.0.0.1:1", "obf_" + "a" * 43)


def fetched(raw: bytes) -> None:
    """With any response in place of a relay's, a fetched page is usable or a documented error."""
    data = Data(raw)
    what, whole = data.number(1), data.number(1)
    _Socket.response = data.rest()
    if not whole:
        body = _Socket.response
        _Socket.response = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    try:
        if what == 0:
            for number, standing in enumerate(_FETCH.lanes()):
                hold(isinstance(standing.lane, str), f"{standing}")
                hold(type(standing.acknowledged) is int, f"{standing}")
                if number > 50:  # The page names itself as its next page.
                    break
        else:
            _check_page(_FETCH.page("lane", 0))
    except CannotFetch as error:
        refused(error, "fetch", 600)


def _check_page(page: LanePage) -> None:
    hold(type(page.kept_from) is int and type(page.acknowledged) is int, f"{page}")
    hold(page.next is None or type(page.next) is int, f"{page}")
    for item in page.items:
        hold(type(item.sequence) is int, f"{item}")
        if item.request is not None:
            try:
                verify(item.request.headers, item.request.body, format_secret(SECRET), now=NOW)
            except OutboxError as error:
                refused(error, "fetched", 500)


_RICH = GOOD_BODY.replace(
    b',"data"', b',"tenant":"t","replay_of":{"lane":"a","sequence":3},"backfill":4,'
    b'"lane_ends":true,"data"')  # fmt: skip
_BATCH = b'[{"delivery":"%b",%b]' % (str(_ID).encode(), GOOD_BODY[1:])
_ITEM = {"sequence": 7, "headers": dict(GOOD_HEADERS), "body": GOOD_BODY.decode()}
_LANE = {"lane": "0198c0de0000-1-0", "generation": 1, "acknowledged": 9, "last": 9, "ended": False}
_SIGNED = dict(GOOD_HEADERS)
# The position of the time stamp, as `Data.number` reads it.
_TIME_AT = chr(ord("0") + list(_SIGNED).index("webhook-timestamp"))
_FORGED = "v1," + base64.b64encode(hmac.digest(b"guess", GOOD_BODY, "sha256")).decode()

TARGETS = (
    Target(
        name="signatures",
        one=signatures,
        seeds=(
            b"00", fields("0111000", "x"), fields("010", '{"a":1}'),
            fields("0120", _SIGNED["webhook-id"], "0"), fields("0122", _FORGED, "0"),
            fields("1120", _SIGNED["webhook-id"]) + fields("\x1f121", str(NOW)) + fields("\x1f122",
            "v1,x"),
            fields(f"013{_TIME_AT}91", "10"), fields("0130", "1", "0"),
            fields(f"014{_TIME_AT}", "WEBHOOK-ID", "0"),
        ),
        words=(*_NAMES, "v1,", "v1a,", " ", ".", str(NOW), "+", "=", "webhook-id", "é", "\r\n",
               _SIGNED["webhook-signature"], _FORGED, "v1," * SIGNATURES_MAX, b"\xff"),
        runs=3000,
    ),
    Target(
        name="deliveries",
        one=deliveries,
        seeds=(
            fields(_SIGNED["webhook-id"], b"0" + GOOD_BODY), fields(_SIGNED["webhook-id"],
            b"0" + _RICH),
            fields(_SIGNED["webhook-id"], "110" + _SIGNED["X-Delivery"], "{}"),
            fields("id", '10{"a":1}'),
            fields(_SIGNED["webhook-id"], b"0" + _BATCH),
        ),
        words=('"delivery":"', "X-Last-Sequence", "},{", "[{", "}]", '"previous_sequence":',
               '"sequence":', '"lane":', '"replay_of":{', '"backfill":',
               '"lane_ends":true', '"id":', '"type":', "null", "-1", "1e400",
               "9223372036854775808", "18446744073709551615", "\\u0000", "\\ud800", '"data":',
               "true", "1.0", '"tenant":', '"key":'),
        bytes_max=1500,
        runs=1750,
    ),
    Target(
        name="adapters",
        one=adapters,
        seeds=(
            fields("03webhook-id", "a", "webhook-timestamp", str(NOW), "webhook-signature", "v1,x",
            "2", "{}"),
            fields("10", "", ""), fields("00", "99999999999999999999", ""), fields("00", "+1",
            "x" * 900),
        ),
        words=("webhook-id", "webhook-timestamp", "webhook-signature", "v1,", "x-lane", str(NOW),
               b"\xff\xfe", "²", "-1", "1_0", "x" * 700, "Content-Length"),
        bytes_max=6000,
        runs=1500,
    ),
    Target(
        name="fetched",
        one=fetched,
        prepare=_without_network,
        seeds=(
            b"00" + orjson.dumps({"items": [_LANE], "next": None}),
            b"10" + orjson.dumps(_LANE | {"kept_from": 1, "items": [_ITEM], "next": None}),
            b"01HTTP/1.1 409 Conflict\r\nContent-Length: 14\r\n\r\n{\"detail\":\"x\"}",
            b"01HTTP/1.1 302 x\r\nLocation: http://169.254.169.254/\r\n\r\n",
            b"11HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        ),
        words=('"items":', '"next":', '"lane":', '"acknowledged":', '"generation":', '"kept_from":',
               '"sequence":', '"headers":', '"body":', '"dead_lettered":', "null", "[]", "{}",
               "1e5", "\\ud800", "HTTP/1.1 ", "Content-Length: ", "Transfer-Encoding: chunked",
               "\r\n\r\n", "HTTP/1.1 100 x\r\n\r\n", "detail", "-1", "HTTP/1.1 500 x"),
        bytes_max=3000,
        runs=1250,
    ),
)  # fmt: skip
_ = RequestOutcome
