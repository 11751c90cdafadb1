"""What was tried so far for the delivery at a lane's head, and when it is due.

The retry state of one number: only the head of a lane can be failing, so a lane
has one of these.  It is kept with the lane's progress, and names its number
there, so that a stale one is recognised.

While an endpoint is out of order its lanes' heads are probed between their own
times.  Such an attempt is *free*: it does not count against the budget, and
moves nothing in the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outbox.core.delivery.commands import Progress
    from outbox.core.model.retry_policy import RetryPolicy


@dataclass(slots=True)
class Head:
    """Times are epoch seconds."""

    attempts: int = 0
    """Requests made."""
    spent: int = 0
    """Of these, those that count against the budget."""
    first_attempt_at: float | None = None
    next_attempt_at: float | None = None
    last_answer: dict[str, Any] | None = None

    @classmethod
    def of(cls, progress: Progress) -> Head:
        """The state that is kept, if it is of the number that is next."""
        if progress.head_seq != progress.acked_seq + 1:
            return cls()
        return cls(
            progress.attempts,
            progress.spent,
            progress.first_attempt_at,
            progress.next_attempt_at,
            progress.last_answer,
        )

    def is_due(self, now: float) -> bool:
        """Whether an attempt at this time counts."""
        return self.next_attempt_at is None or self.next_attempt_at <= now

    def answered(self, told: dict[str, Any] | None, started_at: float) -> None:
        """An attempt was made, and it did not succeed; what is kept of the answer."""
        if self.first_attempt_at is None:
            self.first_attempt_at = started_at
        self.last_answer = told

    def put_off(self, until: float) -> None:
        """Try again at this time; the attempt that was made is no fault of this delivery."""
        self.next_attempt_at = until

    def hold_to(self, policy: RetryPolicy, now: float) -> None:
        """Wait no longer than the policy could have said: a clock may have been set back."""
        if self.next_attempt_at is not None:
            _, longest_s = policy.delay_bounds_s(max(self.spent, 1))
            self.next_attempt_at = min(self.next_attempt_at, now + longest_s)

    def spend(
        self,
        policy: RetryPolicy,
        *,
        started_at: float,
        now: float,
        u: float,
        called_off: bool = False,
    ) -> bool:
        """Charge the attempt that was made; whether the budget has ended with it.

        Args:
            called_off: we ended it, for the sake of others.  It is no fault of the receiver
                and costs no attempt; the time since the first one counts all the same.
        """
        assert self.first_attempt_at is not None
        self.spent += not called_off
        if policy.exhausted(self.spent, started_at - self.first_attempt_at):
            return True
        self.next_attempt_at = now + policy.delay_s(max(self.spent, 1), u)
        return False
