"""Whether the replica that sequences looks for events by itself, or is woken for them.

Being woken is quicker than looking, and costs producers nothing as long as they do not wait
for each other; but each waking is a batch, whose commit goes to the same disk as theirs.
So producers are not asked to notify, and the sequencer rests between two looks,

* while events come *thick*: so fast that being woken for each is no use;
* while producers *crowd*: they wait for each other's notifications.  Nobody rests then;
* while that lets them write faster.  Who writes one event after the other, as fast as it
  can, is held up by the batches of those before, and seems to be as slow as it is held.
  Its events tell no more than those of somebody who writes no more, so now and then it is
  *tried*: for as long as some events take at the rate that was seen.  If many more come, they
  were held up, and it goes on for as long as that is so; if not, it is not tried again soon.

The argument of waking up does not hang on any of this: whoever looks by itself may begin and
end that whenever it likes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 0.5
"""The rate of events is that of the last so many seconds."""
REST_S = 0.02
"""Between two looks.  What a batch costs hardly depends on its events, and its commit holds up
those of producers that write as fast as they can: fewer and larger ones leave them their
part of the machine."""
WAITING_MAX, CROWD_S = 2, 1.0
"""When so many producers wait for another one's notification, nobody is asked to
notify for so long: they commit one at a time then, however slow the disk is."""
STEADY_S = 1.0
"""Events have to come for so long before anything is tried: what swells is not held up."""
TRIED_FROM = 100
"""So many events in a window are worth it: a trial of fewer lasts, and each of them waits."""
BUSY_SHARE = 0.3
"""So much of the time has to go into batches: producers are held up by no more than that."""
TRIAL_EVENTS, GAIN = 32, 1.5
"""A trial lasts as long as so many events did before; so many times as many have to come."""
AGAIN_S, AGAIN_S_MAX = 10.0, 640.0
"""From a trial to the next one; twice as long after each that brought nothing."""


@dataclass(slots=True)
class _Trial:
    before_per_s: float
    began_at: float
    gained: bool = False
    events: int = 0

    @property
    def lasts_s(self) -> float:
        return TRIAL_EVENTS / self.before_per_s


class Alertness:
    """How the events of late came; times are steady seconds.

    Args:
        thick_events: so many in a window come thick.
    """

    def __init__(self, thick_events: int) -> None:
        self._thick_events = thick_events
        # When how many were found, and how many that is together.
        self._found: deque[tuple[float, int]] = deque()
        self._events = 0
        # How long batches of the window took, and how long that is together.
        self._took: deque[tuple[float, float]] = deque()
        self._busy_s = 0.0
        # Since when the window has not been empty.
        self._busy_since = 0.0
        self._crowd_until = 0.0
        self._trial: _Trial | None = None
        self._try_at = 0.0
        self._again_s = AGAIN_S

    def found(self, now: float, events: int, waiting: int) -> None:
        """A batch of events was found.

        Args:
            waiting: so many producers wait for another one's notification.
        """
        self._forget(now)
        if not self._found:
            self._busy_since = now
        self._found.append((now, events))
        self._events += events
        if waiting >= WAITING_MAX:
            self._crowd_until = now + CROWD_S
        if self._trial is not None:
            self._trial.events += events
            self._judge(now)
        elif self._worth_trying(now):
            self._trial = _Trial(self._events / WINDOW_S, now)

    def took(self, now: float, seconds: float) -> None:
        """A batch was found, worked out and written in so many seconds."""
        self._took.append((now, seconds))
        self._busy_s += seconds

    def looks_by_itself(self, now: float) -> bool:
        """Whether producers are not asked to notify."""
        return self.rests(now) or now < self._crowd_until

    def rests(self, now: float) -> bool:
        """Whether it looks again after REST_S only."""
        self._forget(now)
        self._judge(now)
        return self._trial is not None or self._events >= self._thick_events

    def _worth_trying(self, now: float) -> bool:
        return (
            now >= self._try_at
            and now - self._busy_since >= STEADY_S
            and TRIED_FROM <= self._events < self._thick_events
            and self._busy_s >= BUSY_SHARE * WINDOW_S
        )

    def _judge(self, now: float) -> None:
        """End the trial, or begin its next part, if it lasted long enough."""
        trial = self._trial
        if trial is None or now < trial.began_at + trial.lasts_s:
            return
        if trial.events >= GAIN * trial.before_per_s * (now - trial.began_at):
            self._trial = _Trial(trial.before_per_s, now, gained=True)
            return
        self._trial = None
        if trial.gained:
            self._again_s = AGAIN_S
        self._try_at = now + self._again_s
        self._again_s = min(2 * self._again_s, AGAIN_S_MAX)

    def _forget(self, now: float) -> None:
        while self._found and now - self._found[0][0] >= WINDOW_S:
            self._events -= self._found.popleft()[1]
        while self._took and now - self._took[0][0] >= WINDOW_S:
            self._busy_s -= self._took.popleft()[1]
