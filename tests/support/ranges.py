"""Dead-letter ranges and lane changes without an owner and an operator."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing import replay_throttle
from outbox.core.sequencing.replay_throttle import ReplayThrottle
from outbox.relay.sequencing.cursor import BatchResult
from outbox.relay.sequencing.replay_feeder import ReplayFeeder
from tests.support.operators import routing_transaction
from tests.support.sequencers import REAL, session, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.sequencing.replay_throttle import EndpointProgress, Share
    from outbox.relay.sequencing.sequencer import Sequencer
    from tests.support.postgres import Database

# All pending deliveries become one range per lane, as when the endpoint is disabled.
DEAD_LETTER_PENDING = """
WITH pending AS (
    UPDATE lane_progress p SET acked_seq = c.last_seq, retry_seq = NULL, attempts = 0,
           first_attempt_at = NULL, next_attempt_at = NULL, last_response = NULL
      FROM lane_counter c, lane_progress was
     WHERE c.lane_id = p.lane_id AND was.lane_id = p.lane_id AND c.last_seq > p.acked_seq
       AND ($1::uuid IS NULL OR p.endpoint_id = $1)
    RETURNING p.lane_id, p.endpoint_id, was.floor_batch, was.acked_seq + 1 AS seq,
              c.last_seq AS to_seq)
INSERT INTO dead_letter (lane_id, endpoint_id, batch, seq, to_seq, reason, attempts)
SELECT lane_id, endpoint_id, floor_batch, seq, to_seq, 'disabled', 0 FROM pending ORDER BY lane_id
RETURNING id
"""

# The next delivery of a lane of an endpoint.
NEXT_PENDING = """
SELECT relay.lane_name(l.endpoint_id, l.generation, l.slot) AS lane, p.acked_seq + 1 AS sequence
  FROM relay.lane l
  JOIN relay.lane_progress p ON p.lane_id = l.id
  JOIN relay.lane_counter c ON c.lane_id = l.id
  JOIN relay.endpoint e ON e.id = l.endpoint_id
 WHERE e.name = $1 AND c.last_seq > p.acked_seq ORDER BY l.id LIMIT 1
"""

NEW_LANES = """
WITH e AS (
    UPDATE endpoint SET generation = generation + 1, lanes = $2 WHERE id = $1
    RETURNING id, generation),
added AS (
    INSERT INTO lane (endpoint_id, generation, slot)
    SELECT e.id, e.generation, slot FROM e, generate_series(0, $2 - 1) AS slot
    RETURNING id, endpoint_id),
counted AS (
    INSERT INTO lane_counter (lane_id, by_xid) SELECT id, txid_current() FROM added)
INSERT INTO lane_progress (lane_id, endpoint_id, floor_batch, epoch)
SELECT added.id, added.endpoint_id, $3, o.epoch
  FROM added JOIN ownership o ON o.endpoint_id = added.endpoint_id
"""


async def next_pending(database: Database, endpoint: str) -> tuple[str, int]:
    """The name of a lane with pending deliveries, and the sequence number of the first one."""
    async with database.at_hand() as db:
        row = await db.fetchrow(NEXT_PENDING, endpoint)
    return row["lane"], row["sequence"]


async def sequencer(database: Database) -> Sequencer:
    """A sequencer that runs one batch on demand."""
    made, store = REAL.build(await session(database), settings(database))
    await store.check()
    return made


async def turn(worker: Sequencer) -> BatchResult:
    """Run a batch of one of several sequencers; one that does not lead takes over first."""
    done = await worker.sequence_batch()
    return await worker.sequence_batch() if done is BatchResult.STALE else done


class Unpaced(ReplayThrottle):
    """A pacer that treats every chunk as delivered at once."""

    most = replay_throttle.ENDPOINT_MAX
    _later = 1e12

    def endpoints_to_poll(self, now: float) -> list[UUID]:
        due = super().endpoints_to_poll(math.inf)
        self._next_at = 0.0
        return due

    def report_progress(self, endpoint_id: UUID, progress: EndpointProgress, now: float) -> None:
        super().report_progress(endpoint_id, replace(progress, done=True), now)

    def shares(self, now: float) -> list[Share]:
        # Long after any live event, and with every rate's burst unused.
        self._later += 1e6
        shares = super().shares(self._later)
        return [replace(share, numbers=self.most, per_lane=self.most) for share in shares]

    @property
    def poll_at(self) -> float | None:
        return None if super().poll_at is None else 0.0


@contextmanager
def unpaced(most: int = replay_throttle.ENDPOINT_MAX) -> Iterator[None]:
    """Take one chunk of replays per batch, with this many sequence numbers at most."""
    was = ReplayFeeder.throttle_type, Unpaced.most
    ReplayFeeder.throttle_type, Unpaced.most = Unpaced, most
    try:
        yield
    finally:
        ReplayFeeder.throttle_type, Unpaced.most = was


async def sequence_all(database: Database, most: int = replay_throttle.ENDPOINT_MAX) -> None:
    """Sequence all events and replays, and send nothing."""
    with unpaced(most):
        worker = await sequencer(database)
        while (
            await worker.sequence_batch() is BatchResult.WRITTEN or worker.cursor.due_at is not None
        ):
            pass


async def dead_letter_pending(db: Connection[Any], endpoint_id: UUID | None = None) -> list[int]:
    """Dead-letter all pending deliveries as ranges; returns their ids."""
    return [row["id"] for row in await db.fetch(DEAD_LETTER_PENDING, endpoint_id)]


async def change_lanes(db: Connection[Any], endpoint_id: UUID, lanes: int) -> None:
    """Begin a new generation of lanes from the next batch on."""
    async with routing_transaction(db) as from_batch:
        await db.execute(NEW_LANES, endpoint_id, lanes, from_batch)
