"""The leader's SQL about replay jobs: what to take next, and how far they are.

What is taken is taken under the cursor row, in the transaction of the batch that
makes deliveries of it.  So an abort, which takes the row too, ends it for good, and
whoever leads next goes on exactly where the last batch ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.replay_throttle import Look, Part
from outbox.core.sequencing.router import Sighting
from outbox.store.channels import WAKE_ALL
from outbox.store.routing_change import RAISE_VERSION, write_journal
from outbox.store.type_match import TYPE_MATCHES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from asyncpg import Connection

    from outbox.core.sequencing.replay_throttle import Share

# Whether a selection `s` means a dead letter `d`, whose endpoint it is apart.  A range
# has neither type nor tenant.
SELECTED = f"""
    (s.types IS NULL OR {TYPE_MATCHES.replace("o.type", "d.type")})
    AND (s.tenant IS NULL OR d.tenant = s.tenant)
    AND (s.reason IS NULL OR d.reason = s.reason)
    AND (s.since IS NULL OR d.at >= s.since)
    AND (s.until IS NULL OR d.at < s.until)
"""

# What no batch has taken yet of the replays of an endpoint, or of a job, never will be:
# those dead letters are dead as before.
CANCEL_REPLAYS = """
WITH pending AS (
    SELECT r.id, r.dead_id, coalesce(r.next_seq > d.seq, true) AS begun
      FROM replay r LEFT JOIN dead_letter d ON d.id = r.dead_id
     WHERE ($1::uuid IS NULL OR r.endpoint_id = $1) AND ($2::bigint IS NULL OR r.job_id = $2)
       AND r.next_seq <= r.to_seq),
cut AS (
    UPDATE replay r SET to_seq = r.next_seq - 1 FROM pending p WHERE r.id = p.id AND p.begun),
called_off AS (
    DELETE FROM replay r USING pending p WHERE r.id = p.id AND NOT p.begun)
UPDATE dead_letter SET state = 'dead' WHERE id IN (SELECT dead_id FROM pending)
"""

READ_PARTS = """
SELECT p.job_id, p.endpoint_id, j.kind, j.rate_per_s, e.lanes,
       CASE WHEN j.state = 'aborted' THEN 'aborted'
            WHEN e.state IN ('removing', 'removed') THEN 'removed'
            WHEN e.state IN ('disabling', 'disabled') THEN 'disabled'
            WHEN j.kind = 'history' AND NOT EXISTS (
                 SELECT FROM subscription s
                  WHERE s.endpoint_id = e.id AND s.to_batch IS NULL) THEN 'unsubscribed' END AS why
  FROM replay_part p
  JOIN replay_job j ON j.id = p.job_id
  JOIN endpoint e ON e.id = p.endpoint_id
 WHERE p.ended_at IS NULL
 ORDER BY p.job_id, p.endpoint_id
"""

# How the last helpings of some endpoints are doing, which is told by the last number of
# each lane in the batches that they went into.  Lanes of older generations count, too:
# they may have been changed since.
LOOK = """
SELECT asked.id AS endpoint_id, coalesce(helping.done, true) AS done, helping.mean_ms,
       coalesce(given.numbers, 0)::bigint AS numbers
  FROM unnest($1::uuid[]) AS asked(id)
 CROSS JOIN LATERAL (
       SELECT bool_and(p.acked_seq >= d.seq OR EXISTS (
                  SELECT FROM attempt a
                   WHERE a.lane_id = l.id AND a.batch = part.batch AND a.seq = d.seq
                     AND a.outcome = 'delivered')) AS done,
              avg(tried.mean_ms) AS mean_ms
         FROM replay_part part
        CROSS JOIN LATERAL (
              SELECT id FROM lane WHERE endpoint_id = part.endpoint_id OFFSET 0) l
        CROSS JOIN LATERAL (
              SELECT seq FROM delivery WHERE lane_id = l.id AND batch = part.batch
               ORDER BY seq DESC LIMIT 1) d
        CROSS JOIN LATERAL (
              SELECT acked_seq FROM lane_progress WHERE lane_id = l.id LIMIT 1) p
        CROSS JOIN LATERAL (
              SELECT avg(elapsed_ms) AS mean_ms FROM attempt
               WHERE lane_id = l.id AND batch = part.batch) tried
        WHERE part.endpoint_id = asked.id AND part.ended_at IS NULL) helping
 CROSS JOIN LATERAL (
       SELECT sum(c.last_seq) AS numbers
         FROM lane l CROSS JOIN LATERAL (
              SELECT last_seq FROM lane_counter
               WHERE lane_id = l.id ORDER BY last_seq DESC LIMIT 1) c
        WHERE l.endpoint_id = asked.id) given
