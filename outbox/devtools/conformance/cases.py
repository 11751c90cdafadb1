"""What a receiver is sent, step by step, and which answers are good.

A case is a story with a lane of its own, told in steps; each step is one request and
what it has to be answered.

    taken       2xx: it has the event
    refused     4xx, of those that a relay does not try again: nothing was done
    cut         that, or the connection is cut before all of it was sent
    either      any answer, as long as it comes in time
    eventually  2xx, or at first 409, 429 or 5xx, and 2xx when it is asked again

Whether an event was *processed* once is seen from outside only when the receiver tells
(`outbox conform --processed`), so each case says which events have to be, and how often.
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
from outbox.testing.sender import FakeSender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from uuid import UUID

    from outbox.receiver.requests import Request

LARGE_BYTES = 256 * 1024
"""The largest payload that is published by default."""
HUGE_BYTES = 20 * 1024 * 1024
EVENT_TYPE = "conform.check"
NO_LANES = b'{"id": "x", "type": "outbox.checkpoint", "lanes": 7}'


class Verdict(StrEnum):
    """Which answers are good."""

    TAKEN = "taken"
    REFUSED = "refused"
    CUT = "cut"
    EITHER = "either"
    EVENTUALLY = "eventually"


@dataclass(frozen=True, slots=True)
class Step:
    """One request, and what is good to answer."""

    request: Request
    verdict: Verdict
    at_once: int = 1
    """So many copies at the same time."""


@dataclass(frozen=True, slots=True)
class Case:
    """A story of a few requests."""

    name: str
    why: str
    """What goes wrong with a receiver that fails it."""
    steps: tuple[Step, ...]
    processed: tuple[str, ...] = ()
    """The ids of events that have to be processed, each as often as it stands here."""


@dataclass(slots=True)
class _Teller:
    """Tells cases, each in a lane of its own."""

    secret: str
    other_secret: str
    endpoint_id: UUID
    clock: Callable[[], float]
    ids: Iterator[UUID]
    lanes: int = 0
    cases: list[Case] = field(default_factory=list)

    def story(self, name: str, why: str) -> _Story:
        self.lanes += 1
        sender = FakeSender(
            self.secret,
            endpoint_id=self.endpoint_id,
            clock=self.clock,
            new_id=lambda: next(self.ids),
        )
        return _Story(self, sender, sender.lane(self.lanes), name, why)


@dataclass(slots=True)
class _Story:
    teller: _Teller
    sender: FakeSender
    lane: str
    name: str
    why: str
    steps: list[Step] = field(default_factory=list)
    processed: list[str] = field(default_factory=list)

    def event(self, data: object = None, **how: object) -> Request:
        return self.sender.event(EVENT_TYPE, data, lane=self.lane, **how)  # type: ignore[arg-type]

    def step(self, request: Request, verdict: Verdict, *, at_once: int = 1) -> None:
        self.steps.append(Step(request, verdict, at_once))

    def taken(self, request: Request, *, again: bool = False) -> Request:
        self.step(request, Verdict.TAKEN)
        if not again:
            self.processed.append(event_id(request))
        return request

    def together(self, *requests: Request, again: Sequence[Request] = ()) -> Request:
        """A batch that has to be taken, in which some were processed before."""
        batch = self.sender.batch(*requests)
        self.step(batch, Verdict.TAKEN)
        self.processed += [event_id(each) for each in requests if each not in again]
        return batch

    def refused(self, request: Request) -> None:
        self.step(request, Verdict.REFUSED)

    def end(self) -> None:
        self.teller.cases.append(
            Case(self.name, self.why, tuple(self.steps), tuple(self.processed))
        )


def event_id(request: Request) -> str:
    """The id of the event that a request carries."""
    found: str = orjson.loads(request.body)["id"]
    return found


def cases(
    secret: str,
    endpoint_id: UUID,
    clock: Callable[[], float],
    *,
    other_secret: str,
    checkpoints: bool = False,
    batches: bool = False,
) -> tuple[Case, ...]:
    """All cases for a receiver that knows `secret`.

    Args:
        endpoint_id: makes lanes and ids that no other run has.
        clock: epoch seconds.
        other_secret: one that it does not know.
        checkpoints: it wants them, so there are cases about them, too.
        batches: the same of them.

    Raises:
        UsageError: a secret cannot be read.
    """
    ids = (uuid5(endpoint_id, str(n)) for n in count())
    teller = _Teller(secret, other_secret, endpoint_id, clock, ids)
    for tell in (_deliveries, _copies, _order, _signatures, _contradictions, _bodies):
        tell(teller)
    if checkpoints:
        _checkpoints(teller)
    if batches:
        _batches(teller)
    return tuple(teller.cases)


# ------------------------------------------------------------------------- the stories


def _deliveries(teller: _Teller) -> None:
    story = teller.story("a delivery", "it takes nothing at all")
    story.taken(story.event({"n": 1}))
    story.end()

    story = teller.story("ten in order", "it stops after a while")
    for n in range(10):
        story.taken(story.event({"n": n}))
    story.end()

    story = teller.story("odd payloads", "an event that it cannot parse stops the lane for hours")
    odd: tuple[object, ...] = (None, [], "", 0, {"é": '\u2028 \U0001f600 \\ "'}, 2**53 - 1, [[[]]])
    for data in odd:
        story.taken(story.event(data))
    story.end()

    story = teller.story("a type it does not know", "a new kind of event becomes a dead letter")
    story.taken(story.sender.event("conform.never_heard_of.v2", 1, lane=story.lane))
    story.end()

    story = teller.story("a field it does not know", "the next version of the relay breaks it")
    story.taken(_edited(teller, story.event(1), {"new_field": {"a": [1]}}))
    story.end()

    story = teller.story("without key, with tenant", "it relies on what may be absent")
    story.taken(story.event(1))
    story.taken(story.event(1, key="k", tenant="acme"))
    story.end()

    story = teller.story("a large payload", f"it does not take {LARGE_BYTES // 1024} KiB")
    story.taken(story.event("x" * (LARGE_BYTES - 10)))
    story.end()


def _copies(teller: _Teller) -> None:
    story = teller.story("a copy", "an answer that was lost makes the event happen twice")
    first = story.taken(story.event(1))
    story.taken(first, again=True)
    story.taken(story.sender.again(first, 2), again=True)
    story.taken(story.event(2))
    story.taken(story.sender.again(first, 3), again=True)
    story.end()

    story = teller.story("copies at once", "two copies at the same time are both processed")
    request = story.event(1)
    story.step(request, Verdict.EVENTUALLY, at_once=5)
    story.processed.append(event_id(request))
    story.taken(story.event(2))
    story.end()

    story = teller.story(
        "a replay of what it has", "an answer that was lost, and the event happens twice"
    )
    first = story.taken(story.event(1))
    story.sender.give_up(first)
    story.taken(story.sender.replay(first), again=True)
    story.end()

    story = teller.story("a backfill", "what somebody asks for once more is dropped")
    first = story.taken(story.event(1))
    story.taken(story.sender.backfill(first))
    story.end()


def _order(teller: _Teller) -> None:
    story = teller.story("a number that was given up", "a hole that was named stops the lane")
    story.taken(story.event(1))
    given_up = story.event(2)
    story.sender.give_up(given_up)
    story.taken(story.event(3))
    story.taken(story.sender.replay(given_up))
    story.taken(story.event(5))
    story.end()

    story = teller.story("a number that is late", "what was overtaken on its way is lost")
    story.taken(story.event(1))
    late, early = story.event(2), story.event(3)
    story.step(early, Verdict.EITHER)
    story.taken(late)
    story.step(story.sender.again(early), Verdict.TAKEN)
    story.processed.append(event_id(early))
    story.end()

    story = teller.story("a number sent again on request", "what it lost never happens")
    story.taken(story.event(1))
    story.event(2)
    story.step(early := story.event(3), Verdict.EVENTUALLY)
    story.processed.append(event_id(early))
    _, again, _ = story.sender.send_again(story.lane, 0)
    story.step(again, Verdict.EVENTUALLY)
    story.processed.append(event_id(again))
    story.end()

    story = teller.story("a lane joined in its middle", "a new receiver refuses what is running")
    for _ in range(41):
        joined = story.event(1)
    story.step(joined, Verdict.TAKEN)
    story.processed.append(event_id(joined))
    story.end()

    story = teller.story("the end of a lane", "a change of lanes stops the endpoint")
    story.taken(story.event(1))
    last = story.taken(story.event(2, lane_ends=True))
    story.taken(story.sender.again(last), again=True)
    story.end()


def _checkpoints(teller: _Teller) -> None:
    story = teller.story("a checkpoint", "whoever tells it how far lanes are is refused")
    story.taken(story.event(1))
    story.step(story.sender.checkpoint(), Verdict.TAKEN)
    story.step(story.sender.checkpoint(), Verdict.TAKEN)
    story.taken(story.event(2))
    story.end()

    story = teller.story("a checkpoint before what it names", "what is late is dropped for ever")
    story.taken(story.event(1))
    late = story.event(2)
    story.step(story.sender.checkpoint(), Verdict.TAKEN)
    story.taken(late)
    story.taken(story.event(3))
    story.end()

    story = teller.story("a forged checkpoint", "anybody can make it believe that all is lost")
    story.taken(story.event(1))
    story.step(_signed(story.sender.checkpoint(), teller.other_secret), Verdict.REFUSED)
    story.step(_resigned(teller, story.sender.checkpoint(), NO_LANES), Verdict.REFUSED)
    story.taken(story.event(2))
    story.end()


def _batches(teller: _Teller) -> None:
    story = teller.story("a batch", "it takes one delivery at a time only")
    story.together(*(story.event(n) for n in range(4)))
    story.together(story.event(4))
    story.taken(story.event(5))
    story.end()

    story = teller.story("a batch again", "an answer that was lost makes events happen twice")
    batch = [story.event(n) for n in range(3)]
    story.together(*batch)
    story.together(*batch, again=batch)
    story.taken(batch[1], again=True)
    story.end()

    story = teller.story("in other company", "what was sent before is dropped with what was not")
    first, second = story.event(1), story.event(2)
    story.taken(first)
    story.together(first, second, again=[first])
    third = story.event(3)
    story.together(second, third, again=[second])
    story.together(first, second, third, story.event(4), again=[first, second, third])
    story.end()

    story = teller.story("batches at once", "two copies at the same time are both processed")
    batch = [story.event(n) for n in range(3)]
    story.step(story.sender.batch(*batch), Verdict.EVENTUALLY, at_once=5)
    story.processed += [event_id(each) for each in batch]
    story.end()

    story = teller.story("a batch with a type it does not know", "what follows it is lost")
    first = story.event(0)
    strange = story.sender.event("conform.never_heard_of.v2", 1, lane=story.lane)
    story.together(first, strange, story.event(2))
    story.end()

    story = teller.story("a batch of 600 KiB", "it does not take what is sent together")
    story.together(*(story.event("x" * 150_000) for _ in range(4)))
    story.end()

    def spoiled(name: str, why: str, spoil: Callable[[Request], Request]) -> None:
        """It is refused as a whole, and the true one is taken."""
        story = teller.story(name, why)
        story.taken(story.event(0))
        batch = [story.event(n) for n in range(1, 4)]
        story.refused(spoil(story.sender.batch(*batch)))
        story.together(*batch)
        story.end()

    def elements(change: Callable[[list[Any]], object]) -> Callable[[Request], Request]:
        return lambda r: _resigned(teller, r, orjson.dumps(change(orjson.loads(r.body))))

    everybody = "anybody can make events happen"
    nonsense = "it believes what contradicts itself"
    spoiled("a forged batch", everybody, lambda r: _signed(r, teller.other_secret))
    spoiled("a changed batch", everybody, _changed_body)
    spoiled("a batch without its last", nonsense, elements(lambda body: body[:-1]))
    spoiled("a batch with a hole", nonsense, elements(lambda body: [body[0], body[2]]))
    spoiled("a batch of nothing", nonsense, elements(lambda _: []))
    spoiled("a batch of numbers", nonsense, elements(lambda _: [1, 2]))
    spoiled(
        "X-Last-Sequence is another one",
        nonsense,
        lambda r: _with_headers(r, {"X-Last-Sequence": "9"}),
    )


def _signatures(teller: _Teller) -> None:
    def forged(name: str, why: str, spoil: Callable[[Request], Request]) -> None:
        """The forgery is refused, and the true delivery of the same number is taken."""
        story = teller.story(name, why)
        story.taken(story.event(0))
        true = story.event(1)
        story.refused(spoil(true))
        story.taken(true)
        story.end()

    def with_header(name: str, value: str | None) -> Callable[[Request], Request]:
        return lambda request: _with_headers(request, {name: value})

    def signed_at(offset_s: int) -> Callable[[Request], Request]:
        return lambda request: _signed(request, teller.secret, int(teller.clock()) + offset_s)

    everybody = "anybody can make events happen"
    forged("another secret", everybody, lambda r: _signed(r, teller.other_secret))
    forged("no signature", everybody, with_header(SIGNATURE_HEADER, None))
    forged("an empty signature", everybody, with_header(SIGNATURE_HEADER, ""))
    forged("an empty v1 signature", everybody, with_header(SIGNATURE_HEADER, "v1,"))
    forged("no version known", everybody, with_header(SIGNATURE_HEADER, "v9,AAAA"))
    forged("no base64", everybody, with_header(SIGNATURE_HEADER, "v1,not base64!"))
    forged("half a signature", everybody, _half_a_signature)
    forged("a changed body", "who is on the way can change events", _changed_body)
    forged("a changed id", "who is on the way can copy events", with_header(ID_HEADER, "msg_1"))
    forged("no id", everybody, with_header(ID_HEADER, None))
    for_ever = "what was once recorded is good for ever"
    forged("no time", for_ever, with_header(TIMESTAMP_HEADER, None))
    for text in ("", "now", "1e9", "-1", "99999999999999999999"):
        forged(
            f"no time but {text!r}", "it fails, or believes it", with_header(TIMESTAMP_HEADER, text)
        )
    forged("an old request", for_ever, signed_at(-900))
    forged("a request of the future", for_ever, signed_at(900))
    forged("a changed time", for_ever, _changed_time)

    story = teller.story("two signatures", "while a secret is replaced, all is refused")
    first = story.event(1)
    story.taken(_also_signed(first, teller.other_secret, before=True))
    second = story.event(2)
    story.taken(_also_signed(second, teller.other_secret, before=False))
    story.end()

    story = teller.story("a signature it does not know", "the next version of the standard")
    first = story.event(1)
    signature = dict(first.headers)[SIGNATURE_HEADER]
    story.taken(_with_headers(first, {SIGNATURE_HEADER: f"v1a,AAAA v9,xx {signature}"}))
    story.end()


def _contradictions(teller: _Teller) -> None:
    """Only the body is signed: a header that says something else was changed."""
    for header, value in (
        ("X-Sequence", "7"),
        ("X-Previous-Sequence", "5"),
        ("X-Lane", "another-1-0"),
        ("X-Delivery", "0d9ff25f-6f0b-4e0d-9d4b-000000000000"),
        ("X-Event", "0d9ff25f-6f0b-4e0d-9d4b-000000000000"),
    ):
        story = teller.story(
            f"{header} is another one",
            "who is on the way can hide copies, or that some are missing",
        )
        story.taken(story.event(0))
        true = story.event(1)
        story.refused(_with_headers(true, {header: value}))
        story.taken(true)
        story.end()


def _bodies(teller: _Teller) -> None:
    for name, body in (
        ("an empty body", b""),
        ("no JSON", b"{"),
        ("no object", b"[]"),
        ("no UTF-8", b'{"id": "\xff"}'),
        ("no numbers", b'{"id": "x", "type": "a.b", "lane": "x", "data": 1}'),
        ("a number that is a text", b'{"id":"x","type":"a.b","lane":"x","sequence":"1"}'),
    ):
        story = teller.story(f"signed, and {name}", "it fails for hours, or takes nonsense")
        story.refused(_resigned(teller, story.event(1), body))
        story.end()

    story = teller.story("far too large", "anybody can fill its memory")
    story.taken(story.event(0))
    story.step(_with_body(story.event(1), b" " * HUGE_BYTES), Verdict.CUT)
    story.end()

    story = teller.story("not a POST", "whoever looks at the URL makes something happen")
    story.step(replace(story.event(1), method="GET", body=b""), Verdict.REFUSED)
    story.end()


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


def _resigned(teller: _Teller, request: Request, body: bytes) -> Request:
    return _signed(_with_body(request, body), teller.secret)


def _edited(teller: _Teller, request: Request, changes: dict[str, object]) -> Request:
    return _resigned(teller, request, orjson.dumps(orjson.loads(request.body) | changes))


def _changed_body(request: Request) -> Request:
    return _with_body(request, request.body.replace(b'"data":', b'"date":'))


def _changed_time(request: Request) -> Request:
    at = int(dict(request.headers)[TIMESTAMP_HEADER])
    return _with_headers(request, {TIMESTAMP_HEADER: str(at + 1)})


def _half_a_signature(request: Request) -> Request:
    signature = dict(request.headers)[SIGNATURE_HEADER]
    return _with_headers(request, {SIGNATURE_HEADER: signature[: len(signature) // 2]})


# ------------------------------------------------------------------------- the vectors


def vectors(told: tuple[Case, ...]) -> Iterator[dict[str, object]]:
    """Each case as JSON has it; bodies in base64, because not all of them are text."""
    for case in told:
        yield {
            "name": case.name,
            "why": case.why,
            "steps": [
                {
                    "method": step.request.method,
                    "headers": dict(step.request.headers),
                    "body": base64.b64encode(step.request.body).decode(),
                    "answer": step.verdict,
                    "at_once": step.at_once,
                }
                for step in case.steps
            ],
            "processed": list(case.processed),
        }
