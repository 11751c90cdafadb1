"""A database with a million events, filled in seconds.

20 endpoints of 100 lanes each. Event `i` (from 0) is delivery `i`, and belongs to lane `i % 2000`;
every hundred events are a batch. Of each lane's 500 sequence numbers the last 10 are pending, and
the 5 before them were acknowledged after the checkpoint. The lanes of endpoint 0 have not moved
since number 101. Missing ids are open gaps. The newest events are not sequenced yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from outbox.store.cluster.timeline import read_server_fence
from tests.support.relay import add_endpoint

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

    from tests.support.postgres import Database

ENDPOINTS, SLOTS = 20, 100
LANES = ENDPOINTS * SLOTS
EVENTS = 1_000_000
PER_BATCH = 100
BATCHES = EVENTS // PER_BATCH
NUMBERS = EVENTS // LANES
ACKED = NUMBERS - 10
CHECKPOINT = ACKED - 5
STUCK = 100
"""The last sequence number that the lanes of endpoint 0 acknowledged."""
UNSEQUENCED = 50
DEAD, DEAD_OPEN = 10_000, 200
REPLAYS, REPLAYS_PENDING = 1_000, 100

# Eight partitions of each are full and the ninth is being written; then come the
# empty ones.
WIDTHS = {"outbox": 120_000, "batch": 1_200, "delivery_run": 1_200, "attempt_run": 1_200}
USED, EMPTY = 9, 3

HOLE_EVERY = 1_000
"""The number of events after which two ids are missing."""

Statistics = Literal["of one lane", "absent", "fresh"]
STATISTICS: tuple[Statistics, ...] = get_args(Statistics)
"""The planner's statistics. The first set is from when one lane had been used, and cannot be
restored; the second is that of a table without ANALYZE.
"""


def outbox_id(i: int) -> int:
    """The id of event `i`."""
    return 1 + i + i // HOLE_EVERY * 2


HIGH = outbox_id(EVENTS - 1)
GAPS = [(outbox_id(i) + 1, outbox_id(i) + 2) for i in range(HOLE_EVERY - 1, EVENTS, HOLE_EVERY)]


def batch_of(seq: int) -> int:
    """The lowest batch of a sequence number, of all lanes."""
    return (seq - 1) * LANES // PER_BATCH


class LongLog:
    """The database and the data that a test needs."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.endpoints: list[UUID] = []
        self.lanes: list[int] = []
        """All lanes, in the order of `i % 2000`."""
        self.replica = 0
        """The replica that owns all endpoints."""
        self.server_fence: int | None = None

    def lanes_of(self, endpoint: int) -> list[int]:
        """The lanes of one endpoint."""
        return self.lanes[endpoint::ENDPOINTS]

    async def fill(self) -> None:
        """Write everything; the statistics are `of one lane`."""
        async with self.database.connection(server_settings={"search_path": "relay"}) as db:
            self.server_fence = await read_server_fence(db)
            # A relay has run for a day.
            await db.execute("UPDATE odometer SET seconds = 86400")
            await _make_partitions(db)
            # Only this module sets the statistics.
            for table in await db.fetch(
                "SELECT oid::regclass::text FROM pg_class "
                "WHERE relnamespace = 'relay'::regnamespace AND relkind = 'r'"
            ):
                await db.execute(f"ALTER TABLE {table[0]} SET (autovacuum_enabled = false)")
            await self._add_endpoint()
            self.lanes = [await db.fetchval("SELECT min(id) FROM lane")]
            await _write_log(db, self.lanes, f"i % {LANES} = 0")
            await db.execute("ANALYZE")
            for _ in range(1, ENDPOINTS):
                await self._add_endpoint()
            self.lanes = [r["id"] for r in await db.fetch("SELECT id FROM lane ORDER BY slot, id")]
            await _write_log(db, self.lanes, f"i % {LANES} <> 0")
            await _write_rest(db, self.lanes)
            self.replica = await db.fetchval(
                "INSERT INTO replica (name, version, label, lease_s, expires_at) "
                "VALUES ('r', '0', 'outbox-relay:r', 5, 'infinity') RETURNING id"
            )
            await db.execute("UPDATE ownership SET replica_id = $1", self.replica)

    async def set_statistics(self, statistics: Statistics) -> None:
        """Set or remove the planner's statistics."""
        async with self.database.connection(server_settings={"search_path": "relay"}) as db:
            if statistics == "absent":
                ours = "(SELECT oid FROM pg_class WHERE relnamespace = 'relay'::regnamespace)"
                await db.execute(
                    f"DELETE FROM pg_statistic WHERE starelid IN {ours};"
                    "UPDATE pg_class SET relpages = 0, reltuples = -1, relallvisible = 0 "
                    "WHERE relnamespace = 'relay'::regnamespace AND relkind IN ('r', 'p')"
                )
            if statistics == "fresh":
                await db.execute("ANALYZE")

    async def _add_endpoint(self) -> None:
        n = len(self.endpoints)
        added = await add_endpoint(self.database, name=f"e{n:02}", lanes=SLOTS)
        self.endpoints.append(added.id)


