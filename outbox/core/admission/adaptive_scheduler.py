"""Adaptive concurrency: how many requests one holder may have open while the loop lags.

One event loop serves all requests and everything else of a relay.  It passes from response to
response, and when more of them arrive than it can process, each pass takes as long as there are
open requests to fast receivers: some 30 ms with 256 of them.  Nothing is sent sooner for that,
and any other work (a batch, an idle endpoint) waits for a pass at each of its steps.  So while
the loop lags, the limit of a holder's fast requests (a tenant's, or those of an endpoint without
one) is halved; it is raised by a quarter when the loop is in time and requests wait.  The result
is little more than what keeps the loop busy, and holders with fewer requests are not affected.

Fewer open requests cost a fifth of the relay's throughput, since more requests wait for slots,
which ends request runs, and each pass does less.  The strict limit therefore applies only if
another holder had a request recently and benefits; the first request after an idle time waits for
longer, once.

The loop may also lag for other reasons, and then fewer requests do not help.  So the limit is
lowered only while the duration of requests is caused by the loop and not by the receivers.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from outbox.core.admission.request_scheduler import RequestScheduler

if TYPE_CHECKING:
    from outbox.core.admission.endpoint_queue import EndpointQueue, Slot, Tenant

LAG_MAX_S = 0.001
"""Above this lag the loop is overloaded.  An idle endpoint's event waits for about six passes
of the loop until it is sent."""
LAG_ALONE_MAX_S = 0.02
"""The limit while all requests belong to one holder.  That lag delays idle endpoints of the same
tenant, and endpoints that have an event less often than every `ALONE_AFTER_S`."""
ALONE_AFTER_S = 10.0
"""A holder without requests for this time no longer counts."""
LAG_SHARE_MAX = 4
"""The loop causes the duration of requests if that is at most this multiple of the lag."""
SHARE_FIRST, SHARE_MIN = 16, 2
"""Open fast requests per holder: the initial limit, and the lowest one."""
OPEN_MIN = 6
"""This many requests keep the loop busy, even if another process causes its lag."""


class AdaptiveRequestScheduler(RequestScheduler):
    """A `RequestScheduler` that adapts `share_max` to event-loop lag (AIMD); same arguments."""

    def __init__(
        self,
        in_flight_max: int,
        tenant_in_flight_max: int | None = None,
        tenant_rate_per_s: float | None = None,
    ) -> None:
        super().__init__(in_flight_max, tenant_in_flight_max, tenant_rate_per_s)
        self.share_max = min(SHARE_FIRST, self.fast_max)
        self._ended = 0
        # The holder of the last completed request, and for how long it was the only one.
        self._last_holder: Tenant | EndpointQueue | None = None
        self._alone_s = inf

    def end(self, slot: Slot, now: float, *, responded: bool = True) -> list[Slot]:
        self._count_ended(slot)
        return super().end(slot, now, responded=responded)

    def continue_run(self, slot: Slot, began_at: float, now: float) -> bool:
        continued = super().continue_run(slot, began_at, now)
        if continued:
            # The request before it has ended.
            self._count_ended(slot)
        return continued

    def _count_ended(self, slot: Slot) -> None:
        self._ended += 1
        holder = slot.queue.holder
        if holder is not self._last_holder:
            if self._last_holder is not None:
                self._alone_s = 0.0
            self._last_holder = holder

    def observe_lag(self, lag_s: float, interval_s: float) -> None:
        """Adapt the share to a sample of event-loop lag.

        Args:
            lag_s: the lag in seconds.
            interval_s: seconds since the last sample.
        """
        ended, self._ended = self._ended, 0
        lag_max_s = LAG_MAX_S if self._alone_s < ALONE_AFTER_S else LAG_ALONE_MAX_S
        self._alone_s += interval_s
        # Mean duration of a request, by Little's law.
        mean_s = self.open * interval_s / ended if ended else inf
        if lag_s <= lag_max_s:
            if self.waiting:
                self.share_max = min(self.share_max + max(self.share_max // 4, 1), self.fast_max)
        elif mean_s <= LAG_SHARE_MAX * lag_s and self.open > OPEN_MIN:
            self.share_max = max(min(self.share_max, self.open) // 2, SHARE_MIN)
