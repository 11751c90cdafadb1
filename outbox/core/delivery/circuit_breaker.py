"""The circuit breaker of one endpoint: whether its lanes may send, and how many at once.

    state        requests admitted                      transitions
    healthy      all lanes                              consecutive failures, Retry-After ▶ failing
                                                        consecutive refusals ▶ rejecting
    failing      one probe at a time, lanes in          success, first refusals ▶ recovering
                 rotation, when the probe is due        consecutive refusals ▶ rejecting
    rejecting    as failing; a refusal does not         success ▶ recovering
                 dead-letter its delivery
    recovering   `width` at once, doubled by each       round without waiting lanes ▶ healthy
                 round in which most succeed            consecutive failures, Retry-After, a failure
                                                        of an unproven recovery ▶ failing
                                                        consecutive refusals ▶ rejecting
    paused       none; set by an operator               operator ▶ recovering
    disabled     none; 410, or too long without a       operator; starts with a new state
                 success

**Probes rotate over the lanes.**  A delivery that its receiver cannot process fails on
every attempt.  If it were the only probe, no other delivery would ever be attempted.
Probes before a delivery's own retry time cost no attempt (see `outbox.core.delivery.lane`).  A
lane may let its turn pass: a delivery at which the application itself fails is probed less and less
often (see `outbox.core.delivery.retry_state`), and an endpoint may have no probes at all.

**A series of refusals is a fault of the endpoint.**  A deployment that responds 404 refuses
every delivery.  The first consecutive refusals dead-letter their deliveries.  From the
refusal that reaches `REFUSALS_MAX` on, refusals are retried like failures until a request
succeeds.

**A recovery may be unproven.**  An operator resumes an endpoint during an outage, or a new owner
finds it recovering, before the receiver has responded again.  If the first new request fails,
probing goes on: the lanes' own retries may be hours away.  The outage then has lasted since before
the resume, while the probe interval grows from the beginning again.  Requests from before the
resume, and preempted ones, say nothing about that.

**Retry-After applies to the endpoint**, not to the delivery that received it.  No lane sends
until it has elapsed, even if earlier requests succeed in the meantime.  Recovery then starts
with one request at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from outbox.core.delivery.commands import Gate
from outbox.core.model.response_policy import RETRY_AFTER_S_MAX, AttemptOutcome

FAILURES_MAX = 5
"""Consecutive failures that open the breaker."""
REFUSALS_MAX = 10
"""Consecutive refusals, of different deliveries, that open the breaker as `rejecting`."""
PROBE_MIN_S, PROBE_MAX_S = 1.0, 60.0
"""Bounds of the probe interval, before full jitter."""
PROBE_SHARE = 0.1
"""Probe interval as a share of the outage so far.  A recovery is then detected within about a
tenth of the outage's length.  Exponential backoff could wait as long again as the outage."""


class BreakerState(StrEnum):
    HEALTHY = "healthy"
    FAILING = "failing"
    REJECTING = "rejecting"
    RECOVERING = "recovering"
    PAUSED = "paused"
    DISABLED = "disabled"


PROBED_STATES = (BreakerState.FAILING, BreakerState.REJECTING)
"""States in which only probes are sent."""
PROBING_TEXT = (
    "its lanes are probed in rotation, at most every second at first, later at least every "
    f"{PROBE_MAX_S:.0f} s"
)
NO_PROBING_TEXT = "its deliveries are not probed, so only their own attempts are made"


def describe_probing(*, probes: bool) -> str:
    """The probe schedule of an owned endpoint without a Retry-After hold-off, for messages."""
    return PROBING_TEXT if probes else NO_PROBING_TEXT


@dataclass(frozen=True, slots=True)
class BreakerRecord:
    """The durable state of a breaker, read by the next owner; times are epoch seconds."""

    state: BreakerState = BreakerState.HEALTHY
    since: float = 0.0
    held_until: float | None = None
    last_response: dict[str, Any] | None = None


# Bound once: enum member access is slow in Python 3.11, and every delivery uses these.
_HEALTHY, _OPEN, _DELIVERED = BreakerState.HEALTHY, Gate.OPEN, AttemptOutcome.DELIVERED