"""

SEEN_MAX, SPARE = 200, 10
"""Dead letters or events that are looked at for one part in one batch; and dead letters
beyond those that may be taken, where any will do that is not erased."""

# The next dead letters of parts none of whose replays is waiting; one empty row for a
# part that has no more.  A lane's part is one replay, and nothing besides.
READ_LETTERS = f"""
SELECT p.job_id, p.endpoint_id, p.last_id, d.id, d.is_erased, d.wanted
  FROM unnest($1::bigint[], $2::uuid[], $3::bigint[]) AS part(job_id, endpoint_id, numbers)
 CROSS JOIN LATERAL (
       SELECT * FROM replay_part
        WHERE job_id = part.job_id AND endpoint_id = part.endpoint_id LIMIT 1) p
  JOIN replay_job s ON s.id = p.job_id AND s.kind IN ('dead', 'lane') AND s.state = 'running'
 CROSS JOIN LATERAL (
       SELECT EXISTS (SELECT FROM replay r
                       WHERE r.job_id = p.job_id AND r.endpoint_id = p.endpoint_id
                         AND r.next_seq <= r.to_seq) AS some OFFSET 0) waiting
  LEFT JOIN LATERAL (
       SELECT d.id, d.outbox_id IS NOT NULL AND d.payload IS NULL AS is_erased,
              {SELECTED} AS wanted
         FROM (SELECT * FROM dead_letter
                WHERE s.kind = 'dead' AND endpoint_id = p.endpoint_id AND state = 'dead'
                  AND id >= p.next_id AND id <= p.last_id
                ORDER BY id
                LIMIT CASE WHEN num_nonnulls(s.types, s.tenant, s.reason, s.since, s.until) > 0
                           THEN {SEEN_MAX} ELSE part.numbers + {SPARE} END) d) d ON true
 WHERE NOT waiting.some
 ORDER BY p.job_id, p.endpoint_id, d.id
"""  # noqa: S608 (constants only)

# Some that somebody may have decided about meanwhile.  Locked in the order of their
# ids, as everybody does who locks several.  The lanes that waited for them go on.
TAKE_LETTERS = """
WITH locked AS MATERIALIZED (
    SELECT id FROM dead_letter WHERE id = ANY ($2) AND state = 'dead' ORDER BY id FOR UPDATE),
taken AS (
    UPDATE dead_letter d SET state = 'replaying' FROM locked WHERE d.id = locked.id
    RETURNING d.id, d.endpoint_id, d.lane_id, d.batch, d.seq, d.to_seq),
unblocked AS (
    DELETE FROM lane_block b USING taken t WHERE b.lane_id = t.lane_id AND b.seq = t.seq
    RETURNING b.lane_id),
asked AS (
    INSERT INTO replay (job_id, endpoint_id, dead_id, next_seq, next_batch, to_seq)
    SELECT chosen.job_id, t.endpoint_id, t.id, t.seq, t.batch, t.to_seq
      FROM taken t JOIN unnest($1::bigint[], $2::bigint[]) AS chosen(job_id, id) ON chosen.id = t.id
     ORDER BY t.id)
