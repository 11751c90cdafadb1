"""Runs of schedules, which are due by the database's clock.

Any number of replicas may do this concurrently.  A run is decided from what was read, and written
in one message, which locks its schedule, checks that it is unchanged, writes the event and
advances `next_at`.  So it is published exactly once; if the message fails, it is still due.

A run of a tenant's schedule is held, and moved into the outbox at the tenant's pace: it neither
exceeds the tenant's share nor overtakes what the tenant's tokens published (see
`outbox.store.schedules.future_events`).

A schedule that the database refuses, by a trigger or a constraint, is postponed alone (see
`outbox.store.refused_rows`), for as long as it has been due.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import asyncpg
import orjson

from outbox.core.schedules.cron import Cron
from outbox.core.schedules.schedule import (
    BY_HAND,
    NAME_HEADER,
    RUN_HEADER,
    TIME_HEADER,
    DueTicks,
    due_ticks,
    overlap_poll_s,
)
from outbox.errors import UsageError
from outbox.store.connection.row_security import rows_hidden
from outbox.store.refused_rows import RefusedRowReports, is_refused, reason_of
from outbox.store.routing_change import ADD_TO_JOURNAL
from outbox.store.sql.message import WriteStatement
from outbox.store.sql.type_match import FILTER_MET, MATCHES, SUBSCRIBERS, TENANT_MATCHES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from asyncpg import Record

    from outbox.store.connection.store_connection import StoreConnection
    from outbox.store.sql.message import WriteCall

RETRY_MIN, RETRY_MAX = timedelta(seconds=10), timedelta(minutes=10)
"""Delay before a refused schedule is tried again: as long as it has been due, within these.  One
that cannot be parsed waits for the maximum."""
SCHEDULES_MAX = 100
"""Maximum number of schedules per transaction."""
RUNS_MAX = 100
"""Maximum number of runs published per schedule and transaction."""
PATTERNS_MAX = 200
"""Type patterns with which the type of a held run is compared."""

# Seconds until the first schedule is due: the first entry of an index.
READ_DUE_IN = """
SELECT extract(epoch FROM (
           SELECT due_at FROM schedule WHERE state = 'active' ORDER BY due_at, id LIMIT 1)
       - clock_timestamp())::float8
"""

# Due schedules.  statement_timestamp(), because clock_timestamp() is volatile and cannot use an
# index.  revision: it changes with every change of the row.  is_held: the last run is.
READ_DUE = """
SELECT id, name, tenant, cron, timezone, misfire, grace_s, overlap, next_at, last_outbox_id,
       last_run_at, statement_timestamp() AS now, xmin::text AS revision,
       EXISTS (SELECT FROM future_event f WHERE f.event_id = s.last_event_id) AS is_held
  FROM schedule s
 WHERE state = 'active' AND due_at <= statement_timestamp()
 ORDER BY due_at, id LIMIT $1
"""

# Locks schedules, and aborts if one was changed since it was read, or is locked by another
# session, which changes it.  PostgreSQL rechecks the revision when it grants the lock.
LOCK_SCHEDULES = WriteStatement(
    "lock_schedules",
    """
WITH unchanged AS MATERIALIZED (
    SELECT FROM schedule s JOIN unnest($1::bigint[], $2::text[]) AS v(id, revision)
      ON s.id = v.id AND s.xmin::text = v.revision
       FOR UPDATE OF s SKIP LOCKED)
SELECT abort_unless((SELECT count(*) FROM unchanged) = cardinality($1::bigint[]))
""",
)

# Which of some events are delivered or dead-lettered in every lane: they are sequenced, no feed is
# yet to give them to its endpoint, and no lane of their batches has them pending.
#   positions: the first batch with high >= id; `late` if the event was in a gap.
#   sequenced: the batch that contains the event.
#   given: that one, and those in which feeds gave the event to endpoints.
# OFFSET 0 keeps the deliveries an index lookup per lane.
READ_ENDED = f"""
WITH positions AS MATERIALIZED (
    SELECT w.outbox_id, p.batch, p.late
      FROM unnest($1::bigint[]) AS w(outbox_id)
     CROSS JOIN LATERAL (
           SELECT batch, young @> w.outbox_id AS late FROM batch
            WHERE high >= w.outbox_id ORDER BY high, batch LIMIT 1) p),
