"""The health of one endpoint: whether it is tried, how often, and by which lane.

    state        its lanes may send                    left by
    healthy      all of them                           failures in a row, Retry-After ▶ failing
                                                       refusals in a row ▶ refusing
    failing      one head at a time, lanes in turn,    an answer of the receiver ▶ recovering
                 when a probe is due                   refusals in a row ▶ refusing
    refusing     the same; a refusal ends no delivery  a success ▶ recovering
    recovering   `width` at once, doubled by every     a round with nobody waiting ▶ healthy
                 round in which most succeed           failures in a row, Retry-After ▶ failing
                                                       refusals in a row ▶ refusing
    paused       none; an operator said so             an operator ▶ recovering
    disabled     none; a 410, or too long without a    an operator, who begins anew
                 success

**One head must not speak for its endpoint.**  A delivery that its receiver
cannot take fails again and again; if it alone were probed, nothing else would
ever be tried.  So lanes take turns, and probes between a delivery's own times
are free (see `outbox.core.delivery.lane`).

**A refusal storm is not news about deliveries.**  A deploy that answers 404
refuses everything.  The first refusals in a row end their deliveries, as a
refusal should; the one that makes it a storm, and all that follow, are tried
again like failures, until something succeeds.

**Retry-After speaks for the endpoint**, not for the delivery that got it:
nothing is sent until it is over, also by lanes whose requests succeed
meanwhile, and then slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from outbox.core.delivery.commands import Gate
from outbox.core.model.response import RETRY_AFTER_S_MAX, Verdict

FAILURES_MAX = 5
"""So many failures in a row, and the breaker opens."""
REFUSALS_MAX = 10
"""So many refusals in a row, of as many deliveries, are a storm."""
PROBE_MIN_S, PROBE_MAX_S = 1.0, 60.0
"""Bounds of the time between probes, which grows and has full jitter."""
PROBE_SHARE = 0.1
"""The time between probes, of how long it has been out of order: so its end is noticed soon
for how long it was, however unlucky the last probes before it.  Doubling would wait for as
long again as the whole outage was."""


class State(StrEnum):
    """How an endpoint is."""

    HEALTHY = "healthy"
    FAILING = "failing"
    REFUSING = "refusing"
    RECOVERING = "recovering"
    PAUSED = "paused"
    DISABLED = "disabled"


PROBED = (State.FAILING, State.REFUSING)
"""Now and then something is sent only to find out whether it would be taken."""
PROBING = f"its lanes are tried in turn, the next within {PROBE_MAX_S:.0f} s of the last answer"
"""How that goes on, as long as somebody owns it and its receiver did not ask for more time."""


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """What is kept of it for the next owner; times are epoch seconds."""

    state: State = State.HEALTHY
    since: float = 0.0
    held_until: float | None = None
    last_answer: dict[str, Any] | None = None


# By name, because each delivery asks: Python 3.11 takes far longer to find the members.
_HEALTHY, _OPEN, _DELIVERED = State.HEALTHY, Gate.OPEN, Verdict.DELIVERED


class Health:
    """The state machine of one endpoint, over all its lanes.

    A lane asks before it sends, and is heard again when `wake` names it.
    """

    __slots__ = (
        "_answers",
        "_disabled",
        "_failures",
        "_held_until",
        "_in_flight",
        "_last_answer",
        "_misses",
        "_paused",
        "_probe_at",
        "_refusals",
        "_since",
        "_state",
        "_tried",
        "_turns",
        "_waiting",
        "_width",
        "troubled_since",
    )

    def __init__(self, record: HealthRecord | None = None) -> None:
        record = record or HealthRecord()
        self._state = record.state
        self._since = record.since
        self._held_until = record.held_until or 0.0
        self._last_answer = record.last_answer
        self.troubled_since = None if record.state is State.HEALTHY else record.since
        """Since when it is not healthy, whatever it seemed to recover meanwhile, as far as this
        owner knows; anew when an operator lets it go on."""
        self._paused = False
        self._disabled = False
        self._failures = 0
        self._refusals = 0
        # Of failing and refusing: a new owner may look at once.
        self._probe_at = 0.0
        # Of recovering.
        self._width = 1
        self._answers = self._misses = 0
        self._tried: set[int] = set()
        # Requests on their way, lanes that may send next, and lanes that wait.
        self._in_flight = 0
        self._turns: set[int] = set()
        self._waiting: dict[int, None] = {}

    # ------------------------------------------------------------ questions

    @property
    def state(self) -> State:
        """How the endpoint is, the operator's word included."""
        if self._disabled:
            return State.DISABLED
        return State.PAUSED if self._paused else self._state

    def silent(self, now: float) -> bool:
        """Whether nothing at all is to be sent now."""
        return self._shut or now < self._held_until

    def record(self) -> HealthRecord:
        """What the next owner should know."""
        held_until = self._held_until or None
        return HealthRecord(self._state, self._since, held_until, self._last_answer)

    def wake_at(self) -> float | None:
        """When to call `wake`; None: an answer or an operator comes first."""
        if not self._waiting or self._shut or self._in_flight or self._turns:
            return None
        if self._state in (State.FAILING, State.REFUSING):
            return max(self._probe_at, self._held_until)
        return self._held_until

    # ---------------------------------------------------------------- lanes

    def ask(self, lane_id: int, now: float) -> Gate:
        """May this lane send?  If not, it waits for its turn; see `wake`."""
        if self.silent(now):
            self._turns.discard(lane_id)  # It came before the word to stop.
            self._waiting[lane_id] = None
            return Gate.SHUT
        if lane_id not in self._turns:
            if self._state is _HEALTHY:
                return _OPEN
            if lane_id in self._waiting or self._waiting or self._places(now) < 1:
                self._waiting[lane_id] = None
                return Gate.SHUT
            self._turns.add(lane_id)
        if self._state is State.HEALTHY or (
            self._state is State.RECOVERING and lane_id in self._tried
        ):
            return Gate.OPEN
        return Gate.PROBE

    def began(self, lane_id: int) -> None:
        """The lane's request goes out."""
        self._in_flight += 1
        self._turns.discard(lane_id)
        if self._state is State.RECOVERING:
            self._tried.add(lane_id)

    def unsent(self, lane_id: int) -> None:
        """The lane's request did not go out after all; it may ask again."""
        self._in_flight -= 1
        self._tried.discard(lane_id)

    def passed(self, lane_id: int) -> bool:
        """The lane does not send now; whether that lets another one have its turn."""
        if lane_id not in self._turns:
            return False
        self._turns.discard(lane_id)
        return True

    def wake(self, now: float) -> list[int]:
        """The lanes whose turn it is now; each must ask, or pass."""
        if self.silent(now) or not self._waiting:
            return []
        if self._state is State.HEALTHY:
            woken = list(self._waiting)
            self._waiting.clear()
            return woken
        woken = list(self._waiting)[: max(self._places(now), 0)]
        for lane_id in woken:
            del self._waiting[lane_id]
            self._turns.add(lane_id)
        return woken

    # -------------------------------------------------------------- answers

    def answered(
        self,
        verdict: Verdict,
        now: float,
        u: float,
        *,
        gone: bool = False,
        retry_after_s: float = 0.0,
        last_answer: dict[str, Any] | None = None,
    ) -> Verdict:
        """A request was answered; returns what that means for its delivery.

        Args:
            u: uniform in [0, 1), for the time of the next probe.
            gone: the receiver says that it will never exist again (410).
            retry_after_s: how long it asks to be left alone.
        """
        self._in_flight -= 1
        if verdict is _DELIVERED:
            self._succeeded(now)
            return verdict
        if gone:
            self._disabled = True
            self._last_answer = last_answer
            return verdict
        if verdict is Verdict.REFUSED:
            return self._refused(now, u, last_answer)
        self._failed(now, u, retry_after_s, last_answer)
        return verdict

    def _succeeded(self, now: float) -> None:
        self._failures = self._refusals = 0
        if now < self._held_until:
            return  # It was sent before the receiver asked to be left alone.
        # Were the clock set back, it would hold once more.
        self._held_until = 0.0
        if self._state is _HEALTHY:
            return
        if self._state in (State.FAILING, State.REFUSING):
            self._recover(now)
        elif self._state is State.RECOVERING:
            self._answered_in_recovery(now, failed=False)

    def _refused(self, now: float, u: float, last_answer: dict[str, Any] | None) -> Verdict:
        self._failures = 0
        self._refusals += 1
        if self._state is State.REFUSING:
            self._probed(now, u)
            return Verdict.RETRY
        if self._refusals >= REFUSALS_MAX:
            self._open(State.REFUSING, now, u, last_answer)
            return Verdict.RETRY
        if self._state is State.FAILING:
            self._recover(now)
        return Verdict.REFUSED

    def _failed(
        self, now: float, u: float, retry_after_s: float, last_answer: dict[str, Any] | None
    ) -> None:
        self._failures += 1
        if retry_after_s:
            self._held_until = max(self._held_until, now + retry_after_s)
        if self._state in (State.FAILING, State.REFUSING):
            self._probed(now, u)
        elif self._failures >= FAILURES_MAX or retry_after_s:
            self._open(State.FAILING, now, u, last_answer)
        elif self._state is State.RECOVERING:
            self._answered_in_recovery(now, failed=True)

    # ------------------------------------------------------------ operators

    def pause(self) -> None:
        """Send nothing; what is in flight ends as usual."""
        self._paused = True

    def resume(self, now: float) -> None:
        """Go on, whatever was known: slowly at first."""
        self._paused = False
        self._failures = self._refusals = 0
        self._held_until = 0.0
        self._recover(now)
        self.troubled_since = now

    def hold_to(self, now: float) -> None:
        """Forget times that a clock can only have told before it was set back."""
        self._since = min(self._since, now)
        if self.troubled_since is not None:
            self.troubled_since = min(self.troubled_since, now)
        self._held_until = min(self._held_until, now + RETRY_AFTER_S_MAX)
        self._probe_at = min(self._probe_at, now + PROBE_MAX_S)

    # --------------------------------------------------------------- inside

    @property
    def _shut(self) -> bool:
        return self._paused or self._disabled

    def _places(self, now: float) -> int:
        """How many more lanes may send; only asked when not healthy."""
        taken = self._in_flight + len(self._turns)
        if self._state is State.RECOVERING:
            return self._width - taken
        return 1 - taken if now >= self._probe_at else 0

    def _probed(self, now: float, u: float) -> None:
        """One more answer like those before; what began earlier is no probe."""
        if self._in_flight == 0:
            self._probe_at = now + _probe_delay_s(now - self._since, u)

    def _open(self, state: State, now: float, u: float, answer: dict[str, Any] | None) -> None:
        self._enter(state, now, answer)
        self._turns.clear()
        self._probe_at = now + _probe_delay_s(0.0, u)

    def _answered_in_recovery(self, now: float, *, failed: bool) -> None:
        """A round is as many answers as lanes are allowed; most of them decide."""
        self._answers += 1
        self._misses += failed
        if self._answers < self._width:
            return
        if 2 * self._misses > self._answers:
            self._width = max(self._width // 2, 1)
        else:
            self._width *= 2
            if not self._waiting:
                self._enter(State.HEALTHY, now, None)
        self._answers = self._misses = 0

    def _recover(self, now: float) -> None:
        self._enter(State.RECOVERING, now, self._last_answer)
        self._width = 1
        self._answers = self._misses = 0
        self._tried.clear()
        self._turns.clear()

    def _enter(self, state: State, now: float, answer: dict[str, Any] | None) -> None:
        self._state = state
        self._since = now
        if state is State.HEALTHY:
            self.troubled_since = None
        elif self.troubled_since is None:
            self.troubled_since = now
        self._last_answer = answer


def _probe_delay_s(bad_for_s: float, u: float) -> float:
    """Full jitter, and never nothing."""
    return (1.0 - u) * min(max(PROBE_MIN_S, bad_for_s * PROBE_SHARE), PROBE_MAX_S)
