"""Which lanes of a stream may be read now, so that the order of each key holds.

A key's lane is its hash modulo the number of lanes.  When that number changes, the relay starts a
new generation of lanes, and ends each lane of the old one with an end entry.  A reader that took
lanes of both would process a key's new event before its old one.

    generation 1   ████E           reads
                   ██████E
    generation 2   ░░░░            waits until each lane of generation 1 has ended
    generation 3   ░               waits for both

The lowest generation that has something to wait for is read, and those below it.  A lane is waited
for unless it has ended, or is *absent*: this reader has received nothing of it, and the broker has
nothing of it either.  The relay starts a generation when the lanes before it are drained; so once
the broker has messages of a newer generation, nothing of an absent lane is still to come.  That is
why the messages must be counted from the newest generation to the oldest, see `counting_order`.

An absent lane occurs where retention has removed an old generation before this reader joined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from outbox.core.model.ids import LaneName, parse_lane_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping


class LaneProgress(NamedTuple):
    """What a reader knows of a lane."""

    has_begun: bool
    """The inbox has received something of it."""
    has_ended: bool
    """The inbox has recorded its end entry."""
    has_entries: bool
    """The broker has messages of it; not examined if it has begun."""

    @property
    def is_absent(self) -> bool:
        """Neither the inbox nor the broker has anything of it."""
        return not self.has_begun and not self.has_entries


class Schedule(NamedTuple):
    """Which lanes may be read."""

    ready: frozenset[str]
    waiting: dict[str, str]
    """Lanes that must not be read yet, each with one that has to end before."""


def schedule(lanes: Mapping[str, LaneProgress]) -> Schedule:
    """Decide which of the lanes may be read now."""
    ready: set[str] = set()
    waiting: dict[str, str] = {}
    by_endpoint: dict[str, list[tuple[int, str]]] = {}
    for lane, progress in lanes.items():
        if progress.has_ended:
            continue
        name = _name_of(lane)
        by_endpoint.setdefault(name.endpoint, []).append((name.generation, lane))
    for open_lanes in by_endpoint.values():
        awaited = [each for each in open_lanes if not lanes[each[1]].is_absent]
        # Without any message, the first one may arrive in a lane of the oldest generation.
        lowest, blocker = min(awaited or open_lanes)
        for generation, lane in open_lanes:
            if generation <= lowest:
                ready.add(lane)
            else:
                waiting[lane] = blocker
    return Schedule(frozenset(ready), waiting)


def relevant_lanes(found: Iterable[str], known: Iterable[str]) -> set[str]:
    """The lanes of the broker, and those of the inbox that belong to the same endpoints."""
    lanes = set(found)
    endpoints = {_name_of(lane).endpoint for lane in lanes}
    return lanes | {lane for lane in known if _name_of(lane).endpoint in endpoints}


def is_new_to_inbox(lane: str, known: Collection[str]) -> bool:
    """Whether the inbox is older than a lane: it has received an older generation.

    Then the first number of the lane is 1; otherwise the reader may join in the middle.
    """
    name = _name_of(lane)
    others = (_name_of(each) for each in known)
    return any(
        other.endpoint == name.endpoint and other.generation < name.generation for other in others
    )


def counting_order(lanes: Iterable[str]) -> list[str]:
    """The order in which to count the messages of lanes: newer generations first."""
    return sorted(lanes, key=lambda lane: -_name_of(lane).generation)


def _name_of(lane: str) -> LaneName:
    """The parts of a lane's name; one of another form is an endpoint of its own."""
    return parse_lane_name(lane) or LaneName(lane, 0, 0)