sequenced AS MATERIALIZED (
    SELECT outbox_id, batch FROM positions WHERE NOT late
     UNION ALL
    SELECT p.outbox_id, f.batch
      FROM positions p CROSS JOIN LATERAL (
           SELECT batch FROM batch
            WHERE p.late AND batch > p.batch AND NOT isempty(found) AND found @> p.outbox_id
            ORDER BY batch LIMIT 1) f),
given AS MATERIALIZED (
    SELECT outbox_id, batch FROM sequenced
     UNION
    SELECT g.outbox_id, f.batch FROM sequenced g CROSS JOIN LATERAL fed_in(g.batch, g.outbox_id) f)
SELECT g.outbox_id FROM sequenced g
 WHERE NOT {
    rows_hidden(
        "batch", "delivery_run", "lane_progress", "attempt_run", "feed", "feed_step", "outbox"
    )
}
   AND NOT EXISTS (
       SELECT FROM feed s JOIN outbox o ON o.id = g.outbox_id
        WHERE s.ended_at IS NULL AND (s.batch, s.outbox_id) < (g.batch, g.outbox_id)
          AND NOT s.seen @> g.outbox_id AND o.erased_at IS NULL
          AND coalesce(o.expires_at > clock_timestamp(), true)
          AND {MATCHES} AND {FILTER_MET} IS NOT FALSE)
   AND NOT EXISTS (
       SELECT FROM given n JOIN batch b ON b.batch = n.batch
        CROSS JOIN LATERAL unnest(b.lanes) AS lane(id)
        CROSS JOIN LATERAL (
              SELECT lane_id, batch, seq FROM delivery
               WHERE lane_id = lane.id AND batch = b.batch AND outbox_id = g.outbox_id
                 AND replay_id IS NULL OFFSET 0) d
         JOIN lane_progress p ON p.lane_id = d.lane_id AND p.acked_seq < d.seq
        WHERE n.outbox_id = g.outbox_id
          AND NOT EXISTS (
              SELECT FROM attempt a
               WHERE a.lane_id = d.lane_id AND a.batch = d.batch AND a.seq = d.seq
                 AND a.outcome = 'delivered'))
