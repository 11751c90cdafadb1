"""How many requests anybody may have open while the relay is as busy as it can be.

One loop serves all requests, and everything else that a relay does.  It passes from answer to
answer, and when more of them come than it can keep up with, each pass is as long as there are
requests open to receivers that answer quickly: with 256 of them, some 30 ms.  Nothing is sent
sooner for that, and whoever wants something between them (a batch, a quiet endpoint) waits for
a pass at each of its steps.  So while the loop is late, nobody gets as much at once: what is
halved is what a tenant, or an endpoint without one, may have open of the quick part.  That is
little more than what keeps the loop busy in the end, and nobody who has less open notices.

To have less open costs a fifth of what the relay can deliver, since more have to wait for
their turns and each pass does less.  So it is done in earnest only where somebody else is
there to have the good of it, which is whoever had a request lately: whoever comes into an
empty house waits for longer, once.

The loop may also be late for other reasons, and then it is of no use to have less open: so
this is done only while the time that requests take is the loop's own doing, and not that of
the receivers.  When the loop is in time and somebody waits, everybody gets more.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from outbox.core.admission.endpoint_queue import holder_of
from outbox.core.admission.request_scheduler import Turns

if TYPE_CHECKING:
    from outbox.core.admission.endpoint_queue import Line, Tenant, Turn

LATE_S = 0.001
"""The loop is late by more than this when it has too much to do at once.  A quiet endpoint's
event waits for half a dozen passes until it is sent."""
LATE_ALONE_S = 0.005
"""The same, while all requests are of one tenant, or of one endpoint without one."""
ALONE_AFTER_S = 10.0
"""Whoever has had no request for so long is not there any more."""
OWN_DOING = 4
"""Requests take long because of the loop if that is at most so many times what it is late by."""
EACH_FIRST, EACH_MIN = 16, 2
"""Open at once for anybody: at first, and however late the loop is."""
OPEN_MIN = 6
"""So many keep the loop busy, even if what it was late by is another process's doing."""


class PacedTurns(Turns):
    """Turns under the pressure that the loop is under; see `Turns` for the arguments."""

    def __init__(
        self,
        in_flight_max: int,
        tenant_in_flight_max: int | None = None,
        tenant_rate_per_s: float | None = None,
    ) -> None:
        super().__init__(in_flight_max, tenant_in_flight_max, tenant_rate_per_s)
        self.each_max = min(EACH_FIRST, self.quick_max)
        self._ended = 0
        # Whose request ended last, and for how long only his have.
        self._last: Tenant | Line | None = None
        self._alone_s = inf

    def end(self, turn: Turn, now: float, *, answered: bool = True) -> list[Turn]:
        """As of `Turns`."""
        self._ended += 1
        whose = holder_of(turn.line)
        if whose is not self._last:
            if self._last is not None:
                self._alone_s = 0.0
            self._last = whose
        return super().end(turn, now, answered=answered)

    def felt(self, late_s: float, since_s: float) -> None:
        """The loop was late by so much.

        Args:
            since_s: this was last told so long ago.
        """
        ended, self._ended = self._ended, 0
        late_max_s = LATE_S if self._alone_s < ALONE_AFTER_S else LATE_ALONE_S
        self._alone_s += since_s
        # What a request takes on average: as many are open as begin in that time.
        took_s = self.open * since_s / ended if ended else inf
        if late_s <= late_max_s:
            if self.waiting:
                self.each_max = min(self.each_max + max(self.each_max // 4, 1), self.quick_max)
        elif took_s <= OWN_DOING * late_s and self.open > OPEN_MIN:
            self.each_max = max(min(self.each_max, self.open) // 2, EACH_MIN)
