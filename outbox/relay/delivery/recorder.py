"""The recorder: writes results of deliveries by group commit.

One task, one connection, one group at a time.  Successes wait up to `ack_group_ms`
for more records; a failure or a dead letter is written at once, together with all
waiting records (so never without the earlier successes of its own lane).  While one
group is written the next one collects, so that groups grow with the load.
"""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING

import asyncpg

from outbox.core.delivery.buffer_budget import BUFFER_BYTES_MAX, RESPONSES_PART
from outbox.core.delivery.commands import DeadLetter, Record, Successes
from outbox.core.model.delivery import Delivery
from outbox.relay.delivery.attempt import PendingRecord
from outbox.relay.delivery.refused_records import RefusedRecords
from outbox.store.errors import Fenced
from outbox.store.refused_rows import ATTEMPT, RefusedRow, is_refused, reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outbox.core.brokers.repair import Repair
    from outbox.core.delivery.commands import Progress
    from outbox.core.delivery.delivery_history import DeliveryHistory
    from outbox.core.delivery.lane import Lane
    from outbox.store.delivery.records import RecordStore

CHECKPOINT_EVERY_S = 1.0
HISTORY_EVERY_S = 10.0
"""Interval at which the delivery history is written; its latest counts are in memory alone."""
HISTORY_ENDPOINTS_MAX = 1_000
"""Endpoints whose counts are written with one checkpoint, because records wait meanwhile; the
others follow with the next checkpoints."""
GROUP_MAX = 5_000
"""Rows in one message; more wait for the next."""
GROUP_BYTES_MAX = 32 << 20
"""Bytes of the payloads of the dead letters in one message, except the last one's.  The server
copies them: this bounds its duration and its WAL, while other records wait."""
PENDING_MAX = 4 * GROUP_MAX
"""Number of waiting rows above which lanes wait, too (backpressure): unwritten records take memory,
and their deliveries are sent again after a crash."""

LANE_PENDING_MAX = 2_000
"""Unwritten deliveries above which a lane waits.  Requests go on while writes wait for the disk,
because the lease does not, and each lane must leave few copies if the server crashes then."""


