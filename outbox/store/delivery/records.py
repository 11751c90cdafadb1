"""The store of the recorder: writes attempts, progress and dead letters.

Everything written for a lane is one message that begins with the *fence*: the replica's
own row, locked FOR KEY SHARE while its lease runs (see `fence`).  A replica that takes over
deletes that row first, so a stale message finds no fence and writes nothing.  Because it
is one message, no lock is held while the database waits for this process.
"""

from __future__ import annotations

from itertools import starmap
from typing import TYPE_CHECKING

from outbox.errors import CannotRun
from outbox.store.absence_proof import AbsenceProof
from outbox.store.delivery.attempt_runs import (
    MAY_SUPPRESS_ATTEMPTS,
    WRITE_ACKNOWLEDGEMENTS,
    WRITE_COUNTED_ACKNOWLEDGEMENTS,
    attempt_runs,
)
from outbox.store.delivery.dead_letters import FINISH_ENDPOINT, dead_letter_calls
from outbox.store.delivery.progress import (
    READ_LANE_CHECKPOINTS,
    WRITE_LANE_CHECKPOINTS,
    WRITE_PROGRESS,
    progress_row,
)
from outbox.store.delivery.stream_progress import (
    WRITE_END,
    WRITE_FOUND,
    WRITE_RECEIPTS,
    WRITE_REPAIRED,
)
from outbox.store.errors import Fenced, ResponseLost
from outbox.store.routing_change import ADD_TO_JOURNAL
from outbox.store.sql.row_params import composite_array, json_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from outbox.core.brokers.repair import Repair
    from outbox.core.delivery.commands import Progress, Record, Successes
    from outbox.core.delivery.delivery_history import CountedDeliveries
    from outbox.store.connection.store_connection import StoreConnection
    from outbox.store.refused_rows import RefusedRow
    from outbox.store.sql.message import WriteCall

# Whether a message was written whose response was lost: its first attempt or dead letter exists.
READ_ATTEMPT_WRITTEN = """
SELECT EXISTS (SELECT FROM attempt_run
                WHERE lane_id = $1 AND batch = $2 AND seq = $3 AND attempt = $4
                  AND replica_id = $5)
"""
READ_DEAD_LETTER_WRITTEN = """
SELECT EXISTS (SELECT FROM dead_letter WHERE lane_id = $1 AND $2 BETWEEN seq AND to_seq)
"""


