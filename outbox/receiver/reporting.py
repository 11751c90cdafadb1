"""Counts, log records and metrics of a receiver."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.receiver.inbox.process import DeliveryOutcome
from outbox.receiver.lane_order import OrderKind
from outbox.receiver.metrics import ReceiverMetrics

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.metrics import MeterProvider

    from outbox.receiver.catch_up import CatchUpResult
    from outbox.receiver.inbox.process import DeliveryResult
    from outbox.receiver.message import Message
    from outbox.receiver.requests import RequestOutcome, Response
    from outbox.receiver.verification import Verified

log = logging.getLogger("outbox.receiver")


@dataclass(slots=True)
class ReceiverTotals:
    """Counters since the receiver was created."""

    requests: Counter[RequestOutcome] = field(default_factory=Counter)
    """Requests by outcome; of a stream, attempts to process an event."""
    fetched: int = 0
    """Deliveries fetched from the relay and processed."""
    gaps: int = 0
    """Deliveries before which sequence numbers were missing."""
    old: int = 0
    """Deliveries overtaken by a higher sequence number."""
    overdue: int = 0
    """Missing sequence numbers overtaken by more than the tolerance."""


class ReceiverReports:
    """Counts what a receiver does, in its totals and its metrics, and logs what is missing.

    Args:
        on_delivery: called with each committed delivery and its result.
        meter_provider: the meter provider; None selects the global one.
    """

    def __init__(
        self,
        on_delivery: Callable[[Message, DeliveryResult], None] | None,
        meter_provider: MeterProvider | None,
    ) -> None:
        self.totals = ReceiverTotals()
        self.metrics = ReceiverMetrics(meter_provider)
        self._on_delivery = on_delivery
        # Requests come in threads, too.
        self._mutex = threading.Lock()

    def request_ended(self, outcome: RequestOutcome, elapsed_s: float | None = None) -> None:
        """Count a request; `elapsed_s` is None if it was not admitted."""
        with self._mutex:
            self.totals.requests[outcome] += 1
        self.metrics.request_ended(outcome, elapsed_s)

    def delivery_committed(self, message: Message, taken: DeliveryResult) -> None:
        """Count, log and report a committed delivery."""
        kind = taken.observation.kind if taken.observation is not None else None
        gap, old = kind is OrderKind.GAP, kind is OrderKind.OLD
        self._count(gap=gap, old=old, overdue=sum(hi - lo + 1 for lo, hi in taken.overdue))
        _log_delivery(message, taken)
        if self._on_delivery is not None:
            try:
                self._on_delivery(message, taken)
            except Exception:
                # The delivery is committed: an error of the callback must not change the response.
                log.exception("the on_delivery callback failed for %s", message.delivery_id)

    def delivery_fetched(self, taken: DeliveryResult) -> None:
        """Count a delivery that was fetched and committed."""
        with self._mutex:
            self.totals.fetched += taken.fresh
        self.metrics.deliveries_fetched(int(taken.fresh))

    def _count(self, *, gap: bool, old: bool = False, overdue: int = 0) -> None:
        with self._mutex:
            self.totals.gaps += gap
            self.totals.old += old
            self.totals.overdue += overdue
        self.metrics.delivery_committed(gap=gap, old=old, overdue=overdue)


def log_catch_up(done: CatchUpResult) -> None:
    """Log the result of a catch-up, unless nothing was fetched."""
    if done.fetched or done.dead_lettered or done.unavailable or done.failed is not None:
        unavailable = f"; refused or no longer retained: {_ranges(done.unavailable)}"
        failed = f"; sequence {done.failed} could not be processed"
        log.log(
            logging.INFO if done.failed is None else logging.WARNING,
            "lane %s: caught up with %d deliveries%s%s%s",
            done.lane,
            done.fetched,
            f"; dead-lettered: {done.dead_lettered}" if done.dead_lettered else "",
            unavailable if done.unavailable else "",
            failed if done.failed is not None else "",
        )


def request_log_row(verified: Verified, response: Response) -> dict[str, Any]:
    """Build the row of a request for the inbox's request table.

    Only signed requests are logged: unsigned ones could fill the table.
    """
    first = verified.messages[0] if verified.messages else None
    return {
        **{name: getattr(first, name, None) for name in ("lane", "sequence", "attempt")},
        "delivery_id": verified.message_id,
        "type": _type(verified),
        "outcome": response.outcome.value,
        "status": response.status,
        "reason": response.text,
    }


def _type(verified: Verified) -> str | None:
    types = {message.type for message in verified.messages}
    return types.pop() if len(types) == 1 else None


def _log_delivery(message: Message, taken: DeliveryResult) -> None:
    seen = taken.observation
    if taken.overdue:
        log.error("lane %s: overdue, still missing: %s", message.lane, _ranges(taken.overdue))
    elif seen is not None and seen.missing:
        log.warning(
            "lane %s: sequence %d arrived before %s",
            message.lane,
            message.sequence,
            _ranges(seen.missing),
        )
    if taken.outcome is DeliveryOutcome.CONFLICT:
        log.error(
            "lane %s: sequence %d was used by another delivery than %s",
            message.lane,
            message.sequence,
            message.delivery_id,
        )
    if seen is not None and seen.lost is not None:
        log.error(
            "lane %s: the sender has no record of sequences %s, which were received",
            message.lane,
            _ranges((seen.lost,)),
        )


def _ranges(ranges: Sequence[tuple[int, int]]) -> str:
    return ", ".join(str(lo) if lo == hi else f"{lo} to {hi}" for lo, hi in ranges)
