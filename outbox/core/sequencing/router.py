"""From committed events to numbered deliveries.

Every event goes to each endpoint that subscribes to its type, may see its
tenant, and has no filter or one that the payload meets; into the lane that its
key chooses, under the lane's next number.  Filters are the database's to
evaluate: here it is said which ones have to be asked about which events.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from outbox.core.model.pattern import Patterns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from uuid import UUID

    Refused = Mapping["Asked", AbstractSet[int]]
    """By filter, the events whose payloads do not meet it."""

Asked: TypeAlias = tuple[str | None, str]
"""A filter of a tenant's endpoints, or of those without one: what a tenant's events make of a
filter is no matter of others that have the same."""

NONE_REFUSED: Refused = MappingProxyType({})

MATCHES_MAX, MATCHED_MAX = 10_000, 500_000
"""How many (tenant, type) pairs are remembered, and how many endpoints of them in all; more
are worked out again."""


class Sighting(NamedTuple):
    """A committed event, as much of it as sequencing needs.

    `spread` chooses the lane: a non-negative hash of the key, or the id.
    """

    id: int
    tenant: str | None
    type: str
    spread: int


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint's current subscription and lanes."""

    endpoint_id: UUID
    types: tuple[str, ...]
    tenant: str | None
    all_tenants: bool
    lane_ids: tuple[int, ...]
    filter: str | None = None
    """The inside of SQL/JSON path's `$ ? (…)`; None also while it is stopped."""

    @property
    def asked(self) -> Asked | None:
        """What has to be asked about each event; None: nothing."""
        return None if self.filter is None else (self.tenant, self.filter)


@dataclass(frozen=True, slots=True)
class Replay:
    """An event that is sent again, at the end of a lane."""

    lane_id: int
    outbox_id: int
    id: int | None = None
    """Of the replay of a number."""
    seq: int | None = None
    """The number it stands for."""
    backfill_id: int | None = None
    """The job that gives it an X-Delivery of its own, or gave one to its dead letter."""
    copy_id: int | None = None
    """The dead letter that has a copy of the event."""
    was_backfill_id: int | None = None
    """When its receiver asked for it: the backfill that what it stands for was of."""


@dataclass(frozen=True, slots=True)
class Helping:
    """What one batch takes of a replay: its next numbers, and where the rest begins."""

    id: int
    job_id: int
    endpoint_id: UUID
    replays: tuple[Replay, ...]
    next_seq: int
    next_batch: int
    missing: int = 0
    """Numbers passed over because their deliveries are not there any more."""


@dataclass(slots=True)
class Deliveries:
    """A batch's deliveries as columns, and the counters after it."""

    lane_ids: list[int] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    outbox_ids: list[int] = field(default_factory=list)
    replay_ids: list[int | None] = field(default_factory=list)
    replay_seqs: list[int | None] = field(default_factory=list)
    backfill_ids: list[int | None] = field(default_factory=list)
    copy_ids: list[int | None] = field(default_factory=list)
    was_backfill_ids: list[int | None] = field(default_factory=list)
    counters: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seqs)


