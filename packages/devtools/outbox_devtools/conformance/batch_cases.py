"""Batches, valid and altered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from outbox_devtools.conformance.altered_requests import (
    changed_body,
    resigned,
    signed,
    with_headers,
)
from outbox_devtools.conformance.suite import ExpectedResponse

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.receiver.requests import Request
    from outbox_devtools.conformance.suite import Suite


def add_batches(suite: Suite) -> None:
    case = suite.case("a batch", "it accepts only single deliveries")
    case.together(*(case.event(n) for n in range(4)))
    case.together(case.event(4))
    case.taken(case.event(5))
    case.end()

    case = suite.case("a batch again", "a lost response makes it process events twice")
    batch = [case.event(n) for n in range(3)]
    case.together(*batch)
    case.together(*batch, again=batch)
    case.taken(batch[1], again=True)
    case.end()

    case = suite.case("a regrouped batch", "new events are dropped together with duplicates")
    first, second = case.event(1), case.event(2)
    case.taken(first)
    case.together(first, second, again=[first])
    third = case.event(3)
    case.together(second, third, again=[second])
    case.together(first, second, third, case.event(4), again=[first, second, third])
    case.end()

    case = suite.case("batches at once", "concurrent copies are processed twice")
    batch = [case.event(n) for n in range(3)]
    case.step(case.sender.batch(*batch), ExpectedResponse.EVENTUALLY, at_once=5)
    case.processed += [suite.event_id(each) for each in batch]
    case.end()

    case = suite.case("a batch with an unknown type", "the events after it are lost")
    first = case.event(0)
    strange = case.sender.event("conform.unknown.v2", 1, lane=case.lane)
    case.together(first, strange, case.event(2))
    case.end()

    case = suite.case("a batch of 600 KiB", "it does not accept large batches")
    case.together(*(case.event("x" * 150_000) for _ in range(4)))
    case.end()

    def spoiled(name: str, reason: str, spoil: Callable[[Request], Request]) -> None:
        """The spoiled batch is refused as a whole, and the original one accepted."""
        case = suite.case(name, reason)
        case.taken(case.event(0))
        batch = [case.event(n) for n in range(1, 4)]
        case.refused(spoil(case.sender.batch(*batch)))
        case.together(*batch)
        case.end()

    def elements(change: Callable[[list[Any]], object]) -> Callable[[Request], Request]:
        return lambda r: resigned(suite, r, orjson.dumps(change(orjson.loads(r.body))))

    forgeable = "anyone can forge events"
    inconsistent = "it accepts inconsistent batches"
    spoiled("a forged batch", forgeable, lambda r: signed(r, suite.other_secret))
    spoiled("a changed batch", forgeable, changed_body)
    spoiled("a batch without its last", inconsistent, elements(lambda body: body[:-1]))
    spoiled("a batch with a hole", inconsistent, elements(lambda body: [body[0], body[2]]))
    spoiled("an empty batch", inconsistent, elements(lambda _: []))
    spoiled("a batch of numbers", inconsistent, elements(lambda _: [1, 2]))
    last = f"{suite.header_prefix}Last-Sequence"
    spoiled(f"a different {last}", inconsistent, lambda r: with_headers(r, {last: "9"}))
