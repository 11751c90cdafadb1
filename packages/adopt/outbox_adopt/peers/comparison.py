"""The comparison of a dual run: what two senders have sent for the same events.

Both send to the recorder.  A request of one is paired with the first unpaired one of the other that
has the same endpoint and the same body, or else a body that is equal as JSON, which shows a
difference in bytes.  What is left in the end was sent by one of them only.

The recorder may be public, so what a comparison keeps is limited.  A pair is counted and forgotten,
except for the first differences.  A request whose signature is refused may be forged: it is
counted, it is paired only with a request that is accepted, and few of them wait for one.

Orders are compared by arrival, within the endpoint.  Two events are swapped if one sender sent the
first of them before the second, and the other sender after it.  The pair that is complete later is
compared with the highest arrivals of the earlier pairs, so that no list of events is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, NamedTuple

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox_adopt.peers.compat_check import CompatCheck

Side = Literal["theirs", "ours"]
OTHER: dict[Side, Side] = {"theirs": "ours", "ours": "theirs"}
UNPAIRED_MAX = 100_000
"""Accepted requests that wait for their counterpart; with more, only one of the senders sends.
They take about 90 MB."""
REFUSED_UNPAIRED_MAX = 1000
DIFFERENCES_MAX = 1000
"""Differences of which the report has the details."""
METHOD = ":method"
"""The name of the method among headers, as in HTTP/2."""


class ComparedEndpoint(NamedTuple):
    """What a receiver expects of an endpoint's requests."""

    check: CompatCheck
    headers: tuple[str, ...]
    """Names of the headers that must be the same from both senders, in lower case."""


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
    headers: tuple[int, ...]
    """A hash of each compared header, in the order of the endpoint's."""
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
    other_headers: tuple[str, ...]
    """Names of the headers that differ."""
    same_order: bool
    """Whether no event arrived before it from one sender, and after it from the other."""
    theirs_accepted: bool
    """Whether a receiver with the endpoint's secret accepts the other sender's signature."""
    ours_accepted: bool

    @property
    def is_same(self) -> bool:
        """Whether nothing that is compared shows the receiver who sent it."""
        return (
            self.same_bytes
            and not self.other_headers
            and self.same_order
            and self.theirs_accepted
            and self.ours_accepted
        )


@dataclass(slots=True)
class EndpointComparison:
    """What was compared of an endpoint, in events."""

    endpoint: str
    same: int = 0
    """Those without a difference."""
    other_bytes: int = 0
    """Those with the same JSON in other bytes, which a receiver that parses it does not notice."""
    other_headers: int = 0
    """Those with another method, content-type or configured header."""
    other_order: int = 0
    """Those that were swapped with an event whose pair was complete before."""
    theirs_refused: int = 0
    """The other sender's requests of which the receiver refuses the signature."""
    ours_refused: int = 0
    only_theirs: int = 0
    """Accepted requests of the other sender without a counterpart."""
    only_ours: int = 0

    @property
    def is_silent(self) -> bool:
        """Whether neither sender has sent anything."""
        return not (self.same or self.other_bytes or self._has_differences)

    @property
    def differs(self) -> bool:
        """Whether the receiver may notice, or nothing was compared."""
        return not (self.same or self.other_bytes) or self._has_differences

    @property
    def _has_differences(self) -> bool:
        return any(
            (
                *(self.other_headers, self.other_order),
                *(self.theirs_refused, self.ours_refused, self.only_theirs, self.only_ours),
            )
        )


@dataclass(frozen=True, slots=True)
class ComparisonReport:
    """The result of a dual run."""

    endpoints: tuple[EndpointComparison, ...]
    """The endpoints in the order of their names, those for which nothing was sent included."""
    differences: tuple[ComparedEvent, ...]
    """The first events with a difference."""
    more_differences: int
    """Further ones."""

    @property
    def differs(self) -> bool:
        return any(each.differs for each in self.endpoints)


class TooManyUnpaired(Exception):
    """A request is not recorded, because too many others wait for their counterpart."""


class _Waiting(NamedTuple):
    """A request that waits for its counterpart."""

    arrival: int
    request: RecordedRequest


_WaitingKey = tuple["Side", str, bytes, bool]
"""The side, the endpoint, the body as JSON, and whether the signature is accepted."""


@dataclass(slots=True)
class _Unpaired:
    """The requests that wait, by their key, each list in the order of arrival."""

    lists: dict[_WaitingKey, list[_Waiting]] = field(default_factory=dict)
    count: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """How many there are, by whether they are accepted."""

    def add(self, side: Side, waiting: _Waiting) -> None:
        request = waiting.request
        key = (side, request.endpoint, request.json, request.is_accepted)
        self.lists.setdefault(key, []).append(waiting)
        self.count[request.is_accepted] += 1

    def pop(self, side: Side, request: RecordedRequest, *, accepted: bool) -> _Waiting | None:
        """Remove the side's counterpart of a request, one of the same bytes if there is any."""
        key = (side, request.endpoint, request.json, accepted)
        if (waiting := self.lists.get(key)) is None:
            return None
        same = (n for n, each in enumerate(waiting) if each.request.body == request.body)
        found = waiting.pop(next(same, 0))
        if not waiting:
            del self.lists[key]
        self.count[accepted] -= 1
        return found


