"""Mistakes with what the relay tells about itself."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.operational_events import Told
from outbox.relay.delivery import dispatcher
from outbox.store import endpoints
from tests.sim.database.statements import operational, records, registry
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def dead_letters_of_operational_events_are_told_too(sim: Simulation) -> None:
    """So each of them that is refused leads to another one."""
    swap(operational, "is_ordinary", lambda *_: True)


@mutant
def a_range_that_grows_is_told_each_time(sim: Simulation) -> None:
    """Whether it held ordinary events before is not asked."""
    swap(records, "holds_ordinary", lambda *_: False)


@mutant
def the_next_owner_does_not_know_what_was_told_of_a_hold(sim: Simulation) -> None:
    """It is only in memory."""
    answer = registry.ANSWERS[endpoints.READ_ENDPOINTS]

    def read_endpoints(*args: Any) -> Any:
        return [{**row, "told_held_since": None} for row in answer(*args)]

    sim.database.changed[endpoints.READ_ENDPOINTS] = read_endpoints


@mutant
def a_hold_is_told_whatever_failed(sim: Simulation) -> None:
    """Also when nothing but operational events did."""
    swap(dispatcher, "is_operational", lambda _: False)


@mutant
def a_hold_is_over_as_soon_as_something_succeeds(sim: Simulation) -> None:
    """It is told to have recovered while it is still recovering."""
    changed = Told.changed

    def too_early(self: Told, state: Any) -> Told:
        return replace(changed(self, state), held_since=None)

    swap(Told, "changed", too_early)
