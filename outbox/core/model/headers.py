"""Custom headers: which headers of endpoints and events are sent, and their precedence.

Headers of an endpoint (for example an API key) and of an event (for example `traceparent`)
are sent unless they would change a header of the relay, the framing or the routing of the
request.  Such headers, and names or values that are invalid in HTTP/1.1 (RFC 9110, 5.5 and
5.6.2; non-ASCII values have no defined encoding), are rejected at input and omitted at
delivery: an invalid header never blocks a delivery.

An event goes to many endpoints, most of them unknown to its producer.  Its headers may
therefore not be credentials, which would go to all endpoints, nor headers that a receiver
trusts from its proxy, and they do not override the endpoint's headers.

Marks are the names that a relay, a reader of a stream or a receiver looks up: of a control entry,
of a signature, of a field of a broker.  `mark_problem` has all of them.  The functions of SQL
refuse them as well; those of a plain INSERT, and of events that were stored before, are omitted at
delivery.  The trace context (`traceparent`, `tracestate`) belongs to publishers.

Their total size is limited, because servers limit it: most accept about 16 KiB and a hundred
headers, including the relay's.  The endpoint's headers take precedence, because its receiver
may require them; the event's headers beyond the limit are omitted.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol

import orjson

from outbox.core.model.text import quoted
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from outbox.core.model.response import Headers

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x20-\x7e\t]*")

DEFAULT_PREFIX = "X-"
HEADER_PREFIX = re.compile(r"[A-Za-z](?:[A-Za-z0-9-]{0,38}[A-Za-z0-9])?-")
_FOREIGN_PREFIXES = ("webhook-", "x-forwarded-", "proxy-", "sec-", "content-", "accept-", "ce-")
"""Prefixes with a meaning of their own."""
_RELAY_NAMES = (
    "attempt",
    "backfill",
    "delivery",
    "event",
    "event-id",
    "event-key",
    "event-tenant",
    "event-time",
    "lane",
    "lane-ends",
    "last-sequence",
    "previous-sequence",
    "replay-of",
    "sequence",
)


def check_prefix(name: str, value: object) -> str:
    """Return the prefix of an endpoint's header names.

    Raises:
        UsageError: it is not one; the message starts with `name`.
    """
    if not isinstance(value, str):
        raise UsageError(f"{name}: must be a text, not {quoted(value)}")
    if not HEADER_PREFIX.fullmatch(value) or value.lower().startswith(_FOREIGN_PREFIXES):
        raise UsageError(
            f"{name}: {quoted(value)} must be letters, digits and dashes, such as X-Acme-, "
            f"and not begin with {', '.join(_FOREIGN_PREFIXES)}"
        )
    return value


@lru_cache(1024)
def relay_headers(prefix: str) -> frozenset[str]:
    """The headers that describe a delivery to an endpoint with this prefix, normalized."""
    return frozenset(normalize_name(prefix + name) for name in _RELAY_NAMES)


def normalize_name(name: str) -> str:
    """Normalize a name, so that names which a receiver may confuse are equal.

    Names are case-insensitive, and CGI and WSGI do not distinguish - from _.
    """
    return name.lower().replace("_", "-")


_MARKS = relay_headers(DEFAULT_PREFIX) | frozenset(
    {
        "content-type",
        # The field of an entry that has the body.
        "body",
        # In a broker's message, the end of a pull.
        "description",
        "status",
    }
)
_MARK_PREFIXES = ("outbox-", "x-outbox-", "webhook-", "ce-")
"""Control entries, signatures, attributes of CloudEvents."""
_POSITION_SUFFIXES = (
    "-lane",
    "-lane-ends",
    "-last-sequence",
    "-previous-sequence",
    "-replay-of",
    "-sequence",
)
"""Names of a lane's position under any endpoint's prefix.

A receiver that accepts several prefixes recognizes by the lane which one a delivery has.
"""
_MARKS_OF_RELAY = relay_headers(DEFAULT_PREFIX) | {"body", "content-type", "outbox-control"}
_MARK_PREFIXES_OF_RELAY = ("webhook-", "ce-")
"""What an endpoint may not set either: a request or message has it already."""
_RESERVED = frozenset(
    {
        "user-agent",
        # Framing and routing of the request or response.
        "accept-encoding",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "range",
        "trailer",
        "transfer-encoding",
        # Hop-by-hop headers (RFC 9110, 7.6.1) and headers for proxies.
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "upgrade",
    }
)
_OF_ENDPOINTS = frozenset(
    {
        # Credentials.
        "authorization",
        "cookie",
        # The original client and request behind a proxy (RFC 7239 and its predecessors).
        "cf-connecting-ip",
        "fastly-client-ip",
        "forwarded",
        "true-client-ip",
        "via",
        "x-client-ip",
        "x-cluster-client-ip",
        "x-http-method",
        "x-http-method-override",
        "x-method-override",
        "x-original-host",
        "x-original-url",
        "x-real-ip",
        "x-rewrite-url",
    }
)
_OF_ENDPOINTS_PREFIX = "x-forwarded-"
WIRE_BYTES_MAX, WIRE_COUNT_MAX = 12 * 1024, 64
"""Limits of the endpoint's and event's headers together, including colons and line ends."""

WIDELY_ACCEPTED_BYTES = 7 * 1024
"""Bytes of these headers that all usual servers accept: Jetty and lighttpd refuse requests with
more than 8 KiB of headers (431), and Tomcat (400); the relay's own take up to 1 KiB."""


