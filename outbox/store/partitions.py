"""Keeps empty partitions ahead of the ids and batches that are being written.

The last partition is open-ended, so a producer never meets a missing one, even
if no relay runs for years.  While it is still empty and far away it is cut: it
becomes a bounded one, and a new open-ended one stands behind it.  None of that
blocks a producer: DETACH CONCURRENTLY waits for them, not they for it, and
ATTACH takes a lock that goes together with theirs.  Between the two, ids beyond
the cut have no partition, and they are at least `WIDTH` away.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from outbox.core.names import quote_ident

if TYPE_CHECKING:
    from asyncpg import Connection

WIDTH = 1_000_000
"""Ids or batches per partition."""

AHEAD = 2
"""Bounded partitions to have beyond the one that is being written."""

PARENTS = ("outbox", "batch", "delivery", "attempt")

# One maintainer at a time; a session lock, because DETACH CONCURRENTLY cannot
# run in a transaction.
_KEY = "hashtextextended('outbox-relay maintains ' || current_schema(), 0)"
LOCK = f"SELECT pg_try_advisory_lock({_KEY})"
UNLOCK = f"SELECT pg_advisory_unlock({_KEY})"

READ_PARTITIONS = """
SELECT c.relname AS name, pg_get_expr(c.relpartbound, c.oid) AS bound,
       i.inhdetachpending AS detaching
  FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
 WHERE i.inhparent = $1::text::regclass
"""

# Where writing is now: ids for the outbox, batch numbers for the others.
READ_POSITIONS = """
SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence('outbox', 'id')::regclass), 0) AS id,
       (SELECT max(batch) FROM batch) AS batch
"""

TABLE_EXISTS = "SELECT to_regclass(quote_ident($1)) IS NOT NULL"
ADD_OPEN_ENDED = "SELECT add_partition($1::text::regclass, $2, NULL)"

_BOUND = re.compile(r"FROM \('?(\d+)'?\) TO \((?:'?(\d+)'?|MAXVALUE)\)")


@dataclass(frozen=True, slots=True)
class Partition:
    """[lo, hi) of a parent; `hi` is None when it is open-ended."""

    name: str
    lo: int
    hi: int | None
    detaching: bool


class PartitionStore:
    """Partition maintenance on a connection of its own.

    Args:
        pooled: it leads to a proxy that pools transactions, where a lock of the
            session would stay with whoever gets that session next.  Two
            maintainers do no harm, then: each step looks at what is there, and of
            two at once one is refused, and looks again.
    """

    def __init__(
        self, connection: Connection[Any], width: int = WIDTH, *, pooled: bool = False
    ) -> None:
        self._db = connection
        self._width = width
        self._pooled = pooled

    async def extend(self) -> int:
        """Have enough partitions ahead; returns how many were made."""
        if self._pooled:
            return await self._extend_all()
        if not await self._db.fetchval(LOCK):
            return 0
        try:
            made = await self._extend_all()
        except asyncpg.PostgresError:
            await self._db.execute(UNLOCK)
            raise
        # Whoever is cancelled leaves it to the end of the connection.
        await self._db.execute(UNLOCK)
        return made

    async def _extend_all(self) -> int:
        at = await self._db.fetchrow(READ_POSITIONS)
        made = 0
        for parent in PARENTS:
            position = at["id"] if parent == "outbox" else at["batch"]
            while await self._extend_once(parent, position):
                made += 1
        return made

    async def analyze(self) -> None:
        """Tell the planner about the parents, which autovacuum leaves out."""
        for parent in PARENTS:
            await self._db.execute(f"ANALYZE {parent}")

    async def partitions(self, parent: str) -> list[Partition]:
        """All partitions of a parent in order."""
        found = []
        for row in await self._db.fetch(READ_PARTITIONS, parent):
            match = _BOUND.search(row["bound"] or "")
            if match is not None:
                hi = match[2] and int(match[2])
                found.append(Partition(row["name"], int(match[1]), hi or None, row["detaching"]))
        return sorted(found, key=lambda p: p.lo)

    async def _extend_once(self, parent: str, position: int) -> bool:
        """One step of the way; False when there is nothing to do."""
        last = (await self.partitions(parent))[-1]
        name = quote_ident(last.name)
        if last.detaching:
            # Somebody was interrupted while cutting.
            await self._db.execute(f"ALTER TABLE {parent} DETACH PARTITION {name} FINALIZE")
            return await self._close_behind(parent, last.lo)
        if last.hi is not None:
            return await self._close_behind(parent, last.hi)
        if not position < last.lo < position + AHEAD * self._width:
            # Far enough away; or in use already, and then it stays as it is.
            return False
        await self._db.execute(f"ALTER TABLE {parent} DETACH PARTITION {name} CONCURRENTLY")
        return await self._close_behind(parent, last.lo)

    async def _close_behind(self, parent: str, lo: int) -> bool:
        """Attach the cut partition with an upper bound, and an open one behind it."""
        child = f"{parent}_{lo}"
        async with self._db.transaction():
            if await self._db.fetchval(TABLE_EXISTS, child):
                await self._db.execute(
                    f"ALTER TABLE {parent} ATTACH PARTITION {quote_ident(child)} "
                    f"FOR VALUES FROM ({lo}) TO ({lo + self._width})"
                )
                lo += self._width
            await self._db.execute(ADD_OPEN_ENDED, parent, lo)
        return True
