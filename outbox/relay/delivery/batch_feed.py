"""The batch feed: notifies the dispatcher of lanes with new deliveries.

A batch becomes known from this replica's own sequencer, from another replica's notification, or
from the tables.  The tables are authoritative; the other two sources save reads.  Other replicas
are notified of this replica's batches, at most every `NOTIFY_EVERY_S`.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from outbox.core.sequencing.batch_notifications import (
    NOTIFY_EVERY_S,
    READ_BATCHES,
    BatchNotification,
    NotificationThrottle,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from outbox.relay.delivery.dispatcher import Dispatcher
    from outbox.relay.sequencing.cursor import SequencedBatch
    from outbox.relay.wake_event import WakeEvent
    from outbox.store.cluster.replicas import ReplicaStore
    from outbox.store.delivery.lanes import LaneStore
    from outbox.telemetry.meters import Meters


class BatchFeed:
    """Forwards new batches to the dispatcher.

    It has no task: `Ownership` calls `run_due`, because claims and batches must stay in order.  A
    lane's counter is read either by its claim or by a later batch.

    Args:
        wake: set when `due_at` moved to an earlier time.
        clock: seconds of the steady clock.
    """

    def __init__(
        self,
        replicas: ReplicaStore,
        lanes: LaneStore,
        dispatcher: Dispatcher,
        wake: WakeEvent,
        clock: Callable[[], float],
        meters: Meters,
    ) -> None:
        self._replicas = replicas
        self._lanes = lanes
        self._dispatcher = dispatcher
        self._wake = wake
        self._clock = clock
        self._meters = meters
        # The newest batch of which the dispatcher knows all lanes.
        self._known_batch = 0
        # When to read other replicas' batches (infinite: no sign of any), and the last read.
        self._read_at, self._last_read_at = 0.0, -inf
        # The backends of other replicas that sequenced at the last poll.
        self._leaders: set[int | None] = set()
        self._throttle = NotificationThrottle()

    async def start(self) -> None:
        """Begin after the newest batch: no lane is owned yet."""
        self._known_batch = await self._lanes.last_batch()

    def due_at(self) -> float:
        """When to call `run_due`, by the steady clock."""
        return min(self._read_at, self._throttle.flush_at())

    async def run_due(self) -> None:
        """Read other replicas' batches, and notify them of this replica's, as far as due."""
        if self._clock() >= self._read_at:
            self._read_at, self._last_read_at = inf, self._clock()
            await self._read_new_batches()
        if self._clock() >= self._throttle.flush_at():
            self._throttle.mark_sent(self._clock())
            await self._replicas.wake_owners(READ_BATCHES)

    def cluster_polled(self, leaders: set[int | None], *, alone: bool) -> None:
        """Note the cluster's state, and read the batches that a lost notification announced.

        Args:
            leaders: the backends of the replicas that sequence.
            alone: no other replica is alive.
        """
        self._leaders = leaders
        self._throttle.alone = alone
        self._read_at = 0.0

    def receive_notification(self, text: str, pid: int) -> None:
        """Process a notification of another session.

        Any session may send one, so the payload is trusted only from a replica's backend.
        If it does not continue the known batches, they are read, at most every `NOTIFY_EVERY_S`.
        """
        notification = BatchNotification.parse(text) if pid in self._leaders else None
        if notification is None or notification.first > self._known_batch + 1:
            if self._read_at == inf:
                self._read_at = self._last_read_at + NOTIFY_EVERY_S
                self._wake.set()
        elif notification.last > self._known_batch:
            self._known_batch = notification.last
            self._dispatcher.notify_new_deliveries(notification.last_seqs)

    def notification_payload(self, batch: int, last_seqs: Mapping[int, int]) -> str | None:
        """The payload of the NOTIFY of a batch that is about to be written; None: no NOTIFY."""
        return self._throttle.next_payload(batch, last_seqs, self._clock())

    def batch_written(self, sequenced: SequencedBatch) -> bool:
        """Process a batch that this replica committed, without reading it.

        Returns:
            Whether one of its own lanes had no other deliveries to send.
        """
        if sequenced.batch == self._known_batch + 1:
            self._known_batch = sequenced.batch
        self._meters.events += sequenced.events
        self._meters.fed_deliveries += len(sequenced.deliveries.feed_ids)
        last_seqs = sequenced.deliveries.counters
        flush_at = self._throttle.flush_at()
        self._throttle.batch_written(
            sequenced.batch, last_seqs, self._clock(), notified=sequenced.notified
        )
        if self._throttle.flush_at() < flush_at:
            self._wake.set()
        return self._dispatcher.notify_batch(sequenced)

    async def _read_new_batches(self) -> None:
        more = True
        while more and (batches := await self._lanes.new_batches(self._known_batch)) is not None:
            self._dispatcher.notify_new_deliveries(batches.last_seqs)
            self._known_batch = max(self._known_batch, batches.batch)
            more = batches.more
