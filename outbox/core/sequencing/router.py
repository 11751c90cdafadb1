"""Routing: from committed events to numbered deliveries.

Every event goes to each endpoint that subscribes to its type, may receive its
tenant's events, and has no filter or one that matches the payload; into the lane
of its key's hash, with the lane's next sequence number.  The database evaluates
filters; the router determines which ones to evaluate on which events.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from outbox.core.model.pattern import Patterns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet
    from uuid import UUID

    Refused = Mapping["TenantFilter", AbstractSet[int]]
    """The events that do not match, by filter."""

TenantFilter: TypeAlias = tuple[str | None, str]
"""A filter of a tenant's endpoints, or of those without a tenant: equal filters of different
tenants are evaluated and charged separately."""

Placements: TypeAlias = list[tuple[int, int]]
"""Pairs of lane and event id."""

NONE_REFUSED: Refused = MappingProxyType({})

MATCHES_MAX, MATCHED_MAX = 10_000, 500_000
"""Limits of the cache of matching routes: (tenant, type) pairs, and endpoints in all."""


class RoutableEvent(NamedTuple):
    """The fields of a committed event that sequencing needs.

    `key_hash` selects the lane: a non-negative hash of the key, or the id; the database computes it
    (`outbox.store.sql.expressions.key_hash`).
    """

    id: int
    tenant: str | None
    type: str
    key_hash: int


@dataclass(frozen=True, slots=True)
class Route:
    """One endpoint's current subscription and lanes."""

    endpoint_id: UUID
    types: tuple[str, ...]
    tenant: str | None
    all_tenants: bool
    lane_ids: tuple[int, ...]
    filter: str | None = None
    """The condition inside the SQL/JSON path's `$ ? (…)`; None also while it is stopped."""

    @property
    def tenant_filter(self) -> TenantFilter | None:
        """The filter to evaluate on each event; None: no filter."""
        return None if self.filter is None else (self.tenant, self.filter)


@dataclass(frozen=True, slots=True)
class Replay:
    """An event to be replayed at the end of a lane."""

    lane_id: int
    outbox_id: int
    id: int | None = None
    """The replay of a sequence number."""
    seq: int | None = None
    """The replayed sequence number."""
    backfill_id: int | None = None
    """The job that determines its X-Delivery, or determined that of its dead letter."""
    copy_id: int | None = None
    """The dead letter with a copy of the event."""


@dataclass(frozen=True, slots=True)
class ReplayChunk:
    """The part of a replay in one batch, and where the rest begins."""

    id: int
    job_id: int
    endpoint_id: UUID
    replays: tuple[Replay, ...]
    next_seq: int
    next_batch: int
    missing: int = 0
    """Sequence numbers that were skipped because their deliveries do not exist any more."""


@dataclass(slots=True)
class Deliveries:
    """The deliveries of a batch as columns, and the lanes' counters after it."""

    lane_ids: list[int] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    outbox_ids: list[int] = field(default_factory=list)
    feed_ids: tuple[int, ...] = ()
    """The feeds of the first of them: events of earlier batches."""
    repeats: tuple[Replay, ...] = ()
    """The last of them: what repeats earlier deliveries."""
    counters: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seqs)

    @property
    def new(self) -> Iterable[tuple[int, int, int]]:
        """Lane, sequence and event of those that repeat no other."""
        columns = zip(self.lane_ids, self.seqs, self.outbox_ids, strict=True)
        return islice(columns, len(self) - len(self.repeats))


