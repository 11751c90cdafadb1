"""Following the delivery log: deliveries as they succeed, fail and die."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.operations.deliveries.model import DeliveryFilter, DeliveryPosition
from outbox.operations.deliveries.queries import find_endpoints
from outbox.operations.deliveries.statements import READ_LANES, READ_NEWEST_BATCH
from outbox.operations.deliveries.walk import Walk, read_rows
from outbox.operations.rows import ID_MAX
from outbox.store.connection.connect import map_errors
from outbox.store.retention.erasure import PLAN_BY_INDEX

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from outbox.operations.deliveries.model import DeliveryRow

NEW_DELIVERIES_MAX = 10_000
"""New deliveries that one poll takes."""
FOLLOWED_PENDING_MAX = 2_000
"""Pending deliveries whose outcome is awaited."""


class DeliveryFollower:
    """The deliveries of an endpoint, or of the endpoints of a tenant, from the first poll on.

    A delivery is reported when it succeeds, each time an attempt of it fails, and when it becomes a
    dead letter.

    Args:
        endpoint, tenant, only: see `outbox.operations.deliveries.queries.list_deliveries`; a status
            is that of the last attempt, and times do not apply.
    """

    def __init__(self, *, endpoint: str | None, tenant: str | None, only: DeliveryFilter) -> None:
        self._endpoint = endpoint
        self._tenant = tenant
        self._only = only
        self._batch: int | None = None
        """The newest batch that was taken."""
        self._pending: dict[tuple[int, int], tuple[Record, int]] = {}
        """The place of each, and the attempts that were reported, by lane and number."""
        self.left_out = False
        """Whether the last poll had to leave out deliveries, because there were too many."""

    async def poll(self, connection: Connection[Any], schema: str) -> list[DeliveryRow]:
        """What has happened since the last poll, in this order.

        Raises:
            NotFound: no endpoint ever had this name.
        """
        with map_errors(schema):
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                await connection.execute(PLAN_BY_INDEX)
                places = await self._read_new(connection)
                places += [place for place, _ in self._pending.values()]
                rows = await read_rows(connection, places)
        happened = [
            row for place, row in zip(places, rows, strict=True) if self._has_changed(place, row)
        ]
        shown = (row for row in happened if self._only.includes(row) and self._has_status(row))
        return sorted(shown, key=lambda row: row.at)

    async def _read_new(self, connection: Connection[Any]) -> list[Record]:
        self.left_out = False
        newest: int = await connection.fetchval(READ_NEWEST_BATCH)
        endpoint_ids = await find_endpoints(connection, self._endpoint, self._tenant)
        if self._batch is None or endpoint_ids is None:
            self._batch = newest
            return []
        lanes = await connection.fetch(READ_LANES, endpoint_ids)
        walk = Walk(
            [(lane["lane_id"], self._batch + 1, 0) for lane in lanes],
            DeliveryFilter(types=self._only.types, tenant=self._only.tenant),
            DeliveryPosition(newest, ID_MAX, ID_MAX, ID_MAX),
            NEW_DELIVERIES_MAX,
        )
        await walk.read(connection)
        self._batch = newest
        self.left_out = walk.position is not None
        return walk.rows

    def _has_changed(self, place: Record, row: DeliveryRow) -> bool:
        """Whether something is to be reported of a delivery; a pending one is looked at again."""
        key = place["lane_id"], place["seq"]
        _, reported = self._pending.pop(key, (place, 0))
        if row.outcome != "pending":
            return True
        if len(self._pending) < FOLLOWED_PENDING_MAX:
            self._pending[key] = place, row.attempts
        else:
            self.left_out = True
        return row.attempts > reported

    def _has_status(self, row: DeliveryRow) -> bool:
        return self._only.status is None or self._only.status.includes(row.status)
