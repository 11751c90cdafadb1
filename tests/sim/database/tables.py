"""The tables and sequences of the schema, as the simulated server keeps them.

What is only ever appended to is kept as lists, by lane where it is read by lane.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from asyncpg import InFailedSQLTransactionError

from outbox.core.sequencing import partition_window
from tests.sim.database.engine import Engine, Table

if TYPE_CHECKING:
    import random
    from collections.abc import Callable
    from uuid import UUID

    from outbox.core.sequencing.partition_window import Kind
    from tests.sim.clockwork import World
    from tests.sim.database.backend import Backend
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction

SCHEMA = "relay"
AWAKE = 1
KINDS: tuple[Kind, ...] = ("events", "log")
LOGGED_AHEAD = 32
"""Values of a sequence that a crash may skip."""


class Event(NamedTuple):
    """A row of outbox."""

    id: int
    event_id: UUID
    type: str
    key: str | None
    payload: str
    created_at: datetime
    expires_at: datetime | None
    spread: int


class Given(NamedTuple):
    """A row of delivery, without its lane."""

    batch: int
    seq: int
    outbox_id: int
    replay_id: int | None
    replay_seq: int | None
    backfill_id: int | None
    copy_id: int | None
    was_backfill_id: int | None

    @property
    def again(self) -> bool:
        """It is not the event's first delivery to its endpoint."""
        return self.replay_id is not None or self.backfill_id is not None


class Tried(NamedTuple):
    """A row of attempt, without its lane."""

    batch: int
    seq: int
    attempt: int
    outcome: str
    replica_id: int
    started_at: datetime
    elapsed_ms: float


class Batch(NamedTuple):
    """A row of batch."""

    batch: int
    high: int
    young: tuple[tuple[int, int], ...]
    found: tuple[tuple[int, int], ...]
    dead: tuple[tuple[int, int], ...]
    lanes: tuple[int, ...]
    writer: int | None
    at: datetime
    committed_after: datetime | None = None


@dataclass
class Network:
    """What lies between a process and the server."""

    usual_s: float = 0.0005
    """A message is on its way for about so long."""
    stalled_until: float = 0.0
    """Nothing gets through before; it is not lost, either."""
    answers_stalled_until: float = 0.0
    """The same, of what the server says."""


