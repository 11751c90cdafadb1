"""Recovery of a chaos run: how long deliveries were pending after each fault.

Theory of operation.  A fault disturbs some endpoints for a bounded time:

* a fault of relays, those that they own, for three leases from its start; if it hits the leader,
  all endpoints for two, because new events are not sequenced;
* another fault of relays within that time extends it, because it may hit the successor;
* a hand-over, which follows when a relay returns or stops, its endpoint until the other relay had
  a lease to acquire it;
* a fault of receivers or a command of an operator, its own endpoints, until retries are over.

A command that is interrupted disturbs no other endpoint.  What is pending for long while nothing
disturbs its endpoint is overdue.  The time after a fault counts from the last one that disturbed
the endpoint.

Pure: ledger and facts in, times out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from outbox_devtools.chaos.facts import STALL, Incident
from outbox_devtools.chaos.ownership import OwnershipHistory
from outbox_devtools.chaos.plan import RELAY_DRAIN_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox_devtools.chaos.facts import RunFacts
    from outbox_devtools.chaos.ledger import LaneRecord, Ledger

ENDPOINT_LEASES, LEADER_LEASES = 3.0, 2.0
"""Bounds on the recovery of the endpoints of a relay, and of sequencing."""
OVERDUE_LEASES = 3.0
"""What is pending for longer than this beyond all bounds is a violation.  A machine without free
processors pauses relays for a lease and more without any fault; a hang has no end."""
RETRIES_S = 10.0
"""A receiver that works again gets its next request within this time: retries are at most two
seconds apart, but the circuit breaker may have opened."""
STALL_LINGER_S = 1.0
HAND_OVER = "hand-over"
"""Kind of an incident that is no fault."""
OUTAGES = ("restart", "down")
"""Recovery from these begins with their end, because the server or every relay is down before."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery times of a run, in seconds."""

    endpoints_s: dict[str, tuple[float, float]]
    """Median and maximum over the faults of a kind, of the longest time until a pending delivery
    of a disturbed endpoint arrived.  Counted from the fault, or from its end for outages and for
    faults of receivers and operators."""
    others_s: dict[str, tuple[float, float]]
    """Recovery times of the other endpoints, for faults of relays that hit the leader."""
    longest_pause_s: float
    """Longest time without an arrival in a lane with pending deliveries."""
    undisturbed_s: float
    """Longest time that a delivery was pending while nothing disturbed its endpoint."""
    overdue: list[Wait]
    """Deliveries for which that took longer than `OVERDUE_LEASES`, the longest first."""


class Wait(NamedTuple):
    """The time in which a delivery was pending and nothing arrived in its lane."""

    lane: str
    seq: int
    begin: float
    end: float
    overdue_s: float
    """How long nothing disturbed the endpoint."""


class _Disturbance(NamedTuple):
    begin: float
    end: float
    incident: Incident
    owned: bool
    """It concerns this endpoint, and not only because the leader was hit."""

    @property
    def counts_from(self) -> float:
        incident = self.incident
        if incident.endpoints or incident.kind in OUTAGES:
            return incident.end
        return incident.begin


@dataclass(slots=True)
class _Times:
    """Longest times by incident, of which each is counted once."""

    by_incident: dict[Incident, float] = field(default_factory=dict)

    def add(self, incident: Incident, seconds: float) -> None:
        self.by_incident[incident] = max(self.by_incident.get(incident, 0.0), seconds)

    def by_kind(self) -> dict[str, tuple[float, float]]:
        times: dict[str, list[float]] = defaultdict(list)
        for incident, seconds in self.by_incident.items():
            times[incident.kind].append(seconds)
        return {kind: (median(each), max(each)) for kind, each in sorted(times.items())}


