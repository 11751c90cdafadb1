"""In-memory inbox: deduplication within one process, for a limited time window.

For idempotent effects, such as invalidating a cache.  A restart forgets everything, and
effects elsewhere are not in its transaction: after a crash an event may be processed again.

It implements the statements of an inbox, below the same plans.  The changes of a
transaction are visible to others after its commit; it locks lanes and X-Delivery values,
so that concurrent copies wait for each other.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

from outbox.drivers.blocking import as_async
from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager
    from typing import Self

    from outbox.drivers.statement import Call, Rows

WINDOW_S = 300.0
SEEN_MAX = 1_000_000
REMEMBERED_LANES_MAX = 10_000
LATEST_MAX = 1_000_000
LOCK_WAIT_S = 30.0

Released: TypeAlias = "Future[None]"
SeenColumns: TypeAlias = "tuple[float, str | None, int | None]"
LaneColumns: TypeAlias = tuple[int, bool, str, str, str]
LatestColumns: TypeAlias = tuple[str, str, int, str, str]

_NEW_LANE: LaneColumns = (0, False, "[]", "[]", "[]")
_LOCKED = {
    "lock_lanes": ("lane", ("lane", "replayed")),
    "claim": ("delivery", ("delivery_id",)),
    "latest": ("key", ("key",)),
}
"""What a statement locks: a kind of row, and the parameters that name the rows."""


class MemoryDatabase:
    """In-memory database for `AsyncReceiver` and `Receiver`.

    Args:
        window_s: retention of X-Delivery values, in seconds.
        clock: returns monotonic seconds.

    Raises:
        UsageError: `window_s` is not positive.
    """

    def __init__(
        self, window_s: float = WINDOW_S, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not window_s > 0:
            raise UsageError(f"window: must be more than 0 s, not {window_s:g}")
        self.window_s = window_s
        # Used by transactions, which hold the mutex during each statement.
        self.clock = clock
        self.mutex = threading.Lock()
        self.seen: OrderedDict[str, SeenColumns] = OrderedDict()
        self.lanes: OrderedDict[str, LaneColumns] = OrderedDict()
        self.forgotten: dict[str, int] = {}
        self.latest: OrderedDict[str, LatestColumns] = OrderedDict()
        self.locks: dict[tuple[str, str], Released] = {}

    def transaction(self) -> MemoryTransaction:
        """Open a transaction: commits at the end of the block, rolls back on an error."""
        return MemoryTransaction(self)

    def transaction_async(self) -> AbstractAsyncContextManager[AsyncMemoryTransaction]:
        """Like `transaction`, for asyncio."""
        return as_async(AsyncMemoryTransaction(self))


class MemoryTransaction:
    """A transaction with private changes and two-phase locking."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._db = database
        self._released: Released = Future()
        self._locked: set[tuple[str, str]] = set()
        self._seen: dict[str, SeenColumns] = {}
        self._lanes: dict[str, LaneColumns] = {}
        self._latest: dict[str, LatestColumns] = {}
        self._added: set[str] = set()

    async def execute(self, call: Call) -> Rows:
        """Run a statement; waits for conflicting locks.

        Raises:
            TimeoutError: no lock within LOCK_WAIT_S, for example in a deadlock of handlers
                that call `is_newest` for several keys in different orders.
        """
        while isinstance(result := self._try(call), Future):
            await self._wait(result)
        return result

    def __enter__(self) -> Self:
        """Begin; nothing is locked yet."""
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        """Make the changes visible unless the block failed, and wake waiting transactions."""
        with self._db.mutex:
            for lock in self._locked:
                del self._db.locks[lock]
            # A waiting transaction continues once the mutex is free, after the commit.
            self._released.set_result(None)
            if failed is None:
                self._commit()

    def _commit(self) -> None:
        db = self._db
        db.seen.update(self._seen)
        for lane in self._added:
            db.lanes.setdefault(lane, _NEW_LANE)
        for lane in self._lanes:
            db.lanes[lane] = self._lanes[lane]
            db.lanes.move_to_end(lane)
        for key in self._latest:
            db.latest[key] = self._latest[key]
            db.latest.move_to_end(key)
        self._forget()

    async def _wait(self, released: Released) -> None:
        released.result(LOCK_WAIT_S)

    def _try(self, call: Call) -> Rows | Released:
        kind, names = _LOCKED.get(call.sql, ("", ()))
        with self._db.mutex:
            for name in sorted({call.parameters[each] for each in names}):
                holder = self._db.locks.setdefault((kind, name), self._released)
                if holder is not self._released:
                    return holder
                self._locked.add((kind, name))
            rows: Rows = getattr(self, call.sql, self.nothing)(**call.parameters)
            return rows

    # ------------------------------------------------------------------------ statements

    def nothing(self, **_: Any) -> Rows:
        # A commit expires rows, and there is no request log.
        return []

    def is_there(self) -> Rows:
        return [(True,)]

    def lock_lanes(self, lane: str, replayed: str) -> Rows:
        return [
            self._row(name, columns)
            for name in sorted({lane, replayed})
            # A delivery creates its own lane, not the one that it replays.
            if (columns := self._lane(name) or (_NEW_LANE if name == lane else None))
        ]

    def keep_lane(
        self, lane: str, high: int, ended: bool, missing: str, holes: str, unknown: str
    ) -> Rows:
        self._lanes[lane] = (high, ended, missing, holes, unknown)
        return []

    def lanes(self) -> Rows:
        return [self._row(*each) for each in sorted((self._db.lanes | self._lanes).items())]

    def lane(self, lane: str) -> Rows:
        columns = self._lane(lane)
        return [] if columns is None else [self._row(lane, columns)]

    def add_lane(self, lane: str) -> Rows:
        # Not in `_lanes`: the lane is not locked, so a commit must not overwrite it.
        self._added.add(lane)
        return []

    def claim(self, delivery_id: str, lane: str | None, sequence: int | None) -> Rows:
        now = self._db.clock()
        known = self._seen.get(delivery_id) or self._db.seen.get(delivery_id)
        if known is not None and known[0] > now - self._db.window_s:
            return []
        self._seen[delivery_id] = (now, lane, sequence)
        return [(1,)]

    def confirm(self, delivery_id: str | None) -> Rows:
        return [(1,)] if delivery_id in self._seen else []

    def unclaim(self, delivery_id: str) -> Rows:
        self._seen.pop(delivery_id, None)
        return []

    def latest(
        self, key: str, delivery_id: str, lane: str, sequence: int, published_at: str
    ) -> Rows:
        known = self._latest.get(key) or self._db.latest.get(key)
        changed = (delivery_id, lane, sequence, published_at, "")
        if known is not None and known[0] != delivery_id:
            _, known_lane, known_sequence, known_at, again_at = known
            if lane == "":
                is_newer = max(known_at, again_at) < published_at
                changed = (delivery_id, known_lane, known_sequence, known_at, published_at)
            elif lane == known_lane:
                is_newer = known_sequence < sequence and again_at <= published_at
            else:
                is_newer = max(known_at, again_at) <= published_at
            if not is_newer:
                return []
        if known is None or known[0] != delivery_id:
            self._latest[key] = changed
        return [(1,)]

    def _lane(self, name: str) -> LaneColumns | None:
        return self._lanes.get(name) or self._db.lanes.get(name)

    def _row(self, name: str, columns: LaneColumns) -> tuple[Any, ...]:
        return (name, *columns, self._db.forgotten.get(name, 0))

    def _forget(self) -> None:
        """Forget what is older than the window or exceeds the memory limits."""
        db = self._db
        oldest = db.clock() - db.window_s
        while db.seen and (len(db.seen) > SEEN_MAX or next(iter(db.seen.values()))[0] <= oldest):
            _, (_, lane, sequence) = db.seen.popitem(last=False)
            if lane in db.lanes and lane is not None and sequence is not None:
                db.forgotten[lane] = max(sequence, db.forgotten.get(lane, 0))
        while len(db.lanes) > REMEMBERED_LANES_MAX:
            db.forgotten.pop(db.lanes.popitem(last=False)[0], None)
        while len(db.latest) > LATEST_MAX:
            db.latest.popitem(last=False)


class AsyncMemoryTransaction(MemoryTransaction):
    """`MemoryTransaction` that waits for locks without blocking the event loop."""

    async def _wait(self, released: Released) -> None:
        async with asyncio.timeout(LOCK_WAIT_S):
            # Shielded: cancelling one waiter must not cancel the shared future.
            await asyncio.shield(asyncio.wrap_future(released))
