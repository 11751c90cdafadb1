"""In-memory inbox: deduplication within one process, for a limited time window.

For idempotent effects, such as invalidating a cache.  A restart forgets everything, and
effects elsewhere are not in its transaction: after a crash an event may be processed again.

It implements the statements of an inbox, below the same plans.  The changes of a
transaction are visible to others after its commit; it locks lanes and X-Delivery values,
so that concurrent copies wait for each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeAlias

from outbox.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from outbox.receiver.inbox.process import Call, Rows

WINDOW_S = 300.0
SEEN_MAX = 1_000_000
LANES_MAX = 10_000
LATEST_MAX = 1_000_000
WAIT_S = 30.0

Released: TypeAlias = "Future[None]"


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
        self.seen: OrderedDict[str, tuple[float, str | None, int | None]] = OrderedDict()
        self.lanes: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.latest: OrderedDict[str, tuple[str, str, int, str, str]] = OrderedDict()
        self.locks: dict[tuple[str, str], Released] = {}

    @contextlib.contextmanager
    def transaction(self) -> Iterator[MemoryTransaction]:
        """Open a transaction: commits at the end of the block, rolls back on an error."""
        transaction = MemoryTransaction(self)
        try:
            yield transaction
            transaction.commit()
        finally:
            transaction.release()

    @contextlib.asynccontextmanager
    async def transaction_async(self) -> AsyncIterator[AsyncMemoryTransaction]:
        """Like `transaction`, for asyncio."""
        transaction = AsyncMemoryTransaction(self)
        try:
            yield transaction
            transaction.commit()
        finally:
            transaction.release()


class MemoryTransaction:
    """A transaction with private changes and two-phase locking."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._db = database
        self._released: Released = Future()
        self._locked: list[tuple[str, str]] = []
        self._seen: dict[str, tuple[float, str | None, int | None]] = {}
        self._lanes: dict[str, dict[str, Any]] = {}
        self._latest: dict[str, tuple[str, str, int, str, str]] = {}

    def execute(self, call: Call) -> Rows:
        """Run a statement; waits for conflicting locks.

        Raises:
            TimeoutError: no lock within WAIT_S, for example in a deadlock of handlers
                that call `is_newest` for several keys in different orders.
        """
        while isinstance(result := self._try(call), Future):
            result.result(WAIT_S)
        return result

    def commit(self) -> None:
        """Make the changes visible to other transactions."""
        db = self._db
        with db.mutex:
            db.seen.update(self._seen)
            for lane, changed in self._lanes.items():
                forgotten = db.lanes.get(lane, changed)["forgotten"]
                db.lanes[lane] = changed | {"forgotten": forgotten}
                db.lanes.move_to_end(lane)
            for key, position in self._latest.items():
                db.latest[key] = position
                db.latest.move_to_end(key)
            self._forget()

    def release(self) -> None:
        """Release the locks and wake waiting transactions."""
        with self._db.mutex:
            for lock in self._locked:
                del self._db.locks[lock]
        self._released.set_result(None)

    def _try(self, call: Call) -> Rows | Released:
        with self._db.mutex:
            for lock in _locks(call):
                holder = self._db.locks.setdefault(lock, self._released)
                if holder is not self._released:
                    return holder
                if lock not in self._locked:
                    self._locked.append(lock)
            return _STATEMENTS[call.sql](self, **call.parameters)

    # ------------------------------------------------------------------------ statements

    def is_there(self) -> Rows:
        return [(True,)]

    def add_lane(self, lane: str) -> Rows:
        # `lock_lanes` creates it.
        return []

    def lock_lanes(self, lane: str, replayed: str) -> Rows:
        kept = {name: self._lane(name) for name in sorted({lane, replayed})}
        kept[lane] = kept[lane] or _NEW_LANE
        return [_row(name, state) for name, state in kept.items() if state is not None]

    def keep_lane(self, lane: str, **changed: Any) -> Rows:
        self._lanes[lane] = (self._lane(lane) or _NEW_LANE) | changed
        return []

    def lanes(self) -> Rows:
        return [_row(name, kept) for name, kept in sorted((self._db.lanes | self._lanes).items())]

    def claim(self, delivery_id: str, lane: str | None, sequence: int | None) -> Rows:
        now = self._db.clock()
        known = self._seen.get(delivery_id) or self._db.seen.get(delivery_id)
        if known is not None and known[0] > now - self._db.window_s:
            return []
        self._seen[delivery_id] = (now, lane, sequence)
        return [(1,)]

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

    def nothing(self, **_: Any) -> Rows:
        # Expiry happens at each commit, and there is no request log.
        return []

    def _lane(self, name: str) -> dict[str, Any] | None:
        return self._lanes.get(name) or self._db.lanes.get(name)

    def _forget(self) -> None:
        """Forget what is older than the window or exceeds the memory limits."""
        db = self._db
        oldest = db.clock() - db.window_s
        while db.seen and (len(db.seen) > SEEN_MAX or next(iter(db.seen.values()))[0] <= oldest):
            _, (_, lane, sequence) = db.seen.popitem(last=False)
            if lane is not None and sequence is not None and (kept := db.lanes.get(lane)):
                kept["forgotten"] = max(kept["forgotten"], sequence)
        while len(db.lanes) > LANES_MAX:
            db.lanes.popitem(last=False)
        while len(db.latest) > LATEST_MAX:
            db.latest.popitem(last=False)


_STATEMENTS: dict[str, Callable[..., Rows]] = {
    "is_there": MemoryTransaction.is_there,
    "add_lane": MemoryTransaction.add_lane,
    "lock_lanes": MemoryTransaction.lock_lanes,
    "keep_lane": MemoryTransaction.keep_lane,
    "lanes": MemoryTransaction.lanes,
    "claim": MemoryTransaction.claim,
    "unclaim": MemoryTransaction.unclaim,
    "latest": MemoryTransaction.latest,
    "lock_old": MemoryTransaction.nothing,
    "expire": MemoryTransaction.nothing,
    "confirm": MemoryTransaction.nothing,
    "touch_lane": MemoryTransaction.nothing,
    "expire_requests": MemoryTransaction.nothing,
    "log": MemoryTransaction.nothing,
}
_NEW_LANE = {
    "high": 0,
    "ended": False,
    "missing": "[]",
    "holes": "[]",
    "unknown": "[]",
    "forgotten": 0,
}


class AsyncMemoryTransaction(MemoryTransaction):
    """`MemoryTransaction` with a statement method for asyncio."""

    async def execute_async(self, call: Call) -> Rows:
        """Run a statement; waits for conflicting locks without blocking the loop."""
        while isinstance(result := self._try(call), Future):
            async with asyncio.timeout(WAIT_S):
                # Shielded: cancelling one waiter must not cancel the shared future.
                await asyncio.shield(asyncio.wrap_future(result))
        return result


def _locks(call: Call) -> list[tuple[str, str]]:
    """Return the locks that a statement needs, in lock order."""
    parameters = call.parameters
    if call.sql == "lock_lanes":
        return [("lane", name) for name in sorted({parameters["lane"], parameters["replayed"]})]
    if call.sql == "claim":
        return [("delivery", parameters["delivery_id"])]
    if call.sql == "latest":
        return [("key", parameters["key"])]
    return []


def _row(name: str, kept: dict[str, Any]) -> tuple[Any, ...]:
    ranges = (kept["missing"], kept["holes"], kept["unknown"])
    return (name, kept["high"], kept["ended"], *ranges, kept["forgotten"])
