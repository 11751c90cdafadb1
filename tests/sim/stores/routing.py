"""Subscriptions and replays, as the sequencer reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.core.sequencing.router import Replay, ReplayChunk, Route, count_fitting
from outbox.store.sequencing import routing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from outbox.core.sequencing.replay_throttle import Share
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database, Given


class Candidate(NamedTuple):
    """A sequence number of a replay that the next batch may take."""

    replay: Replay
    seq: int
    batch: int


class Pending(NamedTuple):
    """A replay with its next candidates."""

    row: Row
    numbers: int
    """Maximum number of sequence numbers of the next chunk."""
    candidates: list[Candidate]


class RoutingStore(routing.RoutingStore):
    """Stands in for `outbox.store.sequencing.routing.RoutingStore`."""

    def __init__(self, connection: Any) -> None:
        self._db: Connection = connection

    async def routes(self, stopped_for_s: float) -> list[Route]:
        return await self._db.call(read_routes)

    async def replays(self, shares: Sequence[Share]) -> list[ReplayChunk]:
        chunks = []
        for share, pending in await self._db.call(read_replays, shares):
            lanes = [c.replay.lane_id for each in pending for c in each.candidates]
            left = count_fitting(lanes, share.per_lane, share.numbers)
            for each in pending:
                chunk, left = _take_chunk(each, left)
                if chunk is None:
                    break
                chunks.append(chunk)
        return chunks


def _take_chunk(pending: Pending, left: int) -> tuple[ReplayChunk | None, int]:
    """Take up to `left` sequence numbers of a replay; returns the chunk and how many are left."""
    row, numbers, candidates = pending
    taken = candidates[:left]
    if candidates and not taken:
        return None, 0
    all_taken = len(taken) == len(candidates)
    next_seq = row["next_seq"] + numbers if all_taken else candidates[left].seq
    chunk = ReplayChunk(
        row["id"],
        row["job_id"],
        row["endpoint_id"],
        tuple(c.replay for c in taken),
        next_seq=next_seq,
        next_batch=taken[-1].batch if taken else row["next_batch"],
        missing=next_seq - row["next_seq"] - len(taken),
    )
    # Nothing of the replays behind one that was cut short may be taken.
    return chunk, left - len(taken) if all_taken else 0


# ------------------------------------------------------------------------ steps


def read_routes(db: Database, tx: Transaction) -> list[Route]:
    found = []
    for s in tx.rows(db.subscription):
        e = tx.get(db.endpoint, s["endpoint_id"])
        assert e is not None
        if s["to_batch"] is not None or e["state"] not in ("active", "paused"):
            continue
        lane_ids = lanes_of(db, tx, e)
        types = tuple(s["types"])
        found.append(Route(e["id"], types, s["tenant"], s["all_tenants"], lane_ids, s["filter"]))
    return found


def lanes_of(db: Database, tx: Transaction, e: Row) -> tuple[int, ...]:
    """The ids of an endpoint's lanes, by their slots."""
    lanes = [
        lane
        for lane in tx.rows(db.lane)
        if lane["endpoint_id"] == e["id"] and lane["generation"] == e["generation"]
    ]
    return tuple(lane["id"] for lane in sorted(lanes, key=lambda lane: int(lane["slot"])))


def pending_of(db: Database, tx: Transaction, job_id: int, endpoint_id: UUID) -> list[Row]:
    """The replays of a part that have numbers left."""
    return sorted(
        (
            r
            for r in tx.rows(db.replay)
            if (r["job_id"], r["endpoint_id"]) == (job_id, endpoint_id)
            and r["next_seq"] <= r["to_seq"]
        ),
        key=lambda r: int(r["id"]),
    )


def read_replays(
    db: Database, tx: Transaction, shares: Sequence[Share]
) -> list[tuple[Share, list[Pending]]]:
    found = []
    for share in sorted(shares, key=lambda s: (s.part.job_id, s.part.endpoint_id)):
        part, limit, pending = share.part, share.numbers, []
        e = tx.get(db.endpoint, part.endpoint_id)
        assert e is not None
        if e["state"] not in ("active", "paused"):
            continue
        before = 0
        for r in pending_of(db, tx, part.job_id, part.endpoint_id):
            if before >= limit:
                break
            numbers = min(r["to_seq"] - r["next_seq"] + 1, limit - before)
            before += r["to_seq"] - r["next_seq"] + 1
            pending.append(Pending(r, numbers, candidates_of(db, tx, r, e, numbers)))
        found.append((share, pending))
    return found


def candidates_of(db: Database, tx: Transaction, r: Row, e: Row, numbers: int) -> list[Candidate]:
    """The next numbers of a replay, each in the lane that its key has now."""
    dead_letter = tx.get(db.dead_letter, r["dead_id"])
    assert dead_letter is not None
    if dead_letter["outbox_id"] is None:
        found = [
            (g.seq, g.batch, g.outbox_id, g.backfill_id, g.copy_id)
            for g in _numbered(db, dead_letter["lane_id"], r["next_seq"], numbers)
        ]
    else:
        event = dead_letter["outbox_id"], dead_letter["backfill_id"], dead_letter["id"]
        found = [(r["next_seq"], r["next_batch"], *event)]
    lane_ids = {
        lane["slot"]: lane["id"]
        for lane in tx.rows(db.lane)
        if (lane["endpoint_id"], lane["generation"]) == (e["id"], e["generation"])
    }
    candidates = []
    for seq, batch, outbox_id, backfill_id, copy_id in found:
        lane_id = lane_ids[db.outbox[outbox_id].key_hash % e["lanes"]]
        replay = Replay(lane_id, outbox_id, r["id"], seq, backfill_id, copy_id)
        candidates.append(Candidate(replay, seq, batch))
    return candidates


def _numbered(db: Database, lane_id: int, seq: int, numbers: int) -> list[Given]:
    return [g for g in db.deliveries.get(lane_id, []) if seq <= g.seq < seq + numbers]
