"""Transactions and row locks of the simulated server.

A statement is a generator.  It yields where time may pass or where it waits for a lock,
and other statements are executed meanwhile.  The writes of a transaction are visible to
no other transaction until it commits.  The commit makes all of them visible at one moment, and
releases the locks some time later, as in PostgreSQL.

A read sees what is committed at its time (READ COMMITTED; one step of a generator is
one snapshot), and the writes of its own transaction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, TypeVar

import asyncpg

from outbox.store.errors import ABORTED

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

    from tests.sim.clockwork import World
    from tests.sim.database.backend import Backend

    R = TypeVar("R")

    Row = dict[str, Any]
    Steps = Generator[Any, Any, R]
    """A statement that yields where time may pass, and returns its result."""

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


def perform(result: Any) -> Steps[Any]:
    """The steps of one of several statements in a message, which may be none."""
    if isinstance(result, Generator):
        result = yield from result
    return result


def abort_unless(condition: bool) -> None:
    """Abort the message unless a condition holds, as the SQL function of this name does."""
    if not condition:
        error = asyncpg.PostgresError("a condition does not hold")
        error.sqlstate = ABORTED
        raise error


class Table:
    """Committed rows by key; a row is replaced, and never changed in place."""

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
    """One transaction, of one statement or of several."""

    __slots__ = (
        "appends",
        "began_at",
        "committing",
        "durable",
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
        # Inserts into append-only tables, executed by the commit.
        self.appends: list[Callable[[], None]] = []
        self.locks: list[tuple[tuple[str, Any], str]] = []
        self.notifications: dict[tuple[str, str], None] = {}
        self.savepoints: list[tuple[Any, ...]] = []
        self.lock_timeout_s = 0.0
        self.failed = False
        self.committing = False
        # Whether its commit waits for the disk.
        self.durable = True
        # Whether it has an id, because it wrote something.
        self.written = False
        # Under REPEATABLE READ: the snapshot of its first statement.
        self.snapshot: Any = None
        # Its session sends no notifications.
        self.quiet = False
        # Changes, for the checkers, when it commits.
        self.notes: list[tuple[str, Any]] = []

    def get(self, table: Table, key: Any) -> Row | None:
        """A row that this transaction sees; None: there is none."""
        own = self.writes.get(table)
        if own is not None and key in own:
            return own[key]
        return table.rows.get(key)

    def rows(self, table: Table) -> Iterator[Row]:
        """All rows that this transaction sees."""
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
        """Insert, replace or (None) delete a row."""
        self.wrote()
        self.writes.setdefault(table, {})[key] = row

    def change(self, table: Table, key: Any, **values: Any) -> Row:
        """Replace some values of an existing row."""
        row = self.get(table, key)
        assert row is not None
        new = {**row, **values}
        self.put(table, key, new)
        return new

    def append(self, what: Callable[[], None]) -> None:
        """Insert into an append-only table when the transaction commits."""
        self.wrote()
        self.appends.append(what)

    def wrote(self) -> None:
        """Give the transaction an id."""
        if not self.written:
            self.written = True
            self.server.running[self.vxid] = None

    def notify(self, channel: str, payload: str) -> None:
        """Send a notification, once, when the transaction commits."""
        self.wrote()
        self.notifications[channel, payload] = None

    def try_lock(self, table: Table | str, key: Any, mode: str) -> bool:
        """Lock a row unless that has to wait (SKIP LOCKED)."""
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
        rng: for the durations.
    """

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self.up = True
        # The transactions with an id whose rows are not visible yet, by vxid.
        self.running: dict[str, None] = {}
        # The transactions that hold the lock of the sequence of outbox.id.
        self.holders: dict[str, None] = {}
        self.prepared: dict[str, Transaction] = {}
        self.backends: dict[int, Backend] = {}
        self._locks: dict[tuple[str, Any], list[tuple[Transaction, str]]] = {}
        self._waiting: dict[
            tuple[str, Any], deque[tuple[Transaction, str, Callable[[], None]]]
        ] = {}
        self._pids = 1000
        # The rows before the commits that did not wait for the disk: table, key, row.
        self.unflushed: list[tuple[Table, Any, Row | None]] = []
        self._listening: dict[str, dict[int, None]] = {}
        self.statements = 0
        # Messages that the proof of absence aborted, because its second read found an event.
        self.proof_aborts = 0
        # Called when a lock is granted to a statement that has waited for it, in seconds.
        self.on_granted: list[Callable[[Wait, float], None]] = []
        # Called when a commit has become visible.
        self.on_commit: list[Callable[[Transaction], None]] = []

    # ------------------------------------------------------------------ time

    def wall(self) -> float:
        """The server's clock, in epoch seconds."""
        raise NotImplementedError

    def pause_s(self) -> float:
        """The duration of a part of a statement."""
        u = self.rng.random()
        if u < 0.9:
            return u * 0.0005
        return 0.02 * self.rng.random() if u < 0.99 else 0.3 * self.rng.random()

    # ----------------------------------------------------------------- locks

    def holder_of(self, key: tuple[str, Any], tx: Transaction) -> Transaction | None:
        """Another transaction that holds a row."""
        return next((t for t, _ in self._locks.get(key, ()) if t is not tx), None)

    def try_lock(self, tx: Transaction, key: tuple[str, Any], mode: str) -> bool:
        held = self._locks.get(key)
        if held is not None and any(
            other is not tx and (theirs, mode) in _CONFLICTS for other, theirs in held
        ):
            return False
        # A transaction that waits goes first, unless this one holds the lock already.
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
        """Whether the transaction waits for a lock."""
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
        """Release all locks of a transaction."""
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
        """Commit: make everything visible at this moment."""
        if not tx.durable:
            self.unflushed += [
                (table, key, table.rows.get(key)) for table, own in tx.writes.items() for key in own
            ]
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
                self.backends[pid].send_notification(channel, payload, tx)
        if tx.written and tx.durable:
            self.flushed()

    def flushed(self) -> None:
        """A commit, and everything before it, has reached the disk."""
        self.unflushed.clear()

    def lose_unflushed(self) -> None:
        """A crash loses the commits that did not wait for the disk."""
        for table, key, row in reversed(self.unflushed):
            if row is None:
                table.rows.pop(key, None)
            else:
                table.rows[key] = row
        self.unflushed.clear()

    def abort(self, tx: Transaction) -> None:
        """Roll back a transaction."""
        self.running.pop(tx.vxid, None)
        self.stop_waiting(tx)
        self.release(tx)

    # -------------------------------------------------------------- sessions

    def session_of(self, tx: Transaction) -> Backend:
        """The session of a transaction."""
        return self.backends[int(tx.vxid.partition("/")[0])]

    def new_pid(self) -> int:
        """The id of a new session."""
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
        """Crash as by `pg_ctl stop -m immediate`: what is not committed is lost."""
        self.up = False
        for backend in list(self.backends.values()):
            backend.vanish()
        self._locks.clear()
        self._waiting.clear()
        self.running.clear()
        self.holders.clear()
        for number, tx in enumerate(self.prepared.values(), 700):
            # A prepared transaction has another vxid after a restart.
            tx.vxid = f"-1/{number}"
            self.running[tx.vxid] = None
            self.holders[tx.vxid] = None
            for key, mode in tx.locks:
                self._locks.setdefault(key, []).append((tx, mode))
