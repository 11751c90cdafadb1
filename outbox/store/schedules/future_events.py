"""Delayed and held events: they wait in `future_event`, and are moved into the outbox when due.

An application's event waits for its `deliver_at`, by the database's clock.  One that a tenant's
token published is *held* if it exceeds the tenant's share, or delayed until its `deliver_at`; both
are moved at the tenant's pace (see `outbox.core.sequencing.tenant_pace`), the held ones in the
order in which they were accepted.

An event is moved by one message.  One that the database refuses, by a trigger or a constraint, is
postponed alone (see `outbox.store.refused_rows`), for as long as it has been due.
"""

from __future__ import annotations

import asyncio
from itertools import groupby
from typing import TYPE_CHECKING

import asyncpg

from outbox.core.sequencing.tenant_pace import PASS_TENANTS_MAX, PacedEvent, TenantPace
from outbox.store.refused_rows import RefusedRowReports, is_refused, reason_of
from outbox.store.schedules.schedule_runs import RETRY_MAX, RETRY_MIN
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Record

    from outbox.store.connection.store_connection import StoreConnection

DELAYED_EVENTS_MAX = 200
"""Maximum number of applications' events per message."""
PACED_EVENTS_MAX = 500
"""Maximum number of events of each kind that are read for a tenant and pass."""
MOVED_EVENTS_MAX = 1_000
"""Maximum number of tenants' events per message."""
PROBES_MAX = 1_000
"""Maximum number of tenants that are examined for delayed events at once."""
PASS_PROBES_MAX = 10
"""How often tenants are examined in a pass until events of some are due."""
SEARCH_EVERY_S = 10.0
"""How often tenants are searched in the events, instead of their shares, and from the first event
on, which dead rows make slow while a transaction is open; and how often shares are forgotten."""

_HELD = "held_before IS NOT NULL"
_PACED = "cost IS NOT NULL AND held_before IS NULL"
_DUE_AT = "coalesce(retry_at, deliver_at)"

# Seconds until the first application's event is due, and the first one of a tenant.  Each is the
# first entry of an index.
READ_EVENTS_DUE_IN = f"""
SELECT extract(epoch FROM (SELECT {_DUE_AT} FROM future_event WHERE cost IS NULL
                            ORDER BY {_DUE_AT}, id LIMIT 1) - clock_timestamp()
       )::float8 AS of_applications,
       CASE WHEN EXISTS (SELECT FROM tenant_share s JOIN future_event f ON f.id = s.last_id) THEN 0
            ELSE extract(epoch FROM (SELECT {_DUE_AT} FROM future_event WHERE {_PACED}
                                      ORDER BY {_DUE_AT} LIMIT 1) - clock_timestamp())
       END::float8 AS of_tenants
"""  # noqa: S608 (constants only)

# Due events of applications, in the order of their delivery.
READ_DUE_EVENTS = f"""
SELECT id FROM future_event WHERE cost IS NULL AND {_DUE_AT} <= statement_timestamp()
 ORDER BY {_DUE_AT}, id LIMIT $1
"""  # noqa: S608 (constants only)


def _tenants(kind: str, due_at: str) -> str:
    """The first event of each tenant after $1, up to $2 tenants: one index entry for each."""
    first = f"""
        SELECT tenant COLLATE "C" AS tenant, {due_at} AS at FROM future_event
         WHERE {kind} AND tenant COLLATE "C" > %s ORDER BY tenant COLLATE "C", {due_at} LIMIT 1"""  # noqa: S608 (constants only)
    return f"""(
    WITH RECURSIVE found AS (
        ({first % "$1::text"})
        UNION ALL
        SELECT f.* FROM found p CROSS JOIN LATERAL ({first % "p.tenant"}) f)
    SELECT * FROM found LIMIT $2)"""  # noqa: S608 (constants only)


# Tenants with events: whether one is due, and whether one is delayed.  While no delayed event of
# any tenant is due, tenants are not examined for them.
#   $3: also search for held events of which no share tells.
READ_PACED_TENANTS = f"""
SELECT tenant, bool_or(at IS NULL OR at <= statement_timestamp()) AS is_due,
       bool_or(at IS NOT NULL) AS is_delayed
  FROM (SELECT * FROM {_tenants(_PACED, _DUE_AT)} AS delayed
         WHERE (SELECT {_DUE_AT} FROM future_event WHERE {_PACED} ORDER BY {_DUE_AT} LIMIT 1)
               <= statement_timestamp()
        UNION ALL
        SELECT tenant, NULL FROM {_tenants(_HELD, "id")} AS held WHERE $3
        UNION ALL
        SELECT * FROM (SELECT s.tenant, NULL::timestamptz FROM tenant_share s
                         JOIN future_event f ON f.id = s.last_id
                        WHERE s.tenant > $1::text ORDER BY s.tenant LIMIT $2) AS named) t
 GROUP BY tenant ORDER BY tenant COLLATE "C"
"""  # noqa: S608 (constants only)

