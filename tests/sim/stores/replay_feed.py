"""Replay jobs, as the leader reads and writes them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.replay_throttle import EndpointProgress, JobPart
from outbox.core.sequencing.router import RoutableEvent
from outbox.store import replay_feed
from outbox.store.replay_feed import SCAN_MAX, DeadLetterChunk, HistoryChunk
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.stores import channels, replay_jobs, routing_change
from tests.sim.stores.replays import add_replay, unblock
from tests.sim.stores.routing import pending_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from uuid import UUID

    from outbox.core.sequencing.replay_throttle import EndReason, Share
    from outbox.store.replay_feed import PartProgress
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database, Given


class ReplayFeedStore(replay_feed.ReplayFeedStore):
    """Stands in for `outbox.store.replay_feed.ReplayFeedStore`."""

    def __init__(self, connection: Any) -> None:
        self._db: Connection = connection

    async def read_parts(self) -> list[JobPart]:
        return await self._db.call(read_parts)

    async def read_chunk_progress(
        self, endpoint_ids: Sequence[UUID]
    ) -> dict[UUID, EndpointProgress]:
        return await self._db.call(read_progress, endpoint_ids)

    async def claim_dead_letters(
        self, shares: Sequence[Share]
    ) -> tuple[dict[tuple[int, UUID], DeadLetterChunk | None], bool]:
        found = await self._db.call(find_dead_letters, shares)
        chosen = sorted((i, job) for (job, _), each in found.items() if each for i in each.chosen)
        unblocked = 0
        if chosen:
            unblocked = await self._db.call(replay_dead_letters, chosen)
        return found, bool(unblocked)

    async def notify_owners(self) -> None:
        await self._db.call(routing_change.raise_version)
        await self._db.call(channels.notify_all)

    async def read_history(self, part: JobPart) -> HistoryChunk | None:
        return await self._db.call(read_history, part)

    async def advance_parts(self, batch: int, moves: Sequence[PartProgress]) -> None:
        await self._db.call(advance_positions, batch, moves)

    async def end_parts(self, parts: Sequence[JobPart], actor: str) -> None:
        db = self._db
        for endpoint_id in {
            p.endpoint_id for p in parts if p.end_reason in ("disabled", "removed")
        }:
            await db.call(replay_jobs.cancel_replays, endpoint_id, None)
        await db.call(end_parts, parts)
        for job_id, state in await db.call(end_jobs, sorted({p.job_id for p in parts})):
            taken = await db.call(read_taken, job_id)
            data = {"job": job_id, "state": state, "taken": taken}
            await routing_change.write_journal(db, "replay_ended", actor, None, data)


# ------------------------------------------------------------------------ parts


END_REASONS: dict[str, EndReason] = {
    "removing": "removed",
    "removed": "removed",
    "disabling": "disabled",
    "disabled": "disabled",
}
"""Why the parts of an endpoint end, by its state."""


def read_parts(db: Database, tx: Transaction) -> list[JobPart]:
    found = []
    for part in open_parts(db, tx):
        job, e = tx.get(db.replay_job, part["job_id"]), tx.get(db.endpoint, part["endpoint_id"])
        assert job is not None
        assert e is not None
        end_reason: EndReason | None = (
            "aborted" if job["state"] == "aborted" else END_REASONS.get(e["state"])
        )
        if end_reason is None and job["kind"] == "history" and not is_subscribed(db, tx, e["id"]):
            end_reason = "unsubscribed"
        found.append(
            JobPart(job["id"], e["id"], job["kind"], job["rate_per_s"], e["lanes"], end_reason)
        )
    return found


def open_parts(db: Database, tx: Transaction) -> Iterator[Row]:
    """Those that have not ended, in their order."""
    found = [part for part in tx.rows(db.replay_job_endpoint) if part["ended_at"] is None]
    yield from sorted(found, key=lambda part: (part["job_id"], str(part["endpoint_id"])))


def is_subscribed(db: Database, tx: Transaction, endpoint_id: UUID) -> bool:
    return any(
        s["endpoint_id"] == endpoint_id and s["to_batch"] is None for s in tx.rows(db.subscription)
    )


def read_progress(
    db: Database, tx: Transaction, endpoint_ids: Sequence[UUID]
) -> dict[UUID, EndpointProgress]:
    """The state of the last chunks of endpoints."""
    found = {}
    for endpoint_id in endpoint_ids:
        lanes = [lane["id"] for lane in tx.rows(db.lane) if lane["endpoint_id"] == endpoint_id]
        done, took_ms = True, []
        for part in open_parts(db, tx):
            if part["endpoint_id"] != endpoint_id or part["batch"] is None:
                continue
            for lane_id in lanes:
                given = _in_batch(db, lane_id, part["batch"])
                if not given:
                    continue
                attempts = [t for t in db.attempts.get(lane_id, ()) if t.batch == part["batch"]]
                took_ms += [t.elapsed_ms for t in attempts]
                progress = tx.get(db.lane_progress, lane_id)
                assert progress is not None
                last = given[-1].seq
                acked = any(t.seq == last and t.outcome == "delivered" for t in attempts)
                done = done and (acked or progress["acked_seq"] >= last)
        counters = [tx.get(db.lane_counter, lane_id) for lane_id in lanes]
        assigned = sum(c["last_seq"] for c in counters if c is not None)
        mean_ms = sum(took_ms) / len(took_ms) if took_ms else None
        found[endpoint_id] = EndpointProgress(done, mean_ms, assigned)
    return found


def _in_batch(db: Database, lane_id: int, batch: int) -> list[Given]:
    given = db.deliveries.get(lane_id, [])
    return given[bisect_left(given, (batch,)) : bisect_left(given, (batch + 1,))]


def advance_positions(
    db: Database, tx: Transaction, batch: int, moves: Sequence[PartProgress]
) -> Steps[None]:
    for m in moves:
        key = (m.share.part.job_id, m.share.part.endpoint_id)
        yield Wait(db.replay_job_endpoint, key, UPDATE)
        part = tx.get(db.replay_job_endpoint, key)
        assert part is not None
        tx.change(db.replay_job_endpoint, key, **position_columns(part, batch, m))


def position_columns(part: Row, batch: int, advance_parts: PartProgress) -> Row:
    """The columns of a part that a batch changes."""
    return {
        "next_id": part["next_id"] if advance_parts.next_id is None else advance_parts.next_id,
        "taken": part["taken"] + advance_parts.taken,
        "erased": part["erased"] + advance_parts.erased,
        "batch": batch if advance_parts.taken else part["batch"],
        "from_id": advance_parts.from_id,
    }


def end_parts(db: Database, tx: Transaction, parts: Sequence[JobPart]) -> Steps[None]:
    for part in parts:
        key = (part.job_id, part.endpoint_id)
        yield Wait(db.replay_job_endpoint, key, UPDATE)
        ended = {"ended_at": db.clock_timestamp(), "end_reason": part.end_reason, "from_id": None}
        tx.change(db.replay_job_endpoint, key, **ended)


def end_jobs(db: Database, tx: Transaction, ids: Sequence[int]) -> Steps[list[tuple[int, str]]]:
    """End those of the jobs that have no open part; returns the id and state of each."""
    ended = []
    for job_id in ids:
        if any(part["job_id"] == job_id for part in open_parts(db, tx)):
            continue
        yield Wait(db.replay_job, job_id, UPDATE)
        job = tx.get(db.replay_job, job_id)
        assert job is not None
        state = "done" if job["state"] == "running" else job["state"]
        tx.change(db.replay_job, job_id, state=state, ended_at=db.clock_timestamp())
        ended.append((job_id, state))
    return ended


def read_taken(db: Database, tx: Transaction, job_id: int) -> int:
    return sum(p["taken"] for p in tx.rows(db.replay_job_endpoint) if p["job_id"] == job_id)


# ---------------------------------------------------------------------- letters


def find_dead_letters(
    db: Database, tx: Transaction, shares: Sequence[Share]
) -> dict[tuple[int, UUID], DeadLetterChunk | None]:
    """The next dead letters of parts that have no pending replay; None: there are no more."""
    found: dict[tuple[int, UUID], DeadLetterChunk | None] = {}
    for share in sorted(shares, key=lambda s: (s.part.job_id, s.part.endpoint_id)):
        key = (share.part.job_id, share.part.endpoint_id)
        part, job = tx.get(db.replay_job_endpoint, key), tx.get(db.replay_job, key[0])
        assert part is not None
        assert job is not None
        if job["kind"] == "history" or job["state"] != "running" or pending_of(db, tx, *key):
            continue
        ids = sorted(
            d["id"]
            for d in tx.rows(db.dead_letter)
            if job["kind"] == "dead"
            and d["endpoint_id"] == key[1]
            and d["state"] == "dead"
            and part["next_id"] <= d["id"] <= part["last_id"]
        )
        if not ids:
            found[key] = None
        elif chosen := ids[: share.numbers]:
            found[key] = DeadLetterChunk(chosen, 0, chosen[-1] + 1)
    return found


def replay_dead_letters(db: Database, tx: Transaction, chosen: list[tuple[int, int]]) -> Steps[int]:
    """Add replays of (dead letter, job) pairs; returns how many lanes were unblocked."""
    unblocked = 0
    for dead_id, job_id in chosen:
        yield Wait(db.dead_letter, dead_id, EXCLUSIVE)
        dead_letter = tx.get(db.dead_letter, dead_id)
        assert dead_letter is not None
        if dead_letter["state"] != "dead":
            continue
        tx.change(db.dead_letter, dead_id, state="replaying")
        add_replay(db, tx, job_id, dead_letter)
        unblocked += yield from unblock(db, tx, [dead_id])
    return unblocked


# ---------------------------------------------------------------------- history


def read_history(db: Database, tx: Transaction, job_part: JobPart) -> HistoryChunk | None:
    part = tx.get(db.replay_job_endpoint, (job_part.job_id, job_part.endpoint_id))
    job = tx.get(db.replay_job, job_part.job_id)
    assert part is not None
    assert job is not None
    if job["state"] != "running":
        return None
    lo = bisect_left(db.outbox_ids, part["next_id"])
    ids = db.outbox_ids[lo : bisect_right(db.outbox_ids, part["last_id"])][:SCAN_MAX]
    events = [
        RoutableEvent(event.id, None, event.type, event.key_hash)
        for event in (db.outbox[i] for i in ids)
        if event.created_at >= job["since"]
        and not any(lo <= event.id <= hi for lo, hi in job["gaps"])
    ]
    more = len(ids) == SCAN_MAX
    return HistoryChunk(events, next_id=(ids[-1] if more else part["last_id"]) + 1, more=more)
