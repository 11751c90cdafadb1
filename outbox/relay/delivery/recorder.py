"""The recorder: writes what became of deliveries, group by group.

One task, one connection, one group at a time.  Successes wait up to
`ack_group_ms` for company; a failure or the end of a delivery is written at
once, together with everything that waits (so never without the successes of
its own lane that came before it).  While a group is under way the next one
gathers, which makes groups grow with the load.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import DeadLetter
from outbox.core.delivery.message import Delivery
from outbox.store.records import Fenced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from outbox.core.delivery.commands import Progress, Record
    from outbox.core.delivery.lane import Lane
    from outbox.store.records import RecordStore

CHECKPOINT_EVERY_S = 1.0
GROUP_MAX = 5_000
"""Records in one statement; more wait for the next."""
GROUP_BYTES_MAX = 32 << 20
"""Dead letters' payloads in one statement, apart from the last one's."""


PENDING_MAX = 4 * GROUP_MAX
"""With more than these waiting, lanes wait too: what is not on disk is sent again
after a crash, and is held in memory until then."""


class Entry:
    """One record on its way to the disk; `done` is set when somebody waits for it."""

    __slots__ = ("done", "epoch", "lane", "record")

    def __init__(self, lane: Lane, epoch: int, record: Record) -> None:
        self.lane = lane
        self.epoch = epoch
        self.record = record
        self.done: asyncio.Future[None] | None = None

    async def written(self) -> None:
        """Wait until it is on disk; whoever gives up waiting disturbs nobody."""
        if self.done is None:
            self.done = asyncio.get_running_loop().create_future()
        await asyncio.shield(self.done)


class Recorder:
    """Groups records and writes them until cancelled.

    Args:
        group_s: how long a success may wait for company.
        lease_left_s: how long this replica may still write; when it is over,
            writing fails with Fenced.
    """

    def __init__(
        self,
        store: RecordStore,
        group_s: float,
        lease_left_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._group_s = group_s
        self._lease_left_s = lease_left_s
        self._pending: list[Entry] = []
        self._arrived = asyncio.Event()
        self._urgent = asyncio.Event()
        # The newest entry, until it is written.
        self._newest: Entry | None = None
        self._writing = asyncio.Lock()
        # The lanes of which more is on disk than was written down as progress: their epochs,
        # and how far they are.
        self._moved: dict[int, tuple[int, Progress]] = {}

    @property
    def full(self) -> bool:
        """Whether whoever adds something should wait until it is on disk."""
        return len(self._pending) > PENDING_MAX

    def add(self, lane: Lane, epoch: int, record: Record) -> None:
        """Take a success; it is durable some time soon."""
        self._append(Entry(lane, epoch, record))

    async def write(self, lane: Lane, epoch: int, record: Record) -> None:
        """Take a record that must be durable before its lane goes on.

        Raises:
            Fenced: this replica is no longer the owner.
        """
        entry = Entry(lane, epoch, record)
        self._append(entry)
        self._urgent.set()
        await entry.written()

    async def flushed(self) -> None:
        """Wait until everything that was taken before is on disk."""
        if self._newest is not None:
            self._urgent.set()
            await self._newest.written()

    def taken(self, lane_id: int, epoch: int, progress: Progress) -> None:
        """A lane was taken over whose last owner did not write down how far it is."""
        self._moved[lane_id] = (epoch, progress)
        self._arrived.set()

    def _append(self, entry: Entry) -> None:
        self._pending.append(entry)
        self._newest = entry
        self._arrived.set()

    async def run(self) -> None:
        """Write groups and checkpoints until cancelled.

        Raises:
            Fenced: this replica is no longer the owner.
        """
        clock = asyncio.get_running_loop().time
        # None: nothing has moved since the last one.
        checkpoint_at: float | None = None
        while True:
            # Looked at before each group, because under load one always waits.
            if checkpoint_at is not None and clock() >= checkpoint_at:
                await self.checkpoint()
                checkpoint_at = None
            try:
                async with asyncio.timeout_at(checkpoint_at):
                    await self._arrived.wait()
            except TimeoutError:
                continue
            if checkpoint_at is None:
                checkpoint_at = clock() + CHECKPOINT_EVERY_S
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
        if not self._pending:
            self._arrived.clear()
            self._urgent.clear()
        try:
            if self._lease_left_s() <= 0:
                raise Fenced
            async with self._writing:
                await self._store.write([e.record for e in group], [e.epoch for e in group])
        except BaseException as error:
            for entry in group:
                if entry.done is not None and not entry.done.done():
                    # Waiters end with the task group that all of us are in.
                    entry.done.cancel()
            raise error
        # A lane's records are in order, so that the last one tells how far all of them are.
        for entry in {entry.lane: entry for entry in group}.values():
            entry.lane.recorded(entry.record)
            if entry.record.progress is None:
                self._moved[entry.lane.id] = (entry.epoch, entry.lane.checkpoint())
        for entry in group:
            if entry.done is not None and not entry.done.done():
                entry.done.set_result(None)
        if group[-1] is self._newest:
            self._newest = None

    def _group_size(self) -> int:
        """How many of the waiting records go into one statement."""
        size = payload_bytes = 0
        for entry in self._pending[:GROUP_MAX]:
            size += 1
            dead = entry.record.dead
            if isinstance(dead, DeadLetter) and isinstance(dead.delivery, Delivery):
                payload_bytes += len(dead.delivery.payload)
            if payload_bytes > GROUP_BYTES_MAX:
                break
        return size

    async def finish(self, endpoint_id: UUID, lanes: Sequence[tuple[int, int]]) -> None:
        """Give up what the (lane, acked number) pairs of an endpoint that ends still owe.

        Raises:
            Fenced: this replica is no longer the owner.
        """
        async with self._writing:
            await self._store.finish(endpoint_id, lanes)

    async def checkpoint(self) -> None:
        """Write down how far every lane is that moved since the last time.

        Raises:
            Fenced: the lease ran out.
        """
        async with self._writing:
            moved, self._moved = self._moved, {}
            if not moved:
                return
            if self._lease_left_s() <= 0:
                raise Fenced
            await self._store.checkpoint([(lane_id, *at) for lane_id, at in moved.items()])
