"""The sequencer's SQL about who gets what: subscriptions, and replays asked for.

Read under the cursor row, which everybody takes who changes one of them.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.router import Helping, Replay, Route, fitting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncpg import Connection

    from outbox.core.sequencing.replay_throttle import Share

# A paused endpoint's deliveries are numbered, though none is sent.  A filter that was
# stopped less than so many seconds ago counts as met.
READ_ROUTES = """
SELECT s.endpoint_id, s.types, s.tenant, s.all_tenants,
       CASE WHEN s.filter_stopped_at > clock_timestamp() - make_interval(secs => $1) THEN NULL
            ELSE s.filter END AS filter,
       array(SELECT l.id FROM lane l
              WHERE l.endpoint_id = e.id AND l.generation = e.generation
              ORDER BY l.slot) AS lane_ids
  FROM subscription s
  JOIN endpoint e ON e.id = s.endpoint_id AND e.state IN ('active', 'paused')
 WHERE s.to_batch IS NULL
"""

RESENT_SPARE = 20
"""Numbers of a lane that are looked at beyond those that may be taken: some are passed over."""

# Whether a delivery `{d}` of the lane `{lane}` is to be sent again when its receiver asks
# for what it got from the number `{first}` on: if it was not given up, which is an
# operator's to decide about, and is not itself a copy, made because of such a wish, of one
# that is sent again anyway.
RESENT = """
    (NOT EXISTS (SELECT FROM replay_job j
                  WHERE j.id = {d}.backfill_id AND j.kind = 'lane' AND j.lane_id = {lane}
                    AND {d}.replay_seq >= {first})
     AND coalesce((SELECT x.to_seq FROM dead_letter x
                    WHERE x.lane_id = {lane} AND x.seq <= {d}.seq
                    ORDER BY x.seq DESC LIMIT 1), 0) < {d}.seq)
"""
_IS_COPY = """
    EXISTS (SELECT FROM replay_job j WHERE j.id = n.backfill_id AND j.kind = 'lane')
"""

# The next numbers of the replays that are waiting, of each of some parts of jobs the
# oldest first, at most so many of each part; each goes to the end of the lane that its
# key has today.  How many each replay may take is known beforehand, because numbers
# have no holes, so no more is read of a range than is taken, and it is read from where
# the last batch ended.  One letter has its own copy of the event; of a range only the
# deliveries are left, whose events tell the key, or the letters that they came of, when
# a lane gave up what was sent again.  So it is with what a lane delivered, of which some
# are not wanted: a job has but one of these.  A number whose delivery is gone is
# NULL here, once for its replay, and passed over.  LIMIT 1 keeps it to a look for each
# replay, and OFFSET 0 to those that wait, whatever the planner knows.
READ_REPLAYS = f"""
WITH asked AS MATERIALIZED (
    SELECT part.job_id, part.endpoint_id, part.most, r.*, x.*,
           sum(r.to_seq - r.next_seq + 1) OVER (
               PARTITION BY part.job_id, part.endpoint_id ORDER BY r.id
               ROWS UNBOUNDED PRECEDING) - (r.to_seq - r.next_seq + 1) AS before
      FROM unnest($1::bigint[], $2::uuid[], $3::bigint[]) AS part(job_id, endpoint_id, most)
     CROSS JOIN LATERAL (
           SELECT * FROM (
               SELECT id, dead_id, next_seq, next_batch, to_seq FROM replay
                WHERE job_id = part.job_id AND endpoint_id = part.endpoint_id
                  AND next_seq <= to_seq OFFSET 0) waiting
            ORDER BY id LIMIT part.most) r
     CROSS JOIN LATERAL (
           SELECT j.lane_id AS resent_id, coalesce(j.lane_id, d.lane_id) AS lane_id, p.first_id,
                  d.outbox_id, d.key, d.backfill_id, d.batch, d.seq, e.generation, e.lanes
             FROM replay_job j
             JOIN replay_part p ON p.job_id = j.id AND p.endpoint_id = part.endpoint_id
             JOIN endpoint e ON e.id = part.endpoint_id AND e.state IN ('active', 'paused')
             LEFT JOIN dead_letter d ON d.id = r.dead_id
            WHERE j.id = part.job_id LIMIT 1) x),
taking AS (
    SELECT *, least(to_seq - next_seq + 1,
                    CASE WHEN resent_id IS NULL THEN most - before
                         ELSE most + {RESENT_SPARE} END)::bigint AS numbers
      FROM asked WHERE before < most)
