"""The tables of one lane in memory: deliveries, progress, attempts and dead letters.

Every write is fenced by the endpoint's epoch.  A snapshot is a restored backup.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING
from uuid import UUID

from outbox.core.brokers.message import end_id
from outbox.core.delivery.commands import DeadRange, Progress
from outbox.core.model.delivery import Delivery
from outbox.core.model.response import STREAM_HOLD_FAILURES, Failure
from outbox.store.delivery.lanes import FoundDelivery, LostDeliveries
from outbox.store.errors import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from outbox.core.brokers.repair import Repair
    from outbox.core.delivery.commands import Fetch, Record

ENDPOINT = UUID(int=1)
LANE = "lane"
PUBLISHED_AT = 1_767_225_600.0


@dataclass
class Database:
    """The database.

    Args:
        on_acknowledged, on_dead: called for each sequence when its record is written.
    """

    on_acknowledged: Callable[[int], None]
    on_dead: Callable[[int, str], None]
    ids: Iterator[int] = field(default_factory=lambda: count(1))
    epoch: int = 0
    deliveries: dict[int, Delivery] = field(default_factory=dict)
    progress: Progress = field(default_factory=Progress)
    delivered: dict[int, float] = field(default_factory=dict)
    """The attempt log: when each sequence was delivered."""
    dead: frozenset[int] = frozenset()
    repair: Repair | None = None
    """What an operator has requested."""
    ended: bool = False
    """A newer generation has replaced the lane."""
    end_seq: int | None = None
    """Of its end entry in the stream."""

    @property
    def last_seq(self) -> int:
        return len(self.deliveries)

    @property
    def held(self) -> Failure | None:
        """Why the lane is held, as far as the database knows."""
        progress = self.progress
        failure = (progress.last_response or {}).get("failure")
        is_failing = progress.attempts > 0 and progress.retry_seq == progress.acked_seq + 1
        return Failure(failure) if is_failing and failure in STREAM_HOLD_FAILURES else None

    def expected(self) -> list[tuple[int, str]]:
        """What a complete stream has."""
        stored = [(n, d.message_id) for n, d in self.deliveries.items() if n not in self.dead]
        return [*stored, (self.last_seq + 1, end_id(LANE))] if self.ended else stored

    def snapshot(self) -> Database:
        """A backup."""
        backup = copy(self)
        backup.deliveries, backup.delivered = dict(self.deliveries), dict(self.delivered)
        return backup

    # ---------------------------------------------------------------- writing

    def assign(self, expires_at: float | None = None) -> Delivery:
        """Assign the next sequence to a new event."""
        seq, outbox_id = self.last_seq + 1, next(self.ids)
        delivery = Delivery(
            ENDPOINT, LANE, seq, seq, outbox_id, UUID(int=outbox_id), "a.b", None, None,
            PUBLISHED_AT, expires_at, b"1", None,
        )  # fmt: skip
        self.deliveries[seq] = delivery
        return delivery

    def claim(self) -> int:
        """Give the endpoint to another owner."""
        self.epoch += 1
        return self.epoch

    def write(self, epoch: int, records: Sequence[Record]) -> None:
        """Write a group of records."""
        self._fence(epoch)
        for record in records:
            row = record.attempt
            if row is not None and row.outcome == "delivered":
                self.delivered.setdefault(row.seq, row.started_at)
                self.on_acknowledged(row.seq)
            if record.progress is not None:
                self.progress = record.progress
            if (dead := record.dead) is not None:
                first = dead.seq if isinstance(dead, DeadRange) else record.seq
                for seq in range(first, record.seq + 1):
                    self.dead |= {seq}
                    self.on_dead(seq, dead.reason)

    def write_found(self, epoch: int, through: int, batch: int, at: float) -> None:
        """Acknowledge what the stream has."""
        self._fence(epoch)
        for seq in range(self.progress.acked_seq + 1, through + 1):
            if seq not in self.delivered:
                self.delivered[seq] = at
                self.on_acknowledged(seq)
        self.progress = Progress(through, through, batch, success_at=at)

    def write_end(self, epoch: int, seq: int) -> None:
        """Record that the stream has the end entry."""
        self._fence(epoch)
        self.end_seq = seq
        self.progress = self.progress._replace(retry_seq=None, attempts=0)

    def checkpoint(self, epoch: int, progress: Progress) -> None:
        """Write a checkpoint, which only moves forward."""
        self._fence(epoch)
        if progress.acked_seq > self.progress.acked_seq:
            self.progress = progress._replace(retry_seq=None, attempts=0)

    def finish_repair(self, epoch: int, repair: Repair) -> None:
        """Delete the request that was carried out; a fenced owner deletes nothing."""
        if epoch == self.epoch and self.repair == repair:
            self.repair = None

    def _fence(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise Fenced

    # ---------------------------------------------------------------- reading

    def tail(self) -> list[tuple[int, int, float]]:
        """The acknowledgements after the checkpoint."""
        acked = self.progress.acked_seq
        return [(seq, seq, at) for seq, at in self.delivered.items() if seq > acked]

    def read(self, fetch: Fetch, rows_max: int) -> list[Delivery]:
        """The next deliveries of a Fetch."""
        first = fetch.after_seq + 1
        return [self.deliveries[n] for n in range(first, min(first + rows_max, self.last_seq + 1))]

    def delivery_at(self, seq: int) -> FoundDelivery | None:
        """The delivery with a sequence."""
        found = self.deliveries.get(seq)
        return None if found is None else FoundDelivery(found.batch, found.message_id)

    def lost_deliveries(self, after_seq: int, through_seq: int, rows_max: int) -> LostDeliveries:
        """Deliveries that a stream has lost."""
        last = min(through_seq, after_seq + rows_max)
        kept = [self.deliveries[n] for n in range(after_seq + 1, last + 1) if n in self.delivered]
        return LostDeliveries(last, kept)
