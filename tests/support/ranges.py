"""Dead-letter ranges and lane changes, without the owner and the operator who make them."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing import replay_throttle
from outbox.core.sequencing.replay_throttle import Pacing
from outbox.relay.sequencing.cursor import Turn
from outbox.relay.sequencing.replay_feeder import Replaying
from outbox.store.routing_change import change
from tests.support.sequencers import REAL, session, settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.sequencing.replay_throttle import Look, Share
    from outbox.relay.sequencing.sequencer import Sequencer
    from tests.support.postgres import Database

# Everything owed becomes one range per lane, as when its endpoint is disabled.
GIVE_UP = """
WITH owed AS (
    UPDATE lane_progress p SET acked_seq = c.last_seq, head_seq = NULL, attempts = 0,
           first_attempt_at = NULL, next_attempt_at = NULL, last_answer = NULL
      FROM lane_counter c, lane_progress was
     WHERE c.lane_id = p.lane_id AND was.lane_id = p.lane_id AND c.last_seq > p.acked_seq
       AND ($1::uuid IS NULL OR p.endpoint_id = $1)
    RETURNING p.lane_id, p.endpoint_id, was.floor_batch, was.acked_seq + 1 AS seq,
              c.last_seq AS to_seq)
INSERT INTO dead_letter (lane_id, endpoint_id, batch, seq, to_seq, reason, attempts)
SELECT lane_id, endpoint_id, floor_batch, seq, to_seq, 'disabled', 0 FROM owed ORDER BY lane_id
RETURNING id
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
    INSERT INTO lane_counter (lane_id) SELECT id FROM added)
INSERT INTO lane_progress (lane_id, endpoint_id, floor_batch, epoch)
SELECT added.id, added.endpoint_id, $3, o.epoch
  FROM added JOIN ownership o ON o.endpoint_id = added.endpoint_id
"""


async def sequencer(database: Database) -> Sequencer:
    """A sequencer that takes a turn when it is told to."""
    made, store = REAL.build(await session(database), settings(database))
    await store.check()
    return made


async def turn(worker: Sequencer) -> Turn:
    """A turn of one of several; who does not lead any more takes the lead."""
    done = await worker.turn()
    return await worker.turn() if done is Turn.OVERTAKEN else done


class Unpaced(Pacing):
    """As if whatever is taken were delivered at once: nobody waits for it."""

    most = replay_throttle.ENDPOINT_MAX

    def due(self, now: float) -> list[UUID]:
        due = super().due(math.inf)
        self._next_at = 0.0
        return due

    def looked(self, endpoint_id: UUID, look: Look, now: float) -> None:
        super().looked(endpoint_id, replace(look, done=True), now)

    def shares(self, now: float) -> list[Share]:
        return [
            replace(share, numbers=self.most, per_lane=self.most) for share in super().shares(now)
        ]

    @property
    def look_at(self) -> float | None:
        return None if super().look_at is None else 0.0


@contextmanager
def unpaced(most: int = replay_throttle.ENDPOINT_MAX) -> Iterator[None]:
    """Replays are taken as fast as batches are made, so many numbers in each."""
    was = Replaying.pacing_type, Unpaced.most
    Replaying.pacing_type, Unpaced.most = Unpaced, most
    try:
        yield
    finally:
        Replaying.pacing_type, Unpaced.most = was


async def sequence_all(database: Database, most: int = replay_throttle.ENDPOINT_MAX) -> None:
    """Make deliveries of everything published, and of every replay, and send nothing."""
    with unpaced(most):
        worker = await sequencer(database)
        while await worker.turn() is Turn.MOVED or worker.cursor.replay_at is not None:
            pass


async def give_up(db: Connection[Any], endpoint_id: UUID | None = None) -> list[int]:
    """Everything owed becomes dead-letter ranges; returns their ids."""
    return [row["id"] for row in await db.fetch(GIVE_UP, endpoint_id)]


async def change_lanes(db: Connection[Any], endpoint_id: UUID, lanes: int) -> None:
    """A new generation of lanes, from the next batch on."""
    async with change(db, "relay") as from_batch:
        await db.execute(NEW_LANES, endpoint_id, lanes, from_batch)
