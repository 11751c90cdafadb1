"""Where feeds begin: the decisions are the real ones, with steps in place of statements."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncpg import Range

from outbox.operations.feeds import starts as real
from tests.sim.database.engine import abort_unless
from tests.sim.stores import feeds, timeline
from tests.sim.stores.change import new_job

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.core.model.start import Start
    from outbox.operations.feeds.starts import FeedStart
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Batch, Database
    from tests.sim.stores.change import Change


class Reads:
    """A connection for the real functions, which executes a step for each of their statements."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def fetchrow(self, statement: str, *arguments: Any) -> Row | None:
        steps: dict[str, Any] = {
            real.READ_BATCH: read_batch,
            real.READ_LEFT_AT: read_left_at,
            real.FIND_BATCH_BEFORE: find_batch_before,
            real.FIND_OLDEST: find_oldest,
        }
        row: Row | None = await self._connection.call(steps[statement], *arguments)
        return row

    async def fetchval(self, statement: str, *arguments: Any) -> Any:
        steps: dict[str, Any] = {
            real.READ_GONE: is_gone,
            real.COUNT_AFTER: count_events_after,
            real.HAS_BEGUN: has_begun,
        }
        return await self._connection.call(steps[statement], *arguments)


async def resolve_start(db: Any, start: Start) -> FeedStart:
    return await real.resolve_start(Reads(db), start)


async def resolve_missed(db: Any, endpoint_id: UUID) -> FeedStart | None:
    return await real.resolve_missed(Reads(db), endpoint_id)


async def count_after(db: Any, start: FeedStart) -> int:
    return await real.count_after(Reads(db), start)


def begin_feed(
    change: Change, endpoint_id: UUID, start: FeedStart, *, after_new_job: bool = False
) -> None:
    change.write(require_start, start)
    change.write(begin_endpoint_feed, endpoint_id, start, after_new_job=after_new_job)


# ------------------------------------------------------------------------ steps


class Gone(NamedTuple):
    """The newest batch after which something is gone, and the time of the newest such event."""

    batch: int
    until: datetime | None


def read_gone(db: Database, tx: Transaction) -> Gone:
    first = feeds.kept_batches(db, tx)[0].batch
    dropped = [p for p in tx.rows(db.period) if p["kind"] == "events" and p["dropped"]]
    until = max((p["ended_at"] for p in dropped), default=None)
    batch = max([first, *(p["last_batch"] for p in dropped)])
    return Gone(batch, None if until is None else datetime.fromtimestamp(until).astimezone())


def is_gone(db: Database, tx: Transaction, batch: int) -> bool:
    return batch < read_gone(db, tx).batch


def find_oldest(db: Database, tx: Transaction) -> Row:
    batch = read_gone(db, tx).batch
    found = _find(feeds.kept_batches(db, tx), batch)
    assert found is not None
    return {"batch": batch, "high": found.high}


def history_changed(db: Database, tx: Transaction) -> bool:
    return timeline.history_changed(db, tx)


def read_batch(db: Database, tx: Transaction, batch: int) -> Row:
    kept = feeds.kept_batches(db, tx)
    found, gone = _find(kept, batch), read_gone(db, tx)
    return {
        "high": None if found is None else found.high,
        "at": None if found is None else found.at,
        "gone": gone.batch,
        "gone_until": gone.until,
        "timeline": None,
        "incarnation": timeline.incarnation_of(db, tx),
        "history_changed": history_changed(db, tx),
        "newest": kept[-1].batch,
    }


def _find(batches: list[Batch], batch: int) -> Batch | None:
    return next((b for b in batches if b.batch == batch), None)


def find_batch_before(
    db: Database, tx: Transaction, at: datetime | None, age: timedelta | None
) -> Row:
    now = db.clock_timestamp()
    if at is None:
        assert age is not None
        at = now - age
    before = [(b.at, b.batch, b.high) for b in feeds.kept_batches(db, tx) if b.at < at]
    _, batch, high = max(before, default=(None, None, None))
    gone = batch is None or is_gone(db, tx, batch)
    return {"at": at, "is_future": at > now, "batch": batch, "high": high, "is_gone": gone}


def count_events_after(db: Database, tx: Transaction, batch: int) -> int:
    return sum(b.events for b in feeds.kept_batches(db, tx) if b.batch > batch)


def read_left_at(db: Database, tx: Transaction, endpoint_id: UUID) -> Row | None:
    """Up to where an endpoint that was disabled has got everything."""
    kept, found = feeds.kept_batches(db, tx), []
    ended = [
        s["to_batch"]
        for s in tx.rows(db.subscription)
        if s["endpoint_id"] == endpoint_id and s["to_batch"] is not None
    ]
    for f in tx.rows(db.feed):
        if f["endpoint_id"] != endpoint_id or f["end_reason"] not in ("disabled", "removed"):
            continue
        if any(to_batch - 1 > f["batch"] for to_batch in ended):
            continue
        b = _find(kept, f["batch"])
        if b is not None:
            found.append((f["batch"], f["outbox_id"], f["seen"], b.high))
    if ended:
        before = [b for b in kept if b.batch < max(ended)]
        found += [(b.batch, b.high, (), b.high) for b in before[-1:]]
    if not found:
        return None
    batch, outbox_id, seen, high = max(found, key=lambda row: row[:2])
    ranges = [Range(lo, hi + 1) for lo, hi in seen]
    return {"batch": batch, "outbox_id": outbox_id, "seen": ranges, "high": high}


def has_begun(db: Database, tx: Transaction, endpoint_id: UUID) -> bool:
    """Whether an endpoint ever had a subscription or a feed."""
    rows = [*tx.rows(db.subscription), *tx.rows(db.feed)]
    return any(row["endpoint_id"] == endpoint_id for row in rows)


def require_start(db: Database, tx: Transaction, start: FeedStart) -> None:
    """Abort if a batch was changed or dropped since it was read, or events of later ones were, and
    if a position is of another history.
    """
    abort_unless(not (start.is_position and history_changed(db, tx)))
    found = _find(feeds.kept_batches(db, tx), start.batch)
    abort_unless(found is not None and found.high == start.high)
    abort_unless(read_gone(db, tx).batch <= start.batch - start.is_inside)


def begin_endpoint_feed(
    db: Database, tx: Transaction, endpoint_id: UUID, start: FeedStart, *, after_new_job: bool
) -> None:
    place = {"batch": start.batch, "outbox_id": start.outbox_id, "seen": start.seen}
    after_job = new_job(db, tx) if after_new_job else None
    feeds.add_feed(db, tx, endpoint_id, {**place, "after_job": after_job})
