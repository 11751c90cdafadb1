"""Latency of reads on ten million deliveries: the delivery log, a trace, and a take-over.

Forty endpoints of eight lanes; each event is delivered to four of them.  Four fifths of the
deliveries were sequenced in batches of 2,000 events, as in a drain, and stand in runs of 25; the
last fifth in batches of ten, as under a steady load, each alone.  At half of the endpoints every
hundredth of these failed once.  Each read is repeated on a warm connection.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Rounds, Row, Samples, Target
from benchmarks.stage import search
from outbox.core.model.endpoint_settings import EndpointSettings
from outbox.operations.deliveries.model import DeliveryFilter, DeliveryPosition, StatusRange
from outbox.operations.deliveries.queries import list_deliveries
from outbox.operations.endpoints import changes as endpoint_changes
from outbox.operations.rows import ID_MAX
from outbox.store.delivery.lanes import READ_ACKNOWLEDGED
from outbox.store.retention.partitions import PartitionStore
from outbox_doctor.trace.queries import trace_delivery, trace_events
from tests.support.postgres import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from asyncpg import Connection

    from benchmarks.stage import Stage

REPEATED, QUICK_REPEATED = 20, 3
BOUND_MS = 100.0
BOUND = Target("at most", 1.0)

ENDPOINTS, LANES, FAN_OUT = 40, 8, 4
TYPES = ENDPOINTS // FAN_OUT
EVERY = TYPES * LANES
"""A lane gets every n-th event."""
PER_RUN = 25
DRAINED, STEADY = PER_RUN * EVERY, TYPES
"""Events of a batch."""
TENANT = "acme"
"""The tenant of all events and of every fourth endpoint."""

EVENTS = f"""
INSERT INTO outbox (id, event_id, type, tenant, key, payload, created_at) OVERRIDING SYSTEM VALUE
SELECT i + 1, lpad(to_hex(i), 32, '0')::uuid, 't' || i % {TYPES} || '.made', '{TENANT}',
       'k' || i / 2,
       jsonb_build_object('n', i, 'fill', repeat('x', 200)), now() - ($2 - i) * interval '1 ms'
  FROM generate_series($1::int, $2::int - 1) AS i
"""
BATCHES = f"""
INSERT INTO batch (batch, high, events, deliveries, lanes, writer, at)
SELECT $3 + n, $1 + (n + 1) * $4::int, $4, $4 * {FAN_OUT},
       array(SELECT DISTINCT 1 + {LANES} * (i % {TYPES} + {TYPES} * f) + i / {TYPES} % {LANES}
               FROM generate_series($1 + n * $4, $1 + (n + 1) * $4 - 1) AS i,
                    generate_series(0, {FAN_OUT} - 1) AS f),
       1, now() - ($5::int - $1 - n * $4) * interval '1 ms'
  FROM generate_series(0, ($2::int - $1::int) / $4 - 1) AS n
"""
# Of the endpoint e and the slot s, the first event of batch n.
_RUNS = f"""
  FROM generate_series(0, $1::int / {DRAINED} - 1) AS n, generate_series(0, {ENDPOINTS} - 1) AS e,
       generate_series(0, {LANES} - 1) AS s
"""
RUNS = f"""
INSERT INTO delivery_run (lane_id, batch, seq, outbox_id, offsets)
SELECT 1 + {LANES} * e + s, 1 + n, 1 + {PER_RUN} * n, 1 + {DRAINED} * n + e % {TYPES} + {TYPES} * s,
       array(SELECT {EVERY} * m FROM generate_series(0, {PER_RUN} - 1) AS m)
{_RUNS}
"""
RUN_ATTEMPTS = f"""
INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, status, started_at,
                         elapsed_ms, count, starts_us)
