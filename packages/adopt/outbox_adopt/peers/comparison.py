"""The comparison of a dual run: what two senders have sent for the same events.

Both send to the recorder.  A request of one is paired with the first unpaired one of the other that
has the same endpoint and the same body.  In the end, what is left is paired if the bodies are equal
as JSON, which shows a difference in bytes; the rest was sent by one of them only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, NamedTuple

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterable

Side = Literal["theirs", "ours"]
OTHER: dict[Side, Side] = {"theirs": "ours", "ours": "theirs"}
UNPAIRED_MAX = 100_000
"""Requests that wait for their counterpart; with more, only one of the senders sends."""


class RecordedRequest(NamedTuple):
    """A request that one of the senders has sent."""

    endpoint: str
    event: str
    """The event's id, as far as the request has it."""
    at: float
    """Epoch seconds."""
    body: bytes
    """A hash of the body."""
    json: bytes
    """A hash of what the body is as JSON; of the body, if it is none."""
    is_accepted: bool
    """Whether a receiver with the endpoint's secret accepts the signature."""


@dataclass(frozen=True, slots=True)
class ComparedEvent:
    """An event, as both have sent it."""

    endpoint: str
    event: str
    theirs_at: float | None
    """When the other sender sent it, in epoch seconds; None: it did not."""
    ours_at: float | None
    same_bytes: bool
    theirs_accepted: bool
    """Whether a receiver with the endpoint's secret accepts the other sender's signature."""
    ours_accepted: bool

    @property
    def is_same(self) -> bool:
        """Whether the receiver cannot tell who sent it."""
        return self.same_bytes and self.theirs_accepted and self.ours_accepted


@dataclass(slots=True)
class EndpointComparison:
    """What was compared of an endpoint, in events."""

    endpoint: str
    same: int = 0
    """Those that the receiver accepts from both, with the same body."""
    other_bytes: int = 0
    theirs_refused: int = 0
    """Those of which the receiver refuses the other sender's signature."""
    ours_refused: int = 0
    only_theirs: int = 0
    only_ours: int = 0

    @property
    def differs(self) -> bool:
        differing = (
            *(self.other_bytes, self.theirs_refused, self.ours_refused),
            *(self.only_theirs, self.only_ours),
        )
        return self.same == 0 or any(differing)


class Comparison:
    """Pairs the requests of two senders."""

    def __init__(self) -> None:
        self.events: list[ComparedEvent] = []
        """What both have sent."""
        self._waiting: dict[tuple[Side, str, bytes], deque[RecordedRequest]] = {}
        self._count = 0

    @property
    def is_full(self) -> bool:
        """Whether more wait than if both senders were sending."""
        return self._count >= UNPAIRED_MAX

    def add(self, side: Side, request: RecordedRequest) -> ComparedEvent | None:
        """Add a request; returns the event, if the other one has sent it, too."""
        other = self._waiting.get((OTHER[side], request.endpoint, request.body))
        if not other:
            own = self._waiting.setdefault((side, request.endpoint, request.body), deque())
            own.append(request)
            self._count += 1
            return None
        self._count -= 1
        pair = (request, other.popleft()) if side == "theirs" else (other.popleft(), request)
        event = _compared(*pair)
        self.events.append(event)
        return event

    def finish(self) -> list[ComparedEvent]:
        """All events in the order of their first requests, those of one sender included."""
        left: dict[Side, list[RecordedRequest]] = {"theirs": [], "ours": []}
        for (side, _, _), requests in self._waiting.items():
            left[side] += requests
        ours: dict[tuple[str, bytes], deque[RecordedRequest]] = {}
        for each in left["ours"]:
            ours.setdefault((each.endpoint, each.json), deque()).append(each)
        events = list(self.events)
        for each in left["theirs"]:
            equal = ours.get((each.endpoint, each.json))
            events.append(_compared(each, equal.popleft() if equal else None))
        events += [_compared(None, each) for rest in ours.values() for each in rest]
        return sorted(events, key=lambda event: min(_times(event)))


def _compared(theirs: RecordedRequest | None, ours: RecordedRequest | None) -> ComparedEvent:
    known = ours or theirs
    assert known is not None
    return ComparedEvent(
        known.endpoint,
        known.event,
        theirs and theirs.at,
        ours and ours.at,
        theirs is not None and ours is not None and theirs.body == ours.body,
        theirs is not None and theirs.is_accepted,
        ours is not None and ours.is_accepted,
    )


def _times(event: ComparedEvent) -> list[float]:
    return [at for at in (event.theirs_at, event.ours_at) if at is not None]


def by_endpoint(events: Iterable[ComparedEvent]) -> list[EndpointComparison]:
    """The totals of each endpoint, by name."""
    totals: dict[str, EndpointComparison] = {}
    for event in events:
        each = totals.setdefault(event.endpoint, EndpointComparison(event.endpoint))
        if event.theirs_at is None:
            each.only_ours += 1
        elif event.ours_at is None:
            each.only_theirs += 1
        else:
            each.same += event.is_same
            each.other_bytes += not event.same_bytes
            each.theirs_refused += not event.theirs_accepted
            each.ours_refused += not event.ours_accepted
    return [totals[name] for name in sorted(totals)]


def hashes_of(body: bytes) -> tuple[bytes, bytes]:
    """The hashes of a body, and of what it is as JSON."""
    exact = sha256(body).digest()
    try:
        value = orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, TypeError):
        return exact, exact
    return exact, sha256(value).digest()
