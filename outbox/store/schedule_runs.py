"""What the clock puts into the outbox: ticks of schedules, and future events.

Any number of replicas may try at the same time.  A tick is decided in one
transaction, which locks its schedule, writes the event and moves `next_at` on, so it
is published once or, if the transaction is lost, not yet.  A future event moves by
one statement.  The time is the database's.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outbox.core.schedules.cron import Cron
from outbox.core.schedules.schedule import (
    BY_HAND,
    NAME_HEADER,
    RUN_HEADER,
    TIME_HEADER,
    Due,
    due,
    wait_s,
)
from outbox.errors import UsageError
from outbox.store.routing_change import write_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from asyncpg import Connection, Record

SCHEDULES_MAX = 100
"""Schedules that one transaction looks at."""
TICKS_MAX = 100
"""And ticks that it publishes of each."""
EVENTS_MAX = 200
"""Future events that one statement moves."""
BROKEN_RETRY = timedelta(minutes=10)
"""A schedule that this program cannot read is looked at again after so long."""

# Until the first of all is due, in seconds; each an index's first entry.
READ_DUE_IN = """
SELECT extract(epoch FROM least(
           (SELECT look_at FROM schedule WHERE state = 'active' ORDER BY look_at, id LIMIT 1),
           (SELECT deliver_at FROM future_event ORDER BY deliver_at, id LIMIT 1)
       ) - clock_timestamp())::float8
"""

# The row is read anew when its lock is granted, so what another replica has just
# moved on is not due any more.  Not clock_timestamp(), which no index can serve.
LOCK_DUE = """
SELECT id, name, cron, timezone, misfire, grace_s, overlap, next_at, last_outbox_id,
       last_run_at, statement_timestamp() AS now
  FROM schedule
 WHERE state = 'active' AND look_at <= statement_timestamp()
 ORDER BY look_at, id LIMIT $1
   FOR UPDATE SKIP LOCKED
"""

# Those of some events that are delivered or given up wherever they go: they are
# sequenced, and no lane of their batch still owes them.  OFFSET 0 keeps it to a look
# at each lane.
READ_ENDED = """
WITH passed AS MATERIALIZED (
    SELECT w.outbox_id, p.batch, p.late
      FROM unnest($1::bigint[]) AS w(outbox_id)
     CROSS JOIN LATERAL (
           SELECT batch, young @> w.outbox_id AS late FROM batch
            WHERE high >= w.outbox_id ORDER BY high, batch LIMIT 1) p),
given AS MATERIALIZED (
    SELECT outbox_id, batch FROM passed WHERE NOT late
     UNION ALL
    SELECT p.outbox_id, f.batch
      FROM passed p CROSS JOIN LATERAL (
           SELECT batch FROM batch
            WHERE p.late AND batch > p.batch AND NOT isempty(found) AND found @> p.outbox_id
            ORDER BY batch LIMIT 1) f)
SELECT g.outbox_id FROM given g
 WHERE NOT EXISTS (
       SELECT FROM batch b CROSS JOIN LATERAL unnest(b.lanes) AS lane(id)
        CROSS JOIN LATERAL (
              SELECT lane_id, batch, seq FROM delivery
               WHERE lane_id = lane.id AND batch = b.batch AND outbox_id = g.outbox_id
                 AND replay_id IS NULL OFFSET 0) d
         JOIN lane_progress p ON p.lane_id = d.lane_id AND p.acked_seq < d.seq
        WHERE b.batch = g.batch
          AND NOT EXISTS (
              SELECT FROM attempt a
               WHERE a.lane_id = d.lane_id AND a.batch = d.batch AND a.seq = d.seq
                 AND a.outcome = 'delivered'))
"""

# The payloads do not leave the server.  A tick's event has the same id wherever it is
# published: a fail-over that loses commits makes it be published anew, and receivers
# that had it already can tell.
PUBLISH = f"""
WITH tick AS MATERIALIZED (
    SELECT t.*, CASE WHEN $3 THEN gen_random_uuid() ELSE encode(substring(sha256(convert_to(
               concat_ws(' ', s.name, extract(epoch FROM s.created_at), extract(epoch FROM t.at)),
               'UTF8')) FOR 16), 'hex')::uuid END AS event_id
      FROM unnest($1::bigint[], $2::timestamptz[]) WITH ORDINALITY AS t(schedule_id, at, n)
      JOIN schedule s ON s.id = t.schedule_id),
