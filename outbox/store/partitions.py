"""The partitions of periods: made before they are needed, dropped when their period is.

None of that blocks a producer.  ATTACH takes a lock that goes together with theirs,
and DETACH CONCURRENTLY waits for them, not they for it.

A relay need not own the tables: what only an owner can do is done by functions that
run with the owner's rights (schema/0007_roles.sql).  But DETACH CONCURRENTLY cannot be
done in a function, and without it a producer would have to wait.  So a relay that owns
nothing empties the partitions of a dropped period, which gives their space back, and
leaves their shells for `outbox migrate`, which their owner runs.
"""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.model.sql_names import quote_ident
from outbox.core.sequencing.partition_window import AHEAD

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from asyncpg import Connection

    from outbox.core.sequencing.partition_window import Kind

PARENTS: Mapping[Kind, tuple[str, ...]] = {
    "events": ("outbox",),
    "log": ("attempt", "delivery", "batch"),
}
"""What has a partition for each period of a kind."""

# One maintainer at a time; a session lock, because DETACH CONCURRENTLY cannot
# run in a transaction.
UPKEEP_KEY = "hashtextextended('outbox-relay maintains ' || current_schema(), 0)"
LOCK = f"SELECT pg_try_advisory_lock({UPKEEP_KEY})"
UNLOCK = f"SELECT pg_advisory_unlock({UPKEEP_KEY})"

READ_PARTITIONS = """
SELECT c.relname AS name, pg_get_expr(c.relpartbound, c.oid) AS bound,
       i.inhdetachpending AS detaching
  FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
 WHERE i.inhparent = $1::text::regclass
"""

# The periods of a kind that should have a partition of this parent, and do not.
READ_MISSING = """
SELECT n AS number
  FROM (SELECT max(number) AS number FROM period WHERE kind = $2) p,
       generate_series(p.number, p.number + $3::bigint) AS n
 WHERE to_regclass(quote_ident($1 || '_' || n)) IS NULL
 ORDER BY n
"""
ADD = "SELECT add_partition($1::text::regclass, $2)"

# Tables of periods that are dropped, oldest first; `detaching`: somebody was
# interrupted; NULL: it is detached already.  `owned`: this role may drop it; another
# one's is there as long as there is something in it that may be emptied.
READ_DOOMED = """
SELECT parent, p.number, c.relname AS name, i.inhdetachpending AS detaching, o.owned
  FROM period p, unnest($2::text[]) AS parent
  JOIN pg_class c ON c.relnamespace = quote_ident(current_schema())::regnamespace
 CROSS JOIN LATERAL (SELECT pg_has_role(c.relowner, 'USAGE') AS owned OFFSET 0) o
  LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
 WHERE p.kind = $1 AND p.dropped_at IS NOT NULL AND c.relname = parent || '_' || p.number
   AND (o.owned OR p.dropped_at < clock_timestamp() - interval '1 hour'
                   AND pg_relation_size(c.oid) > 0)
 ORDER BY p.number, array_position($2, parent)
"""
# Whether this role may do so.
OWNS = "SELECT pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = 'outbox'::regclass"

EMPTY = "SELECT empty_partition($1::text::regclass, $2)"

# The indexes that producers leave to be brought up to date, one for each partition.
READ_SUMMARIES = """
SELECT inhrelid::bigint AS id FROM pg_inherits WHERE inhparent = 'outbox_lookup'::regclass
"""
SUMMARIZE = "SELECT summarize($1::bigint::oid::regclass)"

ANALYZE = "SELECT analyze_parent($1::text::regclass)"

_BOUND = re.compile(r"FROM \('?(\d+)'?\) TO \('?(\d+)'?\)")


@dataclass(frozen=True, slots=True)
class Partition:
    """[lo, hi) of a parent."""

    name: str
    lo: int
    hi: int
    detaching: bool


class PartitionStore:
    """Partitions, on the connection for maintenance.

    Args:
        pooled: it leads to a proxy that pools transactions, where a lock of the
            session would stay with whoever gets that session next.  Two
            maintainers do no harm, then: each step looks at what is there, and of
            two at once one is refused, and looks again.
    """

    def __init__(self, connection: Connection[Any], *, pooled: bool = False) -> None:
        self._db = connection
        self._pooled = pooled

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[bool]:
        """Be the one who maintains for the length of a block, if nobody else is."""
        if self._pooled:
            yield True
            return
        if not await self._db.fetchval(LOCK):
            yield False
            return
        try:
            yield True
        except asyncpg.PostgresError:
            await self._db.execute(UNLOCK)
            raise
        # Whoever is cancelled leaves it to the end of the connection.
        await self._db.execute(UNLOCK)

    async def extend(self) -> int:
        """Have partitions for the periods to come; returns how many were made."""
        made = 0
        for kind, parents in PARENTS.items():
            for parent in parents:
                for row in await self._db.fetch(READ_MISSING, parent, kind, AHEAD):
                    await self._db.execute(ADD, parent, row["number"])
                    made += 1
        return made

    async def drop(self) -> tuple[int, int]:
        """Drop what periods that are dropped had, and empty what is not ours to drop.

        Waits for every transaction that may still look into what it drops.

        Returns:
            How many tables went, and how many were emptied.
        """
        gone = emptied = 0
        for row in await self._doomed():
            if row["owned"]:
                await self._drop(row)
                gone += 1
            elif await self._db.fetchval(EMPTY, row["parent"], row["number"]):
                emptied += 1
        return gone, emptied

    async def drop_owned(self) -> int:
        """Only drop what is ours to drop; returns how many tables went."""
        if not await self._db.fetchval(OWNS):
            return 0
        owned = [row for row in await self._doomed() if row["owned"]]
        for row in owned:
            await self._drop(row)
        return len(owned)

    async def _doomed(self) -> list[Any]:
        found: list[Any] = []
        for kind, parents in PARENTS.items():
            found += await self._db.fetch(READ_DOOMED, kind, list(parents))
        return found

    async def _drop(self, row: Any) -> None:
        name = quote_ident(row["name"])
        if row["detaching"] is not None:
            how = "FINALIZE" if row["detaching"] else "CONCURRENTLY"
            await self._db.execute(f"ALTER TABLE {row['parent']} DETACH PARTITION {name} {how}")
        await self._db.execute(f"DROP TABLE {name}")

    async def summarize(self) -> None:
        """Let new events be found by their id and key."""
        for row in await self._db.fetch(READ_SUMMARIES):
            await self._db.execute(SUMMARIZE, row["id"])

    async def analyze(self) -> None:
        """Tell the planner about the parents, which autovacuum leaves out."""
        for parents in PARENTS.values():
            for parent in parents:
                await self._db.execute(ANALYZE, parent)

    async def partitions(self, parent: str) -> list[Partition]:
        """All partitions of a parent in order."""
        found = []
        for row in await self._db.fetch(READ_PARTITIONS, parent):
            match = _BOUND.search(row["bound"] or "")
            if match is not None:
                found.append(Partition(row["name"], int(match[1]), int(match[2]), row["detaching"]))
        return sorted(found, key=lambda p: p.lo)
