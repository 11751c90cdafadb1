"""Backfills: requests to send an endpoint its history."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from outbox.core.sequencing import partition_window
from outbox.errors import Conflict, NotFound
from outbox.operations.replays.jobs import JobRange
from tests.sim.database.engine import abort_unless
from tests.sim.stores.change import make_change_and_read
from tests.sim.stores.replay_feed import is_subscribed
from tests.sim.stores.replays import add_job, read_new_job

if TYPE_CHECKING:
    from collections.abc import Sequence
    from uuid import UUID

    from outbox.core.sequencing.gaps import Range
    from outbox.operations.criteria import Criteria
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


async def request_backfill(
    connection: Connection,
    schema: str,
    criteria: Criteria,
    *,
    actor: str,
    rate_per_s: float | None = None,
    outbox_ids: Sequence[int] | None = None,
) -> int:
    if criteria.until is not None or criteria.types or outbox_ids is not None:
        raise NotImplementedError("a backfill of the simulation is of all events, up to now")

    async def plan(change: Change) -> None:
        endpoint_id, first, last, gaps = await _find_range(change.db, criteria)
        first_id = max(first, await _require_oldest(change) * partition_window.WIDTH)
        part = JobRange(endpoint_id, first_id, last, from_id=first_id)
        add_job(change, "history", criteria, [part], rate_per_s=rate_per_s, gaps=gaps)
        data = {"from_id": first_id, "to_id": last}
        change.journal("backfill_requested", endpoint_id, data, with_job=True)

    return await make_change_and_read(connection, schema, actor, plan, read_new_job)


async def _require_oldest(change: Change) -> int:
    number = await change.db.call(read_oldest)
    change.write(require_oldest_period, number)
    return number


async def _find_range(
    connection: Connection, criteria: Criteria
) -> tuple[UUID, int, int, Sequence[Range]]:
    """The endpoint, the first and the last id, and the gaps between them, which are sent live."""
    name = criteria.endpoint
    assert name is not None
    assert isinstance(criteria.since, datetime)
    found = await connection.call(find_endpoint, name)
    if found is None:
        raise NotFound(f"there is no endpoint {name}")
    endpoint_id, state, subscribed = found
    if state in ("disabling", "disabled", "removing") or not subscribed:
        raise Conflict(f"endpoint {name} is {state}")
    high, gaps = await connection.call(read_cursor)
    first = await connection.call(find_first, criteria.since, high)
    last = first and await connection.call(find_last, first, high)
    if first is None or last is None:
        return endpoint_id, 1, 0, ()
    return endpoint_id, first, last, [(lo, hi) for lo, hi in gaps if hi >= first and lo <= last]


def find_endpoint(db: Database, tx: Transaction, name: str) -> tuple[UUID, str, bool] | None:
    """The id, the state, and whether it has a subscription."""
    for e in tx.rows(db.endpoint):
        if e["name"] == name and e["state"] != "removed":
            return e["id"], e["state"], is_subscribed(db, tx, e["id"])
    return None


def read_cursor(db: Database, tx: Transaction) -> tuple[int, Sequence[Range]]:
    """The highest id that is sequenced, and the open gaps below it."""
    return db.batches[-1].high, db.open_gaps(tx)


def read_oldest(db: Database, tx: Transaction) -> int:
    """The oldest period of events that is not dropped."""
    periods = (row for row in tx.rows(db.period) if row["kind"] == "events")
    oldest: int = min(row["number"] for row in periods if not row["dropped"])
    return oldest


def require_oldest_period(db: Database, tx: Transaction, number: int) -> None:
    abort_unless(read_oldest(db, tx) == number)


def find_first(db: Database, tx: Transaction, since: datetime, high: int) -> int | None:
    before = [b.high for b in db.batches if b.at < since]
    start = before[-1] if before else 0
    ids = (i for i in db.outbox_ids if start < i <= high and db.outbox[i].created_at >= since)
    return next(ids, None)


def find_last(db: Database, tx: Transaction, first: int, high: int) -> int | None:
    return next((i for i in reversed(db.outbox_ids) if first <= i <= high), None)