class Database(Engine):
    """The server with the schema in it, empty but for what a migration leaves.

    Args:
        skew_s: how far its clock is from the true one.
    """

    def __init__(self, world: World, rng: random.Random, skew_s: float = 0.0) -> None:
        super().__init__(world, rng)
        self.skew_s = skew_s
        self.connections: list[Connection] = []
        self.networks: dict[str, Network] = {}
        # Whether sessions can be ended by others; behind a pooler they cannot.
        self.signals = True
        # ------------------------------------------------------- the outbox
        self.outbox: dict[int, Event] = {}
        self.outbox_ids: list[int] = []
        self.last_id = 0
        self.wakeup = AWAKE
        self.wakeup_on_disk = AWAKE
        # -------------------------------------------------------- the relay
        self.cursor = Table("cursor")
        self.cursor.rows[1] = {
            "writer": None,
            "version": 1,
            "erasures": 0,
            "lagging": False,
            "lagging_at": None,
        }
        self.gap = Table("gap")
        self.endpoint = Table("endpoint")
        self.endpoint_health = Table("endpoint_health")
        self.subscription = Table("subscription")
        self.lane = Table("lane")
        self.lane_counter = Table("lane_counter")
        self.lane_progress = Table("lane_progress")
        self.lane_block = Table("lane_block")
        self.dead_letter = Table("dead_letter")
        self.replay_job = Table("replay_job")
        self.replay_part = Table("replay_part")
        self.replay = Table("replay")
        self.replica = Table("replica")
        self.ownership = Table("ownership")
        self.schedule = Table("schedule")
        self.future_event = Table("future_event")
        # The application's own: a counter for each key.
        self.domain = Table("domain")
        self.batches: list[Batch] = [
            Batch(0, 0, (), (), (), (), None, datetime.fromtimestamp(world.EPOCH_S, UTC))
        ]
        # ---------------------------------------------------------- retention
        # Whether anything is dropped in this run.
        self.maintained = False
        self.period = Table("period")
        for kind in KINDS:
            self.period.rows[kind, 0] = self.new_period(kind, 0)
        # The lowest id whose event is kept.
        self.first_id = 0
        # For the checkers, of a log that is gone: the numbers of lanes that were
        # delivered, and what all of them were.
        self.old_successes: dict[int, set[int]] = {}
        self.old_given: dict[tuple[int, int], Given] = {}
        self.deliveries: dict[int, list[Given]] = {}
        self.attempts: dict[int, list[Tried]] = {}
        self.journal: list[tuple[float, str, str, UUID | None, Any]] = []
        # Called with the session that has found something due.
        self.on_tick: list[Callable[[str], None]] = []
        # Called with the session that has locked a replica, to free what that owns.
        self.on_burial: list[Callable[[Backend], None]] = []
        # Hashes of keys, where it matters which ones they are.
        self.spreads: dict[str, int] = {}
        self._serials: dict[str, int] = {}
        # Answers that a mutant gives in place of ours.
        self.changed: dict[str, Any] = {}

    # ------------------------------------------------------------------ time

    def wall(self) -> float:
        return self.world.wall() + self.skew_s

    def clock_timestamp(self) -> datetime:
        return datetime.fromtimestamp(self.wall(), UTC)

    def later(self, seconds: float) -> datetime:
        return datetime.fromtimestamp(self.wall() + seconds, UTC)

    # ------------------------------------------------------------- sequences

    def flag_seen_by(self, tx: Transaction) -> int:
        """The wake-up flag: a sequence, whose value no snapshot hides."""
        return self.wakeup

    def serial(self, table: Table) -> int:
        """The next id of a table; never given back."""
        n = self._serials[table.name] = self._serials.get(table.name, 0) + 1
        return n

    def flushed(self) -> None:
        self.wakeup_on_disk = self.wakeup

    def crash(self) -> None:
        super().crash()
        self.last_id += self.rng.randrange(LOGGED_AHEAD)
        # Set without waiting for the disk.
        if self.rng.random() < 0.5:
            self.wakeup = self.wakeup_on_disk

    # ------------------------------------------------------------- retention

    def new_period(self, kind: Kind, number: int) -> dict[str, Any]:
        """A row of period that begins now."""
        row: dict[str, Any] = {"kind": kind, "number": number, "began_at": self.wall()}
        return {**row, "ended_at": None, "last_batch": None, "dropped": False}

    def drop_below(self, kind: Kind, number: int) -> None:
        """The partitions of all periods below that one are gone."""
        first = number * partition_window.WIDTH
        if kind == "events":
            self.first_id = first
            del self.outbox_ids[: bisect_left(self.outbox_ids, first)]
            return
        for lane_id, tried in self.attempts.items():
            gone = {a.seq for a in tried if a.batch < first and a.outcome == "delivered"}
            self.old_successes.setdefault(lane_id, set()).update(gone)
            self.attempts[lane_id] = [a for a in tried if a.batch >= first]
        for lane_id, given in self.deliveries.items():
            self.old_given |= {(lane_id, g.seq): g for g in given if g.batch < first}
            self.deliveries[lane_id] = [g for g in given if g.batch >= first]

    def given(self, lane_id: int, seq: int) -> Given:
        """A number of a lane, whenever it was given."""
        old = self.old_given.get((lane_id, seq))
        if old is not None:
            return old
        kept = self.deliveries[lane_id]
        return kept[bisect_left(kept, seq, key=lambda g: g.seq)]

    def batch(self, number: int) -> Batch:
        """A batch by its number; there are holes where periods begin."""
        return self.batches[bisect_left(self.batches, number, key=lambda b: b.batch)]

    # --------------------------------------------------------------- inserts

    def add_event(self, event: Event) -> None:
        self.outbox[event.id] = event
        insort(self.outbox_ids, event.id)

    def spread_of(self, key: str) -> int:
        """A hash of a key; any will do that is always the same."""
        return self.spreads.get(key) or crc32(key.encode())

    # ------------------------------------------------------------- two phases

    def prepare(self, gid: str, backend: Backend) -> None:
        """PREPARE TRANSACTION: it is nobody's session's any more, and survives a crash."""
        tx = backend.transaction
        if tx is None or tx.failed:
            backend.client.answer(None, InFailedSQLTransactionError("the transaction is aborted"))
            return
        backend.end_transaction()
        self.prepared[gid] = tx
        backend.client.answer("PREPARE TRANSACTION", None)

    def end_prepared(self, gid: str, commit: bool, backend: Backend) -> None:
        """COMMIT PREPARED or ROLLBACK PREPARED; done before is as good."""
        tx = self.prepared.pop(gid, None)
        if tx is None:
            backend.client.answer("COMMIT PREPARED", None)
        elif commit:
            tx.explicit = False
            backend.commit(tx)
        else:
            self.abort(tx)
            backend.client.answer("ROLLBACK PREPARED", None)

    # --------------------------------------------------------------- network

    def network_of(self, process: str) -> Network:
        """The way from this process."""
        return self.networks.setdefault(process, Network())

    def stalled_until(self, process: str) -> float:
        """When all that this process has said is heard and done."""
        own = (c.backend for c in self.connections if c.process.name == process)
        stalls = [b.stalled_until for b in own if b is not None and b.alive]
        return max(self.world.now, self.network_of(process).stalled_until, *stalls)

    def network_s(self, process: str, *, answers: bool = False) -> float:
        """How long a message of this process, or to it, is on its way from now on."""
        network = self.network_of(process)
        u = self.rng.random()
        trip_s = 2 * network.usual_s * u if u < 0.98 else 0.05 * self.rng.random()
        until = network.stalled_until
        if answers and network.answers_stalled_until > until:
            until = network.answers_stalled_until
        late_s = until - self.world.now
        return trip_s + late_s if late_s > 0 else trip_s