class Recorder:
    """Groups records and writes them until cancelled.

    Args:
        group_s: how long a success may wait for more records, in seconds.
        lease_left_s: remaining lease; when it is not positive, writing raises Fenced.
        history: written with checkpoints, at most every `HISTORY_EVERY_S`.
        response_bytes_max: what the responses of unwritten rows may take; lanes wait above.
    """

    def __init__(
        self,
        store: RecordStore,
        group_s: float,
        lease_left_s: Callable[[], float],
        history: DeliveryHistory,
        response_bytes_max: int = BUFFER_BYTES_MAX // RESPONSES_PART,
    ) -> None:
        self._response_bytes_max = response_bytes_max
        self.response_bytes = 0
        """What the responses of rows that are not written take in memory."""
        self._store = store
        self._refused = RefusedRecords(store)
        self._history = history
        self._group_s = group_s
        self._lease_left_s = lease_left_s
        self._pending: list[PendingRecord] = []
        self._pending_rows = 0
        self._arrived = asyncio.Event()
        self._urgent = asyncio.Event()
        # The newest record, until it is written.
        self._newest: PendingRecord | None = None
        self._writing = asyncio.Lock()
        # Lanes whose progress is not checkpointed yet: epoch and progress.
        self._dirty_lanes: dict[int, tuple[int, Progress]] = {}
        # Receipts of brokers that are not written yet: epoch and receipt, by lane.
        self._receipts: dict[int, tuple[int, str]] = {}

    def is_full(self, lane: Lane) -> bool:
        """Whether callers of `add` for this lane should wait for `flush`."""
        return (
            self._pending_rows > PENDING_MAX
            or self.response_bytes > self._response_bytes_max
            or lane.unwritten > LANE_PENDING_MAX
        )

    def add(self, lane: Lane, epoch: int, record: Record | Successes) -> PendingRecord:
        """Queue a success, or those of a run or a batch; durable within about `group_s`."""
        entry = self._newest = PendingRecord(lane, epoch, record)
        self._pending.append(entry)
        self._pending_rows += entry.rows
        self.response_bytes += entry.response_bytes
        self._arrived.set()
        return entry

    async def write(self, lane: Lane, epoch: int, record: Record) -> Record:
        """Write a record that must be durable before its lane continues.

        Returns:
            The record, or another one if the database refused its dead letter.

        Raises:
            Fenced: this replica is no longer the owner.
        """
        entry = self.add(lane, epoch, record)
        self._urgent.set()
        await entry.written()
        assert isinstance(entry.record, Record)
        return entry.record

    async def flush(self) -> None:
        """Wait until all queued records are durable."""
        if self._newest is not None:
            self._urgent.set()
            await self._newest.written()

    def mark_dirty(self, lane_id: int, epoch: int, progress: Progress) -> None:
        """Checkpoint an acquired lane whose last owner wrote acknowledgements after its
        checkpoint.
        """
        self._dirty_lanes[lane_id] = (epoch, progress)
        self._arrived.set()

    async def run(self) -> None:
        """Write groups and checkpoints until cancelled.

        Raises:
            Fenced: this replica is no longer the owner.
        """
        clock = asyncio.get_running_loop().time
        # None: no lane is dirty, and the history is written.
        checkpoint_at: float | None = None
        history_at = clock() + HISTORY_EVERY_S
        # Endpoints whose history is due.
        due = 0
        while True:
            # Checked before each group, because under load a group is always waiting.
            if checkpoint_at is not None and (now := clock()) >= checkpoint_at:
                if not due and now >= history_at:
                    due, history_at = len(self._history), now + HISTORY_EVERY_S
                part = min(due, HISTORY_ENDPOINTS_MAX)
                await self._write_checkpoint(part)
                due -= part
                next_at = clock() + CHECKPOINT_EVERY_S
                checkpoint_at = None
                if self._history:
                    checkpoint_at = next_at if due else max(next_at, history_at)
            try:
                async with asyncio.timeout_at(checkpoint_at):
                    await self._arrived.wait()
            except TimeoutError:
                continue
            checkpoint_at = min(checkpoint_at or inf, clock() + CHECKPOINT_EVERY_S)
            if not self._pending:
                self._arrived.clear()
                continue
            try:
                async with asyncio.timeout(self._group_s):
                    await self._urgent.wait()
            except TimeoutError:
                pass
            await self._write_group()

    async def _write_group(self) -> None:
        size = self._group_size()
        group, self._pending = self._pending[:size], self._pending[size:]
        self._pending_rows = sum(entry.rows for entry in self._pending)
        if not self._pending:
            self._arrived.clear()
            self._urgent.clear()
        try:
            if self._lease_left_s() <= 0:
                raise Fenced
            async with self._writing:
                try:
                    await self._store.write(
                        [e.record for e in group if isinstance(e.record, Record)],
                        [e.epoch for e in group if isinstance(e.record, Record)],
                        [(e.lane.id, e.record) for e in group if isinstance(e.record, Successes)],
                    )
                except asyncpg.PostgresError as error:
                    if not is_refused(error):
                        raise
                    await self._refused.write(group)
        except BaseException as error:
            for entry in group:
                if entry.done is not None and not entry.done.done():
                    # The waiters end with the task group.
                    entry.done.cancel()
            raise error
        self.response_bytes -= sum(entry.response_bytes for entry in group)
        # A lane's records are in order, so its last record has its progress.
        for entry in {entry.lane: entry for entry in group}.values():
            if isinstance(entry.record, Successes):
                entry.lane.confirm_run(entry.record)
            else:
                entry.lane.confirm_recorded(entry.record)
            if not (isinstance(entry.record, Record) and entry.record.urgent):
                self._dirty_lanes[entry.lane.id] = (entry.epoch, entry.lane.checkpoint())
            if (stream := entry.lane.stream) is not None:
                receipt = stream.release_receipt(entry.lane.committed_seq)
                if receipt is not None:
                    self._receipts[entry.lane.id] = (entry.epoch, receipt)
        for entry in group:
            if entry.done is not None and not entry.done.done():
                entry.done.set_result(None)
        if group[-1] is self._newest:
            self._newest = None

    def _group_size(self) -> int:
        """Number of waiting entries that fit into one statement; at least one."""
        size = rows = payload_bytes = 0
        for entry in self._pending:
            rows += entry.rows
            if size and rows > GROUP_MAX:
                break
            size += 1
            dead = None if isinstance(entry.record, Successes) else entry.record.dead
            if isinstance(dead, DeadLetter) and isinstance(dead.delivery, Delivery):
                payload_bytes += len(dead.delivery.payload)
            if payload_bytes > GROUP_BYTES_MAX:
                break
        return size

    async def finish_endpoint(
        self, endpoint_id: UUID, lanes: Sequence[tuple[int, int]]
    ) -> str | None:
        """Dead-letter the pending deliveries of an endpoint that ends.

        Args:
            lanes: pairs of lane id and acknowledged sequence number.

        Returns:
            Why the database refuses a row of it; None: it is finished.

        Raises:
            Fenced: this replica is no longer the owner.
        """
        async with self._writing:
            try:
                await self._store.finish_endpoint(endpoint_id, lanes)
            except asyncpg.PostgresError as error:
                if not is_refused(error):
                    raise
                return reason_of(error)
        return None

    async def acknowledge_found(
        self, lane: Lane, epoch: int, through_seq: int, batch: int, at: float
    ) -> None:
        """Acknowledge the pending deliveries of a lane that its stream has.

        Args:
            batch: the batch of the delivery `through_seq`.
            at: epoch seconds.

        Raises:
            Fenced: this replica is no longer the owner.
        """
        found = (lane.id, epoch, through_seq, batch, at)
        async with self._writing:
            try:
                await self._store.write_found(*found)
            except asyncpg.PostgresError as error:
                if not is_refused(error):
                    raise
                place = (lane.id, lane.floor_batch, lane.acked_seq + 1, through_seq)
                refused = RefusedRow.of_sequences(
                    ATTEMPT, place, "delivered", reason_of(error), error.sqlstate
                )
                await self._store.write_found(*found, refused)

    async def write_end(self, lane: Lane, epoch: int, seq: int) -> None:
        """Record that the stream of a lane has its end entry, with this sequence.

        Raises:
            Fenced: this replica is no longer the owner.
        """
        async with self._writing:
            await self._store.write_end(lane.id, epoch, seq)

    async def journal_refill(
        self, lane_id: int, endpoint_id: UUID, first_seq: int, last_seq: int
    ) -> None:
        """Record that a stream was refilled as its endpoint's setting says."""
        async with self._writing:
            await self._store.journal_refill(lane_id, endpoint_id, first_seq, last_seq)

    async def finish_repair(self, lane: Lane, epoch: int, repair: Repair) -> None:
        """Delete an operator's request that was carried out."""
        async with self._writing:
            await self._store.write_repaired(lane.id, epoch, repair)

    async def checkpoint(self) -> None:
        """Write the progress of all dirty lanes, their receipts and the delivery history.

        Raises:
            Fenced: the lease expired.
        """
        # Once without history, too.  What is counted meanwhile is not waited for.
        for _ in range(0, len(self._history) + 1, HISTORY_ENDPOINTS_MAX):
            await self._write_checkpoint(HISTORY_ENDPOINTS_MAX)

    async def _write_checkpoint(self, history_endpoints_max: int) -> None:
        async with self._writing:
            moved, self._dirty_lanes = self._dirty_lanes, {}
            # A lane is not dirty after an append that stored a part of its messages, because the
            # record of its failure has the progress.
            receipts, self._receipts = self._receipts, {}
            counted = self._history.remove(history_endpoints_max)
            if not moved and not receipts and not counted:
                return
            if self._lease_left_s() <= 0:
                raise Fenced
            if moved or counted:
                await self._refused.checkpoint(
                    [(lane_id, *at) for lane_id, at in moved.items()], counted
                )
            if receipts:
                await self._store.write_receipts(
                    [(lane_id, *receipt) for lane_id, receipt in receipts.items()]
                )