"""  # noqa: S608 (constants only)

# Runs with their events; the payloads do not leave the server.  The event id of a run is
# deterministic: if a failover loses the commit, the run is published again with the same id, and
# receivers recognize the duplicate.
#   $3: the event id of a manual run.
_RUN = f"""
WITH run AS MATERIALIZED (
    SELECT t.*, s.tenant, s.type, s.key, s.payload, coalesce($3::uuid, encode(substring(sha256(
               convert_to(concat_ws(' ', s.name, extract(epoch FROM s.created_at),
                                    extract(epoch FROM t.at)), 'UTF8')) FOR 16), 'hex')::uuid)
               AS event_id,
           coalesce(s.headers, '{{}}') || jsonb_build_object(
               '{NAME_HEADER}', s.name,
               '{TIME_HEADER}', to_char(t.at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'))
           || CASE WHEN $3 IS NOT NULL THEN '{{"{RUN_HEADER}": "{BY_HAND}"}}'::jsonb ELSE '{{}}' END
               AS headers
      FROM unnest($1::bigint[], $2::timestamptz[]) WITH ORDINALITY AS t(schedule_id, at, n)
      JOIN schedule s ON s.id = t.schedule_id),"""  # noqa: S608 (constants only)

# newest: the last event of each schedule.
_UPDATE_SCHEDULES = """
newest AS (
    SELECT DISTINCT ON (t.schedule_id) t.schedule_id, t.at, f.outbox_id, f.event_id
      FROM run t JOIN published f ON f.event_id = t.event_id ORDER BY t.schedule_id, t.n DESC),
updated AS (
    UPDATE schedule s
       SET last_at = n.at, last_run_at = clock_timestamp(),
           last_outbox_id = n.outbox_id, last_event_id = n.event_id
      FROM newest n WHERE s.id = n.schedule_id)"""

# Publishes runs of schedules without a tenant.  It fails unless each event was stored.
PUBLISH_RUNS = WriteStatement(
    "publish_runs",
    f"""{_RUN}
published AS (
    INSERT INTO outbox (event_id, tenant, type, key, payload, headers)
    SELECT event_id, tenant, type, key, payload, headers FROM run ORDER BY n
    RETURNING id AS outbox_id, event_id),{_UPDATE_SCHEDULES}
SELECT require_stored((SELECT count(*) FROM published) = (SELECT count(*) FROM run), 'outbox')
""",  # noqa: S608 (constants only)
)

# Locks the shares of tenants before HOLD_RUNS, in one order; the other one aborts the message if
# another session has locked one.
_SHARES = """
SELECT {lock}(t.tenant)
  FROM (SELECT DISTINCT unnest($1::text[]) COLLATE "C" AS tenant ORDER BY 1) t
"""
LOCK_SHARES = WriteStatement("lock_shares", _SHARES.format(lock="lock_share"))
TRY_LOCK_SHARES = WriteStatement("try_lock_shares", _SHARES.format(lock="try_lock_share"))

# Holds runs of tenants' schedules, whose shares are locked.  Moving the last one tells the schedule
# its id.  It fails unless each event was stored and the newest one of each tenant is named.
#   charged: with the deliveries to the endpoints that get the type, or to all endpoints of
#     the tenant and of all tenants if they have more than PATTERNS_MAX patterns: a tenant may have
#     10,000 within its quotas, which take 0.2 s for each type, while others' events wait.
HOLD_RUNS = WriteStatement(
    "hold_runs",
    f"""{_RUN}
charged AS MATERIALIZED (
    SELECT o.tenant, o.type,
           greatest(CASE WHEN every.patterns > {PATTERNS_MAX} THEN every.endpoints ELSE (
               SELECT count(*) FROM {SUBSCRIBERS} s WHERE {MATCHES})
           END, 1)::integer AS cost
      FROM (SELECT DISTINCT tenant, type FROM run) o
     CROSS JOIN LATERAL (
           SELECT count(*) AS endpoints, sum(cardinality(s.types)) AS patterns
             FROM {SUBSCRIBERS} s WHERE {TENANT_MATCHES}) every),
published AS (
    INSERT INTO future_event (event_id, tenant, type, key, payload, headers, deliver_at, cost,
                              held_before)
    SELECT r.event_id, r.tenant, r.type, r.key, r.payload, r.headers, clock_timestamp(), c.cost,
           s.total + sum(c.cost) OVER (PARTITION BY r.tenant ORDER BY r.n) - c.cost
      FROM run r JOIN charged c ON c.tenant = r.tenant AND c.type = r.type
      JOIN tenant_share s ON s.tenant = r.tenant ORDER BY r.n
    RETURNING NULL::bigint AS outbox_id, event_id, id, tenant, held_before + cost AS total),
named AS (
    UPDATE tenant_share s SET last_id = p.last_id, total = p.total
      FROM (SELECT tenant, max(id) AS last_id, max(total) AS total
              FROM published GROUP BY tenant) p
     WHERE s.tenant = p.tenant
    RETURNING 1),{_UPDATE_SCHEDULES}
SELECT require_stored((SELECT count(*) FROM published) = (SELECT count(*) FROM run)
                      AND (SELECT count(*) FROM named) = (SELECT count(DISTINCT tenant) FROM run),
                      'future_event')
""",  # noqa: S608 (constants only)
)


class Run(NamedTuple):
    """A run of a schedule."""

    at: datetime
    schedule_id: int
    tenant: str | None


def publish_calls(
    runs: Sequence[Run], event_id: UUID | None = None, *, wait: bool = False
) -> list[WriteCall]:
    """The calls that publish runs, or hold them for their tenants.

    Args:
        event_id: the event id of a manual run.
        wait: wait for other sessions that hold events of the tenants.
    """
    calls: list[WriteCall] = []
    direct = [run for run in runs if run.tenant is None]
    held = [run for run in runs if run.tenant is not None]
    if held:
        lock = LOCK_SHARES if wait else TRY_LOCK_SHARES
        calls.append((lock, [run.tenant for run in held]))
    for statement, some in ((HOLD_RUNS, held), (PUBLISH_RUNS, direct)):
        if some:
            ids, times = [run.schedule_id for run in some], [run.at for run in some]
            calls.append((statement, ids, times, event_id))
    return calls


# Advances schedules to their next run.
ADVANCE_SCHEDULES = WriteStatement(
    "advance_schedules",
    """
UPDATE schedule s SET next_at = v.next_at, due_at = v.due_at
  FROM unnest($1::bigint[], $2::timestamptz[], $3::timestamptz[]) AS v(id, next_at, due_at)
 WHERE s.id = v.id
""",
)


@dataclass(frozen=True, slots=True)
class ScheduleDecision:
    """The decision about one due schedule."""

    schedule: Record
    due: DueTicks
    due_at: datetime
    problem: str | None = None
    """Why no run can be published."""
    sqlstate: str | None = None
    """The error with which the database refused it; None: it was not refused."""


@dataclass(frozen=True, slots=True)
class ScheduleRunResult:
    """The result of one transaction."""

    schedules: int
    """Number of due schedules that were processed."""
    broken: tuple[tuple[str, str], ...] = ()
    """Schedules that cannot be parsed, or that the database refuses: name and reason."""


class ScheduleRunStore:
    """Runs schedules.

    Not safe for concurrent use; asyncpg's errors propagate.
    """

    def __init__(self, connection: StoreConnection, replica_id: int) -> None:
        self._db = connection
        self._actor = f"replica {replica_id}"
        self._reports = RefusedRowReports()

    async def due_in_s(self) -> float | None:
        """Seconds until something is due, by the database's clock; None: nothing is planned."""
        seconds: float | None = await self._db.fetchval(READ_DUE_IN)
        return seconds

    async def run_due_schedules(self) -> ScheduleRunResult:
        """Run due schedules, up to `SCHEDULES_MAX`."""
        rows = await self._db.fetch(READ_DUE, SCHEDULES_MAX)
        if not rows:
            return ScheduleRunResult(0)
        waited_for = [
            row["last_outbox_id"]
            for row in rows
            if row["overlap"] == "wait" and row["last_outbox_id"] is not None
        ]
        ended: set[int] = set()
        if waited_for:
            found = await self._db.fetch(READ_ENDED, waited_for)
            ended = {row["outbox_id"] for row in found}
        decided = [decide_run(row, ended) for row in rows]
        broken: list[tuple[str, str]] = []
        written = await self._write(decided, broken)
        return ScheduleRunResult(written, tuple(broken))

    async def _write(self, decided: list[ScheduleDecision], broken: list[tuple[str, str]]) -> int:
        """Write decisions; those that the database refuses become broken ones.

        Args:
            broken: name and reason of broken ones are added to it.

        Returns:
            How many were written: none of a tenant if a schedule was changed meanwhile, or its
            share is locked.
        """
        try:
            written = await self._write_all(decided)
        except asyncpg.PostgresError as error:
            if not is_refused(error):
                raise
            if len(decided) > 1:
                return sum([await self._write([each], broken) for each in decided])
            row, reason = decided[0].schedule, reason_of(error)
            if decided[0].sqlstate is not None:
                # It cannot even be postponed.
                broken.append((row["name"], reason))
                return 0
            due_s = row["now"] - row["next_at"]
            due_at = row["now"] + min(max(due_s, RETRY_MIN), RETRY_MAX)
            none_due = DueTicks((), row["next_at"])
            postponed = ScheduleDecision(row, none_due, due_at, reason, error.sqlstate)
            return await self._write([postponed], broken)
        if not written:
            # No tenant's schedule waits until another tenant's share is free.
            of_tenant: dict[str | None, list[ScheduleDecision]] = {}
            for each in decided:
                of_tenant.setdefault(each.schedule["tenant"], []).append(each)
            if len(of_tenant) == 1:
                return 0
            return sum([await self._write(some, broken) for some in of_tenant.values()])
        broken += [(d.schedule["name"], d.problem) for d in decided if d.problem is not None]
        return len(decided)

    async def _write_all(self, decided: Sequence[ScheduleDecision]) -> bool:
        """Write decisions in one message.

        Returns:
            False if a schedule was changed meanwhile, or a tenant's share is locked.
        """
        ids = [d.schedule["id"] for d in decided]
        calls: list[WriteCall] = [(LOCK_SCHEDULES, ids, [d.schedule["revision"] for d in decided])]
        for each in decided:
            if each.problem is not None and each.sqlstate is not None:
                identity = {"schedule": each.schedule["name"]}
                report = self._reports.report(
                    "schedule",
                    identity,
                    each.problem,
                    each.sqlstate,
                    actor=self._actor,
                    now=asyncio.get_running_loop().time(),
                )
                calls.append(report)
        calls += publish_calls(
            # In chronological order over all schedules.
            sorted(
                Run(at, d.schedule["id"], d.schedule["tenant"])
                for d in decided
                for at in d.due.ticks
            )
        )
        calls.append(
            (ADVANCE_SCHEDULES, ids, [d.due.next_at for d in decided], [d.due_at for d in decided])
        )
        for each in decided:
            if each.due.missed is not None:
                data = orjson.dumps(_skipped(each.schedule, *each.due.missed)).decode()
                calls.append((ADD_TO_JOURNAL, "schedule_skipped", self._actor, None, data))
        return bool(await self._db.write_unless_aborted(*calls))


def decide_run(row: Record, ended: set[int]) -> ScheduleDecision:
    """Decide which runs of a due schedule to publish, and when it is due again.

    Args:
        row: the schedule, with the database's time as `now`.
        ended: ids of events that are delivered or dead-lettered in every lane.
    """
    now, next_at = row["now"], row["next_at"]
    waits = row["overlap"] == "wait"
    if waits and (row["is_held"] or row["last_outbox_id"] not in (None, *ended)):
        going_s = (now - row["last_run_at"]).total_seconds()
        due_at = now + timedelta(seconds=overlap_poll_s(going_s))
        return ScheduleDecision(row, DueTicks((), next_at), due_at)
    try:
        cron = Cron(row["cron"], row["timezone"])
    except UsageError as error:
        # Inserted by SQL, or the time zone is unknown on this machine.
        return ScheduleDecision(row, DueTicks((), next_at), now + RETRY_MAX, str(error))
    decided = due_ticks(
        cron,
        next_at,
        now,
        misfire=row["misfire"],
        grace_s=row["grace_s"],
        ticks_max=1 if waits else RUNS_MAX,
    )
    return ScheduleDecision(row, decided, decided.next_at)


def _skipped(row: Record, first: datetime, before: datetime) -> dict[str, Any]:
    return {
        "name": row["name"],
        "from": first.isoformat(),
        "before": before.isoformat(),
        "misfire": row["misfire"],
    }
