"""Partitions of periods: created in advance, dropped with their period.

Neither blocks producers: the lock of ATTACH PARTITION does not conflict with theirs, and DETACH
CONCURRENTLY waits for them, not they for it.  But both lock a table of the application that has a
foreign key to ours, and what waits for such a lock blocks those who write to that table.  So each
lock is awaited for a tenth of a second, again and again with a pause (`lock_retry`), and DETACH,
which searches such a table for references, is limited as a whole.

A relay need not own the tables: operations that require the owner are SECURITY DEFINER functions
(schema/0007_roles.sql).  But DETACH CONCURRENTLY cannot run in a function, and without it
producers would wait.  So a relay that does not own the tables empties the partitions of a dropped
period, which frees their space; `outbox migrate`, run by the owner, drops the empty tables.

A lease keeps other sessions from doing the same work.  A session that hangs loses it, and so does
one whose step takes longer, such as DETACH CONCURRENTLY behind a long transaction, which cannot
check a lease in its transaction either.  So two maintainers may run at once, and each step is
safe then:

- A partition is created by one transaction: the second one finds its name in use.
- A table is dropped only if the decision to drop its period is recorded, which is irrevocable and
  made under the cursor row (`retention`), and if it is attached or its detaching was recorded.  Of
  two that detach or drop it one fails, or finishes what the other one began (FINALIZE waits for the
  same snapshots); the rest is repeated later.
- Deleting expired rows skips those that are locked; emptying, summarizing and analyzing change
  nothing the second time.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import asyncpg

from outbox.core.model.sql_names import quote_ident
from outbox.core.sequencing.partition_window import AHEAD, WIDTH
from outbox.store.schema.lock_attempts import MESSAGE_LOCK_TIMEOUT_S, PAUSE_S, RETRY_FOR_S
from outbox.store.sql.message import WriteStatement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from outbox.core.sequencing.partition_window import WindowKind
    from outbox.store.connection.store_connection import StoreConnection

PARENTS: Mapping[WindowKind, tuple[str, ...]] = {
    "events": ("outbox",),
    "log": ("attempt_run", "delivery_run", "batch"),
}
"""The partitioned tables of each kind of period."""

ADDED_MAX = 10
"""Partitions that the function add_partition() creates beyond the current period."""

MAINTENANCE_LEASE_S = 120.0
"""Time after which another session maintains, if one hangs."""

# Takes or renews the maintenance lease, by the database's clock; one row if this session has it.
# One that expired is renewed if no other session has taken it.  One that expires later than a new
# one would was taken by a clock that has been set back, and has expired as well.
TAKE_LEASE = WriteStatement(
    "take_maintenance_lease",
    """
UPDATE lock SET holder = current_setting('application_name'), token = $1,
                expires_at = clock_timestamp() + make_interval(secs => $2)
 WHERE name = 'maintenance'
   AND (token = $1
        OR coalesce(expires_at NOT BETWEEN clock_timestamp()
                                       AND clock_timestamp() + make_interval(secs => $2), true))
""",
)
RELEASE_LEASE = WriteStatement(
    "release_maintenance_lease",
    "UPDATE lock SET expires_at = NULL, token = NULL WHERE name = 'maintenance' AND token = $1",
)

# Partitions of a table with their bounds.
READ_PARTITIONS = """
SELECT c.relname AS name, pg_get_expr(c.relpartbound, c.oid) AS bound,
       i.inhdetachpending AS detaching
  FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
 WHERE i.inhparent = $1::text::regclass
"""

# Periods of a kind that lack a partition of this table: the coming ones, and those up to the one
# after the last id, which somebody may have set.
READ_MISSING = f"""
SELECT n AS number
  FROM (SELECT max(number) AS number FROM period WHERE kind = $2) p,
       generate_series(p.number, least(p.number + {ADDED_MAX}, greatest(p.number + $3::bigint, 1 + (
           SELECT CASE $2 WHEN 'events' THEN coalesce(pg_sequence_last_value(
                       pg_get_serial_sequence('outbox', 'id')::regclass), 0) / {WIDTH} ELSE 0 END
       )))) AS n
 WHERE to_regclass(quote_ident($1 || '_' || n)) IS NULL
 ORDER BY n