fired AS (
    INSERT INTO outbox (event_id, tenant, type, key, payload, headers)
    SELECT t.event_id, s.tenant, s.type, s.key, s.payload,
           coalesce(s.headers, '{{}}') || jsonb_build_object(
               '{NAME_HEADER}', s.name,
               '{TIME_HEADER}', to_char(t.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
           || CASE WHEN $3 THEN '{{"{RUN_HEADER}": "{BY_HAND}"}}'::jsonb ELSE '{{}}' END
      FROM tick t JOIN schedule s ON s.id = t.schedule_id
     ORDER BY t.n
    RETURNING id, event_id),
newest AS (
    SELECT DISTINCT ON (t.schedule_id) t.schedule_id, t.at, f.id, f.event_id
      FROM tick t JOIN fired f ON f.event_id = t.event_id ORDER BY t.schedule_id, t.n DESC)
UPDATE schedule s
   SET last_at = n.at, last_run_at = clock_timestamp(),
       last_outbox_id = n.id, last_event_id = n.event_id
  FROM newest n WHERE s.id = n.schedule_id
RETURNING s.last_event_id
"""  # noqa: S608 (constants only)

ADVANCE = """
UPDATE schedule s SET next_at = v.next_at, look_at = v.look_at
  FROM unnest($1::bigint[], $2::timestamptz[], $3::timestamptz[]) AS v(id, next_at, look_at)
 WHERE s.id = v.id
"""

# One mover at a time: a second one would wait for the first, row by row, or each for
# the other, and then find that nothing is left of its helping.
LOCK_FUTURE = """
SELECT pg_try_advisory_xact_lock(
           hashtextextended('outbox-relay moves future events ' || current_schema(), 0))
"""

# A statement of its own: its snapshot begins after the lock was granted.  An array of
# ids is looked up in the index however many the server thinks are due; a join with
# them may read the whole table for one.
MOVE_FUTURE = """
WITH moved AS (
    DELETE FROM future_event WHERE id = ANY(ARRAY(
        SELECT id FROM future_event WHERE deliver_at <= statement_timestamp()
         ORDER BY deliver_at, id LIMIT $1))
    RETURNING *),
written AS (
    INSERT INTO outbox (event_id, tenant, type, key, payload, headers, expires_at)
    SELECT event_id, tenant, type, key, payload, headers, expires_at
      FROM moved ORDER BY deliver_at, id)
SELECT count(*) FROM moved
"""


@dataclass(frozen=True, slots=True)
class Decided:
    """What becomes of one schedule that was looked at."""

    schedule: Record
    due: Due
    look_at: datetime
    problem: str | None = None
    """Why this program cannot read it."""


@dataclass(frozen=True, slots=True)
class Ticked:
    """What came of a helping."""

    schedules: int
    """So many were looked at."""
    broken: tuple[tuple[str, str], ...] = ()
    """Those that cannot be read, by name, and why."""


class TickStore:
    """Ticks and future events, on one connection.

    Not safe for concurrent use; asyncpg's errors pass through.
    """

    def __init__(self, connection: Connection[Any], replica_id: int) -> None:
        self._db = connection
        self._actor = f"replica {replica_id}"

    async def due_in_s(self) -> float | None:
        """Until something is due, by the database's clock; None: nothing is planned."""
        seconds: float | None = await self._db.fetchval(READ_DUE_IN)
        return seconds

    async def tick(self) -> Ticked:
        """Decide on a helping of the schedules that are due."""
        async with self._db.transaction(isolation="read_committed"):
            rows = await self._db.fetch(LOCK_DUE, SCHEDULES_MAX)
            if not rows:
                return Ticked(0)
            waited_for = [
                row["last_outbox_id"]
                for row in rows
                if row["overlap"] == "wait" and row["last_outbox_id"] is not None
            ]
            ended: set[int] = set()
            if waited_for:
                found = await self._db.fetch(READ_ENDED, waited_for)
                ended = {row["outbox_id"] for row in found}
            decided = [_decide(row, ended) for row in rows]
            await self._write(decided)
        broken = tuple((d.schedule["name"], d.problem) for d in decided if d.problem is not None)
        return Ticked(len(rows), broken)

    async def move(self) -> int:
        """Move a helping of the future events that are due; returns how many it was."""
        async with self._db.transaction(isolation="read_committed"):
            if not await self._db.fetchval(LOCK_FUTURE):
                return 0
            moved: int = await self._db.fetchval(MOVE_FUTURE, EVENTS_MAX)
        return moved

    async def _write(self, decided: Sequence[Decided]) -> None:
        # In the order of their time, over all schedules.
        ticks = sorted((at, d.schedule["id"]) for d in decided for at in d.due.ticks)
        if ticks:
            await self._db.execute(PUBLISH, [i for _, i in ticks], [at for at, _ in ticks], False)
        await self._db.execute(
            ADVANCE,
            [d.schedule["id"] for d in decided],
            [d.due.next_at for d in decided],
            [d.look_at for d in decided],
        )
        for each in decided:
            if each.due.missed is not None:
                data = _skipped(each.schedule, *each.due.missed)
                await write_journal(self._db, "schedule_skipped", self._actor, None, data)


def _decide(row: Record, ended: set[int]) -> Decided:
    now, next_at = row["now"], row["next_at"]
    waits = row["overlap"] == "wait"
    if waits and row["last_outbox_id"] not in (None, *ended):
        going_s = (now - row["last_run_at"]).total_seconds()
        return Decided(row, Due((), next_at), now + timedelta(seconds=wait_s(going_s)))
    try:
        cron = Cron(row["cron"], row["timezone"])
    except UsageError as error:
        # Written by hand, or its zone is not known on this machine.
        return Decided(row, Due((), next_at), now + BROKEN_RETRY, str(error))
    decided = due(
        cron,
        next_at,
        now,
        misfire=row["misfire"],
        grace_s=row["grace_s"],
        ticks_max=1 if waits else TICKS_MAX,
    )
    return Decided(row, decided, decided.next_at)


def _skipped(row: Record, first: datetime, before: datetime) -> dict[str, Any]:
    return {
        "name": row["name"],
        "from": first.isoformat(),
        "before": before.isoformat(),
        "misfire": row["misfire"],
    }
