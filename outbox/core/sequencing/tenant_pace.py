"""The pace of tenants: how fast events above a tenant's share are moved into the outbox.

What tenants' tokens publish above their share is held, and what they delay is paced when it is due.
A tenant has `PER_S` deliveries per second, whatever its backlog, so it cannot delay others by more
than that.  Its held events keep their order; delayed ones take turns with them by time.

    held     1 2 3 4 …     in order of acceptance ──┐
                                                     ├──▶ the first ones, while the pace allows it
    delayed  a b …         in order of deliver_at ──┘
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

PER_S = 5_000.0
"""Deliveries per second of a tenant."""
HELD_DELIVERIES_MAX = int(PER_S * 600)
"""Deliveries of a tenant that may be held: ten minutes of its pace."""
BURST_S = 0.2
"""The burst, as seconds of unused pace: more than the interval between two passes."""
PASS_S = 0.1
"""Interval between two passes."""
PASS_TENANTS_MAX = 20
"""Tenants in a pass; more take turns."""


class PacedEvent(NamedTuple):
    """A held event, or one whose `deliver_at` has come."""

    id: int
    due_at: float
    """When it was accepted, or its `deliver_at`; seconds of the database's clock."""
    cost: int
    """Its deliveries."""


class TenantPace:
    """Chooses the events that tenants may publish now.  Times are seconds of a monotonic clock.

    A bucket for each tenant, stored as the time at which it is full again, as in
    `outbox.core.admission.rate_limit`; an event may take more than is left, and delays the next.
    """

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}

    def choose(
        self, tenant: str, held: Sequence[PacedEvent], delayed: Sequence[PacedEvent], now: float
    ) -> list[int]:
        """Choose the tenant's next events, and charge it with them.

        Args:
            held, delayed: the first ones of each kind, in their order.

        Returns:
            Their ids, in the order in which they are published.
        """
        full_at = max(self._full_at.get(tenant, now), now)
        chosen: list[int] = []
        queues = [list(reversed(held)), list(reversed(delayed))]
        while any(queues) and full_at < now + BURST_S:
            # The order of the held ones does not depend on a clock: only their heads are compared.
            event = min((q for q in queues if q), key=lambda q: q[-1].due_at).pop()
            chosen.append(event.id)
            full_at += event.cost / PER_S
        self._full_at[tenant] = full_at
        return chosen

    def forget(self, now: float) -> None:
        """Forget tenants whose bucket is full."""
        self._full_at = {tenant: at for tenant, at in self._full_at.items() if at > now}
