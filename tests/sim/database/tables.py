"""The tables and sequences of the simulated server.

Append-only tables are lists, by lane where they are read by lane.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID
from zlib import crc32

from asyncpg import InFailedSQLTransactionError

from outbox.core.cluster.observed_time import Odometer
from outbox.core.sequencing import partition_window
from tests.sim.database.engine import Engine, Table

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from outbox.core.model.int_ranges import Range
    from outbox.core.sequencing.partition_window import WindowKind
    from tests.sim.clockwork import World
    from tests.sim.database.backend import Backend
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction

SCHEMA = "relay"
AWAKE = 1
KINDS: tuple[WindowKind, ...] = ("events", "log")
LOGGED_AHEAD = 32
"""Maximum number of values of a sequence that a crash skips."""


class Event(NamedTuple):
    """A row of outbox."""

    id: int
    event_id: UUID
    type: str
    key: str | None
    payload: str
    created_at: datetime
    expires_at: datetime | None
    key_hash: int


class Given(NamedTuple):
    """A row of delivery, without its lane."""

    batch: int
    seq: int
    outbox_id: int
    replay_id: int | None
    replay_seq: int | None
    backfill_id: int | None
    copy_id: int | None
    feed_id: int | None

    @property
    def again(self) -> bool:
        """Whether it is not the first delivery of its event to its endpoint."""
        return self.replay_id is not None or self.backfill_id is not None


class Tried(NamedTuple):
    """A row of attempt, without its lane."""

    batch: int
    seq: int
    attempt: int
    outcome: str
    replica_id: int
    started_at: float
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
    events: int = 0


@dataclass
class Network:
    """The network between a process and the server."""

    usual_s: float = 0.0005
    """The mean duration of a message."""
    stalled_until: float = 0.0
    """No message arrives before; none is lost."""
    responses_stalled_until: float = 0.0
    """The same for the messages of the server."""


class Database(Engine):
    """The server with the schema, and the rows of a migration.

    Args:
        skew_s: the error of its clock.
    """

    def __init__(self, world: World, rng: random.Random, skew_s: float = 0.0) -> None:
        super().__init__(world, rng)
        self.skew_s = skew_s
        self.connections: list[Connection] = []
        self.networks: dict[str, Network] = {}
        # Whether a session can terminate others; behind a pooler it cannot.
        self.signals = True
        # Of the cluster and the database; a database that is restored has another one.
        self.identity = "1/1"
        self.restores = 0
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
            "identity": None,
            "incarnation": UUID(int=0),
        }
        self.lag_report = Table("lag_report")
        self.lag_report.rows[1] = {"lagging": False, "lagging_at": None}
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
        self.replay_job_endpoint = Table("replay_job_endpoint")
        self.replay = Table("replay")
        self.feed = Table("feed")
        self.feed_step = Table("feed_step")
        self.replica = Table("replica")
        self.odometer = Table("odometer")
        self.odometer.rows[1] = {"seconds": 0.0, "adder": None, "began_s": 0.0}
        self.odometer_mark = Table("odometer_mark")
        self.odometer_mark.rows[0.0] = {"seconds": 0.0, "at": self.wall()}
        self.ownership = Table("ownership")
        self.schedule = Table("schedule")
        self.future_event = Table("future_event")
        self.tenant_share = Table("tenant_share")
        self.idempotency_key = Table("idempotency_key")
        # A table of the application, with a counter for each key.
        self.domain = Table("domain")
        self.batches: list[Batch] = [
            Batch(0, 0, (), (), (), (), None, datetime.fromtimestamp(world.EPOCH_S, UTC))
        ]
        # ---------------------------------------------------------- retention
        # Whether periods are dropped in this run.
        self.maintained = False
        self.period = Table("period")
        for kind in KINDS:
            self.period.rows[kind, 0] = self.new_period(kind, 0)
        # The lowest id whose event is kept.
        self.first_id = 0
        # For the checkers, of dropped periods: the sequence numbers of lanes that were
        # delivered, and all deliveries.
        self.old_successes: dict[int, set[int]] = {}
        self.old_given: dict[tuple[int, int], Given] = {}
        self.deliveries: dict[int, list[Given]] = {}
        self.attempts: dict[int, list[Tried]] = {}
        self.journal: list[tuple[float, str, str, UUID | None, Any]] = []
        # The changes by operators, by request id, each with the data of its first entry.
        self.journalled = Table("journalled")
        # Called with the name of a session that has found a schedule due.
        self.on_tick: list[Callable[[str], None]] = []
        # By the name of a step of a store: called with the connection before each execution.
        self.before_step: dict[str, Callable[[Connection], None]] = {}
        # Hashes of keys, where they must equal those of a real server.
        self.key_hashes: dict[str, int] = {}
        self.serials: dict[str, int] = {}

    # ------------------------------------------------------------------ time

    def wall(self) -> float:
        return self.world.wall() + self.skew_s

    def clock_timestamp(self) -> datetime:
        return datetime.fromtimestamp(self.wall(), UTC)

    def later(self, seconds: float) -> datetime:
        return datetime.fromtimestamp(self.wall() + seconds, UTC)

    def open_gaps(self, tx: Transaction) -> list[Range]:
        """The ids up to the newest batch's `high` that are not sequenced, in ascending order."""
        old = ((gap["lo"], gap["hi"]) for gap in tx.rows(self.gap))
        return sorted([*self.batches[-1].young, *old])

    # ------------------------------------------------------------- sequences

    def flag_seen_by(self, tx: Transaction) -> int:
        """The wake-up flag, a sequence: every snapshot sees its newest value."""
        return self.wakeup

    def serial(self, table: Table) -> int:
        """The next id of a table; no rollback returns it."""
        n = self.serials[table.name] = self.serials.get(table.name, 0) + 1
        return n

    def flushed(self) -> None:
        super().flushed()
        self.wakeup_on_disk = self.wakeup

    def crash(self) -> None:
        super().crash()
        self.last_id += self.rng.randrange(LOGGED_AHEAD)
        # Its write does not wait for the disk.
        if self.rng.random() < 0.5:
            self.wakeup = self.wakeup_on_disk
        if self.rng.random() < 0.5:
            self.lose_unflushed()

    def observed_time(self, tx: Transaction) -> Odometer:
        """The odometer and its marks."""
        odometer, meter = Odometer(), tx.get(self.odometer, 1)
        assert meter is not None
        marks = sorted((row["seconds"], row["at"]) for row in tx.rows(self.odometer_mark))
        odometer.update(meter["seconds"], marks)
        return odometer

    # ------------------------------------------------------------- retention

    def new_period(self, kind: WindowKind, number: int) -> dict[str, Any]:
        """The row of a period that begins now."""
        row: dict[str, Any] = {"kind": kind, "number": number, "began_at": self.wall()}
        return {**row, "ended_at": None, "last_batch": None, "dropped": False}

    def drop_below(self, kind: WindowKind, number: int) -> None:
        """Drop the partitions of all periods below this one."""
        first = number * partition_window.WIDTH
        if kind == "events":
            self.first_id = first
            del self.outbox_ids[: bisect_left(self.outbox_ids, first)]
            return
        for lane_id, tried in self.attempts.items():
            dropped = {a.seq for a in tried if a.batch < first and a.outcome == "delivered"}
            self.old_successes.setdefault(lane_id, set()).update(dropped)
            self.attempts[lane_id] = [a for a in tried if a.batch >= first]
        for lane_id, given in self.deliveries.items():
            self.old_given |= {(lane_id, g.seq): g for g in given if g.batch < first}
            self.deliveries[lane_id] = [g for g in given if g.batch >= first]

    def given(self, lane_id: int, seq: int) -> Given:
        """The delivery with a sequence number of a lane, of a dropped period as well."""
        old = self.old_given.get((lane_id, seq))
        if old is not None:
            return old
        kept = self.deliveries[lane_id]
        return kept[bisect_left(kept, seq, key=lambda g: g.seq)]

    def batch(self, number: int) -> Batch:
        """A batch by its number; the numbers have holes where periods begin."""
        return self.batches[bisect_left(self.batches, number, key=lambda b: b.batch)]

    # --------------------------------------------------------------- inserts

    def add_event(self, event: Event) -> None:
        self.outbox[event.id] = event
        insort(self.outbox_ids, event.id)

    def hash_key(self, key: str) -> int:
        """The hash of a key."""
        return self.key_hashes.get(key) or crc32(key.encode())

    # ------------------------------------------------------------- two phases

    def prepare(self, gid: str, backend: Backend) -> None:
        """PREPARE TRANSACTION: it belongs to no session afterwards, and survives a crash."""
        tx = backend.transaction
        if tx is None or tx.failed:
            backend.client.response(None, InFailedSQLTransactionError("the transaction is aborted"))
            return
        backend.end_transaction()
        self.prepared[gid] = tx
        backend.client.response("PREPARE TRANSACTION", None)

    def forget_prepared(self) -> None:
        """End all prepared transactions, which a dump does not contain."""
        for tx in self.prepared.values():
            self.abort(tx)
        self.prepared.clear()

    def end_prepared(self, gid: str, commit: bool, backend: Backend) -> None:
        """COMMIT PREPARED or ROLLBACK PREPARED; the second time it does nothing."""
        tx = self.prepared.pop(gid, None)
        if tx is None:
            backend.client.response("COMMIT PREPARED", None)
        elif commit:
            tx.explicit = False
            backend.commit(tx)
        else:
            self.abort(tx)
            backend.client.response("ROLLBACK PREPARED", None)

    # --------------------------------------------------------------- network

    def network_of(self, process: str) -> Network:
        """The network of this process."""
        return self.networks.setdefault(process, Network())

    def network_s(self, process: str, *, responses: bool = False) -> float:
        """The duration of a message from or to this process that is sent now."""
        network = self.network_of(process)
        u = self.rng.random()
        trip_s = 2 * network.usual_s * u if u < 0.98 else 0.05 * self.rng.random()
        until = network.stalled_until
        if responses and network.responses_stalled_until > until:
            until = network.responses_stalled_until
        late_s = until - self.world.now
        return trip_s + late_s if late_s > 0 else trip_s
