"""Leases of replicas.

Clocks are never compared.  A replica measures its own lease on its own steady clock,
from the *start* of the renewal that the database confirmed, so it stops sending before
any other replica may take over.  Other replicas consider it dead after the same renewal
counter was visible for a whole lease on *their* steady clock: that renewal had started
before they saw it.  Expiring a replica checks the counter once more, under the lock that
a renewal takes as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

RENEWALS_PER_LEASE = 5


class Lease:
    """This replica's own lease; times are seconds of its steady clock."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._until = 0.0

    def renewed(self, started_at: float) -> None:
        """Record a confirmed renewal by the time at which it was *started*."""
        self._until = started_at + self.lease_s

    def left_s(self, now: float) -> float:
        """Remaining seconds of the lease; not positive when the replica must stop."""
        return self._until - now

    @property
    def renew_every_s(self) -> float:
        return self.lease_s / RENEWALS_PER_LEASE


@dataclass(frozen=True, slots=True)
class Peer:
    """A row of a replica."""

    id: int
    renewals: int
    lease_s: float


class PeerWatch:
    """Detects dead replicas by their renewal counters."""

    def __init__(self) -> None:
        # By replica: its counter, and when it is dead if the counter does not change.
        self._seen: dict[int, tuple[int, float]] = {}

    def observe(self, peers: Iterable[Peer], now: float) -> tuple[set[int], set[int]]:
        """Process all rows; return the ids of (alive, dead) replicas.

        Args:
            now: seconds of the steady clock, read after the rows were.
        """
        alive: set[int] = set()
        dead: set[int] = set()
        seen: dict[int, tuple[int, float]] = {}
        for peer in peers:
            known = self._seen.get(peer.id)
            if known is None or known[0] != peer.renewals:
                known = (peer.renewals, now + peer.lease_s)
            seen[peer.id] = known
            (dead if now >= known[1] else alive).add(peer.id)
        self._seen = seen
        return alive, dead

    def next_expiry_at(self, me: int) -> float:
        """The earliest time at which another replica may be dead; infinite without others.

        Polling at that time makes the take-over as early as possible.
        """
        return min(
            (dead_at for peer, (_, dead_at) in self._seen.items() if peer != me), default=inf
        )


class ClaimBatchSize:
    """Adapts the number of endpoints claimed in one step to their number of lanes.

    The number of lanes is not known in advance: it is estimated from the last step, and the
    step grows by a factor of at most four.
    """

    def __init__(self, endpoints_max: int, lanes_max: int) -> None:
        self._endpoints_max = endpoints_max
        self._lanes_max = lanes_max
        self.endpoints = 1
        """Endpoints of the next step."""

    def record_claim(self, endpoints: int, lanes: int) -> None:
        """Record how many endpoints and lanes a step claimed."""
        fitting = self._lanes_max * endpoints // max(lanes, 1)
        self.endpoints = max(min(fitting, 4 * self.endpoints, self._endpoints_max), 1)
