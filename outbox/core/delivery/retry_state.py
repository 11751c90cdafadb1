"""Retry state of a lane's next delivery: attempts, budget and the time of the next attempt.

Only the next delivery of a lane can be failing, so a lane has one retry state.  It is stored
with the lane's progress together with its sequence, so that stale state is recognised.

While the circuit breaker is open, deliveries are probed between their own attempts.  Such a
probe is *free*: it neither counts against the budget nor changes the schedule.

A delivery that its application cannot process fails each time.  So after such a response it is
probed again only after a time that doubles with each, whoever's turn the circuit breaker says it
is; other failures say nothing about the delivery, and begin anew.

Retry-After is not part of this state: it applies to the whole endpoint, see `circuit_breaker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.operational_events import STUCK_EVERY
from outbox.core.model.response import Failure

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Progress
    from outbox.core.model.retry_policy import RetryPolicy

PROBE_WAIT_S_MIN, PROBE_WAIT_S_MAX = 1.0, 60.0
"""Time until a delivery is probed again at which the application failed, before jitter; it is
doubled each time in a row."""

# Bound once: enum member access is slow in Python 3.11.
MISSING = Failure.MISSING


@dataclass(slots=True)
class RetryState:
    """Attempts of one delivery; times are epoch seconds."""

    attempts: int = 0
    """Requests made."""
    spent: int = 0
    """Attempts that count against the budget."""
    first_attempt_at: float | None = None
    next_attempt_at: float | None = None
    last_response: dict[str, Any] | None = None
    exhausted: bool = False
    """A changed policy allows no further attempt."""
    blocks: bool = False
    """If the delivery is dead-lettered for that, its lane waits for an operator."""
    reported_spent: int = 0
    """`spent` when the lane was last reported as stuck."""
    probe_wait_s: float = 0.0
    """The last time between two requests at which the application failed, before jitter; 0: it did
    not fail the last time."""
    next_probe_at: float = -inf
    """No probe before this time."""

    @classmethod
    def from_progress(cls, progress: Progress) -> RetryState:
        """The stored state, or a new one if the stored one is of another sequence."""
        if progress.retry_seq != progress.acked_seq + 1:
            return cls()
        return cls(
            progress.attempts,
            progress.spent,
            progress.first_attempt_at,
            progress.next_attempt_at,
            progress.last_response,
            # It is not stored: an earlier owner has probably reported the multiples.
            reported_spent=progress.spent - progress.spent % STUCK_EVERY,
        )

    def report_stuck(self) -> bool:
        """Record that the lane is reported as stuck, if that is due; whether it is."""
        if self.spent - self.reported_spent < STUCK_EVERY:
            return False
        self.reported_spent = self.spent
        return True

    @property
    def is_missing(self) -> bool:
        """Whether the delivery holds its lane because its event is gone."""
        return self.last_response is not None and self.last_response.get("failure") == MISSING

    @property
    def requests(self) -> int:
        """Requests made; `attempts` also counts how often a missing event was searched for."""
        return self.spent if self.is_missing else self.attempts

    def is_due(self, now: float) -> bool:
        """Whether an attempt at `now` counts against the budget."""
        return self.next_attempt_at is None or self.next_attempt_at <= now

    def record_failure(self, response: dict[str, Any] | None, started_at: float) -> None:
        """Record a failed attempt and its stored response."""
        if self.first_attempt_at is None:
            self.first_attempt_at = started_at
        self.last_response = response

    def delay_probe(self, now: float, u: float, *, by_application: bool) -> None:
        """Set the time of the next probe after a failed request.

        Args:
            u: uniform in [0, 1), for the jitter, which takes up to half.
            by_application: the application failed at the delivery.
        """
        if not by_application:
            self.probe_wait_s, self.next_probe_at = 0.0, -inf
            return
        self.probe_wait_s = min(max(self.probe_wait_s * 2, PROBE_WAIT_S_MIN), PROBE_WAIT_S_MAX)
        self.next_probe_at = now + self.probe_wait_s * (1.0 - u / 2)

    def postpone(self, until: float) -> None:
        """Set the next attempt without charging the last one to this delivery."""
        self.next_attempt_at = until

    def clamp_delay(self, policy: RetryPolicy, now: float) -> None:
        """Limit the delays to their maximum, after the clock was set back."""
        self.next_probe_at = min(self.next_probe_at, now + PROBE_WAIT_S_MAX)
        if self.next_attempt_at is not None:
            _, longest_s = policy.delay_bounds_s(max(self.spent, 1))
            self.next_attempt_at = min(self.next_attempt_at, now + longest_s)

    def apply_policy(self, policy: RetryPolicy, *, blocks: bool) -> None:
        """Apply a changed policy to the attempts that were made."""
        self.exhausted = self.spent > 0 and policy.exhausted(self.spent, 0.0)
        self.blocks = blocks

    def charge_attempt(
        self,
        policy: RetryPolicy,
        *,
        now: float,
        u: float,
        observed_s: float,
        preempted: bool = False,
    ) -> bool:
        """Charge the last attempt to the budget; returns whether the budget is exhausted.

        Args:
            u: uniform in [0, 1), for the jitter.
            observed_s: observed seconds from the start of the first attempt to that of this one.
            preempted: admission control cancelled the request.  It costs no attempt; the
                budget of time still applies.
        """
        self.spent += not preempted
        if policy.exhausted(self.spent, observed_s):
            return True
        self.next_attempt_at = now + policy.delay_s(max(self.spent, 1), u)
        return False
