"""The steps that write endpoints, each for any number of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.sim.database.endpoints import add_lane, add_rows, settings_columns
from tests.sim.database.engine import UPDATE, Wait, abort_unless
from tests.sim.stores import timeline
from tests.sim.stores.feeds import add_feed
from tests.sim.stores.routing_change import next_batch

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from uuid import UUID

    from outbox.core.model.endpoint_settings import EndpointSettings
    from tests.sim.database.engine import Row, Steps, Transaction
    from tests.sim.database.tables import Database
    from tests.sim.stores.change import Change


def replace_subscriptions(change: Change, ids: Collection[UUID]) -> None:
    if ids:
        change.write(delete_unused_subscriptions, ids)
        change.write(end_subscriptions, ids)
        change.write(begin_subscriptions, ids)


def change_feeds(change: Change, ids: Collection[UUID]) -> None:
    if ids:
        change.write(restart_feeds, ids)


# ------------------------------------------------------------------------ steps


def require_states(
    db: Database, tx: Transaction, ids: Sequence[UUID], states: Sequence[str]
) -> Steps[None]:
    for endpoint_id, state in sorted(zip(ids, states, strict=True)):
        row = yield from _locked(db, tx, endpoint_id)
        abort_unless(row["state"] == state)


def set_states(
    db: Database, tx: Transaction, ids: Collection[UUID], state: str, by: str, comment: str | None
) -> Steps[None]:
    for endpoint_id in ids:
        yield from _locked(db, tx, endpoint_id)
        tx.change(db.endpoint, endpoint_id, state=state, state_by=by, state_comment=comment)


def add_endpoint(
    db: Database, tx: Transaction, endpoint_id: UUID, settings: EndpointSettings
) -> Steps[None]:
    """Add an endpoint with its lanes, without a subscription."""
    add_rows(db, tx.put, endpoint_id, settings)
    yield from add_lanes(db, tx, [endpoint_id])


def update_endpoints(
    db: Database, tx: Transaction, updated: Mapping[UUID, EndpointSettings]
) -> Steps[None]:
    for endpoint_id, settings in updated.items():
        yield from _locked(db, tx, endpoint_id)
        tx.change(db.endpoint, endpoint_id, **settings_columns(settings))


def begin_generation(db: Database, tx: Transaction, ids: Collection[UUID]) -> Steps[None]:
    for endpoint_id in ids:
        row = yield from _locked(db, tx, endpoint_id)
        generation = timeline.next_generation(db, tx, row["generation"])
        tx.change(db.endpoint, endpoint_id, generation=generation)


def add_lanes(db: Database, tx: Transaction, ids: Collection[UUID]) -> Steps[None]:
    """Add the lanes of the current generation."""

    def put(table: Any, key: Any, row: Any) -> None:
        tx.put(table, key, row)

    for endpoint_id in sorted(ids):
        yield Wait(db.ownership, endpoint_id, UPDATE)
        owned, e = tx.get(db.ownership, endpoint_id), tx.get(db.endpoint, endpoint_id)
        assert owned is not None
        assert e is not None
        for slot in range(e["lanes"]):
            place = (endpoint_id, e["generation"], slot)
            add_lane(db, put, *place, next_batch(db), owned["epoch"])


def delete_unused_subscriptions(db: Database, tx: Transaction, ids: Collection[UUID]) -> None:
    for endpoint_id in ids:
        tx.put(db.subscription, (endpoint_id, next_batch(db)), None)


def end_subscriptions(db: Database, tx: Transaction, ids: Collection[UUID]) -> None:
    for row in list(tx.rows(db.subscription)):
        if row["endpoint_id"] in ids and row["to_batch"] is None:
            key = (row["endpoint_id"], row["from_batch"])
            tx.change(db.subscription, key, to_batch=next_batch(db))


def stop_feeds(db: Database, tx: Transaction, ids: Collection[UUID], reason: str) -> Steps[None]:
    """End feeds before they arrived; what is left stays with them."""
    for row in list(tx.rows(db.feed)):
        if row["endpoint_id"] in ids and row["ended_at"] is None:
            yield Wait(db.feed, row["id"], UPDATE)
            tx.change(db.feed, row["id"], ended_at=db.clock_timestamp(), end_reason=reason)


def restart_feeds(db: Database, tx: Transaction, ids: Collection[UUID]) -> Steps[None]:
    """Go on with feeds by the subscriptions that endpoints' settings describe now."""
    feeds = [row for row in tx.rows(db.feed) if row["ended_at"] is None]
    yield from stop_feeds(db, tx, ids, "changed")
    for row in feeds:
        if row["endpoint_id"] in ids:
            kept = {name: row[name] for name in ("batch", "outbox_id", "seen", "after_job")}
            add_feed(db, tx, row["endpoint_id"], kept)


def begin_subscriptions(db: Database, tx: Transaction, ids: Collection[UUID]) -> None:
    for endpoint_id in ids:
        e, from_batch = tx.get(db.endpoint, endpoint_id), next_batch(db)
        assert e is not None
        row = {name: e[name] for name in ("types", "tenant", "all_tenants", "filter")}
        row |= {"endpoint_id": endpoint_id, "from_batch": from_batch, "to_batch": None}
        tx.put(db.subscription, (endpoint_id, from_batch), row)


def _locked(db: Database, tx: Transaction, endpoint_id: UUID) -> Steps[Row]:
    yield Wait(db.endpoint, endpoint_id, UPDATE)
    row = tx.get(db.endpoint, endpoint_id)
    assert row is not None
    return row