SELECT count(*) AS unblocked FROM unblocked
"""

# The next events for a backfill, in order.  Only what was sequenced when it was asked
# for is in it: everything up to `last_id` was, apart from the gaps that were open then,
# so these events are all there, whoever looks and whenever.  What turns up in one of
# those gaps is sequenced after that, in a batch of its own, and so the endpoint gets it
# as a live event: not twice, and not never.
READ_HISTORY = f"""
SELECT p.last_id, o.id, o.tenant, o.type,
       CASE WHEN o.key IS NULL THEN o.id
            ELSE hashtextextended(o.key, 0) & 9223372036854775807 END AS spread,
       o.created_at >= s.since AND (s.until IS NULL OR o.created_at < s.until)
           AND NOT s.gaps @> o.id AND (s.types IS NULL OR {TYPE_MATCHES}) AS wanted
  FROM (SELECT * FROM replay_part WHERE job_id = $1 AND endpoint_id = $2 LIMIT 1) p
  JOIN replay_job s ON s.id = p.job_id AND s.state = 'running'
  LEFT JOIN LATERAL (
       SELECT id, tenant, type, key, created_at FROM outbox
        WHERE id >= p.next_id AND id <= p.last_id ORDER BY id LIMIT $3) o ON true
 ORDER BY o.id
"""  # noqa: S608

MOVE_PARTS = """
UPDATE replay_part p
   SET next_id = coalesce(m.next_id, p.next_id), taken = p.taken + m.taken,
       erased = p.erased + m.erased,
       batch = CASE WHEN m.taken > 0 THEN $1::bigint ELSE p.batch END, from_id = m.from_id
  FROM unnest($2::bigint[], $3::uuid[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])
       AS m(job_id, endpoint_id, next_id, taken, erased, from_id)
 WHERE p.job_id = m.job_id AND p.endpoint_id = m.endpoint_id
"""

END_PARTS = """
UPDATE replay_part p SET ended_at = clock_timestamp(), why = e.why, from_id = NULL
  FROM unnest($1::bigint[], $2::uuid[], $3::text[]) AS e(job_id, endpoint_id, why)
 WHERE p.job_id = e.job_id AND p.endpoint_id = e.endpoint_id
"""

# Jobs whose last part has just ended.
END_JOBS = """
UPDATE replay_job j
   SET state = CASE j.state WHEN 'running' THEN 'done' ELSE j.state END,
       ended_at = clock_timestamp()
 WHERE j.id = ANY ($1)
   AND NOT EXISTS (SELECT FROM replay_part p WHERE p.job_id = j.id AND p.ended_at IS NULL)
