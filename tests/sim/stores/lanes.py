"""Endpoints, lanes and their pending deliveries, as the dispatcher reads them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from outbox.core.delivery.circuit_breaker import BreakerRecord, BreakerState
from outbox.core.delivery.commands import ErasedEvent, Progress
from outbox.core.delivery.connection_reuse import ConnectionReuse
from outbox.core.delivery.endpoint import Endpoint
from outbox.core.delivery.operational_events import ReportedState
from outbox.core.messages.signature import parse_signing_key
from outbox.core.model import retryable_statuses
from outbox.core.model.delivery import Delivery, EventContent, earliest_commit, epoch_seconds
from outbox.core.model.endpoint_settings import SETTING_FIELDS
from outbox.core.model.headers import EndpointHeaders
from outbox.core.model.ids import lane_name
from outbox.core.model.message_format import MessageFormat
from outbox.core.model.response_policy import RETRYABLE
from outbox.store.connection.secrets import CLEAR
from outbox.store.delivery import lanes as real
from outbox.store.delivery.lanes import NEW_BATCHES_MAX, LoadedLane, NewBatches
from tests.sim.database.endpoints import SECRET
from tests.sim.stores.routing_change import read_last_batch
from tests.sim.stores.skip import read_skipped
from tests.sim.stores.timeline import history_changed

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from datetime import datetime
    from uuid import UUID

    from outbox.core.brokers.repair import Repair
    from outbox.core.delivery.event_cache import EventCache, LaneIdentity
    from outbox.store.connection.secrets import Vault
    from outbox.store.delivery.delivery_reads import LaneRead
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Row, Transaction
    from tests.sim.database.tables import Database, Given


class LaneStore(real.LaneStore):
    """Stands in for `outbox.store.delivery.lanes.LaneStore`."""

    def __init__(self, connection: Any, vault: Vault = CLEAR) -> None:
        self._db: Connection = connection

    async def endpoints(self, endpoint_ids: Collection[UUID]) -> list[Endpoint]:
        return await self._db.call(read_endpoints, list(endpoint_ids))

    async def last_batch(self) -> int:
        return await self._db.call(read_last_batch)

    async def lanes(self, endpoint_ids: Collection[UUID]) -> list[LoadedLane]:
        found = await self._db.call(read_lanes, set(endpoint_ids))
        tails = await self._db.call(read_acknowledged, found)
        return [replace(lane, tail=tails[lane.id]) for lane in found]

    async def deliveries(
        self, requested: Sequence[LaneRead], events: EventCache | None = None
    ) -> dict[int, list[Delivery | ErasedEvent]]:
        return await self._db.call(read_deliveries, requested)

    async def new_batches(self, after_batch: int) -> NewBatches | None:
        return await self._db.call(read_new_batches, after_batch)

    async def counters(self, lane_ids: Collection[int]) -> dict[int, int]:
        return await self._db.call(read_counters, set(lane_ids))

    async def blocked(self, lane_ids: Collection[int]) -> set[int]:
        return await self._db.call(read_blocked, set(lane_ids))

    async def skipped(self, endpoint_ids: Collection[UUID]) -> dict[int, int]:
        return await self._db.call(read_skipped, set(endpoint_ids))

    async def repairs(self, endpoint_ids: Collection[UUID]) -> dict[int, Repair]:
        return {}  # Of brokers.


# -------------------------------------------------------------------- endpoints


def read_endpoints(db: Database, tx: Transaction, endpoint_ids: list[UUID]) -> list[Endpoint]:
    found = []
    for each in endpoint_ids:
        e, h = tx.get(db.endpoint, each), tx.get(db.endpoint_health, each)
        if e is not None and h is not None:
            found.append(_endpoint(e, h))
    return found


def _endpoint(e: Row, h: Row) -> Endpoint:
    settings = e["settings"]
    plain = {
        each: getattr(settings, each)
        for each in SETTING_FIELDS
        if each not in ("headers", "retryable")
    }
    retryable = settings.retryable
    return Endpoint(
        id=e["id"],
        state=e["state"],
        headers=EndpointHeaders(prefix=settings.header_prefix),
        message_format=MessageFormat(settings.format, settings.source),
        secrets=((parse_signing_key(SECRET), None),),
        networks=(),
        identity=None,
        retryable=RETRYABLE if retryable is None else retryable_statuses.parse(retryable),
        blocks=settings.on_dead_letter == "block",
        generation=e["generation"],
        resumes=e["resumes"],
        applied_resumes=h["resumes"],
        health=BreakerRecord(
            BreakerState(h["state"]), h["since"], h["held_until"], h["last_response"]
        ),
        reported=ReportedState(
            h["reported_held_since"], h["reported_stalled_at"], h["failing_reported_at"]
        ),
        reuse=ConnectionReuse(settings.keep_alive, h["unsolicited_at"]),
        **plain,
    )


# ------------------------------------------------------------------------ lanes


def read_lanes(db: Database, tx: Transaction, endpoint_ids: set[UUID]) -> list[LoadedLane]:
    """Lanes that are of the newest generation, pending or blocked, without acknowledged
    deliveries.
    """
    found = []
    for lane in tx.rows(db.lane):
        if lane["endpoint_id"] not in endpoint_ids:
            continue
        e = tx.get(db.endpoint, lane["endpoint_id"])
        p = tx.get(db.lane_progress, lane["id"])
        c = tx.get(db.lane_counter, lane["id"])
        assert e is not None
        assert p is not None
        assert c is not None
        blocked = tx.get(db.lane_block, lane["id"]) is not None
        pending = c["last_seq"] > p["acked_seq"]
        newest = lane["generation"] == e["generation"]
        if not newest and not pending and not blocked:
            continue
        first = _given_after(db, lane["id"], p["floor_batch"], p["acked_seq"]) if pending else []
        found.append(
            LoadedLane(
                lane["id"],
                c["last_seq"],
                Progress(**{name: p[name] for name in Progress._fields}),
                pending_since=db.batch(first[0].batch).at.timestamp() if first else None,
                blocked=blocked,
                ended=not newest or history_changed(db, tx),
                skip_seq=lane["skip_seq"] or 0,
                endpoint_id=lane["endpoint_id"],
                name=lane_name(lane["endpoint_id"], lane["generation"], lane["slot"]),
                generation=lane["generation"],
            )
        )
    return found


def _given_after(db: Database, lane_id: int, floor_batch: int, seq: int) -> list[Given]:
    return [g for g in db.deliveries.get(lane_id, ()) if g.seq > seq and g.batch >= floor_batch]


def read_acknowledged(
    db: Database, tx: Transaction, lanes: list[LoadedLane]
) -> dict[int, tuple[tuple[int, int, float], ...]]:
    """The deliveries of each lane that were acknowledged after its checkpoint."""
    return {
        lane.id: tuple(
            (a.seq, a.batch, a.started_at)
            for a in db.attempts.get(lane.id, ())
            if a.outcome == "delivered"
            and a.batch >= lane.progress.floor_batch
            and a.seq > lane.progress.acked_seq
        )
        for lane in lanes
    }


def read_new_batches(db: Database, tx: Transaction, after: int) -> NewBatches | None:
    first = bisect_right(db.batches, after, key=lambda b: b.batch)
    newer = db.batches[first : first + NEW_BATCHES_MAX]
    if not newer:
        return None
    last_seqs = read_counters(db, tx, {lane_id for b in newer for lane_id in b.lanes})
    return NewBatches(newer[-1].batch, last_seqs, more=len(newer) == NEW_BATCHES_MAX)


def read_counters(db: Database, tx: Transaction, lane_ids: set[int]) -> dict[int, int]:
    return {
        row["lane_id"]: row["last_seq"]
        for row in tx.rows(db.lane_counter)
        if row["lane_id"] in lane_ids
    }


def read_blocked(db: Database, tx: Transaction, lane_ids: set[int]) -> set[int]:
    return {i for i in lane_ids if tx.get(db.lane_block, i) is not None}


# ------------------------------------------------------------------- deliveries


def read_deliveries(
    db: Database, tx: Transaction, requested: Sequence[LaneRead]
) -> dict[int, list[Delivery | ErasedEvent]]:
    return {
        lane.id: [
            _erased_event(lane, g)
            if is_dropped(db, g)
            else build_delivery(db, tx, lane, g, db.batch(g.batch).committed_after)
            for g in _given_after(db, lane.id, floor, after)[:limit]
        ]
        for lane, floor, after, limit, _ in requested
    }


def is_dropped(db: Database, given: Given) -> bool:
    """Whether the event of a delivery was dropped, and no dead letter has a copy."""
    return given.outbox_id < db.first_id and given.copy_id is None


def _erased_event(lane: LaneIdentity, given: Given) -> ErasedEvent:
    return ErasedEvent(lane.endpoint_id, given.seq, given.batch, given.outbox_id, given.backfill_id)


def content_of(event: Any) -> EventContent:
    """What a delivery takes from its event."""
    return EventContent(
        event.event_id,
        event.type,
        None,
        event.key,
        event.created_at.timestamp(),
        epoch_seconds(event.expires_at),
        event.payload.encode(),
        None,
    )


def build_delivery(
    db: Database,
    tx: Transaction,
    lane: LaneIdentity,
    given: Given,
    committed_after: datetime | None,
) -> Delivery:
    event = db.outbox[given.outbox_id]
    replay_of, waits_since = _replay_of(db, tx, given), None
    if not given.again and given.feed_id is None:
        waits_since = earliest_commit(event.created_at.timestamp(), epoch_seconds(committed_after))
    return Delivery(
        lane.endpoint_id,
        lane.name,
        given.seq,
        given.batch,
        event.id,
        event.event_id,
        event.type,
        None,
        event.key,
        event.created_at.timestamp(),
        None if given.again else epoch_seconds(event.expires_at),
        event.payload.encode(),
        None,
        replay_of=replay_of,
        backfill_id=given.backfill_id,
        waits_since=waits_since,
    )


def _replay_of(db: Database, tx: Transaction, given: Given) -> tuple[str, int] | None:
    """The lane and the sequence number of the replayed delivery."""
    if given.replay_id is None or given.replay_seq is None:
        return None
    replay = tx.get(db.replay, given.replay_id)
    assert replay is not None
    dead_letter = tx.get(db.dead_letter, replay["dead_id"])
    assert dead_letter is not None
    was = tx.get(db.lane, dead_letter["lane_id"])
    assert was is not None
    return lane_name(was["endpoint_id"], was["generation"], was["slot"]), given.replay_seq