def measure_recovery(ledger: Ledger, facts: RunFacts) -> Recovery:
    """Measure all recovery times."""
    of_endpoint: dict[int, list[LaneRecord]] = defaultdict(list)
    for lane in ledger.lanes.values():
        of_endpoint[lane.endpoint].append(lane)
    history = OwnershipHistory(facts)
    owned, others = _Times(), _Times()
    longest_s = longest_undisturbed_s = 0.0
    overdue: list[Wait] = []
    for endpoint, lanes in of_endpoint.items():
        disturbances = _disturbances(endpoint, facts, history)
        snapshot = facts.snapshots.get(endpoint)
        added_at = 0.0 if snapshot is None else snapshot.at
        for lane in lanes:
            for (seq, begin, end), current in _with_current(
                _waits(ledger, lane, added_at), disturbances
            ):
                longest_s = max(longest_s, end - begin)
                undisturbed_s = _outside(current, begin, end)
                longest_undisturbed_s = max(longest_undisturbed_s, undisturbed_s)
                if undisturbed_s > OVERDUE_LEASES * facts.lease_s:
                    overdue.append(Wait(lane.name, seq, begin, end, undisturbed_s))
                last = _last(current, end)
                if last is not None:
                    times = owned if last.owned else others
                    times.add(last.incident, end - max(begin, last.counts_from))
    overdue.sort(key=lambda wait: -wait.overdue_s)
    return Recovery(owned.by_kind(), others.by_kind(), longest_s, longest_undisturbed_s, overdue)


def _disturbances(endpoint: int, facts: RunFacts, history: OwnershipHistory) -> list[_Disturbance]:
    """Return what disturbed an endpoint, in the order in which it began."""
    found = [
        _Disturbance(
            at - RELAY_DRAIN_S,
            at + facts.lease_s,
            Incident(HAND_OVER, at - RELAY_DRAIN_S, at),
            owned=True,
        )
        for at in history.hand_overs(endpoint)
    ]
    until = 0.0  # End of the disturbance by relays.
    for incident in sorted(facts.incidents, key=lambda incident: incident.begin):
        begin = incident.begin
        if incident.kind == STALL:
            found.append(_Disturbance(begin, incident.end + STALL_LINGER_S, incident, owned=True))
        elif endpoint in incident.endpoints:
            found.append(_Disturbance(begin, incident.end + RETRIES_S, incident, owned=True))
        elif incident.relays:
            counts_from = incident.end if incident.kind in OUTAGES else begin
            end = counts_from + ENDPOINT_LEASES * facts.lease_s
            owned = bool(history.owners(endpoint, begin, end) & incident.relays)
            led = incident.leader is None or facts.relay_of.get(incident.leader) in incident.relays
            if not owned and begin > until:
                if not led:
                    continue
                end = counts_from + LEADER_LEASES * facts.lease_s
            until = max(until, end)
            found.append(_Disturbance(begin, end, incident, owned))
    return sorted(found, key=lambda d: d.begin)


def _with_current(
    waits: Iterator[tuple[int, float, float]], disturbances: list[_Disturbance]
) -> Iterator[tuple[tuple[int, float, float], list[_Disturbance]]]:
    """Yield each wait with the disturbances during it, in one pass, as both are in order."""
    current: list[_Disturbance] = []
    at = 0
    for wait in waits:
        _, begin, end = wait
        while at < len(disturbances) and disturbances[at].begin < end:
            current.append(disturbances[at])
            at += 1
        current = [d for d in current if d.end > begin]
        yield wait, current


def _last(current: list[_Disturbance], arrived_at: float) -> _Disturbance | None:
    """Return the fault to which a wait is attributed: of the receiver, or else the last one.

    None: there was none, or another cause besides.
    """
    if any(d.incident.kind in (STALL, HAND_OVER) for d in current):
        return None
    counted = [d for d in current if d.counts_from < arrived_at]
    if any(d.incident.endpoints for d in current):
        counted = [d for d in counted if d.incident.endpoints]
    return max(counted, key=lambda d: d.counts_from, default=None)


def _outside(current: list[_Disturbance], begin: float, end: float) -> float:
    """Return how much of a period is outside of all disturbances."""
    outside_s, at = 0.0, begin
    for disturbance in current:
        outside_s += max(disturbance.begin - at, 0.0)
        at = max(at, disturbance.end)
    return outside_s + max(end - at, 0.0)


def _waits(
    ledger: Ledger, lane: LaneRecord, before_at: float
) -> Iterator[tuple[int, float, float]]:
    """Yield (number, begin, end) of the time in which each number was the next one.

    Args:
        before_at: when the endpoint was added, if it gets earlier events.
    """
    for seq in lane.numbers():
        place = ledger.committed.get(lane.events[seq - 1])
        arrived_at = lane.first_at[seq - 1]
        if place is not None and seq not in lane.replays:
            yield seq, max(before_at, ledger.committed_at[place]), arrived_at
        before_at = arrived_at
