"""A reference model of PostgreSQL transactions, as far as the cursor depends on them.

Everything that a producer can do between two statements of a batch is a method
here, so that a Hypothesis machine and a plain random driver can interleave it
at will.  Methods take small integers and pick by them among what there is;
where nothing is possible they do nothing.

What the model knows of PostgreSQL:

* a transaction takes the sequence's lock before it allocates, and keeps it to
  its end, over savepoints and PREPARE TRANSACTION too;
* its rows are visible to others *before* it lets go of its locks;
* `pg_locks` is not read at one moment: who came or went meanwhile may be in it
  or not;
* PREPARE keeps the name of the holder, or changes it to `-1/xid` (14.0); a
  crash always changes it, ends every other transaction, and skips ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from outbox.core.sequencing.gaps import Holders


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
    """Ids of the same key that were committed when its INSERT began."""


@dataclass(eq=False)
class Transaction:
    name: str
    stage: Stage = Stage.OPEN
    holds: bool = False
    """It has the sequence's lock."""
    rows: list[Row] = field(default_factory=list)
    wrote: bool = False
    """It has a transaction id: it wrote a row, which may be rolled back by now."""
    savepoints: list[int] = field(default_factory=list)
    insert: tuple[int, frozenset[int]] | None = None
    """The INSERT that is under way: its key, and what it came after."""


class Look:
    """One look at `pg_locks`, which takes a while."""

    def __init__(self, present: Holders, running: Holders) -> None:
        self._throughout = set(present)
        self._at_times = set(present)
        self._running_at_start = running

    def came(self, name: str) -> None:
        self._at_times.add(name)

    def went(self, name: str) -> None:
        self._throughout.discard(name)

    def renamed(self, name: str, new_name: str) -> None:
        # A lock changes hands at one moment, so one of the two is always seen.
        self._at_times.add(new_name)
        if name in self._throughout:
            self._throughout.remove(name)
            self._throughout.add(new_name)

    def holders(self, choice: int) -> Holders:
        """What it saw; the bits of `choice` decide about who came or went meanwhile."""
        doubtful = sorted(self._at_times - self._throughout)
        return frozenset(self._throughout).union(
            name for n, name in enumerate(doubtful) if choice >> n & 1
        )

    def running(self, holders: Holders) -> Holders:
        """Those whose rows were invisible to a snapshot taken when the look began."""
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
        """How often a transaction became visible, let go of its locks, or changed its name."""
        self._transactions_max = transactions_max
        self._keys = keys
        self._prepare_renames = prepare_renames
        self._numbers = count(1)
        self._looks: list[Look] = []

    # ---------------------------------------------------------------- seeing

    def of(self, *stages: Stage) -> list[Transaction]:
        return [t for t in self.transactions if t.stage in stages]

    @property
    def idle(self) -> list[Transaction]:
        """Open ones that are between two statements."""
        return [t for t in self.of(Stage.OPEN) if t.insert is None]

    @property
    def holders(self) -> Holders:
        return frozenset(t.name for t in self.transactions if t.holds)

    @property
    def running(self) -> Holders:
        """Holders with a transaction id that a new snapshot takes for unfinished."""
        return frozenset(t.name for t in self.of(Stage.OPEN, Stage.PREPARED) if t.holds and t.wrote)

    def rows_to_come(self) -> Iterator[Row]:
        """What would be committed if every transaction were."""
        for t in self.of(Stage.OPEN, Stage.PREPARED):
            yield from t.rows

    def look(self) -> Look:
        """Begin to look at the locks; `looked` ends it."""
        look = Look(self.holders, self.running)
        self._looks.append(look)
        return look

    def looked(self, look: Look) -> None:
        self._looks.remove(look)

    # ------------------------------------------------------- what can happen

    def begin(self) -> None:
        if len(self.transactions) < self._transactions_max:
            self._open()

    def insert(self, i: int, key: int) -> None:
        """An INSERT begins, and takes the sequence's lock."""
        if idle := self.idle:
            self._begin_insert(idle[i % len(idle)], key)

    def allocate(self, i: int, ids: int) -> None:
        """The INSERT that is under way allocates ids and writes its rows."""
        if busy := [t for t in self.of(Stage.OPEN) if t.insert is not None]:
            self._finish_insert(busy[i % len(busy)], ids)

    def start(self, key: int, ids: int) -> None:
        """A transaction begins, and inserts."""
        if len(self.transactions) < self._transactions_max:
            t = self._open()
            self._begin_insert(t, key)
            self._finish_insert(t, ids)

    def finish(self, i: int) -> None:
        """A transaction commits, and lets go of its locks."""
        if able := [*self.idle, *self.of(Stage.PREPARED)]:
            t = able[i % len(able)]
            self._make_visible(t)
            self._end(t)

    def publish(self, key: int) -> None:
        """A whole transaction, which no limit keeps out."""
        t = self._open()
        self._begin_insert(t, key)
        self._finish_insert(t, 1)
        self._make_visible(t)
        self._end(t)

    def burn(self, ids: int) -> None:
        """setval: ids that belong to nobody."""
        self.last_id += ids

    def savepoint(self, i: int) -> None:
        if idle := self.idle:
            t = idle[i % len(idle)]
            t.savepoints.append(len(t.rows))

    def rollback_to_savepoint(self, i: int) -> None:
        if marked := [t for t in self.of(Stage.OPEN) if t.savepoints]:
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
        """The rows become visible; the locks are still held."""
        if able := [*self.idle, *self.of(Stage.PREPARED)]:
            self._make_visible(able[i % len(able)])

    def release(self, i: int) -> None:
        """A committed transaction lets go of its locks."""
        if done := self.of(Stage.VISIBLE):
            self._end(done[i % len(done)])

    def rollback(self, i: int) -> None:
        if unfinished := self.of(Stage.OPEN, Stage.PREPARED):
            self._end(unfinished[i % len(unfinished)])

    def crash(self, skipped: int) -> None:
        """The server crashes and recovers; some ids are never allocated."""
        for t in list(self.transactions):
            if t.stage is Stage.PREPARED:
                self._rename(t)
            else:
                self._end(t)
        self.last_id += skipped

    def end_all(self, commits: int) -> None:
        """Every transaction ends; the bits of `commits` say which of them commit."""
        for n, t in enumerate(list(self.transactions)):
            if t.stage is not Stage.VISIBLE and t.insert is None and commits >> n & 1:
                self._make_visible(t)
            self._end(t)

    # ---------------------------------------------------------------- inside

    def _open(self) -> Transaction:
        t = Transaction(f"3/{next(self._numbers)}")
        self.transactions.append(t)
        return t

    def _begin_insert(self, t: Transaction, key: int) -> None:
        key %= self._keys
        t.insert = (key, frozenset(i for i, row in self.visible.items() if row.key == key))
        if not t.holds:
            t.holds = True
            for look in self._looks:
                look.came(t.name)

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
        for look in self._looks:
            look.went(t.name)

    def _rename(self, t: Transaction) -> None:
        name, t.name = t.name, f"-1/{next(self._numbers)}"
        self.ends += 1
        if t.holds:
            for look in self._looks:
                look.renamed(name, t.name)
