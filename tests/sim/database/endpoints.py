"""Endpoints that are there from the beginning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from tests.sim.database.statements.operators import new_progress

if TYPE_CHECKING:
    from uuid import UUID

    from outbox.core.model.endpoint import EndpointSettings
    from tests.sim.database.engine import Row
    from tests.sim.database.tables import Database

SECRET = "whsec_c2ltdWxhdGVkIHNlY3JldCBvZiAzMiBieXRlcw=="


def add(db: Database, endpoint_id: UUID, settings: EndpointSettings) -> list[Row]:
    """What `outbox endpoint add` leaves, before the first batch; returns its lanes."""
    subscription = {
        "types": list(settings.types),
        "tenant": settings.tenant,
        "all_tenants": settings.all_tenants,
        "filter": settings.filter,
    }
    db.endpoint.rows[endpoint_id] = {
        "id": endpoint_id,
        "name": settings.name,
        "state": "active",
        "state_by": None,
        "state_why": None,
        **subscription,
        "url": settings.url,
        "method": settings.method,
        "headers": "{}",
        "connect_timeout_s": settings.connect_timeout_s,
        "total_timeout_s": settings.total_timeout_s,
        "in_flight_max": settings.in_flight_max,
        "rate_per_s": settings.rate_per_s,
        "batch_max": settings.batch_max,
        "allow_networks": list(settings.allow_networks),
        "ca": settings.ca,
        "identity": None,
        "retry": orjson.dumps(settings.retry.to_dict()).decode(),
        "retryable": None,
        "on_dead_letter": settings.on_dead_letter,
        "backlog_count_max": settings.backlog_count_max,
        "backlog_age_max_s": settings.backlog_age_max_s,
        "disable_after_s": settings.disable_after_s,
        "checkpoint_every_s": settings.checkpoint_every_s,
        "generation": 1,
        "resumes": 0,
        "lanes": settings.lanes,
        "secret": SECRET,
    }
    db.endpoint_health.rows[endpoint_id] = {
        "endpoint_id": endpoint_id,
        "epoch": 0,
        "state": "healthy",
        "since": db.clock_timestamp(),
        "resumes": 0,
        "held_until": None,
        "last_answer": None,
        "told_held_since": None,
        "told_stalled_at": None,
    }
    db.subscription.rows[endpoint_id, 1] = {
        "endpoint_id": endpoint_id,
        "from_batch": 1,
        "to_batch": None,
        **subscription,
    }
    db.ownership.rows[endpoint_id] = {"endpoint_id": endpoint_id, "replica_id": None, "epoch": 0}
    lanes = []
    for slot in range(settings.lanes):
        lane_id = db.serial(db.lane)
        lane = {"id": lane_id, "endpoint_id": endpoint_id, "generation": 1, "slot": slot}
        db.lane.rows[lane_id] = lane
        db.lane_counter.rows[lane_id] = {"lane_id": lane_id, "last_seq": 0}
        db.lane_progress.rows[lane_id] = new_progress(lane_id, endpoint_id, 1, 0)
        lanes.append(lane)
    return lanes
