"""Operational events: changes of the relay's own state, published as events.

    outbox.dead_letter.created   a delivery was dead-lettered
    outbox.lane.blocked          a lane is blocked until an operator unblocks it
    outbox.lane.stuck            a delivery fails again and again while its endpoint is healthy
    outbox.endpoint.failing      the circuit breaker is open: failing or rejecting
    outbox.endpoint.recovered    the circuit breaker closed
    outbox.endpoint.stalled      a lane has had no success for a day
    outbox.endpoint.disabled     an endpoint gets no deliveries until an operator enables it
    outbox.filter.stopped        a slow or failing filter is not evaluated and counts as met
    outbox.relay.lagging         events wait for a sequence although a replica leads
    outbox.row.refused           a trigger or constraint refused a row: postponed or left out

They are delivered like any other event: sequenced, retried, dead-lettered.

**Operational events never cause further ones without end.**  The result of delivering an
operational event is not reported.  A dead letter or a block is reported if it concerns an
ordinary event, a range if it contains one; a stuck lane likewise, after every
`STUCK_EVERY` attempts of the delivery's own; a refused row if it is of an ordinary event.  An
open breaker is reported at the first failure of an ordinary delivery while it is open, at most
once in `FAILING_EVERY_S`, and its recovery only if it was reported; a stall if an ordinary event
is pending in the lane.  Every report therefore needs an ordinary delivery that failed or waits,
and each such delivery causes at most a few.  Two are reported whatever their cause: a disabled
endpoint and a stopped filter.  Neither repeats by itself: only an operator enables an endpoint,
and a filter is evaluated again after a change or after a day.

`ReportedState` is stored with the state of the endpoint, so that the next owner neither repeats
a report nor reports an end without its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from outbox.core.delivery.circuit_breaker import BreakerState
from outbox.core.model.pattern import RESERVED_PREFIX

if TYPE_CHECKING:
    from collections.abc import Collection

DEAD_LETTER_CREATED = f"{RESERVED_PREFIX}dead_letter.created"
LANE_BLOCKED = f"{RESERVED_PREFIX}lane.blocked"
LANE_STUCK = f"{RESERVED_PREFIX}lane.stuck"
ENDPOINT_FAILING = f"{RESERVED_PREFIX}endpoint.failing"
ENDPOINT_RECOVERED = f"{RESERVED_PREFIX}endpoint.recovered"
ENDPOINT_STALLED = f"{RESERVED_PREFIX}endpoint.stalled"
ENDPOINT_DISABLED = f"{RESERVED_PREFIX}endpoint.disabled"
FILTER_STOPPED = f"{RESERVED_PREFIX}filter.stopped"
RELAY_LAGGING = f"{RESERVED_PREFIX}relay.lagging"
ROW_REFUSED = f"{RESERVED_PREFIX}row.refused"

WARN_AFTER_S = 86400.0
"""Seconds without a success after which a lane has stalled.  Not reported if the endpoint is
disabled at that age or earlier."""
STUCK_EVERY = 5
"""Failed attempts of one delivery after which its lane is reported as stuck, and again after as
many more.  Attempts that count against the retry limit; reported only after one that leaves the
circuit breaker closed."""
FAILING_EVERY_S = 3600.0
"""Minimum seconds between two reports that an endpoint fails: one that fails again and again is
reported, and has recovered, once.  If it still fails after them, that is reported then."""
LAGGING_S = 10.0
"""Seconds that events must wait, while a replica leads, to count as late."""
LAGGING_EVERY_S = 600.0
"""Minimum seconds between two reports of lag, across replicas."""
LAG_CHECK_EVERY_S = 1.0
"""Seconds between two checks of the age of waiting events."""


def is_operational(type: str) -> bool:  # noqa: A002
    """Whether an event type is an operational one."""
    return type.startswith(RESERVED_PREFIX)


# ------------------------------------------------------------------ endpoints


@dataclass(frozen=True, slots=True)
class ReportedState:
    """Conditions of an endpoint that were reported and continue; times are epoch seconds."""

    held_since: float | None = None
    stalled_at: float | None = None
    """When the stall was reported, not when it began."""
    failing_at: float | None = None
    """When it was last reported that the breaker opened, also if that has ended."""

    def record_failure(self, state: BreakerState, now: float, *, ordinary: bool) -> ReportedState:
        """The state after a failed attempt.

        Args:
            state: the state of the circuit breaker after the attempt.
            ordinary: whether the event is an ordinary one.
        """
        if (
            ordinary
            and self.held_since is None
            and state in (BreakerState.FAILING, BreakerState.REJECTING)
            and not (self.failing_at is not None and 0 <= now - self.failing_at < FAILING_EVERY_S)
        ):
            return replace(self, held_since=now, failing_at=now)
        return self

    def record_state(self, state: BreakerState) -> ReportedState:
        """The state after the circuit breaker changed."""
        if self.held_since is not None and state is BreakerState.HEALTHY:
            return replace(self, held_since=None)
        return self

    def record_stalls(self, stalled_since: Collection[float]) -> ReportedState:
        """The state after a check of the lanes with pending deliveries.

        A stall lasts until every lane that was stalled at the report had a success.

        Args:
            stalled_since: the time since which each such lane has had no success, whether it may
                send or waits for a slot.
        """
        reported_at = self.stalled_at
        if reported_at is not None and all(since > reported_at for since in stalled_since):
            return replace(self, stalled_at=None)
        return self

    def should_report_stall(self, stalled_s: float, disable_after_s: float) -> bool:
        """Whether to report a lane without a success for `stalled_s` seconds."""
        return self.stalled_at is None and WARN_AFTER_S <= stalled_s < disable_after_s

    def clamp_times(self, now: float) -> ReportedState:
        """Limit stored times to `now`, after the clock was set back."""
        times = self.held_since, self.stalled_at, self.failing_at
        return ReportedState(*(at and min(at, now) for at in times))


# ------------------------------------------------------------------ the leader


class LagAction(Enum):
    """What the leader does about waiting events."""

    NOTHING = auto()
    CHECK = auto()
    """Check the age of the waiting events and report lag."""
    CLOSE = auto()
    """No events wait: the reported lag has ended."""


class LagDetector:
    """Detects lag: events that wait although this replica leads.

    Age alone is not lag: a transaction that was open for an hour commits events that are an
    hour old and have not waited.  Such events fit into one batch.  Only after full batches for
    `LAGGING_S` is the age of the next event its waiting time.  (Its id is above the highest id
    read so far.  If it had been written long ago and become visible just now, higher ids would
    have been read before it, and it would be a gap.)

    Times are seconds of a monotonic clock.
    """

    __slots__ = ("_check_at", "_full_since", "_open")

    def __init__(self) -> None:
        self._full_since: float | None = None
        self._check_at = 0.0
        # Whether the database may have an open lag report; an earlier leader may have written it.
        self._open = True

    def record_batch(self, now: float, *, full: bool) -> LagAction:
        """Record a sequenced batch; `full`: it reached the size limit, so events may remain."""
        if not full:
            self._full_since = None
            return LagAction.CLOSE if self._open else LagAction.NOTHING
        if self._full_since is None:
            self._full_since = self._check_at = now
        if now - self._full_since < LAGGING_S or now < self._check_at:
            return LagAction.NOTHING
        self._check_at = now + LAG_CHECK_EVERY_S
        return LagAction.CHECK

    def mark_reported(self) -> None:
        """Record that the lag is reported in the database."""
        self._open = True
        self._check_at = float("inf")

    def mark_ended(self) -> None:
        """Record that the end of the lag is in the database."""
        self._open = False

    def reset(self) -> None:
        """Reset after another replica took the lead, whose reports are not known here."""
        self._full_since = None
        self._open = True
