"""Operational events: which changes of the relay's own state are told as events.

    outbox.dead_letter.created   something was given up
    outbox.lane.blocked          a lane waits for an operator since then
    outbox.endpoint.held         nothing is sent but probes: it is failing or refusing
    outbox.endpoint.recovered    that is over
    outbox.endpoint.stalled      a lane has had no success for a day
    outbox.endpoint.disabled     it gets nothing any more, until somebody enables it
    outbox.filter.given_up       a filter is slow or fails, and counts as met from now on
    outbox.relay.lagging         events wait to be sequenced, although somebody does

They are events like any other: numbered, tried again, given up.  So they could
tell of each other for ever.

**They never cause more of themselves.**  What becomes of an operational event is
not told.  A dead letter or a block is told if it is of an ordinary event, a range
if it holds one.  A hold is told at the first failure of an ordinary delivery
within it, whoever began it, and its end only if it was told; a stall when the
lane owes an ordinary event.  So whatever is told took an ordinary delivery that
failed or waits, and no such delivery leads to more than a few.  Two are told
whatever led to them: that an endpoint was disabled, and that its filter was given
up.  Neither can go on by itself: only a person enables it again, and a filter is
tried again when a person changed it, or after a day.

What was told of an endpoint is kept with its health (`Told`), because the next
owner must neither repeat it nor tell of an end without its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from outbox.core.delivery.circuit_breaker import State
from outbox.core.model.pattern import RESERVED_PREFIX

if TYPE_CHECKING:
    from collections.abc import Collection

DEAD_LETTER_CREATED = f"{RESERVED_PREFIX}dead_letter.created"
LANE_BLOCKED = f"{RESERVED_PREFIX}lane.blocked"
ENDPOINT_HELD = f"{RESERVED_PREFIX}endpoint.held"
ENDPOINT_RECOVERED = f"{RESERVED_PREFIX}endpoint.recovered"
ENDPOINT_STALLED = f"{RESERVED_PREFIX}endpoint.stalled"
ENDPOINT_DISABLED = f"{RESERVED_PREFIX}endpoint.disabled"
FILTER_GIVEN_UP = f"{RESERVED_PREFIX}filter.given_up"
RELAY_LAGGING = f"{RESERVED_PREFIX}relay.lagging"

WARN_AFTER_S = 86400.0
"""A lane without a success for so long has stalled.  Where an endpoint is disabled
as soon as that, or sooner, it is not told."""
LAGGING_S = 10.0
"""Events that have waited for so long, while somebody sequences, are late."""
LAGGING_EVERY_S = 600.0
"""That they are is told no more often than this, whichever replica leads."""
LAG_LOOK_EVERY_S = 1.0
"""Between two looks at how old what waits is."""


def is_operational(type: str) -> bool:  # noqa: A002
    """Whether an event of this type tells about the relay."""
    return type.startswith(RESERVED_PREFIX)


# ------------------------------------------------------------------ endpoints


@dataclass(frozen=True, slots=True)
class Told:
    """What was told of an endpoint and is not over; times are epoch seconds."""

    held_since: float | None = None
    stalled_at: float | None = None
    """When it was told, not since when it is so."""

    def answered(self, state: State, now: float, *, ordinary: bool) -> Told:
        """After an attempt that failed, with the health that followed from it.

        Args:
            ordinary: it was of an ordinary event.
        """
        if ordinary and self.held_since is None and state in (State.FAILING, State.REFUSING):
            return replace(self, held_since=now)
        return self

    def changed(self, state: State) -> Told:
        """The endpoint's health changed."""
        if self.held_since is not None and state is State.HEALTHY:
            return replace(self, held_since=None)
        return self

    def looked(self, stalled_since: Collection[float]) -> Told:
        """A look at the lanes that owe something, each without a success since a time.

        A stall lasts until all that there were when it was told have ended.
        """
        told_at = self.stalled_at
        if told_at is not None and all(since > told_at for since in stalled_since):
            return replace(self, stalled_at=None)
        return self

    def may_tell_stall(self, stalled_s: float, disable_after_s: float) -> bool:
        """Whether a lane without a success for so long is news."""
        return self.stalled_at is None and WARN_AFTER_S <= stalled_s < disable_after_s

    def hold_to(self, now: float) -> Told:
        """Forget times that a clock can only have told before it was set back."""
        held, stalled = self.held_since, self.stalled_at
        return Told(held and min(held, now), stalled and min(stalled, now))


# ------------------------------------------------------------------ the leader


class Next(Enum):
    """What a leader does about events that wait."""

    NOTHING = auto()
    LOOK = auto()
    """See whether they have waited for long, and tell that."""
    END = auto()
    """Nothing waits any more: the next time is another one."""


class Lag:
    """Whether events are late although this replica sequences them.

    A transaction that was open for an hour shows events that are an hour old and
    have not waited at all.  What tells the two apart is that nothing is late that
    a batch takes in at once: only when batch after batch was full, for as long as
    `LAGGING_S`, is the age of what comes next the time that it has waited for.
    (Its id is above the highest one that was seen.  Had it been written long ago
    and become visible just now, others with higher ids would have been read before
    it, and it would be a gap.)

    Times are seconds of any steady clock.
    """

    __slots__ = ("_full_since", "_look_at", "_open")

    def __init__(self) -> None:
        self._full_since: float | None = None
        self._look_at = 0.0
        # Whether the tables may say that it is going on; one that led before may have.
        self._open = True

    def turned(self, now: float, *, full: bool) -> Next:
        """A batch was taken, which was full or left nothing."""
        if not full:
            self._full_since = None
            return Next.END if self._open else Next.NOTHING
        if self._full_since is None:
            self._full_since = self._look_at = now
        if now - self._full_since < LAGGING_S or now < self._look_at:
            return Next.NOTHING
        self._look_at = now + LAG_LOOK_EVERY_S
        return Next.LOOK

    def told(self) -> None:
        """The tables say that it is going on."""
        self._open = True
        self._look_at = float("inf")

    def ended(self) -> None:
        """The tables say that it is over."""
        self._open = False

    def forget(self) -> None:
        """Another replica leads: whatever it does is not known here."""
        self._full_since = None
        self._open = True