class Router:
    """Determines the lanes of an event from its tenant, type and key hash."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = list(routes)
        # Separate by tenant, so that a lookup does not visit other tenants' subscriptions.
        self._of_tenant: dict[str | None, Patterns] = {}
        self._of_all = Patterns()
        for n, route in enumerate(self._routes):
            patterns = self._of_all
            if not route.all_tenants:
                patterns = self._of_tenant.setdefault(route.tenant, Patterns())
            for each in route.types:
                patterns.add(each, n)
        self.filters = {
            tenant_filter
            for route in self._routes
            if (tenant_filter := route.tenant_filter) is not None
        }
        self._matches: OrderedDict[tuple[str | None, str], tuple[Route, ...]] = OrderedDict()
        self._matched = 0

    def match(self, tenant: str | None, type: str) -> tuple[Route, ...]:  # noqa: A002
        """The subscribed endpoints; cached, since types repeat."""
        pair = (tenant, type)
        routes = self._matches.get(pair)
        if routes is None:
            matching = self._of_all.matching(type)
            if (own := self._of_tenant.get(tenant)) is not None:
                matching |= own.matching(type)
            routes = tuple(self._routes[n] for n in sorted(matching))
            self._matches[pair] = routes
            self._matched += len(routes)
            while len(self._matches) > MATCHES_MAX or self._matched > MATCHED_MAX:
                _, forgotten = self._matches.popitem(last=False)
                self._matched -= len(forgotten)
        return routes

    def for_endpoint(self, endpoint_id: UUID) -> Router | None:
        """A router of one endpoint only; None: it has no subscription."""
        own = [route for route in self._routes if route.endpoint_id == endpoint_id]
        return Router(own) if own else None

    def count_fitting_events(self, events: Sequence[RoutableEvent], deliveries_max: int) -> int:
        """Number of events that fit into one batch; at least one, to make progress."""
        # An event goes to a route at most once.
        if len(events) * len(self._routes) <= deliveries_max:
            return len(events)
        deliveries = 0
        for n, event in enumerate(events):
            deliveries += len(self.match(event.tenant, event.type))
            if deliveries > deliveries_max and n:
                return n
        return len(events)

    def filters_to_evaluate(self, events: Iterable[RoutableEvent]) -> dict[TenantFilter, list[int]]:
        """The filters to evaluate, each with its events."""
        tenant_filter: dict[TenantFilter, list[int]] = {}
        if self.filters:
            for event in events:
                routes = self.match(event.tenant, event.type)
                for each in {route.tenant_filter for route in routes}:
                    if each is not None:
                        tenant_filter.setdefault(each, []).append(event.id)
        return tenant_filter

    def placements(
        self, events: Iterable[RoutableEvent], refused: Refused = NONE_REFUSED
    ) -> Placements:
        """Place each event in a lane of each subscribed endpoint.

        Args:
            refused: results of `filters_to_evaluate`.
        """
        placements: Placements = []
        for event_id, tenant, type_, key_hash in events:
            for route in self.match(tenant, type_):
                tenant_filter = route.tenant_filter
                if tenant_filter is None or event_id not in refused.get(tenant_filter, ()):
                    lane_ids = route.lane_ids
                    placements.append((lane_ids[key_hash % len(lane_ids)], event_id))
        return placements


def assign_sequences(
    placements: Iterable[tuple[int, int]],
    replays: Iterable[Replay],
    counters: Mapping[int, int],
    fed: Iterable[tuple[int, Placements]] = (),
) -> Deliveries:
    """Assign every delivery the next sequence number of its lane: fed ones first, replays last.

    Args:
        placements: the result of `Router.placements`.
        counters: the last sequence number of every lane that occurs.
        fed: pairs of a feed and its placements.
    """
    out = Deliveries()
    last, seqs = out.counters, out.seqs
    feeds = [(feed_id, *each) for feed_id, some in fed for each in some]
    out.feed_ids = tuple(feed_id for feed_id, _, _ in feeds)
    fresh = (*((lane_id, event_id) for _, lane_id, event_id in feeds), *placements)
    out.repeats = tuple(replays)
    out.lane_ids = [lane_id for lane_id, _ in fresh] + [each.lane_id for each in out.repeats]
    out.outbox_ids = [event_id for _, event_id in fresh] + [each.outbox_id for each in out.repeats]
    for lane_id in out.lane_ids:
        last[lane_id] = seq = (last[lane_id] if lane_id in last else counters[lane_id]) + 1
        seqs.append(seq)
    return out


def count_fitting(lane_ids: Iterable[int], per_lane: int, total: int) -> int:
    """Length of the longest prefix within `total` in all and `per_lane` of each lane."""
    taken: dict[int, int] = {}
    n = 0
    for lane_id in lane_ids:
        taken[lane_id] = taken.get(lane_id, 0) + 1
        if taken[lane_id] > per_lane or n == total:
            break
        n += 1
    return n