async def _make_partitions(db: Connection[Any]) -> None:
    for parent, width in WIDTHS.items():
        for name in await db.fetch(
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = $1::text::regclass",
            parent,
        ):
            await db.execute(f"DROP TABLE {name[0]}")
        # The constraints on producers' columns take half the time and do not matter for plans.
        for name in await db.fetch(
            "SELECT conname FROM pg_constraint "
            "WHERE conrelid = $1::text::regclass AND contype = 'c'",
            parent,
        ):
            await db.execute(f"ALTER TABLE {parent} DROP CONSTRAINT {name[0]}")
        for n in range(USED + EMPTY):
            await db.execute(f"SELECT make_partition('{parent}', {n}, {width})")
    await db.execute("INSERT INTO batch (batch, high) VALUES (0, 0)")


async def _write_log(db: Connection[Any], lanes: list[int], which: str) -> None:
    """The events `which`, with their deliveries and attempts."""
    events = f"generate_series(0, {EVENTS} - 1) i WHERE {which}"
    lane = f"($1::bigint[])[1 + i % {LANES}]"
    batch, seq = f"i / {PER_BATCH}", f"1 + i / {LANES}"
    await db.execute(
        "INSERT INTO outbox (id, event_id, type, key, payload, created_at) "
        "OVERRIDING SYSTEM VALUE SELECT 1 + i + i / "
        f"{HOLE_EVERY} * 2, lpad(i::text, 32, '0')::uuid, 'a.b', 'k' || i % {LANES}, '{{}}', now() "
        f"FROM {events}"
    )
    await db.execute(
        "INSERT INTO delivery_run (lane_id, batch, seq, outbox_id) "
        f"SELECT {lane}, {batch}, {seq}, 1 + i + i / {HOLE_EVERY} * 2 FROM {events}",
        lanes,
    )
    acked = f"{seq} <= CASE WHEN i % {ENDPOINTS} = 0 THEN {STUCK} ELSE {ACKED} END"
    for attempt, outcome, some in (
        (1, "d", f"i % 16 <> 0 AND {acked}"),
        (1, "r", f"i % 16 = 0 AND {acked}"),
        (2, "d", f"i % 16 = 0 AND {acked}"),
    ):
        await db.execute(
            "INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, status, "
            "started_at, elapsed_ms) "
            f"SELECT {lane}, {batch}, {seq}, {attempt}, 1, '{outcome}', 200, now(), 1 "
            f"FROM {events} AND {some}",
            lanes,
        )


