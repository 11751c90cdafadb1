"""Conformance cases: requests to a receiver, and the responses expected to each.

A case has its own lane and consists of steps; each step is one request and the expected
response:

    taken       2xx: the event was accepted
    refused     4xx that a relay does not retry: the request had no effect
    cut         the same, or the connection is closed before the whole request was sent
    either      any response in time
    eventually  2xx, or 409, 429 or 5xx at first, and 2xx on a retry

Whether an event was *processed* once is visible from outside only if the receiver reports
it (`outbox conform --processed`), so each case lists the events to process.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid5

import orjson

from outbox.core.delivery.signature import (
    ID_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    parse_secret,
    sign,
)
from outbox.core.delivery.signed_metadata import SIGNATURE_HEADER as METADATA_SIGNATURE
from outbox.core.model.headers import DEFAULT_PREFIX
from outbox.core.model.message_format import UNBATCHED
from outbox.errors import UsageError
from outbox.receiver.verification import pairs_of
from outbox.testing.sender import FakeSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from uuid import UUID

    from outbox.core.model.message_format import FormatName
    from outbox.receiver.requests import Request

LARGE_BYTES = 256 * 1024
"""The largest payload that can be published by default."""
HUGE_BYTES = 20 * 1024 * 1024
EVENT_TYPE = "conform.check"
NO_LANES = b'{"id": "x", "type": "outbox.checkpoint", "lanes": 7}'


class ExpectedResponse(StrEnum):
    """Which responses to a request conform; see the top of this module."""

    TAKEN = "taken"
    REFUSED = "refused"
    CUT = "cut"
    EITHER = "either"
    EVENTUALLY = "eventually"


@dataclass(frozen=True, slots=True)
class CaseStep:
    """One request and the expected response."""

    request: Request
    expected: ExpectedResponse
    at_once: int = 1
    """Number of concurrent copies sent."""


@dataclass(frozen=True, slots=True)
class ConformanceCase:
    """A test case of a few requests."""

    name: str
    reason: str
    """The consequence for a receiver that fails the case."""
    steps: tuple[CaseStep, ...]
    processed: tuple[str, ...] = ()
    """Ids of the events that have to be processed, repeated as often as that."""


@dataclass(slots=True)
class _Suite:
    """Collects cases, each with its own lane."""

    secret: str
    other_secret: str
    endpoint_id: UUID
    clock: Callable[[], float]
    ids: Iterator[UUID]
    header_prefix: str
    format_name: FormatName
    lanes: int = 0
    cases: list[ConformanceCase] = field(default_factory=list)

    @property
    def is_metadata_in_body(self) -> bool:
        return self.format_name not in UNBATCHED

    def event_id(self, request: Request) -> str:
        """Return the id of the event in a request."""
        return dict(pairs_of(request.headers))[f"{self.header_prefix}Event-Id"]

    def case(self, name: str, reason: str) -> _CaseBuilder:
        self.lanes += 1
        sender = FakeSender(
            self.secret,
            endpoint_id=self.endpoint_id,
            clock=self.clock,
            new_id=lambda: next(self.ids),
            header_prefix=self.header_prefix,
            format_name=self.format_name,
        )
        return _CaseBuilder(self, sender, sender.lane(self.lanes), name, reason)


@dataclass(slots=True)
class _CaseBuilder:
    suite: _Suite
    sender: FakeSender
    lane: str
    name: str
    reason: str
    steps: list[CaseStep] = field(default_factory=list)
    processed: list[str] = field(default_factory=list)

    def event(self, data: object = None, **how: object) -> Request:
        return self.sender.event(EVENT_TYPE, data, lane=self.lane, **how)  # type: ignore[arg-type]

    def step(self, request: Request, expected: ExpectedResponse, *, at_once: int = 1) -> None:
        self.steps.append(CaseStep(request, expected, at_once))

    def taken(self, request: Request, *, again: bool = False) -> Request:
        self.step(request, ExpectedResponse.TAKEN)
        if not again:
            self.processed.append(self.suite.event_id(request))
        return request

    def together(self, *requests: Request, again: Sequence[Request] = ()) -> Request:
        """Send a batch that has to be accepted; the events of `again` were processed before."""
        batch = self.sender.batch(*requests)
        self.step(batch, ExpectedResponse.TAKEN)
        self.processed += [self.suite.event_id(each) for each in requests if each not in again]
        return batch

    def refused(self, request: Request) -> None:
        self.step(request, ExpectedResponse.REFUSED)

    def end(self) -> None:
        self.suite.cases.append(
            ConformanceCase(self.name, self.reason, tuple(self.steps), tuple(self.processed))
        )


def cases(
    secret: str,
    endpoint_id: UUID,
    clock: Callable[[], float],
    *,
    other_secret: str,
    checkpoints: bool = False,
    batches: bool = False,
    header_prefix: str = DEFAULT_PREFIX,
    format_name: FormatName = "envelope",
) -> tuple[ConformanceCase, ...]:
    """Build all cases for a receiver.

    Args:
        secret: the receiver's secret.
        endpoint_id: seed of unique lane names and event ids.
        clock: returns epoch seconds.
        other_secret: a secret that the receiver does not have.
        checkpoints: include the cases for checkpoints.
        batches: include the cases for batches.
        header_prefix: begins the names of the headers that describe a delivery.
        format_name: the endpoint's format.

    Raises:
        UsageError: a secret is invalid, or the format has no batches.
    """
    if batches and format_name in UNBATCHED:
        raise UsageError(f"--batches: the format {format_name} has one delivery per request")
    ids = (uuid5(endpoint_id, str(n)) for n in count())
    suite = _Suite(secret, other_secret, endpoint_id, clock, ids, header_prefix, format_name)
    for add_cases in (_deliveries, _copies, _order, _signatures, _contradictions, _bodies):
        add_cases(suite)
    if suite.is_metadata_in_body:
        _malformed_bodies(suite)
    else:
        _metadata(suite)
    if checkpoints:
        _checkpoints(suite)
    if batches:
        _batches(suite)
    return tuple(suite.cases)


# --------------------------------------------------------------------------- the cases


def _deliveries(suite: _Suite) -> None:
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
        case.taken(_edited(suite, case.event(1), {"newfield": "a"}))
        case.end()

    case = suite.case("without key, with tenant", "it relies on optional fields")
    case.taken(case.event(1))
    case.taken(case.event(1, key="k", tenant="acme"))
    case.end()

    case = suite.case("a large payload", f"it does not accept {LARGE_BYTES // 1024} KiB")
    case.taken(case.event("x" * (LARGE_BYTES - 10)))
    case.end()


def _copies(suite: _Suite) -> None:
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


def _order(suite: _Suite) -> None:
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


def _checkpoints(suite: _Suite) -> None:
    case = suite.case("a checkpoint", "it refuses checkpoints")
    case.taken(case.event(1))
    case.step(case.sender.checkpoint(), ExpectedResponse.TAKEN)
    case.step(case.sender.checkpoint(), ExpectedResponse.TAKEN)
    case.taken(case.event(2))
    case.end()

    case = suite.case("a checkpoint before its deliveries", "late deliveries are dropped forever")
    case.taken(case.event(1))
    late = case.event(2)
    case.step(case.sender.checkpoint(), ExpectedResponse.TAKEN)
    case.taken(late)
    case.taken(case.event(3))
    case.end()

    case = suite.case("a forged checkpoint", "anyone can report all deliveries as missing")
    case.taken(case.event(1))
    case.step(_signed(case.sender.checkpoint(), suite.other_secret), ExpectedResponse.REFUSED)
    case.step(_resigned(suite, case.sender.checkpoint(), NO_LANES), ExpectedResponse.REFUSED)
    case.taken(case.event(2))
    case.end()


def _batches(suite: _Suite) -> None:
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
        return lambda r: _resigned(suite, r, orjson.dumps(change(orjson.loads(r.body))))

    forgeable = "anyone can forge events"
    inconsistent = "it accepts inconsistent batches"
    spoiled("a forged batch", forgeable, lambda r: _signed(r, suite.other_secret))
    spoiled("a changed batch", forgeable, _changed_body)
    spoiled("a batch without its last", inconsistent, elements(lambda body: body[:-1]))
    spoiled("a batch with a hole", inconsistent, elements(lambda body: [body[0], body[2]]))
    spoiled("an empty batch", inconsistent, elements(lambda _: []))
    spoiled("a batch of numbers", inconsistent, elements(lambda _: [1, 2]))
    last = f"{suite.header_prefix}Last-Sequence"
    spoiled(f"a different {last}", inconsistent, lambda r: _with_headers(r, {last: "9"}))


def _signatures(suite: _Suite) -> None:
    def forged(name: str, reason: str, spoil: Callable[[Request], Request]) -> None:
        """The forgery is refused, and the original delivery is accepted."""
        case = suite.case(name, reason)
        case.taken(case.event(0))
        true = case.event(1)
        case.refused(spoil(true))
        case.taken(true)
        case.end()

    def with_header(name: str, value: str | None) -> Callable[[Request], Request]:
        return lambda request: _with_headers(request, {name: value})

    def signed_at(offset_s: int) -> Callable[[Request], Request]:
        return lambda request: _signed(request, suite.secret, int(suite.clock()) + offset_s)

    forgeable = "anyone can forge events"
    forged("another secret", forgeable, lambda r: _signed(r, suite.other_secret))
    forged("no signature", forgeable, with_header(SIGNATURE_HEADER, None))
    forged("an empty signature", forgeable, with_header(SIGNATURE_HEADER, ""))
    forged("an empty v1 signature", forgeable, with_header(SIGNATURE_HEADER, "v1,"))
    forged("no version known", forgeable, with_header(SIGNATURE_HEADER, "v9,AAAA"))
    forged("no base64", forgeable, with_header(SIGNATURE_HEADER, "v1,not base64!"))
    forged("half a signature", forgeable, _half_a_signature)
    forged("a changed body", "an intermediary can change events", _changed_body)
    forged("a changed id", "an intermediary can duplicate events", with_header(ID_HEADER, "msg_1"))
    forged("no id", forgeable, with_header(ID_HEADER, None))
    replayable = "a recorded request stays valid forever"
    forged("no time", replayable, with_header(TIMESTAMP_HEADER, None))
    for text in ("", "now", "1e9", "-1", "99999999999999999999"):
        forged(
            f"no time but {text!r}", "it fails, or accepts it", with_header(TIMESTAMP_HEADER, text)
        )
    forged("an old request", replayable, signed_at(-900))
    forged("a request of the future", replayable, signed_at(900))
    forged("a changed time", replayable, _changed_time)

    case = suite.case("two signatures", "it refuses everything while a secret is rotated")
    first = case.event(1)
    case.taken(_also_signed(first, suite.other_secret, before=True))
    second = case.event(2)
    case.taken(_also_signed(second, suite.other_secret, before=False))
    case.end()

    case = suite.case("an unknown signature version", "the next version of the standard breaks it")
    first = case.event(1)
    signature = dict(first.headers)[SIGNATURE_HEADER]
    case.taken(_with_headers(first, {SIGNATURE_HEADER: f"v1a,AAAA v9,xx {signature}"}))
    case.end()


def _contradictions(suite: _Suite) -> None:
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
        case.refused(_with_headers(true, {header: value}))
        case.taken(true)
        case.end()


def _bodies(suite: _Suite) -> None:
    case = suite.case("far too large", "anyone can exhaust its memory")
    case.taken(case.event(0))
    case.step(_with_body(case.event(1), b" " * HUGE_BYTES), ExpectedResponse.CUT)
    case.end()

    case = suite.case("not a POST", "a GET of the URL has an effect")
    case.step(replace(case.event(1), method="GET", body=b""), ExpectedResponse.REFUSED)
    case.end()


def _malformed_bodies(suite: _Suite) -> None:
    for name, body in (
        ("an empty body", b""),
        ("no JSON", b"{"),
        ("no object", b"[]"),
        ("no UTF-8", b'{"id": "\xff"}'),
        ("no numbers", b'{"id": "x", "type": "a.b", "lane": "x", "data": 1}'),
        ("a number that is a text", b'{"id":"x","type":"a.b","lane":"x","sequence":"1"}'),
    ):
        case = suite.case(f"signed, and {name}", "it fails for hours, or accepts invalid bodies")
        case.refused(_resigned(suite, case.event(1), body))
        case.end()


def _metadata(suite: _Suite) -> None:
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
        case.refused(_with_headers(true, {header: change(true)}))
        case.taken(true)
        case.end()

    case = suite.case("the metadata of another delivery", forgeable)
    first = case.taken(case.event(0))
    true = case.event(1)
    case.refused(_with_headers(true, {header: signature_of(first, header)}))
    case.taken(true)
    case.end()


# --------------------------------------------------------------------- spoiled requests


def _with_headers(request: Request, changes: dict[str, str | None]) -> Request:
    headers = dict(request.headers)
    for name, value in changes.items():
        headers.pop(name, None)
        if value is not None:
            headers[name] = value
    return replace(request, headers=headers)


def _with_body(request: Request, body: bytes) -> Request:
    return replace(request, body=body)


def _signed(request: Request, secret: str, timestamp: int | None = None) -> Request:
    headers = dict(request.headers)
    at = int(headers[TIMESTAMP_HEADER]) if timestamp is None else timestamp
    signature = sign(parse_secret(secret), headers[ID_HEADER], at, request.body)
    return _with_headers(request, {TIMESTAMP_HEADER: str(at), SIGNATURE_HEADER: signature})


def _also_signed(request: Request, secret: str, *, before: bool) -> Request:
    ours = dict(request.headers)[SIGNATURE_HEADER]
    other = dict(_signed(request, secret).headers)[SIGNATURE_HEADER]
    both = f"{other} {ours}" if before else f"{ours} {other}"
    return _with_headers(request, {SIGNATURE_HEADER: both})


def _resigned(suite: _Suite, request: Request, body: bytes) -> Request:
    return _signed(_with_body(request, body), suite.secret)


def _edited(suite: _Suite, request: Request, changes: dict[str, object]) -> Request:
    return _resigned(suite, request, orjson.dumps(orjson.loads(request.body) | changes))


def _changed_body(request: Request) -> Request:
    """A body that is well-formed, and not the one that was signed."""
    changed = request.body.replace(b'"data":', b'"date":')
    if changed == request.body:
        changed = request.body.replace(EVENT_TYPE.encode(), b"conform.other")
    return _with_body(request, b"0.5" if changed == request.body else changed)


def _changed_time(request: Request) -> Request:
    at = int(dict(request.headers)[TIMESTAMP_HEADER])
    return _with_headers(request, {TIMESTAMP_HEADER: str(at + 1)})


def _half_a_signature(request: Request) -> Request:
    signature = dict(request.headers)[SIGNATURE_HEADER]
    return _with_headers(request, {SIGNATURE_HEADER: signature[: len(signature) // 2]})


# ------------------------------------------------------------------------- the vectors


def vectors(cases: tuple[ConformanceCase, ...]) -> Iterator[dict[str, object]]:
    """Yield each case as a JSON object; bodies are base64, because some are not UTF-8."""
    for case in cases:
        yield {
            "name": case.name,
            "reason": case.reason,
            "steps": [
                {
                    "method": step.request.method,
                    "headers": dict(step.request.headers),
                    "body": base64.b64encode(step.request.body).decode(),
                    "response": step.expected,
                    "at_once": step.at_once,
                }
                for step in case.steps
            ],
            "processed": list(case.processed),
        }