class Router:
    """Which lanes an event of a tenant and type goes to."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = list(routes)
        # Apart by tenant, so that neither others' endpoints nor what these subscribe to are
        # looked at.
        self._of_tenant: dict[str | None, Patterns] = {}
        self._of_all = Patterns()
        for n, route in enumerate(self._routes):
            patterns = self._of_all
            if not route.all_tenants:
                patterns = self._of_tenant.setdefault(route.tenant, Patterns())
            for each in route.types:
                patterns.add(each, n)
        self.filters = {asked for route in self._routes if (asked := route.asked) is not None}
        self._matches: OrderedDict[tuple[str | None, str], tuple[Route, ...]] = OrderedDict()
        self._matched = 0

    def match(self, tenant: str | None, type: str) -> tuple[Route, ...]:  # noqa: A002
        """The subscribed endpoints; remembered, since types repeat."""
        pair = (tenant, type)
        routes = self._matches.get(pair)
        if routes is None:
            found = self._of_all.matching(type)
            if (own := self._of_tenant.get(tenant)) is not None:
                found |= own.matching(type)
            routes = tuple(self._routes[n] for n in sorted(found))
            self._matches[pair] = routes
            self._matched += len(routes)
            while len(self._matches) > MATCHES_MAX or self._matched > MATCHED_MAX:
                _, forgotten = self._matches.popitem(last=False)
                self._matched -= len(forgotten)
        return routes

    def of(self, endpoint_id: UUID) -> Router | None:
        """To one endpoint alone; None: it is not subscribed."""
        own = [route for route in self._routes if route.endpoint_id == endpoint_id]
        return Router(own) if own else None

    def cut(self, events: Sequence[Sighting], deliveries_max: int) -> int:
        """How many of the events fit into one batch: at least one, so it moves."""
        deliveries = 0
        for n, event in enumerate(events):
            deliveries += len(self.match(event.tenant, event.type))
            if deliveries > deliveries_max and n:
                return n
        return len(events)

    def questions(self, events: Iterable[Sighting]) -> dict[Asked, list[int]]:
        """The filters that have to be evaluated, each with the events it is about."""
        asked: dict[Asked, list[int]] = {}
        if self.filters:
            for event in events:
                routes = self.match(event.tenant, event.type)
                for each in {route.asked for route in routes}:
                    if each is not None:
                        asked.setdefault(each, []).append(event.id)
        return asked

    def placed(
        self, events: Iterable[Sighting], refused: Refused = NONE_REFUSED
    ) -> list[tuple[int, int]]:
        """The lane of every subscribed endpoint for each event, with the event's id."""
        found: list[tuple[int, int]] = []
        for event_id, tenant, type_, spread in events:
            for route in self.match(tenant, type_):
                asked = route.asked
                if asked is None or event_id not in refused.get(asked, ()):
                    lane_ids = route.lane_ids
                    found.append((lane_ids[spread % len(lane_ids)], event_id))
        return found

    def lanes_of(self, events: Iterable[Sighting], refused: Refused = NONE_REFUSED) -> set[int]:
        """All lanes the events go to: whose counters are needed."""
        return {lane_id for lane_id, _ in self.placed(events, refused)}


def number(
    router: Router,
    events: Iterable[Sighting],
    replays: Iterable[Replay],
    counters: Mapping[int, int],
    refused: Refused = NONE_REFUSED,
) -> Deliveries:
    """Give every delivery the next number of its lane; replays come last.

    Args:
        counters: the last number of every lane that occurs.
        refused: what the database said about `Router.questions`.
    """
    out = Deliveries()
    last = out.counters

    def add(lane_id: int, outbox_id: int) -> None:
        seq = (last[lane_id] if lane_id in last else counters[lane_id]) + 1
        last[lane_id] = seq
        out.lane_ids.append(lane_id)
        out.seqs.append(seq)
        out.outbox_ids.append(outbox_id)

    for lane_id, event_id in router.placed(events, refused):
        add(lane_id, event_id)
    fresh = len(out)
    again = tuple(replays)
    for replay in again:
        add(replay.lane_id, replay.outbox_id)
    out.replay_ids = [*[None] * fresh, *[each.id for each in again]]
    out.replay_seqs = [*[None] * fresh, *[each.seq for each in again]]
    out.backfill_ids = [*[None] * fresh, *[each.backfill_id for each in again]]
    out.copy_ids = [*[None] * fresh, *[each.copy_id for each in again]]
    out.was_backfill_ids = [*[None] * fresh, *[each.was_backfill_id for each in again]]
    return out


def fitting(lane_ids: Iterable[int], per_lane: int, most: int) -> int:
    """How many of the first ones may be taken: none behind one that may not."""
    taken: dict[int, int] = {}
    n = 0
    for lane_id in lane_ids:
        taken[lane_id] = taken.get(lane_id, 0) + 1
        if taken[lane_id] > per_lane or n == most:
            break
        n += 1
    return n
