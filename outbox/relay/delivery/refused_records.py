"""Records that the database refuses, by a trigger or a constraint of the application's.

A group is one message, and one refused row undoes all of it.  Then its records are written in
halves, in their order, until the refused one is alone.  That one is written without what is
refused: progress is never lost.

- An attempt is left out of the log.  Its success is recorded as the progress of its lane.
- A dead letter is postponed: the delivery is pending again, and its lane waits.
- The progress of a lane after a failure stays in memory: its next owner tries as if it were the
  first attempt.
- A checkpoint is left out: the attempt log has what came after the last one.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import asyncpg
import structlog

from outbox.core.delivery.commands import Progress, Record
from outbox.store.refused_rows import (
    ATTEMPT,
    DEAD_LETTER,
    PROGRESS,
    RefusedRow,
    RefusedRowReports,
    is_refused,
    reason_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from outbox.core.delivery.delivery_history import CountedDeliveries
    from outbox.relay.delivery.attempt import PendingRecord
    from outbox.store.delivery.records import RecordStore

log = structlog.get_logger("outbox.recorder")


class RefusedRecords:
    """Writes groups that contain refused rows."""

    def __init__(self, store: RecordStore) -> None:
        self._store = store
        self._reports = RefusedRowReports()

    async def write(self, group: Sequence[PendingRecord]) -> None:
        """Write a group; the record of a postponed dead letter is replaced.

        Raises:
            Fenced: this replica is no longer the owner.
            asyncpg.PostgresError: a success is refused, and the progress of its lane.
        """
        await self._write_halves([row for entry in group for row in _rows(entry)])

    async def checkpoint(
        self, rows: Sequence[tuple[int, int, Progress]], history: Sequence[CountedDeliveries]
    ) -> None:
        """Write checkpoints of lanes and the delivery history, except those that are refused.

        Raises:
            asyncpg.PostgresError: the error is not about a row.
        """
        try:
            await self._store.checkpoint(rows, history)
        except asyncpg.PostgresError as error:
            if not is_refused(error):
                raise
            if rows and history:
                parts = [(rows, ()), ((), history)]
            elif len(rows) > 1:
                middle = len(rows) // 2
                parts = [(rows[:middle], ()), (rows[middle:], ())]
            else:
                self._log_refused("checkpoint", rows[0][0] if rows else None, reason_of(error))
                return
            for part in parts:
                await self.checkpoint(*part)

    async def _write_halves(self, rows: Sequence[tuple[PendingRecord, Record]]) -> None:
        try:
            await self._store.write([r for _, r in rows], [entry.epoch for entry, _ in rows])
        except asyncpg.PostgresError as error:
            if not is_refused(error):
                raise
            if len(rows) == 1:
                return await self._write_without(*rows[0], error)
        else:
            return None
        middle = len(rows) // 2
        await self._write_halves(rows[:middle])
        await self._write_halves(rows[middle:])
        return None

    async def _write_without(
        self, entry: PendingRecord, record: Record, error: asyncpg.PostgresError
    ) -> None:
        """Write a record without the row that is refused."""
        reason = reason_of(error)
        for kind, other, in_memory in _weaker(entry, record):
            publish = self._reports.is_due(kind, _now())
            refused = RefusedRow.of_lane(kind, record, reason, error.sqlstate, publish=publish)
            try:
                await self._store.write([other], [entry.epoch], refused=refused)
            except asyncpg.PostgresError as again:
                if not is_refused(again):
                    raise
                continue
            self._log_refused(kind, record.lane_id, reason)
            if in_memory is not None:
                entry.record = in_memory
            return
        raise error

    def _log_refused(self, kind: str, lane_id: int | None, reason: str) -> None:
        now = _now()
        if self._reports.is_due(kind, now):
            self._reports.record(kind, now)
            log.error("the database refuses rows", row=kind, lane=lane_id, reason=reason)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _rows(entry: PendingRecord) -> Iterator[tuple[PendingRecord, Record]]:
    """The records of an entry, one for each row of the attempt log."""
    record = entry.record
    if isinstance(record, Record):
        yield entry, record
        return
    for row in record.rows:
        yield entry, Record(entry.lane.id, row.seq, row)


def _weaker(entry: PendingRecord, record: Record) -> Iterator[tuple[str, Record, Record | None]]:
    """Other records of the same result: what each does not write, and the record.

    The last one is what the lane continues with, unless it is the refused record.
    """
    row = record.attempt
    if record.progress is None:
        assert row is not None
        at = row.started_at + row.elapsed_s
        yield (
            ATTEMPT,
            record._replace(
                attempt=None, progress=Progress(record.seq, record.seq, row.batch, success_at=at)
            ),
            None,
        )
        return
    if row is not None:
        yield ATTEMPT, record._replace(attempt=None), None
    pending = record
    if record.dead is not None:
        pending = entry.lane.refuse_dead_letter(record)
        yield DEAD_LETTER, pending, pending
        if row is not None:
            yield DEAD_LETTER, pending._replace(attempt=None), pending
    yield PROGRESS, pending._replace(progress=None), pending
    yield PROGRESS, pending._replace(progress=None, attempt=None), pending