class RecordStore:
    """Writes attempts, checkpoints of lanes and dead letters, on one connection.

    Args:
        server_fence: `server_fence()` when the replica registered; None: not known.

    Raises:
        Fenced: some or all rows were not written, because this replica is no longer the
            owner; it must stop.
    """

    def __init__(
        self, connection: StoreConnection, replica_id: int, server_fence: int | None = None
    ) -> None:
        self._db = connection
        self._replica_id = replica_id
        self._fence = server_fence
        self._counts_attempts: bool | None = None
        self.proof = AbsenceProof(connection, of_events=True)

    async def write(
        self,
        records: Sequence[Record],
        epochs: Sequence[int],
        runs: Sequence[tuple[int, Successes]] = (),
        refused: RefusedRow | None = None,
    ) -> None:
        """Write a group of results atomically; when fenced, none is written.

        Events that are missing are dead-lettered with the proof that they are gone.  After a lost
        response the table decides whether to write it again.

        Args:
            epochs: the epochs of the records.
            runs: pairs of lane id and results of a request run; written before the records.
            refused: a row that the records leave out, which is reported.

        Raises:
            CursorBroken: missing events may be hidden; nothing was written.
            CannotRun: missing events exist; nothing was written.
        """
        while True:
            try:
                return await self._write(records, epochs, runs, refused)
            except ResponseLost:
                if await self._is_written(records, runs):
                    return None

    async def _is_written(
        self, records: Sequence[Record], runs: Sequence[tuple[int, Successes]]
    ) -> bool:
        """Whether a message of `write` was executed; False if writing it again changes nothing."""
        attempts = [(lane_id, run.rows[0]) for lane_id, run in runs]
        attempts += [(each.lane_id, each.attempt) for each in records if each.attempt is not None]
        for lane_id, row in attempts:
            key = lane_id, row.batch, row.seq, row.attempt, self._replica_id
            return bool(await self._db.fetchval(READ_ATTEMPT_WRITTEN, *key))
        for record in records:
            if record.dead is not None:
                dead = record.lane_id, record.seq
                return bool(await self._db.fetchval(READ_DEAD_LETTER_WRITTEN, *dead))
        return False

    async def _write(
        self,
        records: Sequence[Record],
        epochs: Sequence[int],
        runs: Sequence[tuple[int, Successes]],
        refused: RefusedRow | None,
    ) -> None:
        attempts, count = attempt_runs(runs, records)
        urgent = [(r, e) for r, e in zip(records, epochs, strict=True) if r.progress is not None]
        if not urgent:
            await self._acknowledge(attempts, count, refused)
            return
        progress = composite_array(
            progress_row(r.lane_id, epoch, r.progress)
            for r, epoch in urgent
            if r.progress is not None
        )
        calls: list[WriteCall] = [
            (WRITE_PROGRESS, self._replica_id, *attempts, progress, self._fence, count),
            *dead_letter_calls(self._replica_id, urgent),
        ]
        if missing := [(event_id, event_id) for r, _ in urgent for event_id in r.missing]:
            before = self.proof.contradictions
            moved = await self.proof.write(missing, *await self.proof.prove(missing), *calls)
            if self.proof.contradictions > before:
                raise CannotRun("events that were missing exist; they are read again")
        else:
            moved = await self._db.write_together(*self._reports(refused), *calls)
        if moved != len(urgent):
            raise Fenced

    async def _acknowledge(
        self, attempts: tuple[str, str], count: int, refused: RefusedRow | None
    ) -> None:
        if self._counts_attempts is None:
            self._counts_attempts = bool(await self._db.fetchval(MAY_SUPPRESS_ATTEMPTS))
        counts = self._counts_attempts or refused is not None
        call: WriteCall = (WRITE_ACKNOWLEDGEMENTS, self._replica_id, *attempts, self._fence)
        if counts:
            call = (WRITE_COUNTED_ACKNOWLEDGEMENTS, *call[1:], count)
        stored = await self._db.write_together(*self._reports(refused), call)
        if not stored:
            raise Fenced
        if not counts and stored != count:
            # The next session finds the trigger.
            raise CannotRun(f"of {count} runs of attempts a trigger suppressed {count - stored}")

    async def write_found(
        self,
        lane_id: int,
        epoch: int,
        through_seq: int,
        batch: int,
        at: float,
        refused: RefusedRow | None = None,
    ) -> None:
        """Acknowledge a lane's pending deliveries that its stream has, up to `through_seq`.

        Args:
            batch: the batch of the delivery `through_seq`.
            at: epoch seconds.
            refused: their attempts, which are reported instead of logged.
        """
        progress = (lane_id, epoch, through_seq, batch, at)
        moved = await self._db.write_together(
            *self._reports(refused),
            (WRITE_FOUND, self._replica_id, *progress, self._fence, refused is None),
        )
        if not moved and not await self._db.fetch(
            READ_LANE_CHECKPOINTS, [lane_id], [epoch], [through_seq]
        ):
            raise Fenced

    def _reports(self, refused: RefusedRow | None) -> list[WriteCall]:
        return [] if refused is None else [refused.report(f"replica {self._replica_id}")]

    async def write_end(self, lane_id: int, epoch: int, seq: int) -> None:
        """Record that a broker's stream has the end entry of a lane.

        Args:
            seq: the sequence of the end entry.
        """
        if not await self._db.write(WRITE_END, self._replica_id, lane_id, epoch, seq, self._fence):
            raise Fenced

    async def write_repaired(self, lane_id: int, epoch: int, repair: Repair) -> None:
        """Delete an operator's request that was carried out."""
        await self._db.write(
            WRITE_REPAIRED,
            self._replica_id,
            lane_id,
            epoch,
            repair.kind.value,
            repair.delivered_seq,
            self._fence,
        )

    async def journal_refill(
        self, lane_id: int, endpoint_id: UUID, first_seq: int, last_seq: int
    ) -> None:
        """Record that a stream was refilled as its endpoint's setting says.

        Without the fence: it has happened, whoever owns the lane by now.
        """
        data = json_text({"lane": lane_id, "sequence": first_seq, "to_sequence": last_seq})
        actor = f"replica {self._replica_id}"
        await self._db.write(ADD_TO_JOURNAL, "stream_refilled", actor, endpoint_id, data)

    async def write_receipts(self, rows: Sequence[tuple[int, int, str]]) -> None:
        """Write receipts (lane, epoch, receipt); those of lanes that moved are not written."""
        await self._db.write(
            WRITE_RECEIPTS,
            self._replica_id,
            [lane_id for lane_id, _, _ in rows],
            [epoch for _, epoch, _ in rows],
            [receipt for _, _, receipt in rows],
            self._fence,
        )

    async def checkpoint(
        self,
        rows: Sequence[tuple[int, int, Progress]],
        history: Sequence[CountedDeliveries] = (),
    ) -> set[int]:
        """Write checkpoints of lanes (lane, epoch, progress); returns the lanes that were accepted.

        Args:
            history: added to the delivery history, also of lanes that are not accepted.
        """
        progress = composite_array(starmap(progress_row, rows))
        counted = [
            json_text(
                {
                    "endpoint_id": str(each.endpoint_id),
                    "successes": each.counts.successes,
                    "failures": each.counts.failures,
                    "latencies": each.counts.latencies,
                }
            )
            for each in history
        ]
        call = WRITE_LANE_CHECKPOINTS, self._replica_id, progress, self._fence
        try:
            written = await self._db.write(*call, counted)
        except ResponseLost:
            # A history that may have been counted is not counted again.
            written = await self._db.write(*call, [])
        lane_ids = [lane_id for lane_id, _, _ in rows]
        if written == len(rows):
            return set(lane_ids)
        epochs, acked = [epoch for _, epoch, _ in rows], [p.acked_seq for _, _, p in rows]
        found = await self._db.fetch(READ_LANE_CHECKPOINTS, lane_ids, epochs, acked)
        return {r["lane_id"] for r in found}

    async def finish_endpoint(self, endpoint_id: UUID, lanes: Sequence[tuple[int, int]]) -> None:
        """Dead-letter the pending deliveries of an endpoint that ends.

        Args:
            lanes: pairs of lane id and acknowledged sequence number.
        """
        finished = await self._db.write(
            FINISH_ENDPOINT,
            self._replica_id,
            endpoint_id,
            [lane_id for lane_id, _ in lanes],
            [acked for _, acked in lanes],
            self._fence,
        )
        if not finished:
            raise Fenced
