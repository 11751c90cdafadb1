"""Replay jobs, as the leader reads and writes them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Any

from outbox.core.sequencing.replay_throttle import EndpointProgress, JobPart
from outbox.core.sequencing.router import RoutableEvent
from outbox.store.replays import replay_feed
from outbox.store.replays.replay_feed import SCAN_MAX, DeadLetterChunk, HistoryChunk
from tests.sim.database.engine import EXCLUSIVE, UPDATE, Wait
from tests.sim.stores import channels, routing_change
from tests.sim.stores.replays import add_replay, is_blocking, unblock
from tests.sim.stores.routing import pending_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from uuid import UUID

    from outbox.core.sequencing.replay_throttle import EndReason, PartKey, Share
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database, Given


class ReplayFeedStore(replay_feed.ReplayFeedStore):
    """Stands in for `outbox.store.replays.replay_feed.ReplayFeedStore`."""

    def __init__(self, connection: Any, server_fence: int | None = None) -> None:
        assert server_fence is None
        self._db: Connection = connection  # type: ignore[assignment]

    async def read_parts(self) -> list[JobPart]:
        return await self._db.call(read_parts)

    async def read_chunk_progress(
        self, endpoint_ids: Sequence[UUID]
    ) -> dict[UUID, EndpointProgress]:
        return await self._db.call(read_progress, endpoint_ids)

    async def read_dead_letters(
        self, shares: Sequence[Share]
    ) -> dict[PartKey, DeadLetterChunk | None]:
        return await self._db.call(find_dead_letters, shares)

    async def claim_dead_letters(
        self, chunks: Mapping[PartKey, DeadLetterChunk], leader: int, version: int
    ) -> bool:
        return await self._db.call(claim_dead_letters, chunks, leader, version)

    async def read_history(self, part: JobPart) -> HistoryChunk | None:
        return await self._db.call(read_history, part)


# ------------------------------------------------------------------------ parts


END_REASONS: dict[str, EndReason] = {
    "removing": "removed",
    "removed": "removed",
    "disabling": "disabled",
    "disabled": "disabled",
}
"""Why the parts of an endpoint end, by its state."""


def read_parts(db: Database, tx: Transaction) -> list[JobPart]:
    awaited = {(f["after_job"], f["endpoint_id"], f["ended_at"]) for f in tx.rows(db.feed)}
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
            JobPart(
                job["id"],
                e["id"],
                job["kind"],
                job["rate_per_s"],
                e["lanes"],
                end_reason,
                is_awaited=(job["id"], e["id"], None) in awaited,
            )
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


# ---------------------------------------------------------------------- letters


def find_dead_letters(
    db: Database, tx: Transaction, shares: Sequence[Share]
) -> dict[PartKey, DeadLetterChunk | None]:
    """The next dead letters of parts that have no pending replay; None: there are no more."""
    found: dict[PartKey, DeadLetterChunk | None] = {}
    for share in sorted(shares, key=lambda s: (s.part.job_id, s.part.endpoint_id)):
        key = (share.part.job_id, share.part.endpoint_id)
        part, job = tx.get(db.replay_job_endpoint, key), tx.get(db.replay_job, key[0])
        assert part is not None
        assert job is not None
        if job["state"] != "running" or pending_of(db, tx, *key):
            continue
        open_letters = sorted(
            (d["id"], is_blocking(db, tx, d))
            for d in tx.rows(db.dead_letter)
            if d["endpoint_id"] == key[1]
            and d["state"] == "dead"
            and part["next_id"] <= d["id"] <= part["last_id"]
        )
        if not open_letters:
            found[key] = None
        elif chosen := open_letters[: share.numbers]:
            ids, blocking = [i for i, _ in chosen], [each for _, each in chosen]
            found[key] = DeadLetterChunk(part["next_id"], ids[-1] + 1, ids, 0, any(blocking))
    return found


def claim_dead_letters(
    db: Database,
    tx: Transaction,
    chunks: Mapping[PartKey, DeadLetterChunk],
    leader: int,
    version: int,
) -> Steps[bool]:
    """Add replays of dead letters; returns False, without a change, unless all are still open."""

    def leads() -> bool:
        row = tx.get(db.cursor, 1)
        assert row is not None
        return (row["writer"], row["version"]) == (leader, version)

    chosen = sorted((i, key[0]) for key, each in chunks.items() for i in each.chosen)
    if not leads() or not tx.try_lock(db.cursor, 1, EXCLUSIVE) or not leads():
        return False
    if any(
        not tx.try_lock(db.dead_letter, i, EXCLUSIVE) or not _is_open(db, tx, i) for i, _ in chosen
    ):
        return False
    if any(_next_id(db, tx, key) != chunk.old_id for key, chunk in chunks.items()):
        return False
    if any(chunk.blocks for chunk in chunks.values()):
        yield from routing_change.raise_version(db, tx)
        channels.notify_all(db, tx)
    for key, chunk in chunks.items():
        yield Wait(db.replay_job_endpoint, key, UPDATE)
        tx.change(db.replay_job_endpoint, key, next_id=chunk.next_id)
    for dead_id, job_id in chosen:
        dead_letter = tx.change(db.dead_letter, dead_id, state="replaying")
        add_replay(db, tx, job_id, dead_letter)
        yield from unblock(db, tx, [dead_id])
    return True


def _is_open(db: Database, tx: Transaction, dead_id: int) -> bool:
    row = tx.get(db.dead_letter, dead_id)
    return row is not None and row["state"] == "dead"


def _next_id(db: Database, tx: Transaction, key: PartKey) -> int | None:
    part = tx.get(db.replay_job_endpoint, key)
    return None if part is None else part["next_id"]


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
