"""A reference model of PostgreSQL transactions, as far as the cursor depends on them.

Everything that a producer can do between two statements of a batch is a method, so that a
Hypothesis machine and a random walk can interleave the steps. Methods take small integers as
indexes into the possible choices; where nothing is possible they do nothing.

The model has these properties of PostgreSQL:

* A transaction locks the sequence before it allocates, and holds the lock to its end, across
  savepoints and PREPARE TRANSACTION too.
* Its rows become visible to others *before* it releases its locks.
* `pg_locks` is not read atomically: a transaction that begins or ends during the scan may or
  may not be in the result.
* PREPARE keeps the name of the holder, or changes it to `-1/xid` (14.0). A crash always changes
  the name, ends every other transaction, and skips ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.core.sequencing.gaps import LockHolders


class Stage(Enum):
    OPEN = auto()
    PREPARED = auto()
    VISIBLE = auto()
    """Committed for every new snapshot, but its locks are still held."""


@dataclass(frozen=True)
class Row:
    id: int
    key: int
    after: frozenset[int]
    """Ids of the same key that were committed when the INSERT of this row began."""


@dataclass(eq=False)
class Transaction:
    name: str
    stage: Stage = Stage.OPEN
    holds: bool = False
    """The transaction holds the lock on the sequence."""
    rows: list[Row] = field(default_factory=list)
    wrote: bool = False
    """The transaction has an xid: it wrote a row, which may have been rolled back."""
    savepoints: list[int] = field(default_factory=list)
    insert: tuple[int, frozenset[int]] | None = None
    """The INSERT in progress: its key, and the ids that were committed before it."""


class LockScan:
    """A scan of `pg_locks`, which is not atomic."""

    def __init__(self, present: LockHolders, running: LockHolders) -> None:
        self._throughout = set(present)
        self._at_times = set(present)
        self._running_at_start = running

    def acquired(self, name: str) -> None:
        self._at_times.add(name)

    def released(self, name: str) -> None:
        self._throughout.discard(name)

    def renamed(self, name: str, new_name: str) -> None:
        # A lock changes its owner atomically, so a scan always sees one of the two names.
        self._at_times.add(new_name)
        if name in self._throughout:
            self._throughout.remove(name)
            self._throughout.add(new_name)

    def holders(self, choice: int) -> LockHolders:
        """Return the observed holders; the bits of `choice` decide about transactions that began or
        ended during the scan.
        """
        uncertain = sorted(self._at_times - self._throughout)
        return frozenset(self._throughout).union(
            name for n, name in enumerate(uncertain) if choice >> n & 1
        )

    def running(self, holders: LockHolders) -> LockHolders:
        """Return the holders whose rows were invisible to a snapshot taken when the scan began."""
        return holders & self._running_at_start


class Database:
    """The outbox table, its sequence, and the producers."""

    def __init__(
        self, *, transactions_max: int = 6, keys: int = 1, prepare_renames: bool = False
    ) -> None:
        self.transactions: list[Transaction] = []
        self.visible: dict[int, Row] = {}
        self.last_id = 0
        self.ends = 0
        """Counts commits becoming visible, released locks, and renamed holders."""
        self._transactions_max = transactions_max
        self._keys = keys
        self._prepare_renames = prepare_renames
        self._numbers = count(1)
        self._lock_scans: list[LockScan] = []

    # ------------------------------------------------------------ visibility

    def in_stage(self, *stages: Stage) -> list[Transaction]:
        return [t for t in self.transactions if t.stage in stages]

    @property
    def idle(self) -> list[Transaction]:
        """Open transactions between two statements."""
        return [t for t in self.in_stage(Stage.OPEN) if t.insert is None]

    @property
    def holders(self) -> LockHolders:
        return frozenset(t.name for t in self.transactions if t.holds)

    @property
    def running(self) -> LockHolders:
        """Holders with an xid that a new snapshot considers in progress."""
        return frozenset(
            t.name for t in self.in_stage(Stage.OPEN, Stage.PREPARED) if t.holds and t.wrote
        )

    def rows_to_come(self) -> Iterator[Row]:
        """Rows that would be committed if every transaction committed."""
        for t in self.in_stage(Stage.OPEN, Stage.PREPARED):
            yield from t.rows

    def scan_locks(self) -> LockScan:
        """Begin a scan of the locks; `end_lock_scan` ends it."""
        scan = LockScan(self.holders, self.running)
        self._lock_scans.append(scan)
        return scan

    def end_lock_scan(self, scan: LockScan) -> None:
        self._lock_scans.remove(scan)

    # ---------------------------------------------------------------- events

    def begin(self) -> None:
        if len(self.transactions) < self._transactions_max:
            self._open()

    def insert(self, i: int, key: int) -> None:
        """Begin an INSERT, which locks the sequence."""
        if idle := self.idle:
            self._begin_insert(idle[i % len(idle)], key)

    def allocate(self, i: int, ids: int) -> None:
        """Allocate ids and write the rows of the INSERT in progress."""
        if busy := [t for t in self.in_stage(Stage.OPEN) if t.insert is not None]:
            self._finish_insert(busy[i % len(busy)], ids)

    def start(self, key: int, ids: int) -> None:
        """Begin a transaction with an INSERT."""
        if len(self.transactions) < self._transactions_max:
            t = self._open()
            self._begin_insert(t, key)
            self._finish_insert(t, ids)

    def finish(self, i: int) -> None:
        """Commit a transaction and release its locks."""
        if able := [*self.idle, *self.in_stage(Stage.PREPARED)]:
            t = able[i % len(able)]
            self._make_visible(t)
            self._end(t)

    def publish(self, key: int) -> None:
        """Execute a whole transaction, regardless of the limit on open ones."""
        t = self._open()
        self._begin_insert(t, key)
        self._finish_insert(t, 1)
        self._make_visible(t)
        self._end(t)

    def skip_ids(self, ids: int) -> None:
        """Skip ids with setval."""
        self.last_id += ids

    def savepoint(self, i: int) -> None:
        if idle := self.idle:
            t = idle[i % len(idle)]
            t.savepoints.append(len(t.rows))

    def rollback_to_savepoint(self, i: int) -> None:
        if marked := [t for t in self.in_stage(Stage.OPEN) if t.savepoints]:
            t = marked[i % len(marked)]
            del t.rows[t.savepoints.pop() :]
            t.insert = None

    def prepare(self, i: int) -> None:
        if idle := [t for t in self.idle if t.wrote]:
            t = idle[i % len(idle)]
            t.stage = Stage.PREPARED
            if self._prepare_renames:
                self._rename(t)

    def commit(self, i: int) -> None:
        """Make the rows visible; the locks are still held."""
        if able := [*self.idle, *self.in_stage(Stage.PREPARED)]:
            self._make_visible(able[i % len(able)])

    def release(self, i: int) -> None:
        """Release the locks of a committed transaction."""
        if done := self.in_stage(Stage.VISIBLE):
            self._end(done[i % len(done)])

    def rollback(self, i: int) -> None:
        if unfinished := self.in_stage(Stage.OPEN, Stage.PREPARED):
            self._end(unfinished[i % len(unfinished)])

    def crash(self, skipped: int) -> None:
        """Crash the server and recover it; some ids are never allocated."""
        for t in list(self.transactions):
            if t.stage is Stage.PREPARED:
                self._rename(t)
            else:
                self._end(t)
        self.last_id += skipped

    def end_all(self, commits: int) -> None:
        """End every transaction; the bits of `commits` decide which of them commit."""
        for n, t in enumerate(list(self.transactions)):
            if t.stage is not Stage.VISIBLE and t.insert is None and commits >> n & 1:
                self._make_visible(t)
            self._end(t)

    # ------------------------------------------------------------- internals

    def _open(self) -> Transaction:
        t = Transaction(f"3/{next(self._numbers)}")
        self.transactions.append(t)
        return t

    def _begin_insert(self, t: Transaction, key: int) -> None:
        key %= self._keys
        t.insert = (key, frozenset(i for i, row in self.visible.items() if row.key == key))
        if not t.holds:
            t.holds = True
            for scan in self._lock_scans:
                scan.acquired(t.name)

    def _finish_insert(self, t: Transaction, ids: int) -> None:
        assert t.insert is not None
        key, after = t.insert
        t.insert = None
        t.wrote = True
        for _ in range(ids):
            self.last_id += 1
            t.rows.append(Row(self.last_id, key, after))

    def _make_visible(self, t: Transaction) -> None:
        t.stage = Stage.VISIBLE
        self.visible |= {row.id: row for row in t.rows}
        self.ends += 1

    def _end(self, t: Transaction) -> None:
        self.transactions.remove(t)
        self.ends += 1
        for scan in self._lock_scans:
            scan.released(t.name)

    def _rename(self, t: Transaction) -> None:
        name, t.name = t.name, f"-1/{next(self._numbers)}"
        self.ends += 1
        if t.holds:
            for scan in self._lock_scans:
                scan.renamed(name, t.name)
