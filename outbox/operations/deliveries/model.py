"""Delivery log: rows, filters and pages, and the position at which the next page begins."""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as BinasciiError
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from outbox.core.model import pattern
from outbox.errors import UsageError
from outbox.operations.criteria import REASONS
from outbox.operations.rows import ID_MAX

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from outbox.operations.criteria import When

OUTCOMES = ("pending", "delivered", "dead", *REASONS)
"""What `DeliveryFilter.outcome` selects: `dead` is a dead letter of any reason, whatever became of
it; the others are its reasons."""
DeliveryState: TypeAlias = Literal[
    "delivered", "pending", "dead", "replaying", "replayed", "dead_again", "discarded"
]
"""State of a delivery.  A replayed dead letter is `replaying` while any of its new
deliveries is pending, then `replayed` or `dead_again`; each new delivery has its own state."""
_KEY = struct.Struct(">4q")


class DeliveryPosition(NamedTuple):
    """A place in the log, which is ordered by these numbers, the highest first."""

    batch: int
    outbox_id: int
    lane_id: int
    seq: int

    def __str__(self) -> str:
        """An opaque text."""
        return urlsafe_b64encode(_KEY.pack(*self)).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> DeliveryPosition:
        """The position of a text that `str` made.

        Raises:
            UsageError: the text is none.
        """
        try:
            return cls(*_KEY.unpack(urlsafe_b64decode(text + "=")))
        except (BinasciiError, ValueError, struct.error):
            raise UsageError(
                f'after: "{text[:60]}" is not a position in the delivery log; use the one that '
                "came with the page before"
            ) from None


POSITION = ("batch", "outbox_id", "lane_id", "seq")
"""The names of its numbers."""
NEWEST = DeliveryPosition(ID_MAX, ID_MAX, ID_MAX, ID_MAX)


class StatusRange(NamedTuple):
    """HTTP statuses from `low` to `high`."""

    low: int
    high: int

    def includes(self, status: int | None) -> bool:
        """Whether a status is one of them."""
        return status is not None and self.low <= status <= self.high

    @classmethod
    def parse(cls, text: str) -> StatusRange:
        """Parse a status such as `404`, or a class of them such as `5xx`.

        Raises:
            UsageError: the text is neither.
        """
        low = text.lower().replace("xx", "00")
        if len(text) == 3 and low.isascii() and low.isdigit() and 100 <= int(low) <= 599:
            return cls(int(low), int(low) + (99 if low != text.lower() else 0))
        raise UsageError(f'status: "{text[:20]}" is neither a status such as 404 nor a class (5xx)')


@dataclass(frozen=True, slots=True)
class DeliveryFilter:
    """Conditions on deliveries, combined with AND.

    Raises:
        UsageError: a type is not a valid pattern, or the outcome is unknown.
    """

    types: tuple[str, ...] = ()
    """Type patterns, combined with OR."""
    outcome: str | None = None
    """One of `OUTCOMES`."""
    failed: bool = False
    """Only deliveries of which an attempt failed, and dead letters."""
    status: StatusRange | None = None
    """The status of one of their attempts."""
    since: When | None = None
    until: When | None = None
    """Sequenced at or after `since`, and before `until`."""
    tenant: str | None = None
    """Only events of this tenant."""

    def __post_init__(self) -> None:
        if self.tenant == "":
            # Probably an unset shell variable.
            raise UsageError("tenant is empty")
        for text in self.types:
            pattern.parse(text)
        if self.outcome is not None and self.outcome not in OUTCOMES:
            raise UsageError(
                f'"{self.outcome[:40]}" is not an outcome; choose one of: {", ".join(OUTCOMES)}'
            )

    @property
    def reason(self) -> str | None:
        """The reason of dead letters that the outcome names; None: it names none."""
        return self.outcome if self.outcome in REASONS else None

    @property
    def searches(self) -> bool:
        """Whether deliveries are scanned that do not match."""
        by_outcome = self.outcome == "delivered" or self.reason
        return bool(self.types or self.status or self.tenant or by_outcome)

    @property
    def selects_failures(self) -> bool:
        """Whether deliveries are selected by what became of them, and ranges are left out."""
        return self.failed or self.outcome not in (None, "pending", "delivered")

    def includes(self, row: DeliveryRow) -> bool:
        """Whether a delivery meets the conditions that `outbox.operations.deliveries.statements`
        answers by where it looks."""
        since, until = self.since, self.until
        assert not isinstance(since, timedelta)
        assert not isinstance(until, timedelta)
        if self.outcome in ("pending", "delivered"):
            is_selected = row.outcome == self.outcome
        elif self.outcome is not None:
            is_selected = row.dead_letter is not None and self.outcome in ("dead", row.reason)
        else:
            is_selected = True
        return (
            is_selected
            and (not self.failed or row.failed)
            and (since is None or row.sequenced_at >= since)
            and (until is None or row.sequenced_at < until)
        )


@dataclass(frozen=True, slots=True)
class DeliveryRow:
    """A delivery in the log."""

    delivery: UUID | None
    """Its X-Delivery; null: retention removed the event."""
    endpoint: str
    event: UUID | None
    """The event's id; null, like its type, key and tenant: retention removed the event."""
    type: str | None
    key: str | None
    tenant: str | None
    lane: str
    sequence: int
    outcome: DeliveryState
    reason: str | None
    """Why it is a dead letter."""
    dead_letter: int | None
    """The dead letter that holds it."""
    attempts: int
    """Requests that were made, probes included."""
    probes: int
    """Failed attempts that only probed the receiver; they do not count against the retry limit."""
    status: int | None
    """Status of the last attempt; null: it had no response, or there was none."""
    failure: str | None
    """Why the last attempt has no status."""
    elapsed_ms: float | None
    """Duration of the last attempt."""
    at: datetime
    """Start of the last attempt; without one, when it was dead-lettered or sequenced."""
    sequenced_at: datetime

    @property
    def failed(self) -> bool:
        """Whether an attempt of it failed, or it is a dead letter."""
        return self.dead_letter is not None or self.attempts > (self.outcome == "delivered")


@dataclass(frozen=True, slots=True)
class RemovedLog:
    """What retention removed."""

    before: datetime
    """What was sequenced before this time is gone."""
    at: datetime
    """When they were removed."""


@dataclass(frozen=True, slots=True)
class DeliveryPage:
    """A page of the log, and the extent of the search."""

    deliveries: list[DeliveryRow]
    next: DeliveryPosition | None
    """Where the next page begins; None: there are no more."""
    scanned: int
    """Number of scanned deliveries."""
    scanned_back_to: datetime | None
    """When the oldest scanned delivery was sequenced; None: there was none."""
    removed: RemovedLog | None
    """What retention removed of the log, if the search reached its end."""
    events_removed: RemovedLog | None = None
    """What retention removed of the events, if types or tenants were searched for: deliveries of
    these events match nothing, unless they are dead letters."""
    ranges: int = 0
    """Dead letters of several deliveries each.  They are no part of a page of failures."""
