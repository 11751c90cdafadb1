"""Deliveries that a receiver has to accept: in order, as copies, and with holes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_devtools.conformance.altered_requests import edited
from outbox_devtools.conformance.suite import LARGE_BYTES, ExpectedResponse

if TYPE_CHECKING:
    from outbox_devtools.conformance.suite import Suite


def add_deliveries(suite: Suite) -> None:
    case = suite.case("a delivery", "it accepts no delivery")
    case.taken(case.event({"n": 1}))
    case.end()

    case = suite.case("ten in order", "it stops after some deliveries")
    for n in range(10):
        case.taken(case.event({"n": n}))
    case.end()

    case = suite.case("odd payloads", "an event that it cannot parse blocks the lane for hours")
    odd: tuple[object, ...] = (None, [], "", 0, {"é": '\u2028 \U0001f600 \\ "'}, 2**53 - 1, [[[]]])
    for data in odd:
        case.taken(case.event(data))
    case.end()

    case = suite.case("an unknown type", "a new type of event becomes a dead letter")
    case.taken(case.sender.event("conform.unknown.v2", 1, lane=case.lane))
    case.end()

    if suite.is_metadata_in_body:
        case = suite.case("an unknown field", "the next version of the relay breaks it")
        case.taken(edited(suite, case.event(1), {"newfield": "a"}))
        case.end()

    case = suite.case("without key, with tenant", "it relies on optional fields")
    case.taken(case.event(1))
    case.taken(case.event(1, key="k", tenant="acme"))
    case.end()

    case = suite.case("a large payload", f"it does not accept {LARGE_BYTES // 1024} KiB")
    case.taken(case.event("x" * (LARGE_BYTES - 10)))
    case.end()


def add_binary_payloads(suite: Suite) -> None:
    case = suite.case("payloads that are not JSON", "an event that it cannot parse blocks the lane")
    for payload, content_type in (
        (bytes(range(256)), "application/octet-stream"),
        (b"", "image/png"),
        (b"{", 'text/plain; charset="utf-8"'),
        (b'{"specversion": "1.0"}', "application/json-seq"),
    ):
        case.taken(case.event(payload, content_type=content_type))
    case.taken(case.event({"n": 1}))
    case.end()


def add_copies(suite: Suite) -> None:
    case = suite.case("a copy", "a lost response makes it process the event twice")
    first = case.taken(case.event(1))
    case.taken(first, again=True)
    case.taken(case.sender.resend(first, 2), again=True)
    case.taken(case.event(2))
    case.taken(case.sender.resend(first, 3), again=True)
    case.end()

    case = suite.case("copies at once", "concurrent copies are processed twice")
    request = case.event(1)
    case.step(request, ExpectedResponse.EVENTUALLY, at_once=5)
    case.processed.append(suite.event_id(request))
    case.taken(case.event(2))
    case.end()

    case = suite.case(
        "a replay of a processed event", "a lost response makes it process the event twice"
    )
    first = case.taken(case.event(1))
    case.sender.dead_letter(first)
    case.taken(case.sender.replay(first), again=True)
    case.end()

    case = suite.case("a backfill", "a deliberate backfill is dropped")
    first = case.taken(case.event(1))
    case.taken(case.sender.backfill(first))
    case.end()


def add_order(suite: Suite) -> None:
    case = suite.case("a dead-lettered number", "a declared hole blocks the lane")
    case.taken(case.event(1))
    dead_lettered = case.event(2)
    case.sender.dead_letter(dead_lettered)
    case.taken(case.event(3))
    case.taken(case.sender.replay(dead_lettered))
    case.taken(case.event(5))
    case.end()

    case = suite.case("a late number", "a delivery overtaken in transit is lost")
    case.taken(case.event(1))
    late, early = case.event(2), case.event(3)
    case.step(early, ExpectedResponse.EITHER)
    case.taken(late)
    case.step(case.sender.resend(early), ExpectedResponse.TAKEN)
    case.processed.append(suite.event_id(early))
    case.end()

    case = suite.case("a lane joined in its middle", "a new receiver refuses running lanes")
    for _ in range(41):
        joined = case.event(1)
    case.step(joined, ExpectedResponse.TAKEN)
    case.processed.append(suite.event_id(joined))
    case.end()

    case = suite.case("the end of a lane", "a change of the number of lanes blocks the endpoint")
    case.taken(case.event(1))
    last = case.taken(case.event(2, lane_ends=True))
    case.taken(case.sender.resend(last), again=True)
    case.end()