"""  # noqa: S608 (constants only)

# The last id, if no partition can have it.
READ_BEYOND = f"""
SELECT last.id
  FROM (SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0)
               AS id) last
 WHERE last.id / {WIDTH} > (SELECT max(number) + {ADDED_MAX} FROM period WHERE kind = 'events')
"""  # noqa: S608 (constants only)

# Foreign keys of other tables to this one.
READ_REFERENCES = """
SELECT conrelid::regclass::text AS relation, conname::text AS name FROM pg_constraint
 WHERE contype = 'f' AND confrelid = $1::text::regclass AND conparentid = 0
 ORDER BY 1, 2
"""
ADD_PARTITION = WriteStatement("add_partition", "SELECT add_partition($1::text::regclass, $2)")

# Tables of dropped periods, oldest first.  detaching: true if a DETACH was interrupted, NULL if
# it is not attached.  ours: it is attached, or maintenance has detached it; somebody else may have
# detached another one with events that were never read.  owned: this role may drop the table;
# others are listed while they have data and may be emptied: an hour after the decision, or if that
# is more than an hour ahead, because the clock was set back.  OFFSET 0: the privilege is checked
# once per table.
READ_DROPPABLE = """
SELECT parent, p.kind, p.number, c.relname AS name, c.oid::bigint AS oid,
       i.inhdetachpending AS detaching, o.owned,
       i.inhrelid IS NOT NULL OR c.oid = ANY (p.detaching) AS ours
  FROM period p, unnest($2::text[]) AS parent
  JOIN pg_class c ON c.relnamespace = quote_ident(current_schema())::regnamespace
 CROSS JOIN LATERAL (SELECT pg_has_role(c.relowner, 'USAGE') AS owned OFFSET 0) o
  LEFT JOIN pg_inherits i ON i.inhrelid = c.oid AND i.inhparent = to_regclass(parent)
 WHERE p.kind = $1 AND p.dropped_at IS NOT NULL AND c.relname = parent || '_' || p.number
   AND (o.owned OR p.dropped_at NOT BETWEEN clock_timestamp() - interval '1 hour'
                                        AND clock_timestamp() + interval '1 hour'
                   AND pg_relation_size(c.oid) > 0)
 ORDER BY p.number, array_position($2, parent)
"""
# Records that maintenance detaches a table, before it does.
RECORD_DETACHING = WriteStatement(
    "record_detaching",
    """
UPDATE period SET detaching = detaching || $3::bigint::oid
 WHERE kind = $1 AND number = $2 AND $3::bigint::oid <> ALL (detaching)
""",
)
# Whether this role owns the tables.
READ_OWNS_TABLES = (
    "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = 'outbox'::regclass"
)

# One row if it was emptied.
EMPTY_PARTITION = WriteStatement(
    "empty_partition",
    "SELECT FROM empty_partition($1::text::regclass, $2) AS emptied WHERE emptied",
)

# The BRIN indexes that producers do not summarize, one per partition.
READ_SUMMARIES = """
SELECT inhrelid::bigint AS id FROM pg_inherits WHERE inhparent = 'outbox_lookup'::regclass
"""
SUMMARIZE = WriteStatement("summarize", "SELECT summarize($1::bigint::oid::regclass)")

# Whether a trigger that refuses the removal of events is missing, as after ATTACH by hand.  A
# schema without foreign keys is being restored: a dump creates them after its triggers, and fails
# at a trigger that exists.
HAS_MISSING_GUARDS = """
SELECT EXISTS (SELECT FROM missing_guards())
   AND EXISTS (SELECT FROM pg_constraint
                WHERE contype = 'f' AND connamespace = quote_ident(current_schema())::regnamespace)
