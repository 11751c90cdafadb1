"""Request runs: first attempts of one lane that follow one another without going through
the dispatcher in between.

While a receiver responds to each request with a plain success, the next delivery of its lane can
be sent in the pass of the event loop that received the response.  A run is such a sequence of
requests.  It changes nothing about the lane's rules: one request is in flight at a time, and the
next one starts only after the previous one was delivered.  Whatever is not a plain success, and
every reason not to send the next delivery at once, ends the run with exactly one request in flight
or one result that the run did not take.  That result is handled like any other.  Only the end of
the lease, which is checked at the write, ends it with neither: then the session ends as well.

A run is checked before each of its requests, so that the end of the lease, a stop, a pause,
changed settings, an erased event or a dead-lettered backlog take effect after the request in
flight.  The requests of a run share a connection, so unsolicited data on any connection of its
endpoint ends it as well (see `connection_reuse`).

A run has no end of its own: it goes on while admission control admits it and the recorder keeps up.
Its results are given to the recorder together, some at a time.  After a crash the next owner
repeats those that were not, besides what the recorder had not written yet, with the same sequences
and `X-Delivery`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.delivery.commands import Successes
from outbox.core.model.response_policy import is_success

if TYPE_CHECKING:
    from collections.abc import Callable

    from outbox.core.delivery.circuit_breaker import CircuitBreaker
    from outbox.core.delivery.commands import Send
    from outbox.core.delivery.lane import Lane
    from outbox.core.model.response import AttemptResult

RESULTS_MAX, RESULTS_S = 32, 0.05
"""Successes that are given to the recorder together, and the time that the first one waits for the
others, in seconds.  Whether they are due is decided when a request of the run is sent; one without
a response delays them, as it delays its lane."""


class RequestRun:
    """Decides after each success whether the lane's next delivery is sent at once.

    Args:
        admit: whether admission control lets the next request start in the slot of the one before,
            by its own clock; if so it counts as started.
        send: the first request, a first attempt with one delivery.
        started_at: when it starts, in epoch seconds.
    """

    __slots__ = (
        "_admit",
        "_breaker",
        "_lane",
        "results",
        "send",
        "started_at",
    )

    def __init__(
        self,
        lane: Lane,
        breaker: CircuitBreaker,
        admit: Callable[[float], bool],
        send: Send,
        started_at: float,
    ) -> None:
        self._lane = lane
        self._breaker = breaker
        self._admit = admit
        self.send = send
        """The request in flight."""
        self.started_at = started_at
        """When it started, in epoch seconds."""
        self.results = Successes()
        """The successes that were not given to the recorder yet."""

    def pop_due(self, now: float) -> Successes | None:
        """Remove the results if they are to be given to the recorder now, in epoch seconds."""
        results = self.results
        if len(results) < RESULTS_MAX and now - results.rows[0].started_at < RESULTS_S:
            return None
        self.results = Successes()
        return results

    def advance(
        self,
        response: AttemptResult,
        stored: dict[str, Any] | None,
        known: Send | None,
        *,
        now: float,
        admission_now: float,
        may_reuse: bool,
    ) -> Send | None:
        """Take the result of the request in flight and return the next one, to be sent now.

        Args:
            response: the response to the request in flight; the connection can be used for another
                one.
            stored: the response in its stored form.
            known: the next request, if it was prepared.
            now: epoch seconds.
            admission_now: the time by the clock of admission control.
            may_reuse: whether the endpoint's connections may carry more than one request.

        Returns:
            None: the run ends.  The result was not taken and nothing has changed.
        """
        if (
            response.status is None
            or not is_success(response.status)
            or response.detail
            or not may_reuse
            or not self._breaker.is_calm
        ):
            return None
        lane = self._lane
        following = lane.next_in_run(now, known)
        if following is None or not self._admit(admission_now):
            return None
        self.results.add(self.send.delivery, response, stored, self.started_at)
        lane.advance_run(now)
        self.send, self.started_at = following, now
        return following
