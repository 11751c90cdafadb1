"""The balance of endpoints between replicas: each owns as many as every other, or one more.

Every replica computes all shares by itself, from one snapshot of the table of ownership.
A replica over its share releases endpoints, and one below its share claims unowned ones;
nothing else moves.  On one snapshot the replicas agree: the shares add up to all endpoints,
and no unowned endpoint is in the portions of two.  Replicas with different snapshots may
keep or claim one too many, so each looks again until a snapshot is balanced.

Replicas of two releases must compute the same shares: otherwise an endpoint may be in the portion
of none while both run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from uuid import UUID


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica should own."""

    endpoints: int
    """How many endpoints; it releases those above."""
    claimable: list[UUID]
    """The unowned endpoints that it should claim."""


def is_balanced(
    alive: Collection[int], owned: Mapping[int, int], unowned: Collection[UUID]
) -> bool:
    """Whether every endpoint has an owner, and no replica has two more than another."""
    counts = [owned.get(replica, 0) for replica in alive]
    return not unowned and max(counts) - min(counts) <= 1


def share(
    me: int, alive: Collection[int], owned: Mapping[int, int], unowned: Iterable[UUID]
) -> Share:
    """Compute the share of one replica.

    When the endpoints cannot be divided evenly, the replicas that own the most keep one more:
    an endpoint moves only if its new owner has fewer by two.

    Args:
        me: the replica; one of those that are alive.
        alive: the replicas that share the endpoints.
        owned: how many endpoints a replica owns now; none if missing.  Those of other
            replicas are not counted: they will be released.
        unowned: the endpoints without an owner.
    """
    free = sorted(unowned)
    counts = {replica: owned.get(replica, 0) for replica in alive}
    least, larger = divmod(sum(counts.values()) + len(free), len(counts))
    by_count = sorted(counts, key=lambda replica: (-counts[replica], replica))
    shares = {replica: least + (n < larger) for n, replica in enumerate(by_count)}
    # Each replica's portion of the unowned endpoints begins after those of the replicas before.
    first = sum(max(shares[each] - counts[each], 0) for each in counts if each < me)
    missing = max(shares[me] - counts[me], 0)
    return Share(shares[me], free[first : first + missing])