RETURNING j.id, j.state, j.kind
"""

READ_TAKEN = "SELECT sum(taken)::bigint AS taken FROM replay_part WHERE job_id = $1"


@dataclass(slots=True)
class Move:
    """What a batch takes of a part, and where the rest begins."""

    share: Share
    next_id: int | None = None
    """None: where it began."""
    taken: int = 0
    erased: int = 0
    from_id: int | None = None
    """The lowest event that a backfill may still have to read."""


@dataclass(slots=True)
class Letters:
    """The next dead letters of a part."""

    chosen: list[int] = field(default_factory=list)
    erased: int = 0
    next_id: int = 0


@dataclass(frozen=True, slots=True)
class History:
    """The next events of a backfill."""

    events: list[Sighting]
    """Those that are wanted."""
    next_id: int
    """Behind all that was looked at."""
    more: bool


class ReplayingStore:
    """Reads and moves replay jobs, on the sequencer's connection.

    All but `parts` and `look` only in the transaction of a batch.
    """

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection

    async def parts(self) -> list[Part]:
        """All that have not ended."""
        return [Part(**dict(row)) for row in await self._db.fetch(READ_PARTS)]

    async def look(self, endpoint_ids: Sequence[UUID]) -> dict[UUID, Look]:
        """How the last helpings of the endpoints are doing."""
        rows = await self._db.fetch(LOOK, list(endpoint_ids))
        return {r["endpoint_id"]: Look(r["done"], r["mean_ms"], r["numbers"]) for r in rows}

    async def take_letters(
        self, shares: Sequence[Share]
    ) -> tuple[dict[tuple[int, UUID], Letters | None], bool]:
        """Have the next dead letters of parts sent again.

        Returns:
            By part, what was chosen; None: there are no more.  A part of which some
            still wait for their numbers is left out.  And whether a lane goes on.
        """
        rows = await self._db.fetch(
            READ_LETTERS,
            [share.part.job_id for share in shares],
            [share.part.endpoint_id for share in shares],
            [share.numbers for share in shares],
        )
        numbers = {(s.part.job_id, s.part.endpoint_id): s.numbers for s in shares}
        found: dict[tuple[int, UUID], Letters | None] = {}
        seen: dict[tuple[int, UUID], int] = {}
        for row in rows:
            part = (row["job_id"], row["endpoint_id"])
            if row["id"] is None:
                found[part] = None
                continue
            letters = found.setdefault(part, Letters())
            assert letters is not None
            if len(letters.chosen) == numbers[part]:
                continue
            seen[part] = seen.get(part, 0) + 1
            letters.next_id = row["id"] + 1
            if row["wanted"] and row["is_erased"]:
                letters.erased += 1
            elif row["wanted"]:
                letters.chosen.append(row["id"])
        chosen = [(part[0], i) for part, each in found.items() if each for i in each.chosen]
        unblocked = 0
        if chosen:
            unblocked = await self._db.fetchval(
                TAKE_LETTERS, [job_id for job_id, _ in chosen], [i for _, i in chosen]
            )
        return found, bool(unblocked)

    async def tell_owners(self) -> None:
        """Lanes go on that waited: their owners look at what a higher version tells them.

        Only when the batch is written, which the version stands for.
        """
        await self._db.execute(RAISE_VERSION)
        await self._db.execute(WAKE_ALL)

    async def history(self, part: Part) -> History | None:
        """The next events of a backfill; None: it is not running any more."""
        rows = await self._db.fetch(READ_HISTORY, part.job_id, part.endpoint_id, SEEN_MAX)
        if not rows:
            return None
        seen = [r for r in rows if r["id"] is not None]
        more = len(seen) == SEEN_MAX
        return History(
            [Sighting(r["id"], r["tenant"], r["type"], r["spread"]) for r in seen if r["wanted"]],
            next_id=seen[-1]["id"] + 1 if more else rows[0]["last_id"] + 1,
            more=more,
        )

    async def move(self, batch: int, moves: Sequence[Move]) -> None:
        """Remember how far parts are after this batch."""
        await self._db.execute(
            MOVE_PARTS,
            batch,
            [m.share.part.job_id for m in moves],
            [m.share.part.endpoint_id for m in moves],
            [m.next_id for m in moves],
            [m.taken for m in moves],
            [m.erased for m in moves],
            [m.from_id for m in moves],
        )

    async def end(self, parts: Sequence[Part], actor: str) -> None:
        """Nothing is left of these parts, or nothing more of them is to be taken."""
        for endpoint_id in {p.endpoint_id for p in parts if p.why in ("disabled", "removed")}:
            await self._db.execute(CANCEL_REPLAYS, endpoint_id, None)
        await self._db.execute(
            END_PARTS,
            [p.job_id for p in parts],
            [p.endpoint_id for p in parts],
            [p.why for p in parts],
        )
        for job in await self._db.fetch(END_JOBS, sorted({p.job_id for p in parts})):
            taken = await self._db.fetchval(READ_TAKEN, job["id"])
            data = {"job": job["id"], "state": job["state"], "taken": taken}
            await write_journal(self._db, "replay_ended", actor, None, data)