def mark_problem(name: str) -> str | None:
    """Why a publisher may not set a header, because our own code trusts it; None: it may."""
    plain = normalize_name(name)
    if plain in _MARKS or plain.startswith(_MARK_PREFIXES) or plain.endswith(_POSITION_SUFFIXES):
        return "is set by the relay, and trusted by readers and receivers"
    return None


def header_problem(name: str, value: object) -> str | None:
    """Why a header of an endpoint or event is not allowed; None: it is allowed."""
    plain = normalize_name(name)
    is_set = plain in _MARKS_OF_RELAY or plain.startswith(_MARK_PREFIXES_OF_RELAY)
    if is_set or plain in _RESERVED:
        return "is set by the relay, or controls the framing or routing of the request"
    if not _TOKEN.fullmatch(name):
        return "is not a header name (RFC 9110: letters, digits and !#$%&'*+-.^_`|~)"
    if not isinstance(value, str):
        return "has a value that is not text"
    if not _VALUE.fullmatch(value):
        return "has a value with characters other than printable ASCII"
    return None


def event_header_problem(name: str, value: object) -> str | None:
    """Why a header of an event is not allowed; None: it is allowed.

    Publishing rejects such a header; `merge` omits it.
    """
    plain = normalize_name(name)
    if plain in _OF_ENDPOINTS or plain.startswith(_OF_ENDPOINTS_PREFIX):
        return "is allowed only in endpoint settings, because an event goes to many endpoints"
    return mark_problem(name) or header_problem(name, value)


class ComputedHeaders(Protocol):
    """Headers of an endpoint that are computed for each request, such as a second signature."""

    @property
    def names(self) -> frozenset[str]:
        """Their names, normalized."""
        ...

    def lines(self, message_id: str, timestamp: int, body: bytes) -> str:
        """Their lines, as `format_lines` returns them; `timestamp` is in epoch seconds."""
        ...


class EndpointHeaders(NamedTuple):
    """What an endpoint's settings say about the headers of its requests."""

    own: Headers = ()
    """Sent with each request."""
    prefix: str = DEFAULT_PREFIX
    """Begins the names of the headers that describe a delivery."""
    computed: ComputedHeaders | None = None

    @property
    def reserved(self) -> frozenset[str]:
        """The names that only the relay sets, normalized."""
        names = relay_headers(self.prefix)
        return names if self.computed is None else names | self.computed.names


NO_HEADERS = EndpointHeaders()


def valid_headers(
    headers: Mapping[str, object],
    prefix: str = DEFAULT_PREFIX,
    computed: ComputedHeaders | None = None,
) -> EndpointHeaders:
    """The allowed headers of an endpoint with this prefix, the first of each name."""
    found = _select(headers.items(), header_problem)
    reserved = EndpointHeaders((), prefix, computed).reserved
    own = tuple([each for plain, each in found.items() if plain not in reserved])
    return EndpointHeaders(own, prefix, computed)


def merge(endpoint: EndpointHeaders, event: bytes | None, used_bytes: int = 0) -> Headers:
    """The endpoint's headers, then the event's; the endpoint's take precedence.

    Headers of the event beyond the size limit are omitted, and those that the relay sets.  A plain
    INSERT may write more headers than publishing allows; those beyond that number are ignored.

    Args:
        endpoint: the endpoint's headers, as `valid_headers` returned them.
        event: JSON text of an object of strings.
        used_bytes: the part of the limit that headers of the relay with texts of users take.
    """
    own = endpoint.own
    if event is None:
        return own
    merged = {normalize_name(name): (name, value) for name, value in own}
    bytes_left = WIRE_BYTES_MAX - used_bytes - sum(map(_wire_bytes, own))
    reserved = endpoint.reserved
    for plain, each in _select(
        islice(orjson.loads(event).items(), WIRE_COUNT_MAX), event_header_problem
    ).items():
        size = _wire_bytes(each)
        if plain in merged or plain in reserved:
            continue
        if size <= bytes_left and len(merged) < WIRE_COUNT_MAX:
            merged[plain] = each
            bytes_left -= size
    return tuple(merged.values())


def size_warning(headers: Mapping[str, str]) -> str | None:
    """Why some servers refuse requests with so many bytes of headers; None: they do not."""
    size = sum(map(_wire_bytes, headers.items()))
    if size < WIDELY_ACCEPTED_BYTES:
        return None
    return (
        f"the headers have {size} bytes: Jetty, lighttpd and Tomcat refuse requests with 8 KiB of "
        "headers, those of the relay included, unless they are configured for more"
    )


def format_lines(headers: Headers) -> str:
    """Format headers as lines of `name: value` and CRLF.

    Raises:
        ValueError: a header contains a line break, which would inject another header.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    count = len(headers)
    if lines.count("\n") != count or lines.count("\r") != count or "\0" in lines:
        raise ValueError("a header holds a line break")
    return lines


def parse_lines(lines: str) -> Headers:
    """Parse the lines of `format_lines`."""
    split = (line.partition(": ") for line in lines.split("\r\n")[:-1])
    return tuple((name, value) for name, _, value in split)


def _wire_bytes(header: tuple[str, str]) -> int:
    """Bytes of a header line with CRLF; names and values are ASCII."""
    return len(header[0]) + len(header[1]) + 4


def _select(
    headers: Iterable[tuple[str, object]], problem: Callable[[str, object], str | None]
) -> dict[str, tuple[str, str]]:
    kept: dict[str, tuple[str, str]] = {}
    for name, value in headers:
        plain = normalize_name(name)
        if plain not in kept and problem(name, value) is None:
            kept[plain] = (name, str(value).strip(" \t"))
    return kept
