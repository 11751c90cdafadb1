"""Facts for the checker besides the ledger: injected faults, and the database's tables."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

STALL = "stall"
"""Kind of an incident that was not injected: the event loop of this process stalled."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A past fault; times are on the clock of the ledger."""

    kind: str
    begin: float
    end: float
    relays: frozenset[int] = frozenset()
    """Numbers of the affected relays."""
    endpoints: frozenset[int] = frozenset()
    leader: int | None = None
    """Replica that led when the fault began; None: unknown, or none."""


@dataclass(frozen=True, slots=True)
class LaneCount:
    """The last sequence number assigned in a lane, from the database."""

    name: str
    endpoint: int
    last_seq: int


@dataclass(frozen=True, slots=True)
class DeadRange:
    """A range of dead-lettered sequence numbers."""

    lane: str
    seq: int
    to_seq: int


@dataclass(frozen=True, slots=True)
class OwnershipEvent:
    """A journal entry: an endpoint was acquired or released."""

    endpoint: int
    at: float
    replica: int
    claimed: bool
    reason: str = ""
    """Reason of a release."""


@dataclass(frozen=True, slots=True)
class SnapshotStart:
    """The position of a snapshot, at which an endpoint began."""

    seen: frozenset[bytes]
    """The ids of the events of its types that the snapshot saw."""
    at: float
    """When the endpoint was added."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """All facts of a run."""

    lease_s: float = 2.0
    began_at: float = 0.0
    """Start of the faults; examples show times relative to it."""
    incidents: tuple[Incident, ...] = ()
    lanes: tuple[LaneCount, ...] = ()
    dead: tuple[DeadRange, ...] = ()
    ownership_events: tuple[OwnershipEvent, ...] = ()
    relay_of: Mapping[int, int] = field(default_factory=dict)
    """Relay number by replica id; each restart of a relay is a new replica."""
    audit: tuple[tuple[str, int, tuple[str, ...]], ...] = ()
    """(check, violations, examples) of `outbox verify`."""
    died: tuple[str, ...] = ()
    """Relays that exited without a fault."""
    proof_aborts: tuple[str, ...] = ()
    """Log lines of proofs of absence whose second read found a row."""
    unsettled: str = ""
    """Deliveries still pending at the end of the settling time."""
    subscriptions: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Numbers of the event types that each endpoint gets."""
    late: frozenset[int] = frozenset()
    """Endpoints added later: they get only a part of the events."""
    snapshots: Mapping[int, SnapshotStart] = field(default_factory=dict)
    """Those of them that began at the position of a snapshot."""


def numbers_by_lane(ranges: Iterable[DeadRange]) -> dict[str, set[int]]:
    """Return the dead-lettered numbers of each lane."""
    dead: dict[str, set[int]] = defaultdict(set)
    for each in ranges:
        dead[each.lane].update(range(each.seq, each.to_seq + 1))
    return dead
