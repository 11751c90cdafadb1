"""Headers of others in requests of ours: which may go along, and whose count.

An endpoint's headers (an API key, say) and an event's (`traceparent` is one) go
along unless they could change what a header of ours says, how the request is
framed, or where it goes.  Such headers, and those whose name or value HTTP/1.1
cannot carry unharmed (RFC 9110, 5.5 and 5.6.2; values outside ASCII have no
agreed meaning), are refused where somebody can be told, and left out where
nobody can: a bad header never stops a delivery.

An event goes to many endpoints, and whoever publishes it knows few of them.  So it says
nothing of who asks (credentials would go to all of them), nor what a proxy in front of a
receiver takes for its own word, and what an endpoint says of itself is not for an event to
change.

Both together have a bound on the wire, since receivers have one: what they all take is some
16 KiB and a hundred headers, ours included.  The endpoint's come first, because its receiver
may let nobody in without them; of the event's those are left out that are beyond it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from outbox.core.model.response import Headers

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x20-\x7e\t]*")

_RESERVED = frozenset(
    {
        # Ours.
        "content-type",
        "user-agent",
        "x-attempt",
        "x-delivery",
        "x-event",
        "x-lane",
        "x-last-sequence",
        "x-previous-sequence",
        "x-sequence",
        # What frames the request or the answer, or says where it goes.
        "accept-encoding",
        "content-encoding",
        "content-length",
        "expect",
        "host",
        "range",
        "trailer",
        "transfer-encoding",
        # Hop by hop (RFC 9110, 7.6.1), and what proxies act on.
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
        # Who asks.
        "authorization",
        "cookie",
        # Who asked the proxy, and for what (RFC 7239, and its usual forerunners).
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
"""Of an endpoint's headers and an event's together, each with its colon and line end."""
_RESERVED_PREFIX = "webhook-"


def same_name(name: str) -> str:
    """What two names have in common that a receiver may take for one.

    Case is nobody's; and who hands headers on as variables (CGI, WSGI) makes - of _.
    """
    return name.lower().replace("_", "-")


def header_problem(name: str, value: object) -> str | None:
    """Why a header cannot go along, whoever says it; None: it can."""
    plain = same_name(name)
    if plain in _RESERVED or plain.startswith(_RESERVED_PREFIX):
        return "is set by the relay, or says how the request is carried"
    if not _TOKEN.fullmatch(name):
        return "is not a header name (RFC 9110: letters, digits and !#$%&'*+-.^_`|~)"
    if not isinstance(value, str):
        return "has a value that is not text"
    if not _VALUE.fullmatch(value):
        return "has a value with characters other than printable ASCII"
    return None


def event_header_problem(name: str, value: object) -> str | None:
    """Why an event's header cannot go along; None: it can.

    Producers are told by this when they publish; `merge` leaves it out.
    """
    plain = same_name(name)
    if plain in _OF_ENDPOINTS or plain.startswith(_OF_ENDPOINTS_PREFIX):
        return "is for endpoints to set: an event goes to any of them"
    return header_problem(name, value)


def own(headers: Mapping[str, object]) -> Headers:
    """The headers of an endpoint that may go along, the first of each name."""
    return tuple(_kept(headers.items(), header_problem).values())


def merge(endpoint: Headers, event: bytes | None) -> Headers:
    """An endpoint's headers, then the event's; of one name the endpoint's counts.

    Of the event's, those that go beyond the bound are left out.

    Args:
        endpoint: as `own` returned them.
        event: JSON text of an object of strings.
    """
    if event is None:
        return endpoint
    merged = {same_name(name): (name, value) for name, value in endpoint}
    room = WIRE_BYTES_MAX - sum(map(_wire_bytes, endpoint))
    for plain, each in _kept(orjson.loads(event).items(), event_header_problem).items():
        takes = _wire_bytes(each)
        if plain not in merged and takes <= room and len(merged) < WIRE_COUNT_MAX:
            merged[plain] = each
            room -= takes
    return tuple(merged.values())


def lines_of(headers: Headers) -> str:
    """Headers as they go on the wire, each `name: value` and the line's end.

    Raises:
        ValueError: one of them would be more than one.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers])
    count = len(headers)
    if lines.count("\n") != count or lines.count("\r") != count or "\0" in lines:
        raise ValueError("a header holds a line break")
    return lines


def pairs(lines: str) -> Headers:
    """What `lines_of` made lines of."""
    split = (line.partition(": ") for line in lines.split("\r\n")[:-1])
    return tuple((name, value) for name, _, value in split)


def _wire_bytes(header: tuple[str, str]) -> int:
    """As `name: value` and the line's end; all of it is ASCII."""
    return len(header[0]) + len(header[1]) + 4


def _kept(
    headers: Iterable[tuple[str, object]], problem: Callable[[str, object], str | None]
) -> dict[str, tuple[str, str]]:
    kept: dict[str, tuple[str, str]] = {}
    for name, value in headers:
        plain = same_name(name)
        if plain not in kept and problem(name, value) is None:
            kept[plain] = (name, str(value).strip(" \t"))
    return kept
