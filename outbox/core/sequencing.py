"""From committed events to numbered deliveries.

Every event goes to each endpoint that subscribes to its type and may see its
tenant, into the lane that its key chooses, under the lane's next number.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outbox.core import pattern

if TYPE_CHECKING:
    import re
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

MATCHES_MAX = 10_000
"""How many (tenant, type) pairs are remembered; more are worked out again."""


@dataclass(frozen=True, slots=True)
class Sighting:
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


@dataclass(frozen=True, slots=True)
class Replay:
    """A request to send something again at the end of a lane."""

    id: int
    lane_id: int
    outbox_id: int


@dataclass(slots=True)
class Deliveries:
    """A batch's deliveries as columns, and the counters after it."""

    lane_ids: list[int] = field(default_factory=list)
    seqs: list[int] = field(default_factory=list)
    outbox_ids: list[int] = field(default_factory=list)
    replay_ids: list[int | None] = field(default_factory=list)
    counters: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.seqs)


class Router:
    """Which lanes an event of a tenant and type goes to."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes: list[tuple[Route, list[re.Pattern[str]]]] = [
            (route, [pattern.parse(p) for p in route.types]) for route in routes
        ]
        self._matches: OrderedDict[tuple[str | None, str], tuple[Route, ...]] = OrderedDict()

    def match(self, tenant: str | None, type: str) -> tuple[Route, ...]:  # noqa: A002
        """The subscribed endpoints; remembered, since types repeat."""
        pair = (tenant, type)
        routes = self._matches.get(pair)
        if routes is None:
            routes = tuple(
                route
                for route, patterns in self._routes
                if (route.all_tenants or route.tenant == tenant)
                and any(p.fullmatch(type) for p in patterns)
            )
            self._matches[pair] = routes
            if len(self._matches) > MATCHES_MAX:
                self._matches.popitem(last=False)
        return routes

    def cut(self, events: Sequence[Sighting], deliveries_max: int) -> int:
        """How many of the events fit into one batch: at least one, so it moves."""
        deliveries = 0
        for n, event in enumerate(events):
            deliveries += len(self.match(event.tenant, event.type))
            if deliveries > deliveries_max and n:
                return n
        return len(events)

    def lanes(self, event: Sighting) -> Iterable[int]:
        """The lane of every subscribed endpoint for this event."""
        for route in self.match(event.tenant, event.type):
            yield route.lane_ids[event.spread % len(route.lane_ids)]

    def lanes_of(self, events: Iterable[Sighting]) -> set[int]:
        """All lanes the events go to: whose counters are needed."""
        return {lane for event in events for lane in self.lanes(event)}


def number(
    router: Router,
    events: Iterable[Sighting],
    replays: Iterable[Replay],
    counters: Mapping[int, int],
) -> Deliveries:
    """Give every delivery the next number of its lane; replays come last.

    Args:
        counters: the last number of every lane that occurs.
    """
    out = Deliveries()
    last = out.counters

    def add(lane_id: int, outbox_id: int, replay_id: int | None) -> None:
        seq = (last[lane_id] if lane_id in last else counters[lane_id]) + 1
        last[lane_id] = seq
        out.lane_ids.append(lane_id)
        out.seqs.append(seq)
        out.outbox_ids.append(outbox_id)
        out.replay_ids.append(replay_id)

    for event in events:
        for lane_id in router.lanes(event):
            add(lane_id, event.id, None)
    for replay in replays:
        add(replay.lane_id, replay.outbox_id, replay.id)
    return out