# The next events of tenants.
#   after: no held event of the tenant up to this id is left.
#   next_held: compared as a row, so that $3 entries of the index are read also while there are no
#     statistics of a table that has grown.
READ_PACED_EVENTS = f"""
SELECT t.tenant, e.*
  FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS t(tenant, after, n)
 CROSS JOIN LATERAL (
       (SELECT true AS is_held, id, extract(epoch FROM deliver_at)::float8 AS due_at, cost
          FROM (SELECT tenant, id, deliver_at, cost FROM future_event
                 WHERE {_HELD} AND (tenant COLLATE "C", id) > (t.tenant, t.after)
                 ORDER BY tenant COLLATE "C", id LIMIT $3) next_held
         WHERE next_held.tenant = t.tenant)
       UNION ALL
       (SELECT false, id, extract(epoch FROM {_DUE_AT})::float8, cost FROM future_event
         WHERE {_PACED} AND tenant COLLATE "C" = t.tenant AND {_DUE_AT} <= statement_timestamp()
         ORDER BY {_DUE_AT}, id LIMIT $3)) e
 ORDER BY t.n, CASE WHEN NOT is_held THEN due_at END NULLS FIRST, id
"""  # noqa: S608 (constants only)

# Takes the lock for moving events.  One session at a time: a second one would wait for the first,
# row by row, or deadlock, and then find no rows left.
LOCK_FUTURE = WriteStatement(
    "lock_future",
    """
WITH locked AS MATERIALIZED (
    SELECT FROM lock WHERE name = 'future events' FOR UPDATE SKIP LOCKED)
SELECT abort_unless(EXISTS (SELECT FROM locked))
""",
)

# Moves events that are still due to the outbox, in the order of their ids in $1.  A separate
# statement: its snapshot begins after the lock was granted.  It fails unless all were stored.
#   due: FOR UPDATE, because an operator may delete them, and in id order, as an erasure locks them.
#     clock_timestamp() is volatile, so that the array of ids is what is looked up in an index.  A
#     held event does not depend on the clock.
#   numbered: the last run of a tenant's schedule was held, and has an id now.
MOVE_FUTURE = WriteStatement(
    "move_future",
    f"""
WITH due AS MATERIALIZED (
    SELECT * FROM future_event
     WHERE id = ANY ($1::bigint[])
       AND ({_HELD} OR {_DUE_AT} <= clock_timestamp())
     ORDER BY id FOR UPDATE),
written AS (
    INSERT INTO outbox (event_id, tenant, type, key, payload, body, content_type, headers,
                        expires_at)
    SELECT d.event_id, d.tenant, d.type, d.key, d.payload, d.body, d.content_type, d.headers,
           d.expires_at
      FROM due d JOIN unnest($1::bigint[]) WITH ORDINALITY AS t(id, n) USING (id) ORDER BY t.n
    RETURNING id, event_id),
numbered AS (
    UPDATE schedule s SET last_outbox_id = w.id FROM written w
     WHERE s.last_event_id = w.event_id AND s.last_event_id IS NOT NULL
       AND s.last_outbox_id IS NULL),
moved AS (
    DELETE FROM future_event WHERE id = ANY (ARRAY(SELECT id FROM due)))
SELECT require_stored((SELECT count(*) FROM written) = (SELECT count(*) FROM due), 'outbox')
  FROM due
""",  # noqa: S608 (constants only)
)

# Postpones events, each for as long as it has been due, within $3 and $4 seconds.  A held one is
# held no longer, so that others are not, and waits for its time.
POSTPONE_FUTURE = WriteStatement(
    "postpone_future",
    """
UPDATE future_event f
   SET problem = p.problem, held_before = NULL,
       retry_at = clock_timestamp() + least(greatest(
           clock_timestamp() - f.deliver_at, make_interval(secs => $3)), make_interval(secs => $4))
  FROM unnest($1::bigint[], $2::text[]) AS p(id, problem) WHERE f.id = p.id
""",
)

# Deletes the shares of tenants of which nothing is held.
FORGET_SHARES = WriteStatement("forget_shares", "SELECT forget_shares()")

# Events that were not stored, and are tried again.
READ_POSTPONED = """
SELECT count(*) AS events, min(problem) AS reason FROM future_event WHERE problem IS NOT NULL
"""


