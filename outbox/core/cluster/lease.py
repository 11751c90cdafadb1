"""Who owns which endpoint, and when a replica may still believe in its lease.

No clocks are compared.  A replica counts its own lease on its own steady clock,
from the *start* of the renewal that the database confirmed, so it stops
believing before anyone else may.  Others judge it dead after they saw the same
renewal counter for a whole lease on *their* steady clock: the renewal that they
saw had begun before they saw it.  Whoever buries it looks at the counter once more,
under the lock that a renewal takes, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from uuid import UUID

RENEWALS_PER_LEASE = 5


class Lease:
    """This replica's own lease; times are seconds of its steady clock."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._until = 0.0

    def renewed(self, started_at: float) -> None:
        """The database confirmed a renewal that was *begun* at this time."""
        self._until = started_at + self.lease_s

    def left_s(self, now: float) -> float:
        """How long this replica may go on; not positive when it must stop."""
        return self._until - now

    @property
    def renew_every_s(self) -> float:
        return self.lease_s / RENEWALS_PER_LEASE


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica as its row shows it."""

    id: int
    renewals: int
    lease_s: float


class PeerWatch:
    """Tells the living replicas from the dead ones."""

    def __init__(self) -> None:
        # Of each: its counter, and when it is dead if that stays the same.
        self._seen: dict[int, tuple[int, float]] = {}

    def observe(self, peers: Iterable[Peer], now: float) -> tuple[set[int], set[int]]:
        """Look at all rows; returns (alive, dead) ids.

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

    def judge_at(self, me: int) -> float:
        """When the next of the others is dead, if none of them renews; infinite without others.

        Whoever looks then, and not some time later, takes over as early as can be.
        """
        return min(
            (dead_at for peer, (_, dead_at) in self._seen.items() if peer != me), default=inf
        )


class Portion:
    """How many of many endpoints to take over in one go.

    Nobody knows beforehand how many lanes they have: the next ones probably have as many as
    the last ones, and are at most four times as many endpoints.
    """

    def __init__(self, endpoints_max: int, lanes_max: int) -> None:
        self._endpoints_max = endpoints_max
        self._lanes_max = lanes_max
        self.endpoints = 1
        """The next portion."""

    def took(self, endpoints: int, lanes: int) -> None:
        """So many were taken over, and had so many lanes."""
        fitting = self._lanes_max * endpoints // max(lanes, 1)
        self.endpoints = max(min(fitting, 4 * self.endpoints, self._endpoints_max), 1)


def preferred(endpoint_id: UUID, replica_ids: Collection[int]) -> int:
    """The replica that should own an endpoint: rendezvous hashing.

    When a replica joins or leaves, only the endpoints that it wins or loses
    move.  Source: Thaler and Ravishankar, "Using Name-Based Mappings to
    Increase Hit Rates", IEEE/ACM Transactions on Networking 6 (1), 1998.
    """
    return max(
        replica_ids,
        key=lambda replica: blake2b(
            endpoint_id.bytes + replica.to_bytes(8, "big"), digest_size=8
        ).digest(),
    )
