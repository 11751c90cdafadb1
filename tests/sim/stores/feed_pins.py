"""What feeds keep from being dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.sim.stores.feeds import kept_batches

if TYPE_CHECKING:
    from collections.abc import Iterable
    from uuid import UUID

    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database


def pinned_by_feeds(
    db: Database, tx: Transaction, open_ranges: Iterable[Row], last_batch: int
) -> bool:
    """Whether a feed needs batches up to this one, or their events."""
    feeds = list(tx.rows(db.feed))
    if any(f["ended_at"] is None and f["batch"] <= last_batch for f in feeds):
        return True
    needed: list[tuple[UUID, int]] = []
    for p in tx.rows(db.lane_progress):
        c = tx.get(db.lane_counter, p["lane_id"])
        assert c is not None
        if c["last_seq"] > p["acked_seq"]:
            needed.append((p["endpoint_id"], p["floor_batch"]))
    needed += [(d["endpoint_id"], d["batch"]) for d in open_ranges]
    for r in tx.rows(db.replay):
        d = tx.get(db.dead_letter, r["dead_id"])
        assert d is not None
        if d["outbox_id"] is None and r["next_seq"] <= r["to_seq"]:
            needed.append((d["endpoint_id"], d["batch"]))
    return any(
        f["endpoint_id"] == endpoint_id and _has_fed(db, tx, f, batch, last_batch)
        for endpoint_id, batch in needed
        for f in feeds
    )


def _has_fed(db: Database, tx: Transaction, f: Row, since: int, last_batch: int) -> bool:
    """Whether a feed fed events of batches up to this one since a batch."""
    steps = _steps(db, tx, f["id"])
    if not any(step["batch"] >= since for step in steps):
        return False
    before = [step["to_batch"] for step in steps if step["batch"] < since]
    return bool((before[-1] if before else f["from_batch"]) <= last_batch)


def _steps(db: Database, tx: Transaction, feed_id: int) -> list[Row]:
    found = [step for step in tx.rows(db.feed_step) if step["feed_id"] == feed_id]
    return sorted(found, key=lambda step: int(step["batch"]))


def delete_feed_steps(db: Database, tx: Transaction) -> None:
    """Delete the steps of dropped batches, but for the last one of each feed."""
    first = kept_batches(db, tx)[0].batch
    for f in tx.rows(db.feed):
        for step in [step for step in _steps(db, tx, f["id"]) if step["batch"] < first][:-1]:
            tx.put(db.feed_step, (f["id"], step["to_batch"], step["to_id"]), None)