class FutureEventStore:
    """Moves delayed and held events, on the connection of schedules' runs.

    Not safe for concurrent use; asyncpg's errors propagate.
    """

    def __init__(self, connection: StoreConnection, replica_id: int) -> None:
        self._db = connection
        self._actor = f"replica {replica_id}"
        self._reports = RefusedRowReports()
        self._pace = TenantPace()
        # Where the next pass begins, and the last held event of a tenant that was moved.
        self._after_tenant = ""
        self._after: dict[str, int] = {}
        self._search_at = 0.0
        self.more = False
        """Whether the last pass left tenants to examine, or events for the next pass."""

    async def due_in_s(self) -> tuple[float | None, float | None]:
        """Seconds until events of applications and of tenants are due; None: there are none."""
        row = await self._db.fetchrow(READ_EVENTS_DUE_IN)
        return row["of_applications"], row["of_tenants"]

    async def move_due(self) -> int:
        """Move due events of applications, up to `DELAYED_EVENTS_MAX`, or postpone them.

        Returns:
            Their number.
        """
        rows = await self._db.fetch(READ_DUE_EVENTS, DELAYED_EVENTS_MAX)
        return len(rows) and await self._move_or_postpone([row["id"] for row in rows])

    async def move_shares(self, now: float) -> int:
        """Make a pass: move what the next tenants may publish now; returns the number of events.

        Args:
            now: seconds of a monotonic clock.
        """
        search = now >= self._search_at
        if search:
            self._after.clear()
            self._search_at = now + SEARCH_EVERY_S
            self._pace.forget(now)
            await self._db.write(FORGET_SHARES)
        tenants = await self._next_tenants(search=search)
        after = [self._after.get(tenant, 0) for tenant in tenants]
        rows = await self._db.fetch(READ_PACED_EVENTS, tenants, after, PACED_EVENTS_MAX)
        chosen: list[int] = []
        last_held: dict[str, int] = {}
        for tenant, of_tenant in groupby(rows, key=lambda row: row["tenant"]):
            held, delayed = _split(list(of_tenant))
            ids = self._pace.choose(tenant, held, delayed, now)
            chosen += ids
            moving = {event.id for event in held}.intersection(ids)
            if moving:
                last_held[tenant] = max(moving)
        self.more = bool(rows or self._after_tenant)
        moved = 0
        for at in range(0, len(chosen), MOVED_EVENTS_MAX):
            moved += await self._move_or_postpone(chosen[at : at + MOVED_EVENTS_MAX])
            if moved < min(at + MOVED_EVENTS_MAX, len(chosen)):
                # Another session moves them, or an operator has erased some.
                self.more = moved > 0
                return moved
        self._after |= last_held
        return moved

    async def postponed(self) -> tuple[int, str | None]:
        """Read how many events were not stored, and a reason."""
        row = await self._db.fetchrow(READ_POSTPONED)
        return row["events"], row["reason"]

    async def _next_tenants(self, *, search: bool) -> list[str]:
        """The tenants of a pass: those after the last one of the pass before.

        Tenants whose events are not due yet use up no pass, however many they are.
        """
        for _ in range(PASS_PROBES_MAX):
            tenants = await self._probe_tenants(search=search)
            if tenants or not self._after_tenant:
                break
        return tenants

    async def _probe_tenants(self, *, search: bool) -> list[str]:
        """The next tenants of which events are due."""
        rows = await self._db.fetch(READ_PACED_TENANTS, self._after_tenant, PROBES_MAX, search)
        probed = [row["tenant"] for row in rows if row["is_delayed"]]
        # Tenants after the last probed one have their turn in the next pass.
        end = probed[-1] if len(probed) >= PROBES_MAX else ""
        due = [row["tenant"] for row in rows if row["is_due"] and (not end or row["tenant"] <= end)]
        if len(due) > PASS_TENANTS_MAX:
            end = due[PASS_TENANTS_MAX - 1]
        self._after_tenant = end
        return due[:PASS_TENANTS_MAX]

    async def _move_or_postpone(self, ids: list[int]) -> int:
        """Move events, or postpone those that the database refuses; returns their number."""
        refused: dict[int, asyncpg.PostgresError] = {}
        moved = await self._move(ids, refused)
        if refused:
            reasons = [reason_of(error) for error in refused.values()]
            limits = RETRY_MIN.total_seconds(), RETRY_MAX.total_seconds()
            report = self._reports.report(
                "delayed event",
                {"events": len(refused)},
                reasons[0],
                next(iter(refused.values())).sqlstate,
                actor=self._actor,
                now=asyncio.get_running_loop().time(),
            )
            await self._db.write_together(
                report, (POSTPONE_FUTURE, list(refused), reasons, *limits)
            )
        return moved + len(refused)

    async def _move(self, ids: list[int], refused: dict[int, asyncpg.PostgresError]) -> int:
        """Move events, until another session has the lock; returns how many were moved.

        Args:
            refused: those that the database refuses are added to it.
        """
        moved = 0
        left = [ids]
        while left:
            some = left.pop()
            try:
                count = await self._db.write_unless_aborted((LOCK_FUTURE,), (MOVE_FUTURE, some))
            except asyncpg.PostgresError as error:
                if not is_refused(error):
                    raise
                if len(some) == 1:
                    refused[some[0]] = error
                else:
                    middle = len(some) // 2
                    left += some[middle:], some[:middle]
                continue
            if count == 0:
                break  # Later ones must not overtake these.
            moved += count
        return moved


def _split(rows: Sequence[Record]) -> tuple[list[PacedEvent], list[PacedEvent]]:
    """A tenant's held events, and its delayed ones."""
    held, delayed = (
        [PacedEvent(r["id"], r["due_at"], r["cost"]) for r in rows if r["is_held"] is is_held]
        for is_held in (True, False)
    )
    return held, delayed