SELECT t.job_id, t.endpoint_id, t.id, t.next_seq, t.next_batch, t.numbers, l.id AS lane_id,
       d.seq, d.batch, d.outbox_id, d.backfill_id, d.copy_id, d.was_backfill_id, d.wanted
  FROM taking t
  LEFT JOIN LATERAL (
       SELECT t.next_seq AS seq, t.next_batch AS batch, t.outbox_id, t.key, t.backfill_id,
              t.dead_id AS copy_id, true AS wanted,
              (SELECT was_backfill_id FROM delivery
                WHERE lane_id = t.lane_id AND batch = t.batch AND seq = t.seq) AS was_backfill_id
        WHERE t.outbox_id IS NOT NULL
        UNION ALL
       SELECT n.seq, n.batch, n.outbox_id, coalesce(o.key, c.key),
              CASE WHEN t.resent_id IS NULL THEN n.backfill_id ELSE t.job_id END, n.copy_id,
              t.resent_id IS NULL OR coalesce(o.is_there, c.is_there, false)
              AND {RESENT.format(d="n", lane="t.lane_id", first="t.first_id")},
              CASE WHEN t.resent_id IS NULL OR {_IS_COPY} THEN n.was_backfill_id
                   ELSE n.backfill_id END
         FROM (SELECT seq, batch, outbox_id, backfill_id, copy_id, replay_seq, was_backfill_id
                 FROM delivery
                WHERE t.outbox_id IS NULL AND lane_id = t.lane_id
                  AND batch >= t.next_batch AND seq >= t.next_seq
                ORDER BY batch, seq LIMIT t.numbers) n
         LEFT JOIN LATERAL (
              SELECT key, payload IS NOT NULL AS is_there FROM outbox
               WHERE id = n.outbox_id LIMIT 1) o ON true
         LEFT JOIN LATERAL (
              SELECT key, payload IS NOT NULL AS is_there FROM dead_letter
               WHERE id = n.copy_id LIMIT 1) c ON true
        WHERE n.seq < t.next_seq + t.numbers) d ON true
  LEFT JOIN lane l ON l.endpoint_id = t.endpoint_id AND l.generation = t.generation
   AND l.slot = (CASE WHEN d.key IS NULL THEN d.outbox_id
                      ELSE hashtextextended(d.key, 0) & 9223372036854775807 END) % t.lanes
 ORDER BY t.job_id, t.endpoint_id, t.id, d.seq
"""  # noqa: S608 (constants only)

WRITE_HELPINGS = """
UPDATE replay r SET next_seq = h.next_seq, next_batch = h.next_batch
  FROM unnest($1::bigint[], $2::bigint[], $3::bigint[]) AS h(id, next_seq, next_batch)
 WHERE r.id = h.id
"""


class RoutingStore:
    """Reads who gets what, on the sequencer's connection and in its transaction."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._db = connection

    async def routes(self, stopped_for_s: float) -> list[Route]:
        """Every current subscription with its lanes.

        Args:
            stopped_for_s: a filter that was stopped is not asked for so long.
        """
        return [
            Route(
                r["endpoint_id"],
                tuple(r["types"]),
                r["tenant"],
                r["all_tenants"],
                tuple(r["lane_ids"]),
                r["filter"],
            )
            for r in await self._db.fetch(READ_ROUTES, stopped_for_s)
        ]

    async def replays(self, shares: Sequence[Share]) -> list[Helping]:
        """What a batch may take of the numbers that are being sent again."""
        rows = await self._db.fetch(
            READ_REPLAYS,
            [share.part.job_id for share in shares],
            [share.part.endpoint_id for share in shares],
            [share.numbers for share in shares],
        )
        share_of = {(s.part.job_id, s.part.endpoint_id): s for s in shares}
        helpings: list[Helping] = []
        for part, of_part in groupby(rows, lambda r: (r["job_id"], r["endpoint_id"])):
            its = list(of_part)
            lane_ids = [r["lane_id"] for r in its if r["wanted"]]
            left = fitting(lane_ids, share_of[part].per_lane, share_of[part].numbers)
            for _, of_one in groupby(its, lambda r: r["id"]):
                helping, left = _helping(list(of_one), left)
                if helping is None:
                    break
                helpings.append(helping)
        return helpings

    async def advance(self, helpings: Sequence[Helping]) -> None:
        """Remember what was taken of the replays."""
        await self._db.execute(
            WRITE_HELPINGS,
            [h.id for h in helpings],
            [h.next_seq for h in helpings],
            [h.next_batch for h in helpings],
        )


def _helping(rows: list[Any], left: int) -> tuple[Helping | None, int]:
    """What is taken of one replay when `left` numbers may be; and how many then still."""
    first = rows[0]
    wanted = [r for r in rows if r["wanted"]]
    taken = wanted[:left]
    if wanted and not taken:
        return None, 0
    if len(taken) < len(wanted):
        next_seq = wanted[left]["seq"]
    else:
        next_seq = first["next_seq"] + first["numbers"]
    passed = [r for r in rows if r["seq"] is not None and r["seq"] < next_seq]
    helping = Helping(
        first["id"],
        first["job_id"],
        first["endpoint_id"],
        tuple(
            Replay(
                r["lane_id"],
                r["outbox_id"],
                r["id"],
                r["seq"],
                r["backfill_id"],
                r["copy_id"],
                r["was_backfill_id"],
            )
            for r in taken
        ),
        next_seq=next_seq,
        next_batch=passed[-1]["batch"] if passed else first["next_batch"],
        missing=next_seq - first["next_seq"] - len(passed),
    )
    # When it was cut short, nothing of the replays behind it may be taken.
    return helping, left - len(taken) if len(taken) == len(wanted) else 0
