"""Mistakes with operational events."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.core.delivery import operational_events as reporting
from outbox.core.delivery.operational_events import ReportedState
from outbox.relay.delivery import breaker_follow_up
from tests.sim.mutants.catalogue import mutant, swap
from tests.sim.stores import lanes, operational_events, records

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def dead_letters_of_operational_events_reported(sim: Simulation) -> None:
    """Dead letters of operational events are reported, so each may cause another one."""
    swap(operational_events, "is_ordinary", lambda *_: True)


@mutant
def growing_range_reported_each_time(sim: Simulation) -> None:
    """It is not checked whether the range had ordinary events before."""
    swap(records, "contains_ordinary_event", lambda *_: False)


@mutant
def reported_hold_only_in_memory(sim: Simulation) -> None:
    """The report of a hold is only in the memory of the owner."""
    read = lanes.read_endpoints

    def read_endpoints(*args: Any) -> Any:
        return [replace(e, reported=replace(e.reported, held_since=None)) for e in read(*args)]

    swap(lanes, "read_endpoints", read_endpoints)


@mutant
def hold_reported_for_operational_failures(sim: Simulation) -> None:
    """A hold is reported even if only operational events failed."""
    swap(breaker_follow_up, "is_operational", lambda _: False)


@mutant
def each_hold_reported(sim: Simulation) -> None:
    """An endpoint that fails again is reported each time, however soon that is."""
    swap(reporting, "FAILING_EVERY_S", 0.0)


@mutant
def recovery_reported_while_recovering(sim: Simulation) -> None:
    """An endpoint is reported as recovered while it is still recovering."""
    original = ReportedState.record_state

    def report_early(self: ReportedState, state: Any) -> ReportedState:
        return replace(original(self, state), held_since=None)

    swap(ReportedState, "record_state", report_early)
