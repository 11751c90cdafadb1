"""The rows of endpoints and lanes, and the endpoints that exist from the beginning."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from outbox.core.delivery.commands import Progress
from outbox.core.model.endpoint_settings import EndpointSettings
from tests.sim.database.engine import UPDATE, Wait

if TYPE_CHECKING:
    from collections.abc import Callable
    from uuid import UUID

    from tests.sim.database.engine import Row, Steps, Table, Transaction
    from tests.sim.database.tables import Database

    Put = Callable[[Table, UUID | int, Row], None]

SECRET = "whsec_c2ltdWxhdGVkIHNlY3JldCBvZiAzMiBieXRlcw=="


def settings_columns(settings: EndpointSettings) -> Row:
    """The columns of an endpoint that its settings determine."""
    columns = {each.name: getattr(settings, each.name) for each in fields(EndpointSettings)}
    return {**columns, "settings": settings}


def lock_progress(db: Database, tx: Transaction, endpoint_id: UUID) -> Steps[None]:
    """Lock the progress of an endpoint's lanes, which only its owner writes."""
    for row in list(tx.rows(db.lane_progress)):
        if row["endpoint_id"] == endpoint_id:
            yield Wait(db.lane_progress, row["lane_id"], UPDATE)


def add_lane(
    db: Database,
    put: Put,
    endpoint_id: UUID,
    generation: int,
    slot: int,
    from_batch: int,
    epoch: int,
) -> Row:
    """Add a lane without deliveries."""
    new = db.serial(db.lane)
    lane = {
        "id": new,
        "endpoint_id": endpoint_id,
        "generation": generation,
        "slot": slot,
        "skip_seq": None,
    }
    put(db.lane, new, lane)
    put(db.lane_counter, new, {"lane_id": new, "last_seq": 0})
    progress = Progress(floor_batch=from_batch)._asdict()
    row = {"lane_id": new, "endpoint_id": endpoint_id, "epoch": epoch, **progress}
    put(db.lane_progress, new, row)
    return lane


def add_rows(db: Database, put: Put, endpoint_id: UUID, settings: EndpointSettings) -> None:
    """Add the rows of an endpoint, without lanes and subscription."""
    e = {
        **settings_columns(settings),
        "id": endpoint_id,
        "state": "active",
        "state_by": None,
        "state_comment": None,
        "generation": 1,
        "resumes": 0,
    }
    health = {
        "endpoint_id": endpoint_id,
        "epoch": 0,
        "state": "healthy",
        "since": db.wall(),
        "resumes": 0,
        "held_until": None,
        "last_response": None,
        "reported_held_since": None,
        "reported_stalled_at": None,
        "failing_reported_at": None,
        "unsolicited_at": None,
    }
    put(db.endpoint, endpoint_id, e)
    put(db.endpoint_health, endpoint_id, health)
    owned = {"endpoint_id": endpoint_id, "replica_id": None, "epoch": 0}
    put(db.ownership, endpoint_id, owned)


def add(db: Database, endpoint_id: UUID, settings: EndpointSettings) -> list[Row]:
    """Add an endpoint before the first batch; returns its lanes."""

    def put(table: Table, key: UUID | int, row: Row) -> None:
        table.rows[key] = row

    add_rows(db, put, endpoint_id, settings)
    db.subscription.rows[endpoint_id, 1] = {
        "endpoint_id": endpoint_id,
        "from_batch": 1,
        "to_batch": None,
        "types": settings.types,
        "tenant": settings.tenant,
        "all_tenants": settings.all_tenants,
        "filter": settings.filter,
    }
    db.cursor.rows[1]["identity"] = db.identity
    # Nothing before the first batch is searched.
    return [add_lane(db, put, endpoint_id, 1, n, 1, 0) for n in range(settings.lanes)]