SELECT 1 + {LANES} * e + s, 1 + n, 1 + {PER_RUN} * n, 1, 1, 'd', 204,
       now() - ($2::int - {DRAINED} * n) * interval '1 ms', 3.5, {PER_RUN},
       array(SELECT 1000 * m FROM generate_series(0, {PER_RUN} - 1) AS m)
{_RUNS}
"""
_SINGLE = f"""
  FROM (SELECT i, e, 1 + {LANES} * e + i / {TYPES} % {LANES} AS lane,
               $3::int + (i - $1) / {STEADY} AS batch, 1 + i / {EVERY} AS seq,
               e >= {ENDPOINTS // 2} AND i / {TYPES} % 100 = 0 AS fails
          FROM generate_series($1::int, $2::int - 1) AS i
         CROSS JOIN LATERAL generate_series(i % {TYPES}, {ENDPOINTS} - 1, {TYPES}) AS e) s
"""
SINGLE = f"""
INSERT INTO delivery_run (lane_id, batch, seq, outbox_id) SELECT lane, batch, seq, i + 1 {_SINGLE}
"""
SINGLE_ATTEMPTS = f"""
INSERT INTO attempt_run (lane_id, batch, seq, attempt, replica_id, outcome, status, started_at,
                         elapsed_ms)
SELECT lane, batch, seq, made.attempt, 1, CASE WHEN made.ok THEN 'd' ELSE 'r' END,
       CASE WHEN made.ok THEN 204 ELSE 503 END, now() - ($2::int - i) * interval '1 ms', 3.5
  FROM (SELECT * {_SINGLE}) s
 CROSS JOIN LATERAL (VALUES (1, NOT fails), (2, true)) AS made(attempt, ok)
 WHERE made.attempt = 1 OR fails
"""
COUNTERS = "UPDATE lane_counter SET last_seq = $1, by_xid = txid_current()"
PROGRESS = "UPDATE lane_progress SET acked_seq = $1, delivered_seq = $1, floor_batch = $2"
LANES_OF = "SELECT l.id FROM lane l JOIN endpoint e ON e.id = l.endpoint_id WHERE e.name = $1"


@dataclass(frozen=True, slots=True)
class Log:
    """The size of the log, in events; each has `FAN_OUT` deliveries."""

    drained: int
    steady: int

    @property
    def events(self) -> int:
        return self.drained + self.steady

    @property
    def batches(self) -> int:
        return self.drained // DRAINED + self.steady // STEADY


LARGE = Log(drained=1000 * DRAINED, steady=500_000)
QUICK = Log(drained=5 * DRAINED, steady=4_000)


async def measure(stage: Stage, rounds: int, *, quick: bool) -> list[Row]:
    """Repeat each read in each round."""
    if quick:
        return await run(stage, rounds, QUICK, QUICK_REPEATED)
    return await run(stage, rounds, LARGE, REPEATED)


async def run(stage: Stage, rounds: int, log: Log, repeated: int) -> list[Row]:
    """Run with a log of another size."""
    found = Rounds()
    async with stage.server.database() as database, search(database) as connection:
        stage.say(f"reads: writing {log.events * FAN_OUT:,} deliveries")
        await write(connection, stage.urls["http"], log)
        reads = await _reads(connection, log)
        for number in range(rounds):
            for name, read in reads.items():
                await read(connection)
                took_ms = []
                for _ in range(repeated):
                    began = time.perf_counter()
                    await read(connection)
                    took_ms.append((time.perf_counter() - began) * 1000)
                found.add(name, statistics.median(took_ms))
            stage.say(f"reads, round {number + 1} of {rounds}")
    bound = Samples((BOUND_MS,) * rounds)
    return [
        Row("reads", name, "ms", found.samples_of(name), "the bound", bound, target=BOUND)
        for name in reads
    ]


async def write(connection: Connection[Any], url: str, log: Log) -> None:
    """Fill a new database; `outbox verify` finds no violation in it."""
    for n in range(ENDPOINTS):
        own = n % FAN_OUT == 0
        settings = EndpointSettings(
            name=f"e{n}",
            url=url,
            lanes=LANES,
            types=(f"t{n % TYPES}.made",),
            tenant=TENANT if own else None,
            all_tenants=not own,
        )
        await endpoint_changes.add_endpoint(connection, SCHEMA, settings, actor="bench")
    first = log.drained // DRAINED + 1
    for sql, arguments in (
        (EVENTS, (0, log.events)),
        (BATCHES, (0, log.drained, 1, DRAINED, log.events)),
        (BATCHES, (log.drained, log.events, first, STEADY, log.events)),
        (RUNS, (log.drained,)),
        (RUN_ATTEMPTS, (log.drained, log.events)),
        (SINGLE, (log.drained, log.events, first)),
        (SINGLE_ATTEMPTS, (log.drained, log.events, first)),
        (COUNTERS, (log.events // EVERY,)),
        (PROGRESS, (log.events // EVERY, log.batches)),
    ):
        await connection.execute(sql, *arguments, timeout=600)
    await connection.execute("SELECT setval('outbox_id_seq', $1)", log.events)
    await connection.execute("VACUUM ANALYZE", timeout=600)
    await PartitionStore(connection).summarize()


async def _reads(
    connection: Connection[Any], log: Log
) -> Mapping[str, Callable[[Connection[Any]], Awaitable[object]]]:
    """The reads, by their names in the table."""
    middle = DeliveryPosition(log.batches // 2, ID_MAX, ID_MAX, ID_MAX)
    in_drain = DeliveryPosition(log.drained // DRAINED // 2, ID_MAX, ID_MAX, ID_MAX)
    event = log.events // 2 // EVERY * EVERY
    (last,) = (await list_deliveries(connection, SCHEMA, endpoint="e20", limit=1)).deliveries
    lanes = [row["id"] for row in await connection.fetch(LANES_OF, "e20")]
    acked = log.events // EVERY

    def page(
        endpoint: str | None = "e20", only: DeliveryFilter | None = None, **options: Any
    ) -> Callable[[Connection[Any]], Awaitable[object]]:
        return lambda db: list_deliveries(db, SCHEMA, endpoint=endpoint, only=only, **options)

    return {
        "log of an endpoint, first page": page(),
        "log, a page in the middle": page(after=middle),
        "log, a page in a drain": page(after=in_drain),
        "log, failed": page(only=DeliveryFilter(failed=True)),
        "log, failed, where nothing failed": page("e0", DeliveryFilter(failed=True)),
        "log, status 5xx": page(only=DeliveryFilter(status=StatusRange(500, 599))),
        "log, status 202, of which there is none": page(
            only=DeliveryFilter(status=StatusRange(202, 202))
        ),
        "log, a type of which there is none": page(only=DeliveryFilter(types=("t99.*",))),
        "log, pending": page(only=DeliveryFilter(outcome="pending")),
        "log, dead": page(only=DeliveryFilter(outcome="dead")),
        "log of a key": page(key=f"k{event // 2}"),
        "log of an event, all endpoints": page(None, event=f"{event:032x}"),
        "log of a tenant's endpoints, first page": page(None, owner=TENANT),
        "log of a tenant's endpoints, failed": page(
            None, DeliveryFilter(failed=True), owner=TENANT
        ),
        "a delivery by X-Delivery": lambda db: trace_delivery(db, SCHEMA, str(last.delivery)),
        "trace of an event": lambda db: trace_events(db, SCHEMA, f"{event:032x}"),
        "take-over of eight lanes, 10 runs each": lambda db: db.fetch(
            READ_ACKNOWLEDGED,
            lanes,
            [log.batches - 10 * EVERY // STEADY] * LANES,
            [acked - 10] * LANES,
        ),
    }
