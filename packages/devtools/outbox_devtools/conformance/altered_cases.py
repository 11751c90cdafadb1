"""Requests that a receiver has to refuse: forged, altered in transit, or malformed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from outbox.core.messages.signature import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from outbox.core.messages.signed_metadata import SIGNATURE_HEADER as METADATA_SIGNATURE
from outbox.receiver.verification import pairs_of
from outbox_devtools.conformance.altered_requests import (
    also_signed,
    changed_body,
    changed_time,
    half_a_signature,
    resigned,
    signed,
    with_body,
    with_headers,
)
from outbox_devtools.conformance.suite import ExpectedResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.receiver.requests import Request
    from outbox_devtools.conformance.suite import Suite

HUGE_BYTES = 20 * 1024 * 1024


def add_signatures(suite: Suite) -> None:
    def forged(
        name: str,
        reason: str,
        spoil: Callable[[Request], Request],
        expected: ExpectedResponse = ExpectedResponse.REFUSED,
    ) -> None:
        """The forgery is refused, and the original delivery is accepted."""
        case = suite.case(name, reason)
        case.taken(case.event(0))
        true = case.event(1)
        case.step(spoil(true), expected)
        case.taken(true)
        case.end()

    def with_header(name: str, value: str | None) -> Callable[[Request], Request]:
        return lambda request: with_headers(request, {name: value})

    def signed_at(offset_s: int, secret: str = suite.secret) -> Callable[[Request], Request]:
        return lambda request: signed(request, secret, int(suite.clock()) + offset_s)

    forgeable = "anyone can forge events"
    forged("another secret", forgeable, lambda r: signed(r, suite.other_secret))
    forged("no signature", forgeable, with_header(SIGNATURE_HEADER, None))
    forged("an empty signature", forgeable, with_header(SIGNATURE_HEADER, ""))
    forged("an empty v1 signature", forgeable, with_header(SIGNATURE_HEADER, "v1,"))
    forged("no version known", forgeable, with_header(SIGNATURE_HEADER, "v9,AAAA"))
    forged("no base64", forgeable, with_header(SIGNATURE_HEADER, "v1,not base64!"))
    forged("half a signature", forgeable, half_a_signature)
    forged("a changed body", "an intermediary can change events", changed_body)
    forged("a changed id", "an intermediary can duplicate events", with_header(ID_HEADER, "msg_1"))
    forged("no id", forgeable, with_header(ID_HEADER, None))
    replayable = "a recorded request stays valid forever"
    forged("no time", replayable, with_header(TIMESTAMP_HEADER, None))
    for text in ("", "now", "1e9", "-1", "99999999999999999999"):
        forged(
            f"no time but {text!r}", "it fails, or accepts it", with_header(TIMESTAMP_HEADER, text)
        )
    forged("an old request", replayable, signed_at(-900), ExpectedResponse.STALE)
    forged("a request of the future", replayable, signed_at(900), ExpectedResponse.STALE)
    repeated = "a relay keeps and repeats forged requests"
    forged("an old forged request", repeated, signed_at(-900, suite.other_secret))
    forged("a changed time", replayable, changed_time)

    case = suite.case("two signatures", "it refuses everything while a secret is rotated")
    first = case.event(1)
    case.taken(also_signed(first, suite.other_secret, before=True))
    second = case.event(2)
    case.taken(also_signed(second, suite.other_secret, before=False))
    case.end()

    case = suite.case("an unknown signature version", "the next version of the standard breaks it")
    first = case.event(1)
    signature = dict(first.headers)[SIGNATURE_HEADER]
    case.taken(with_headers(first, {SIGNATURE_HEADER: f"v1a,AAAA v9,xx {signature}"}))
    case.end()


def add_contradictions(suite: Suite) -> None:
    """Only the body is signed: a header that differs from it was changed in transit."""
    for name, value in (
        ("Sequence", "7"),
        ("Previous-Sequence", "5"),
        ("Lane", "another-1-0"),
        ("Delivery", "0d9ff25f-6f0b-4e0d-9d4b-000000000000"),
        ("Event", "another.type"),
        ("Event-Id", "0d9ff25f-6f0b-4e0d-9d4b-000000000000"),
    ):
        header = f"{suite.header_prefix}{name}"
        case = suite.case(
            f"a different {header}",
            "an intermediary can hide duplicates and gaps",
        )
        case.taken(case.event(0))
        true = case.event(1)
        case.refused(with_headers(true, {header: value}))
        case.taken(true)
        case.end()


def add_bodies(suite: Suite) -> None:
    case = suite.case("far too large", "anyone can exhaust its memory")
    case.taken(case.event(0))
    case.step(with_body(case.event(1), b" " * HUGE_BYTES), ExpectedResponse.CUT)
    case.end()

    case = suite.case("not a POST", "a GET of the URL has an effect")
    case.step(replace(case.event(1), method="GET", body=b""), ExpectedResponse.REFUSED)
    case.end()


def add_malformed_bodies(suite: Suite) -> None:
    for name, body in (
        ("an empty body", b""),
        ("no JSON", b"{"),
        ("no object", b"[]"),
        ("no UTF-8", b'{"id": "\xff"}'),
        ("no numbers", b'{"id": "x", "type": "a.b", "lane": "x", "data": 1}'),
        ("a number that is a text", b'{"id":"x","type":"a.b","lane":"x","sequence":"1"}'),
    ):
        case = suite.case(f"signed, and {name}", "it fails for hours, or accepts invalid bodies")
        case.refused(resigned(suite, case.event(1), body))
        case.end()


def add_metadata(suite: Suite) -> None:
    """The metadata is in headers, which have a signature of their own."""

    def signature_of(request: Request, header: str) -> str:
        return dict(pairs_of(request.headers))[header]

    header = METADATA_SIGNATURE
    forgeable = "an intermediary can change order and types"
    for name, change in (
        ("no metadata signature", lambda _: None),
        ("an empty metadata signature", lambda _: ""),
        ("half a metadata signature", lambda r: signature_of(r, header)[:20]),
        ("the body's signature for the metadata", lambda r: signature_of(r, SIGNATURE_HEADER)),
    ):
        case = suite.case(name, forgeable)
        case.taken(case.event(0))
        true = case.event(1)
        case.refused(with_headers(true, {header: change(true)}))
        case.taken(true)
        case.end()

    case = suite.case("the metadata of another delivery", forgeable)
    first = case.taken(case.event(0))
    true = case.event(1)
    case.refused(with_headers(true, {header: signature_of(first, header)}))
    case.taken(true)
    case.end()
