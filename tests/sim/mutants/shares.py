"""Mistakes with the shares of tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.store.schedules.future_events import FutureEventStore
from tests.sim.database import shares
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def direct_although_an_event_is_held(sim: Simulation) -> None:
    """The share alone decides whether a request is direct."""
    # The mover has imported its own.
    swap(shares, "is_named", lambda db, tx, tenant: False)


@mutant
def erasure_does_not_name_the_newest_held_event(sim: Simulation) -> None:
    """A share names an event that was erased, although older ones are held."""
    swap(shares, "name_newest_left", lambda db, tx, deleted, left: None)


@mutant
def held_without_the_lock_of_the_share(sim: Simulation) -> None:
    """Requests that are held at the same time name an older event as the newest."""
    swap(shares, "lock_share", lambda db, tx, tenant: None)


@mutant
def later_events_moved_after_a_part_was_not(sim: Simulation) -> None:
    """A pass goes on with the next message after another session has aborted one."""
    move = FutureEventStore._move_or_postpone

    async def patched(self: Any, ids: list[int]) -> int:
        await move(self, ids)
        return len(ids)

    swap(FutureEventStore, "_move_or_postpone", patched)