"""
GUARD_EVENTS = WriteStatement("guard_events", "SELECT guard_events()")

ANALYZE = WriteStatement("analyze_parent", "SELECT analyze_parent($1::text::regclass)")

# Whether a DETACH of a partition was interrupted.
READ_DETACHING = "SELECT inhdetachpending FROM pg_inherits WHERE inhrelid = $1::text::regclass"

DETACH_TIMEOUTS = (f"{int(MESSAGE_LOCK_TIMEOUT_S * 1000)}ms", "1s")
"""Time limits for one lock, and for one attempt to detach a partition to which another table
refers."""
READ_TIMEOUTS = "SELECT current_setting('lock_timeout'), current_setting('statement_timeout')"
SET_TIMEOUTS = (
    "SELECT set_config('lock_timeout', $1, false), set_config('statement_timeout', $2, false)"
)

_BOUND = re.compile(r"FROM \('?(\d+)'?\) TO \('?(\d+)'?\)")


@dataclass(frozen=True, slots=True)
class Partition:
    """The range [lo, hi) of a partitioned table."""

    name: str
    lo: int
    hi: int
    detaching: bool


class PartitionStore:
    """Partitions, on the maintenance connection."""

    def __init__(self, connection: StoreConnection) -> None:
        self._db = connection
        self._lease = uuid4()

    @asynccontextmanager
    async def maintenance_lease(self) -> AsyncIterator[bool]:
        """Hold the maintenance lease for a block; yields False if another session has it.

        A cancelled block does not release it; it expires.
        """
        if not await self.renew_lease():
            yield False
            return
        try:
            yield True
        except asyncpg.PostgresError:
            if not self._db.is_closed():
                await self._db.write(RELEASE_LEASE, self._lease)
            raise
        await self._db.write(RELEASE_LEASE, self._lease)

    async def renew_lease(self) -> bool:
        """Extend the lease between two steps; returns False if another session has it."""
        return bool(await self._db.write(TAKE_LEASE, self._lease, MAINTENANCE_LEASE_S))

    async def extend(self) -> int:
        """Create the partitions of the coming periods; returns their number."""
        made, failure = 0, None
        for kind, parents in PARENTS.items():
            for parent in parents:
                try:
                    for row in await self._db.fetch(READ_MISSING, parent, kind, AHEAD):
                        await self._add(parent, row["number"])
                        made += 1
                except asyncpg.PostgresConnectionError:
                    raise
                except asyncpg.PostgresError as error:
                    # The other tables do not wait for this one.
                    failure = failure or error
        if failure is not None:
            raise failure
        return made

    async def _add(self, parent: str, number: int) -> None:
        await _until_granted(
            lambda: self._db.write(
                ADD_PARTITION, parent, number, lock_timeout_s=MESSAGE_LOCK_TIMEOUT_S
            )
        )

    async def last_id_beyond(self) -> int | None:
        """The last id of an event, if it is so far away that no partition is made for it."""
        last_id: int | None = await self._db.fetchval(READ_BEYOND)
        return last_id

    async def drop(self) -> tuple[int, int, list[str]]:
        """Drop the tables of dropped periods, and empty those of another owner.

        Waits for every transaction that may still read them.

        Returns:
            The number of dropped and of emptied tables, and the names of tables that are kept,
            because they were detached by somebody else.

        Raises:
            asyncpg.PostgresError: the first failure; the other tables were dropped.
        """
        dropped, emptied, kept, failure = 0, 0, [], None
        for row in await self._droppable():
            if not row["ours"]:
                kept.append(row["name"])
                continue
            try:
                if row["owned"]:
                    await self._drop(row)
                    dropped += 1
                elif await self._db.write(EMPTY_PARTITION, row["parent"], row["number"]):
                    emptied += 1
            except (asyncpg.PostgresConnectionError, asyncpg.LockNotAvailableError):
                raise
            except (asyncpg.UndefinedTableError, asyncpg.ObjectNotInPrerequisiteStateError):
                continue  # Another maintainer detaches it, or has dropped it.
            except asyncpg.PostgresError as error:
                # Such as: rows of another table refer to it.
                failure = failure or error
        if failure is not None:
            raise failure
        return dropped, emptied, kept

    async def drop_owned(self) -> int:
        """Drop the tables that this role owns; returns their number."""
        if not await self._db.fetchval(READ_OWNS_TABLES):
            return 0
        owned = [row for row in await self._droppable() if row["owned"] and row["ours"]]
        for row in owned:
            await self._drop(row)
        return len(owned)

    async def _droppable(self) -> list[Any]:
        found: list[Any] = []
        for kind, parents in PARENTS.items():
            found += await self._db.fetch(READ_DROPPABLE, kind, list(parents))
        return found

    async def _drop(self, row: Any) -> None:
        name = quote_ident(row["name"])
        if row["detaching"] is not None:
            await self._db.write(RECORD_DETACHING, row["kind"], row["number"], row["oid"])
            await self._detach(row["parent"], name)
        await self._db.execute(f"DROP TABLE {name}")

    async def _detach(self, parent: str, name: str) -> None:
        """Detach a partition; it waits for all transactions that use the table.

        Nothing waits for it meanwhile, unless another table has a foreign key to this one: that
        table is locked and searched, so each attempt is short.  Behind a proxy, a limit cannot be
        set for a statement that takes several transactions, so `outbox migrate` has to do it.
        """
        detach = f"ALTER TABLE {parent} DETACH PARTITION {name} "
        if not await self._db.fetch(READ_REFERENCES, parent):
            mode = "FINALIZE" if await self._is_detaching(name) else "CONCURRENTLY"
            await self._db.execute(detach + mode)
            return
        if self._db.message_settings:
            raise asyncpg.LockNotAvailableError(
                f"another table has a foreign key to {parent}; run outbox migrate without the proxy"
            )
        before = await self._db.fetchrow(READ_TIMEOUTS)
        try:
            await _until_granted(lambda: self._try_to_detach(detach, name))
        finally:
            if not self._db.is_closed():
                await self._db.fetch(SET_TIMEOUTS, *before)

    async def _try_to_detach(self, detach: str, name: str) -> None:
        # Each time, because the connection may have been opened again.
        await self._db.fetch(SET_TIMEOUTS, *DETACH_TIMEOUTS)
        # An attempt that was interrupted is finished by another statement.
        mode = "FINALIZE" if await self._is_detaching(name) else "CONCURRENTLY"
        try:
            await self._db.execute(detach + mode)
        except asyncpg.QueryCanceledError as error:
            raise asyncpg.LockNotAvailableError(f"DETACH PARTITION {name}: {error}") from error

    async def _is_detaching(self, name: str) -> bool:
        return bool(await self._db.fetchval(READ_DETACHING, name))

    async def guard(self) -> bool:
        """Repair the triggers that refuse the removal of events; True: one was missing."""
        missing: bool = await self._db.fetchval(HAS_MISSING_GUARDS)
        if missing:
            await self._db.write(GUARD_EVENTS)
        return missing

    async def summarize(self) -> None:
        """Summarize the lookup index, so that new events are found by their id and key."""
        for row in await self._db.fetch(READ_SUMMARIES):
            await self._db.write(SUMMARIZE, row["id"])

    async def analyze(self) -> None:
        """Analyze the partitioned tables, which autovacuum does not do."""
        for parents in PARENTS.values():
            for parent in parents:
                await self._db.write(ANALYZE, parent)

    async def partitions(self, parent: str) -> list[Partition]:
        """All partitions of a table, in order."""
        found = []
        for row in await self._db.fetch(READ_PARTITIONS, parent):
            match = _BOUND.search(row["bound"] or "")
            if match is not None:
                found.append(Partition(row["name"], int(match[1]), int(match[2]), row["detaching"]))
        return sorted(found, key=lambda p: p.lo)


async def _until_granted(attempt: Callable[[], Awaitable[object]]) -> None:
    """Repeat an attempt until its locks are granted, for `RETRY_FOR_S` at most."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + RETRY_FOR_S
    while True:
        try:
            await attempt()
        except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError):
            if clock() >= deadline:
                raise
        else:
            return
        await asyncio.sleep(PAUSE_S)
