"""Mistakes with request runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.admission import adaptive_scheduler, request_scheduler
from outbox.core.delivery import circuit_breaker, connection_reuse, request_run, signing_clock
from outbox.core.delivery.commands import Successes
from outbox.relay.delivery import lane_run, recorder
from tests.sim.mutants.catalogue import mutant, swap

if TYPE_CHECKING:
    from outbox.core.model.response import AttemptResult
    from tests.sim.simulation import Simulation


@mutant
def run_continues_after_pause(sim: Simulation) -> None:
    """Nothing ends a run, not even a pause."""
    swap(request_scheduler, "RUN_S", 1e9)
    swap(request_scheduler, "ROTATION_S", 1e9)
    follow = lane_run.LaneRun.follow

    def patched(self: Any, response: AttemptResult) -> Any:
        self._endpoint = self._lane.runtime.endpoint
        return follow(self, response)

    swap(lane_run.LaneRun, "follow", patched)
    swap(circuit_breaker.CircuitBreaker, "is_calm", True)


@mutant
def run_continues_after_failure(sim: Simulation) -> None:
    """Any response with a status acknowledges a delivery of a run."""
    swap(request_run, "is_success", lambda status: True)


@mutant
def run_continues_after_unsolicited_data(sim: Simulation) -> None:
    """A run does not ask whether connections are still reused."""
    swap(connection_reuse.ConnectionReuse, "is_allowed", lambda self, now: True)


@mutant
def refused_time_is_final(sim: Simulation) -> None:
    """A refusal dead-letters its delivery although the clocks differ."""
    swap(signing_clock.SigningClock, "retryable", lambda self, choice, response, given: given)


@mutant
def run_is_not_recorded(sim: Simulation) -> None:
    """The successes of a run are not in the attempt log."""
    add = recorder.Recorder.add

    def patched(self: Any, lane: Any, epoch: int, record: Any) -> Any:
        return None if isinstance(record, Successes) else add(self, lane, epoch, record)

    swap(recorder.Recorder, "add", patched)


@mutant
def run_forgets_due_results(sim: Simulation) -> None:
    """A run that goes on does not give its successes to the recorder."""
    pop_due = request_run.RequestRun.pop_due

    def patched(self: Any, now: float) -> None:
        pop_due(self, now)

    swap(request_run.RequestRun, "pop_due", patched)


@mutant
def run_ignores_limits(sim: Simulation) -> None:
    """A run takes neither rates nor those that wait into account."""
    swap(adaptive_scheduler.AdaptiveRequestScheduler, "continue_run", lambda *_: True)
