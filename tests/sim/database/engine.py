"""Transactions and row locks of the simulated server.

A statement is a generator: it yields where time may pass or a lock is waited for,
so that others get between.  Writes are kept with their transaction and seen by
nobody else until it commits; when it does, they become visible at one moment, and
the locks are let go only some time after that, as in PostgreSQL.

Reads see what is committed when they are made (READ COMMITTED; one step of a
generator is one snapshot), and their own transaction's writes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Generator, Iterator

    from tests.sim.clockwork import World
    from tests.sim.database.backend import Backend

    Row = dict[str, Any]
    Steps = Generator[Any, Any, Any]

SHARE, UPDATE, EXCLUSIVE = "share", "update", "exclusive"
"""FOR KEY SHARE; FOR NO KEY UPDATE and UPDATE; FOR UPDATE and DELETE."""

_CONFLICTS = {
    (SHARE, EXCLUSIVE),
    (EXCLUSIVE, SHARE),
    (UPDATE, UPDATE),
    (UPDATE, EXCLUSIVE),
    (EXCLUSIVE, UPDATE),
    (EXCLUSIVE, EXCLUSIVE),
}


class Table:
    """Committed rows by their key; a row is never changed, only replaced."""

    __slots__ = ("name", "rows")

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: dict[Any, Row] = {}


class Wait:
    """Yielded by a statement that needs a row lock."""

    __slots__ = ("key", "mode")

    def __init__(self, table: Table | str, key: Any, mode: str) -> None:
        self.key = (table if isinstance(table, str) else table.name, key)
        self.mode = mode


class Transaction:
    """One transaction; of a single statement, or of several."""

    __slots__ = (
        "appends",
        "began_at",
        "committing",
        "explicit",
        "failed",
        "lock_timeout_s",
        "locks",
        "notes",
        "notifications",
        "quiet",
        "savepoints",
        "server",
        "snapshot",
        "vxid",
        "writes",
        "written",
    )

    def __init__(self, server: Engine, vxid: str, *, explicit: bool) -> None:
        self.server = server
        self.vxid = vxid
        self.explicit = explicit
        self.began_at = server.world.now
        self.writes: dict[Table, dict[Any, Row | None]] = {}
        # Of append-only tables: done when it commits.
        self.appends: list[Callable[[], None]] = []
        self.locks: list[tuple[tuple[str, Any], str]] = []
        self.notifications: dict[tuple[str, str], None] = {}
        self.savepoints: list[tuple[Any, ...]] = []
        self.lock_timeout_s = 0.0
        self.failed = False
        self.committing = False
        # Whether it has an id of its own, because it wrote something.
        self.written = False
        # Under REPEATABLE READ: what it took with its first statement.
        self.snapshot: Any = None
        # Its session does not notify.
        self.quiet = False
        # What a checker should know of it when it commits.
        self.notes: list[tuple[str, Any]] = []

    def get(self, table: Table, key: Any) -> Row | None:
        """A row as this transaction sees it."""
        own = self.writes.get(table)
        if own is not None and key in own:
            return own[key]
        return table.rows.get(key)

    def rows(self, table: Table) -> Iterator[Row]:
        """All rows as this transaction sees them."""
        own = self.writes.get(table)
        if not own:
            yield from list(table.rows.values())
            return
        for key, row in list(table.rows.items()):
            if key not in own:
                yield row
        for mine in list(own.values()):
            if mine is not None:
                yield mine

    def put(self, table: Table, key: Any, row: Row | None) -> None:
        """Insert, replace or (None) delete."""
        self.wrote()
        self.writes.setdefault(table, {})[key] = row

    def change(self, table: Table, key: Any, **values: Any) -> Row:
        """Replace some values of a row that is there."""
        row = self.get(table, key)
        assert row is not None
        new = {**row, **values}
        self.put(table, key, new)
        return new

    def append(self, what: Callable[[], None]) -> None:
        """An insert into an append-only table, seen when it commits."""
        self.wrote()
        self.appends.append(what)

    def wrote(self) -> None:
        """It has an id of its own from now on."""
        if not self.written:
            self.written = True
            self.server.running[self.vxid] = None

    def notify(self, channel: str, payload: str) -> None:
        """Sent when it commits, once."""
        self.wrote()
        self.notifications[channel, payload] = None

    def try_lock(self, table: Table | str, key: Any, mode: str) -> bool:
        """SKIP LOCKED: a lock, or none."""
        name = table if isinstance(table, str) else table.name
        return self.server.try_lock(self, (name, key), mode)

    def savepoint(self) -> None:
        writes = {table: dict(own) for table, own in self.writes.items()}
        self.savepoints.append((writes, len(self.appends), dict(self.notifications)))

    def roll_back_to_savepoint(self) -> None:
        writes, appends, notifications = self.savepoints[-1]
        self.writes = {table: dict(own) for table, own in writes.items()}
        del self.appends[appends:]
        self.notifications = dict(notifications)
        self.failed = False


class Engine:
    """Transactions and locks, without any tables.

    Args:
        rng: for how long things take.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.up = True
        # Transactions with an id whose rows are not visible yet, by vxid.
        self.running: dict[str, None] = {}
        # Who holds the lock of outbox.id's sequence.
        self.holders: dict[str, None] = {}
        self.prepared: dict[str, Transaction] = {}
        self.backends: dict[int, Backend] = {}
        self._locks: dict[tuple[str, Any], list[tuple[Transaction, str]]] = {}
        self._waiting: dict[
            tuple[str, Any], deque[tuple[Transaction, str, Callable[[], None]]]
        ] = {}
        self._pids = 1000
        self._listening: dict[str, dict[int, None]] = {}
        self.statements = 0
        # Called right after each commit became visible.
        self.on_commit: list[Callable[[Transaction], None]] = []

    # ------------------------------------------------------------------ time

    def wall(self) -> float:
        """The server's clock, in epoch seconds."""
        raise NotImplementedError

    def pause_s(self) -> float:
        """How long a part of a statement takes."""
        u = self.rng.random()
        if u < 0.9:
            return u * 0.0005
        return 0.02 * self.rng.random() if u < 0.99 else 0.3 * self.rng.random()

    # ----------------------------------------------------------------- locks

    def try_lock(self, tx: Transaction, key: tuple[str, Any], mode: str) -> bool:
        held = self._locks.get(key)
        if held is not None and any(
            other is not tx and (theirs, mode) in _CONFLICTS for other, theirs in held
        ):
            return False
        # Whoever came first goes first, apart from those that have it already.
        if self._waiting.get(key) and not any(other is tx for other, _ in held or ()):
            return False
        self._grant(tx, key, mode)
        return True

    def _grant(self, tx: Transaction, key: tuple[str, Any], mode: str) -> None:
        self._locks.setdefault(key, []).append((tx, mode))
        tx.locks.append((key, mode))

    def wait_for(
        self, tx: Transaction, key: tuple[str, Any], mode: str, granted: Callable[[], None]
    ) -> None:
        self._waiting.setdefault(key, deque()).append((tx, mode, granted))

    def waits(self, tx: Transaction) -> bool:
        """Whether it waits for a lock."""
        return any(each[0] is tx for queue in self._waiting.values() for each in queue)

    def stop_waiting(self, tx: Transaction) -> None:
        for key, queue in list(self._waiting.items()):
            left = deque(each for each in queue if each[0] is not tx)
            if len(left) != len(queue):
                self._set_waiting(key, left)
                self._pass_on(key)

    def _set_waiting(self, key: tuple[str, Any], queue: deque[Any]) -> None:
        if queue:
            self._waiting[key] = queue
        else:
            self._waiting.pop(key, None)

    def release(self, tx: Transaction) -> None:
        """Let all locks of a transaction go."""
        self.holders.pop(tx.vxid, None)
        keys = dict.fromkeys(key for key, _ in tx.locks)
        tx.locks = []
        for key in keys:
            left = [each for each in self._locks.get(key, ()) if each[0] is not tx]
            if left:
                self._locks[key] = left
            else:
                self._locks.pop(key, None)
            self._pass_on(key)

    def _pass_on(self, key: tuple[str, Any]) -> None:
        while queue := self._waiting.get(key):
            tx, mode, granted = queue[0]
            held = self._locks.get(key, ())
            if any(other is not tx and (theirs, mode) in _CONFLICTS for other, theirs in held):
                return
            queue.popleft()
            self._set_waiting(key, queue)
            self._grant(tx, key, mode)
            granted()

    # ---------------------------------------------------------- transactions

    def apply(self, tx: Transaction) -> None:
        """The commit: everything is visible from this moment on."""
        for table, own in tx.writes.items():
            rows = table.rows
            for key, row in own.items():
                if row is None:
                    rows.pop(key, None)
                else:
                    rows[key] = row
        for append in tx.appends:
            append()
        self.running.pop(tx.vxid, None)
        for watcher in self.on_commit:
            watcher(tx)
        for channel, payload in tx.notifications:
            for pid in self._listening.get(channel, ()):
                self.backends[pid].tell(channel, payload, tx)
        if tx.written:
            self.flushed()

    def flushed(self) -> None:
        """A commit reached the disk, and everything before it."""

    def abort(self, tx: Transaction) -> None:
        """Nothing of it ever happened."""
        self.running.pop(tx.vxid, None)
        self.stop_waiting(tx)
        self.release(tx)

    # -------------------------------------------------------------- sessions

    def session_of(self, tx: Transaction) -> Backend:
        """Whose transaction it is."""
        return self.backends[int(tx.vxid.partition("/")[0])]

    def new_pid(self) -> int:
        """For a session."""
        self._pids += 1
        return self._pids

    def listen(self, backend: Backend, channel: str) -> None:
        self._listening.setdefault(channel, {})[backend.pid] = None

    def unlisten(self, backend: Backend, channel: str) -> None:
        """UNLISTEN."""
        self._listening[channel].pop(backend.pid, None)

    def forget(self, backend: Backend) -> None:
        self.backends.pop(backend.pid, None)
        for pids in self._listening.values():
            pids.pop(backend.pid, None)

    def crash(self) -> None:
        """`pg_ctl stop -m immediate`: whatever is not committed is gone."""
        self.up = False
        for backend in list(self.backends.values()):
            backend.vanish()
        self._locks.clear()
        self._waiting.clear()
        self.running.clear()
        self.holders.clear()
        for number, tx in enumerate(self.prepared.values(), 700):
            # What its transaction was called before is not known any more.
            tx.vxid = f"-1/{number}"
            self.running[tx.vxid] = None
            self.holders[tx.vxid] = None
            for key, mode in tx.locks:
                self._locks.setdefault(key, []).append((tx, mode))
