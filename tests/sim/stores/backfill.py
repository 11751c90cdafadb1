"""Backfills: requests to send an endpoint its history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.errors import Conflict, NotFound
from outbox.store.connection.connect import map_errors
from tests.sim.stores.replay_feed import is_subscribed
from tests.sim.stores.replays import PartRange, add_job, add_parts
from tests.sim.stores.routing_change import routing_transaction, write_journal

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime
    from uuid import UUID

    from outbox.core.sequencing.gaps import Range
    from outbox.operations.backfill import Backfill
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database


async def request_backfill(
    connection: Connection,
    schema: str,
    backfill: Backfill,
    *,
    actor: str,
    rate_per_s: float | None = None,
) -> int:
    if backfill.until is not None or backfill.types:
        raise NotImplementedError("a backfill of the simulation is of all types, up to now")
    with map_errors(schema, "operator"):
        endpoint_id, first, last, gaps = await _find_range(connection, backfill)
    async with routing_transaction(connection, schema):
        first = max(first, await connection.call(read_first_kept))
        job = await connection.call(
            add_job,
            "history",
            backfill.endpoint,
            actor,
            rate_per_s=rate_per_s,
            since=backfill.since,
            gaps=gaps,
        )
        await connection.call(add_parts, job, [PartRange(endpoint_id, first, last, from_id=first)])
        data = {"job": job, "from_id": first, "to_id": last}
        await write_journal(connection, "backfill_requested", actor, endpoint_id, data)
    return job


async def _find_range(
    connection: Connection, backfill: Backfill
) -> tuple[UUID, int, int, Sequence[Range]]:
    """The endpoint, the first and the last id, and the gaps between them, which are sent live."""
    name = backfill.endpoint
    found = await connection.call(find_endpoint, name)
    if found is None:
        raise NotFound(f"there is no endpoint {name}")
    endpoint_id, state, subscribed = found
    if state in ("disabling", "disabled", "removing") or not subscribed:
        raise Conflict(f"endpoint {name} is {state}")
    high, gaps = await connection.call(read_cursor)
    first = await connection.call(find_first, backfill.since, high)
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
    newest = db.batches[-1]
    old = ((gap["lo"], gap["hi"]) for gap in tx.rows(db.gap))
    return newest.high, sorted([*newest.young, *old])


def find_first(db: Database, tx: Transaction, since: datetime, high: int) -> int | None:
    before = [b.high for b in db.batches if b.at < since]
    start = before[-1] if before else 0
    ids = (i for i in db.outbox_ids if start < i <= high and db.outbox[i].created_at >= since)
    return next(ids, None)


def find_last(db: Database, tx: Transaction, first: int, high: int) -> int | None:
    return next((i for i in reversed(db.outbox_ids) if first <= i <= high), None)


def read_first_kept(db: Database, tx: Transaction) -> int:
    return db.first_id
