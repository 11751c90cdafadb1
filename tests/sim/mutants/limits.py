"""Mistakes with who may send, and how often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.admission import rate_limit, request_scheduler
from outbox.relay.delivery import admission
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


@mutant
def a_rate_that_is_asked_and_never_charged(sim: Simulation) -> None:
    """What is begun does not weigh on it."""
    swap(rate_limit.Rate, "take", lambda self, now: None)


@mutant
def one_request_too_many_of_an_endpoint(sim: Simulation) -> None:
    """A limit is taken for what it has to be passed by."""

    begin = request_scheduler.Turns.ask

    def patched(self: Any, turn: Any, now: float, **rest: Any) -> Any:
        line = turn.line
        most, line.in_flight_max = line.in_flight_max, line.in_flight_max and line.in_flight_max + 1
        try:
            return begin(self, turn, now, **rest)
        finally:
            line.in_flight_max = most

    swap(request_scheduler.Turns, "ask", patched)


@mutant
def nobody_wakes_those_who_wait_for_a_time(sim: Simulation) -> None:
    """A turn that comes with time alone never comes."""
    swap(admission.Queueing, "_set_timer", lambda self: None)


@mutant
def a_turn_that_was_not_wanted_any_more_is_kept(sim: Simulation) -> None:
    """Who finds that it would not be sent by now does not give it back."""
    end = admission.Queueing.end

    def patched(self: Any, turn: Any, *, answered: bool) -> None:
        if answered:
            end(self, turn, answered=answered)

    swap(admission.Queueing, "end", patched)
