"""Counts of events and deliveries, and the rates between two samples of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from datetime import datetime

# Two monotonic counters, without a scan of the log partitions.
COUNT_SEQUENCED = "SELECT coalesce(sum(last_seq), 0)::bigint FROM lane_counter"
COUNT_EVENTS = "SELECT coalesce(sum(events), 0)::bigint FROM batch WHERE batch > $1 AND batch <= $2"


class DeliveryTotals(Protocol):
    """Totals at a moment."""

    @property
    def at(self) -> datetime: ...
    @property
    def sequenced(self) -> int: ...
    @property
    def pending(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates between two samples, per second."""

    events: float
    """Events sequenced."""
    deliveries: float
    """Deliveries sequenced in their lanes."""
    ended: float
    """Deliveries acknowledged or dead-lettered."""


def compute_rates(before: DeliveryTotals, now: DeliveryTotals, events: int) -> Rates | None:
    """Compute rates between two totals; None when no time has passed.

    Args:
        events: number of events sequenced between the two.
    """
    seconds = (now.at - before.at).total_seconds()
    if seconds <= 0:
        return None
    sequenced = now.sequenced - before.sequenced
    # Sequenced deliveries that are no longer pending have ended.
    ended = sequenced - (now.pending - before.pending)
    return Rates(*(max(n, 0) / seconds for n in (events, sequenced, ended)))