class Comparison:
    """Pairs the requests of two senders.

    Args:
        endpoints: those that are compared, by name.
    """

    def __init__(self, endpoints: Mapping[str, ComparedEndpoint]) -> None:
        self.endpoints = endpoints
        self._totals = {name: EndpointComparison(name) for name in sorted(endpoints)}
        self._highest = dict.fromkeys(endpoints, (0, 0))
        """The highest arrivals among each endpoint's pairs: of theirs, of ours."""
        self._unpaired = _Unpaired()
        self._arrivals = 0
        self._differences: list[ComparedEvent] = []
        self._more_differences = 0

    def add(self, side: Side, request: RecordedRequest) -> ComparedEvent | None:
        """Add a request; returns the event, if the other one has sent it, too.

        Raises:
            TooManyUnpaired: it has no counterpart yet, and more wait than if both were sending.
        """
        self._arrivals += 1
        waiting = _Waiting(self._arrivals, request)
        totals = self._totals[request.endpoint]
        if not request.is_accepted:
            totals.theirs_refused += side == "theirs"
            totals.ours_refused += side == "ours"
        other = self._unpaired.pop(OTHER[side], request, accepted=True)
        if other is None and request.is_accepted:
            other = self._unpaired.pop(OTHER[side], request, accepted=False)
        if other is None:
            self._wait(side, waiting)
            return None
        event = self._pair(*((waiting, other) if side == "theirs" else (other, waiting)))
        totals.same += event.is_same
        totals.other_bytes += not event.same_bytes
        totals.other_headers += bool(event.other_headers)
        totals.other_order += not event.same_order
        self._keep(event)
        return event

    def finish(self) -> ComparisonReport:
        """The report; accepted requests that still wait were sent by one sender only."""
        alone: list[ComparedEvent] = []
        for (side, name, _, is_accepted), waiting in self._unpaired.lists.items():
            if is_accepted:
                alone += [_alone(side, each.request) for each in waiting]
                totals = self._totals[name]
                totals.only_theirs += len(waiting) * (side == "theirs")
                totals.only_ours += len(waiting) * (side == "ours")
        for event in sorted(alone, key=_first_at):
            self._keep(event)
        return ComparisonReport(
            tuple(self._totals.values()),
            tuple(sorted(self._differences, key=_first_at)),
            self._more_differences,
        )

    def _wait(self, side: Side, waiting: _Waiting) -> None:
        is_accepted = waiting.request.is_accepted
        limit = UNPAIRED_MAX if is_accepted else REFUSED_UNPAIRED_MAX
        if self._unpaired.count[is_accepted] < limit:
            self._unpaired.add(side, waiting)
        elif is_accepted:
            raise TooManyUnpaired

    def _pair(self, theirs: _Waiting, ours: _Waiting) -> ComparedEvent:
        its, own = theirs.request, ours.request
        same_order = True
        # A forged request has no place in the order.
        if its.is_accepted and own.is_accepted:
            arrivals, highest = (theirs.arrival, ours.arrival), self._highest[own.endpoint]
            same_order = arrivals[0] > highest[0] and arrivals[1] > highest[1]
            self._highest[own.endpoint] = (
                max(arrivals[0], highest[0]),
                max(arrivals[1], highest[1]),
            )
        names = self.endpoints[own.endpoint].headers
        compared = zip(names, its.headers, own.headers, strict=True)
        return ComparedEvent(
            own.endpoint,
            own.event,
            its.at,
            own.at,
            same_bytes=its.body == own.body,
            other_headers=tuple(name for name, a, b in compared if a != b),
            same_order=same_order,
            theirs_accepted=its.is_accepted,
            ours_accepted=own.is_accepted,
        )

    def _keep(self, event: ComparedEvent) -> None:
        if event.is_same:
            return
        if len(self._differences) < DIFFERENCES_MAX:
            self._differences.append(event)
        else:
            self._more_differences += 1


def _alone(side: Side, request: RecordedRequest) -> ComparedEvent:
    """An event that one of the senders has sent."""
    is_theirs = side == "theirs"
    return ComparedEvent(
        request.endpoint,
        request.event,
        request.at if is_theirs else None,
        None if is_theirs else request.at,
        same_bytes=False,
        other_headers=(),
        same_order=True,
        theirs_accepted=is_theirs,
        ours_accepted=not is_theirs,
    )


def _first_at(event: ComparedEvent) -> float:
    return min(at for at in (event.theirs_at, event.ours_at) if at is not None)


def hashes_of(body: bytes) -> tuple[bytes, bytes]:
    """The hashes of a body, and of what it is as JSON."""
    exact = sha256(body).digest()
    try:
        value = orjson.dumps(orjson.loads(body), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, TypeError):
        return exact, exact
    return exact, sha256(value).digest()