class CircuitBreaker:
    """The circuit breaker of one endpoint, shared by all its lanes.

    A lane calls `admit` before it sends.  A lane that is not admitted waits until `wake`
    returns its id.
    """

    __slots__ = (
        "_admitted",
        "_disabled",
        "_failures",
        "_held_until",
        "_in_flight",
        "_is_shut",
        "_last_response",
        "_opened_at",
        "_outage_since",
        "_paused",
        "_probe_at",
        "_refusals",
        "_round_failures",
        "_round_results",
        "_since",
        "_stale_requests",
        "_state",
        "_tried_lanes",
        "_unproven",
        "_width",
        "state",
        "unhealthy_since",
        "waiting",
    )

    def __init__(self, record: BreakerRecord | None = None) -> None:
        record = record or BreakerRecord()
        self._state = record.state
        self._since = record.since
        self._held_until = record.held_until or 0.0
        self._last_response = record.last_response
        self.unhealthy_since = None if record.state is BreakerState.HEALTHY else record.since
        """When the endpoint left the healthy state, as far as known here; None: it is healthy.

        A recovery that fails does not reset it; `resume` does."""
        self._paused = False
        self._disabled = False
        self._show_state()
        self._failures = 0
        self._refusals = 0
        # For failing and rejecting; 0: a new owner may probe at once.  The interval of probes grows
        # with the time since the breaker opened.
        self._probe_at = 0.0
        self._opened_at = record.since
        # Since when the endpoint was failing or rejecting before an unproven recovery.
        self._outage_since: float | None = None
        # For recovering.
        self._width = 1
        self._round_results = self._round_failures = 0
        self._tried_lanes: set[int] = set()
        # No response has shown yet that the receiver works again; and the number of requests in
        # flight that began before the resume.
        self._unproven = record.state is BreakerState.RECOVERING
        self._stale_requests = 0
        # Requests in flight, and lanes that were admitted and have not sent.
        self._in_flight = 0
        self._admitted: set[int] = set()
        self.waiting: dict[int, None] = {}
        """The lanes that wait for `wake` (FIFO)."""

    # ---------------------------------------------------------------- state

    @property
    def is_calm(self) -> bool:
        """Whether it is healthy and a success would change nothing, not even a counter."""
        return (
            self.state is _HEALTHY
            and not self._failures
            and not self._refusals
            and not self._held_until
        )

    def blocks_all(self, now: float) -> bool:
        """Whether no request may be sent now, not even a probe."""
        return self._is_shut or now < self._held_until

    def record(self) -> BreakerRecord:
        """The durable state, for the next owner."""
        held_until = self._held_until or None
        return BreakerRecord(self._state, self._since, held_until, self._last_response)

    def wake_at(self) -> float | None:
        """When to call `wake`, in epoch seconds; None: after the next response or operator call."""
        if not self.waiting or self._is_shut or self._in_flight or self._admitted:
            return None
        if self._state in PROBED_STATES:
            return max(self._probe_at, self._held_until)
        return self._held_until

    # ---------------------------------------------------------------- lanes

    def admit(self, lane_id: int, now: float) -> Gate:
        """Whether this lane may send; a lane that may not is queued for `wake`."""
        if self._is_shut or now < self._held_until:
            self._admitted.discard(lane_id)  # Admitted before the breaker shut.
            self.waiting[lane_id] = None
            return Gate.SHUT
        if lane_id not in self._admitted:
            if self._state is _HEALTHY:
                return _OPEN
            if lane_id in self.waiting or self.waiting or self._free_slots(now) < 1:
                self.waiting[lane_id] = None
                return Gate.SHUT
            self._admitted.add(lane_id)
        if self._state is BreakerState.HEALTHY or (
            self._state is BreakerState.RECOVERING and lane_id in self._tried_lanes
        ):
            return Gate.OPEN
        return Gate.PROBE

    def is_admitted(self, lane_id: int) -> bool:
        """Whether the lane has an unused admission."""
        return lane_id in self._admitted

    def started(self, lane_id: int) -> None:
        """Record that an admitted lane sent its request."""
        self._in_flight += 1
        self._admitted.discard(lane_id)
        if self._state is BreakerState.RECOVERING:
            self._tried_lanes.add(lane_id)

    def released(self, lane_id: int) -> None:
        """Undo `started` for a request that was not sent; the lane may call `admit` again."""
        self._in_flight -= 1
        self._tried_lanes.discard(lane_id)

    def yielded(self, lane_id: int) -> bool:
        """Return an unused admission; True if there was one, so that another lane may be woken."""
        if lane_id not in self._admitted:
            return False
        self._admitted.discard(lane_id)
        return True

    def wake(self, now: float) -> list[int]:
        """Admit waiting lanes and return them; each must call `admit` or `yielded`."""
        if self.blocks_all(now) or not self.waiting:
            return []
        if self._state is BreakerState.HEALTHY:
            woken = list(self.waiting)
            self.waiting.clear()
            return woken
        woken = list(self.waiting)[: max(self._free_slots(now), 0)]
        for lane_id in woken:
            del self.waiting[lane_id]
            self._admitted.add(lane_id)
        return woken

    # -------------------------------------------------------------- results

    def record_result(
        self,
        outcome: AttemptOutcome,
        now: float,
        u: float,
        *,
        gone: bool = False,
        preempted: bool = False,
        retry_after_s: float = 0.0,
        opens: bool = False,
        last_response: dict[str, Any] | None = None,
    ) -> AttemptOutcome:
        """Record the result of a request and return the outcome for its delivery.

        Args:
            u: uniform in [0, 1), for the jitter of the next probe.
            gone: the status was 410 (RFC 9110, 15.5.11), which disables the endpoint.
            preempted: the request was cancelled by admission control before it got a response.
            retry_after_s: the hold-off from Retry-After, in seconds; 0: none.
            opens: one such failure is enough to open the breaker.

        Returns:
            The outcome, or `AttemptOutcome.RETRY` for a refusal while the endpoint is rejecting.
        """
        self._in_flight -= 1
        is_new = not self._stale_requests
        if not is_new:
            self._stale_requests -= 1
        if outcome is _DELIVERED:
            self._record_success(now)
            return outcome
        if gone:
            self._disabled = True
            self._show_state()
            self._last_response = last_response
            return outcome
        if outcome is AttemptOutcome.REFUSED:
            return self._record_refusal(now, u, last_response)
        is_new = is_new and not preempted
        self._record_failure(now, u, retry_after_s, last_response, is_new=is_new, opens=opens)
        return outcome

    def _record_success(self, now: float) -> None:
        self._failures = self._refusals = 0
        self._unproven = False
        if now < self._held_until:
            return  # The request was sent before the hold-off began.
        # Clear it: a clock that is set back would start the hold-off again.
        self._held_until = 0.0
        if self._state is _HEALTHY:
            return
        if self._state in PROBED_STATES:
            self._recover(now)
        elif self._state is BreakerState.RECOVERING:
            self._record_recovery(now, failed=False)

    def _record_refusal(
        self, now: float, u: float, last_response: dict[str, Any] | None
    ) -> AttemptOutcome:
        self._failures = 0
        self._unproven = False
        self._refusals += 1
        if self._state is BreakerState.REJECTING:
            self._schedule_probe(now, u)
            return AttemptOutcome.RETRY
        if self._refusals >= REFUSALS_MAX:
            self._trip(BreakerState.REJECTING, now, u, last_response)
            return AttemptOutcome.RETRY
        if self._state is BreakerState.FAILING:
            self._recover(now)
        return AttemptOutcome.REFUSED

    def _record_failure(
        self,
        now: float,
        u: float,
        retry_after_s: float,
        last_response: dict[str, Any] | None,
        *,
        is_new: bool,
        opens: bool,
    ) -> None:
        self._failures += 1
        if retry_after_s:
            self._held_until = max(self._held_until, now + retry_after_s)
        if self._state in PROBED_STATES:
            self._schedule_probe(now, u)
        elif (
            self._failures >= FAILURES_MAX or opens or retry_after_s or (self._unproven and is_new)
        ):
            self._trip(BreakerState.FAILING, now, u, last_response)
        elif self._state is BreakerState.RECOVERING:
            self._record_recovery(now, failed=True)

    # ------------------------------------------------------------ operators

    def pause(self) -> None:
        """Admit no requests; requests in flight complete as usual."""
        self._paused = True
        self._show_state()

    def resume(self, now: float) -> None:
        """Clear all failures and the hold-off, and start recovering with one request at a time."""
        self._paused = False
        if self._state in PROBED_STATES:
            self._outage_since = self._since
        elif not self._unproven:
            self._outage_since = None
        self._unproven = self._state is not _HEALTHY or self._failures > 0
        self._stale_requests = self._in_flight
        self._failures = self._refusals = 0
        self._held_until = 0.0
        self._recover(now)
        self.unhealthy_since = now

    def clamp_times(self, now: float) -> None:
        """Limit stored times to what is possible at `now`, after the clock was set back."""
        self._since = min(self._since, now)
        self._opened_at = min(self._opened_at, now)
        if self._outage_since is not None:
            self._outage_since = min(self._outage_since, now)
        if self.unhealthy_since is not None:
            self.unhealthy_since = min(self.unhealthy_since, now)
        self._held_until = min(self._held_until, now + RETRY_AFTER_S_MAX)
        self._probe_at = min(self._probe_at, now + PROBE_MAX_S)

    # ------------------------------------------------------------- internal

    def _show_state(self) -> None:
        # Kept, because each delivery asks for it several times.
        self._is_shut = self._paused or self._disabled
        self.state = self._state
        """The state, including what an operator set."""
        if self._is_shut:
            self.state = BreakerState.DISABLED if self._disabled else BreakerState.PAUSED

    def _free_slots(self, now: float) -> int:
        """How many more lanes may be admitted; not for the healthy state."""
        in_use = self._in_flight + len(self._admitted)
        if self._state is BreakerState.RECOVERING:
            return self._width - in_use
        return 1 - in_use if now >= self._probe_at else 0

    def _schedule_probe(self, now: float, u: float) -> None:
        """Schedule the next probe, unless requests from before the breaker opened are in flight."""
        if self._in_flight == 0:
            self._probe_at = now + _probe_delay_s(now - self._opened_at, u)

    def _trip(
        self, state: BreakerState, now: float, u: float, response: dict[str, Any] | None
    ) -> None:
        self._enter(state, now, response)
        self._opened_at = now
        if self._unproven and self._outage_since is not None:
            # The outage goes on: no response has shown its end.
            self._since = self._outage_since
        self._admitted.clear()
        self._probe_at = now + _probe_delay_s(0.0, u)

    def _record_recovery(self, now: float, *, failed: bool) -> None:
        """Count a result; a round has `width` results, and its majority sets the next width."""
        self._round_results += 1
        self._round_failures += failed
        if self._round_results < self._width:
            return
        if 2 * self._round_failures > self._round_results:
            self._width = max(self._width // 2, 1)
        else:
            self._width *= 2
            if not self.waiting:
                self._enter(BreakerState.HEALTHY, now, None)
        self._round_results = self._round_failures = 0

    def _recover(self, now: float) -> None:
        self._enter(BreakerState.RECOVERING, now, self._last_response)
        self._width = 1
        self._round_results = self._round_failures = 0
        self._tried_lanes.clear()
        self._admitted.clear()

    def _enter(self, state: BreakerState, now: float, response: dict[str, Any] | None) -> None:
        self._state = state
        self._show_state()
        self._since = now
        if state is BreakerState.HEALTHY:
            self.unhealthy_since = None
        elif self.unhealthy_since is None:
            self.unhealthy_since = now
        self._last_response = response


def _probe_delay_s(unhealthy_for_s: float, u: float) -> float:
    """The probe interval with full jitter; `1 - u` keeps it above 0."""
    return (1.0 - u) * min(max(PROBE_MIN_S, unhealthy_for_s * PROBE_SHARE), PROBE_MAX_S)
