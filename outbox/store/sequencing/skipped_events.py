"""Committed events that the cursor skipped, because it had declared their ids dead.

That cannot happen while only the sequence assigns ids, one by one.  It happens when the sequence
was altered (CACHE, setval), or when an event is inserted with an explicit id.  `outbox resequence`
lets the next batches sequence such events.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from outbox.store.routing_change import ADD_TO_JOURNAL

if TYPE_CHECKING:
    from outbox.store.connection.store_connection import StoreConnection

BATCHES_PER_SEARCH = 5_000
"""Batches with dead ids per search: this many of the newest, and as many older ones."""
SKIPPED_EVENTS_MAX, SKIPPED_IDS_MAX = 10_000, 10
"""Events that are counted, and ids that are named."""
REPORTED_MAX = 1_000
"""Results that are remembered as reported, the newest: one may be found again in each cycle of
searches, and there are new ones as long as producers insert explicit ids."""

# The skipped events of `examined` batches.  LATERAL: an index lookup for each range of ids.
SKIPPED_EVENTS = """
SELECT examined.batch, o.id
  FROM {examined} examined
 CROSS JOIN unnest(examined.dead) AS dead(ids)
 CROSS JOIN LATERAL (
       SELECT id FROM outbox WHERE id >= lower(dead.ids) AND id < upper(dead.ids) OFFSET 0) o
"""

# Searches the newest $1 batches with dead ids, and $1 of those before batch $2.
#   reached: the oldest batch of the latter; NULL: there are no older ones.
FIND_SKIPPED_EVENTS = f"""
WITH newest AS MATERIALIZED (
    SELECT batch, dead FROM batch WHERE NOT isempty(dead) ORDER BY batch DESC LIMIT $1),
older AS MATERIALIZED (
    SELECT batch, dead FROM batch
     WHERE NOT isempty(dead) AND batch < coalesce($2::bigint, (SELECT min(batch) FROM newest))
     ORDER BY batch DESC LIMIT $1),
skipped AS MATERIALIZED (
    {SKIPPED_EVENTS.format(examined="(SELECT * FROM newest UNION SELECT * FROM older)")}
     LIMIT {SKIPPED_EVENTS_MAX})
SELECT (SELECT CASE count(*) WHEN $1 THEN min(batch) END FROM older) AS reached,
       (SELECT count(*) FROM skipped) AS events,
       array(SELECT id FROM skipped ORDER BY id LIMIT {SKIPPED_IDS_MAX}) AS first_ids
"""  # noqa: S608 (constants only)


@dataclass(frozen=True, slots=True)
class SkippedEvents:
    """The result of a search that found some."""

    events: int
    """Their number, at most `SKIPPED_EVENTS_MAX`."""
    first_ids: tuple[int, ...]
    """The lowest of their ids, at most `SKIPPED_IDS_MAX`."""


class SkippedEventStore:
    """Searches for skipped events, the newest batches first.

    Each search examines a limited number of batches and continues where the previous one
    stopped, so that all batches are examined in the course of time.

    Not safe for concurrent use; asyncpg's errors propagate.

    Args:
        actor: author of the journal entries.
    """

    def __init__(self, connection: StoreConnection, actor: str) -> None:
        self._db = connection
        self._actor = actor
        self._examined_from: int | None = None
        self._reported: deque[SkippedEvents] = deque(maxlen=REPORTED_MAX)

    async def find(self) -> SkippedEvents | None:
        """Search once; a result that was not reported yet is journalled."""
        row = await self._db.fetchrow(FIND_SKIPPED_EVENTS, BATCHES_PER_SEARCH, self._examined_from)
        self._examined_from = row["reached"]
        if not row["events"]:
            return None
        found = SkippedEvents(row["events"], tuple(row["first_ids"]))
        if found not in self._reported:
            data = {"events": found.events, "first_ids": found.first_ids}
            await self._db.write(
                ADD_TO_JOURNAL, "events_skipped", self._actor, None, orjson.dumps(data).decode()
            )
            # Each search combines the newest batches with other older ones, so results alternate.
            self._reported.append(found)
        return found
