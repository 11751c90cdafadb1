"""Payload of the NOTIFY that tells other replicas which lanes have new deliveries.

It is short: first and last batch, and the last sequence number of every lane with new
deliveries in these batches.

    41-43 7:12 19:3

A replica that knows all batches before the first one applies it without a read; after a
gap it reads the batches.  Notifications are throttled to one per `NOTIFY_EVERY_S`: the
first batch is sent at once, the following ones together.  Otherwise every event of a
steady trickle would wake all replicas.  Nothing depends on notifications, because all
replicas poll as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

NOTIFY_EVERY_S = 0.02
NOTIFY_WITHIN_S = 0.025
"""Batches that no later batch has announced by then get a notification of their own."""
TEXT_CHARS_MAX = 7000
"""PostgreSQL limits a payload to less than 8,000 bytes."""
NOTIFIED_LANES_MAX = TEXT_CHARS_MAX // 4
READ_BATCHES = ""
"""The payload that says only that there are batches to read."""


@dataclass(frozen=True, slots=True)
class BatchNotification:
    """Consecutive batches and their new deliveries."""

    first: int
    last: int
    last_seqs: Mapping[int, int] = field(default_factory=dict)
    """The last assigned sequence number of each lane."""

    def payload(self) -> str:
        """The NOTIFY payload; `READ_BATCHES` if it would be too long."""
        if len(self.last_seqs) > NOTIFIED_LANES_MAX:
            return READ_BATCHES
        lanes = "".join(f" {lane}:{seq}" for lane, seq in self.last_seqs.items())
        text = f"{self.first}-{self.last}{lanes}"
        return text if len(text) <= TEXT_CHARS_MAX else READ_BATCHES

    @classmethod
    def parse(cls, text: str) -> BatchNotification | None:
        """Parse a payload; None: it has no batches, or another format."""
        head, *lanes = text.split(" ")
        try:
            first, last = map(int, head.split("-"))
            last_seqs = {int(lane): int(seq) for lane, seq in (each.split(":") for each in lanes)}
        except ValueError:
            return None
        return cls(first, last, last_seqs)


class NotificationThrottle:
    """Throttles notifications; times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.alone = False
        """At the last poll there were no other replicas to notify."""
        self._sent_at = -inf
        # The first batch without a notification, and the last numbers of it and later ones.
        self._first: int | None = None
        self._unsent: dict[int, int] = {}

    def next_payload(self, batch: int, last_seqs: Mapping[int, int], now: float) -> str | None:
        """The payload to send with a batch that is about to be written; None: nothing now."""
        if self.alone or now - self._sent_at < NOTIFY_EVERY_S:
            return None
        first = batch if self._first is None else self._first
        return BatchNotification(first, batch, {**self._unsent, **last_seqs}).payload()

    def batch_written(
        self, batch: int, last_seqs: Mapping[int, int], now: float, *, notified: bool
    ) -> None:
        """Record a committed batch, and whether its notification was sent with it."""
        if notified and last_seqs:
            self.mark_sent(now)
            return
        if self._first is None:
            self._first = batch
        if len(self._unsent) <= NOTIFIED_LANES_MAX:  # More do not change the payload.
            self._unsent.update(last_seqs)

    def flush_at(self) -> float:
        """When to send unsent batches; infinite: there are none."""
        return self._sent_at + NOTIFY_WITHIN_S if self._unsent and not self.alone else inf

    def mark_sent(self, now: float) -> None:
        """Record that all batches were announced."""
        self._sent_at = now
        self._first = None
        self._unsent.clear()