async def _write_rest(db: Connection[Any], lanes: list[int]) -> None:
    """Write batches, lane positions, gaps, dead letters, and unsequenced events."""
    await db.execute("DELETE FROM batch")
    await db.execute(
        "INSERT INTO batch (batch, high, events, deliveries, lanes) "
        f"SELECT b, 1 + i + i / {HOLE_EVERY} * 2, {PER_BATCH}, {PER_BATCH}, "
        f"       ($1::bigint[])[1 + i % {LANES} - {PER_BATCH - 1} : 1 + i % {LANES}] "
        f"  FROM (SELECT b, (b + 1) * {PER_BATCH} - 1 AS i FROM generate_series(0, $2 - 1) b) x",
        lanes,
        BATCHES,
    )
    await db.execute(
        "UPDATE lane_counter SET last_seq = $1, by_xid = txid_current()",
        NUMBERS,
    )
    await db.execute(
        "UPDATE lane_progress SET acked_seq = n, delivered_seq = n, floor_batch = f "
        "FROM (VALUES (true, $2::bigint, $3::bigint), (false, $4, $5)) AS v(stuck, n, f) "
        "WHERE stuck = (endpoint_id = $1)",
        await db.fetchval("SELECT id FROM endpoint WHERE name = 'e00'"),
        STUCK,
        batch_of(STUCK + 1),
        CHECKPOINT,
        batch_of(CHECKPOINT + 1),
    )
    await db.executemany("INSERT INTO gap (lo, hi) VALUES ($1, $2)", GAPS[:-20])
    await db.execute(
        "INSERT INTO outbox (id, type, payload) OVERRIDING SYSTEM VALUE "
        "SELECT $1 + i, 'a.b', '{}' FROM generate_series(1, $2::int) i",
        HIGH + 2,
        UNSEQUENCED,
    )
    await db.execute(
        "INSERT INTO dead_letter (endpoint_id, lane_id, batch, seq, to_seq, outbox_id, type, "
        "       payload, reason, attempts, state) "
        "SELECT l.endpoint_id, l.id, 0, 1 + n / $2, 1 + n / $2, 1 + n, 'a.b', '{}', 'refused', 1, "
        "       CASE WHEN n >= $1 - $3::int THEN 'dead' WHEN n < $4::int THEN 'replaying' "
        "            ELSE 'discarded' END "
        "  FROM generate_series(0, $1::int - 1) n JOIN (SELECT *, row_number() OVER (ORDER BY id) "
        "       AS r FROM lane) l ON l.r = 1 + n % $2::int ORDER BY n",
        DEAD,
        LANES,
        DEAD_OPEN,
        REPLAYS,
    )
    # A batch took the older ones long ago, and they are deliveries now.
    await db.execute(
        "WITH job AS ("
        "    INSERT INTO replay_job (kind, requested_by) VALUES ('dead', 'test') RETURNING id), "
        "part AS (INSERT INTO replay_job_endpoint (job_id, endpoint_id, first_id, next_id, "
        "last_id) "
        "         SELECT job.id, e.id, 1, 1, $2 FROM job, endpoint e) "
        "INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq) "
        "SELECT job.id, endpoint_id, dead_letter.id, "
        "       seq + CASE WHEN row_number() OVER (ORDER BY dead_letter.id) <= $1 "
        "                  THEN 1 ELSE 0 END, "
        "       batch, to_seq FROM job, dead_letter "
        " WHERE dead_letter.state = 'replaying' ORDER BY dead_letter.id",
        REPLAYS - REPLAYS_PENDING,
        DEAD,
    )
    await db.execute(
        "UPDATE delivery_run d SET replay_id = r.id, replay_seq = x.seq "
        "  FROM replay r JOIN dead_letter x ON x.id = r.dead_id "
        " WHERE r.next_seq > r.to_seq AND d.lane_id = x.lane_id AND d.batch = $1 + x.seq * $3 "
        "   AND d.seq = $2 + x.seq",
        batch_of(ACKED - 100),
        ACKED - 100,
        batch_of(2) - batch_of(1),
    )
    await db.execute(
        "SELECT setval(pg_get_serial_sequence('outbox', 'id'), $1)", HIGH + 2 + UNSEQUENCED
    )
