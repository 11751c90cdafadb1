"""Following the delivery log: deliveries as they succeed, fail and die."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from outbox.core.model import pattern
from outbox.operations.criteria import find_endpoint_ids
from outbox.operations.deliveries.statements import READ_ENDED, READ_LANE_ENDS
from outbox.operations.deliveries.walk import read_rows
from outbox.store.connection.connect import map_errors
from outbox.store.retention.erasure import PLAN_BY_INDEX

if TYPE_CHECKING:
    from uuid import UUID

    from asyncpg import Connection

    from outbox.operations.deliveries.model import DeliveryFilter, DeliveryRow

POLLED_DELIVERIES_MAX = 5_000
"""Deliveries that one poll reads; the next one goes on from there."""


class _End(NamedTuple):
    """How far a lane was reported."""

    seq: int
    """All deliveries up to this number have ended."""
    from_batch: int
    """No later one is in an older batch."""
    attempts: int
    """Attempts of the next one that were reported."""


class DeliveryFollower:
    """The deliveries of an endpoint, or of the endpoints of a tenant, from the first poll on.

    Each delivery that ends is reported: it has succeeded, or it became a dead letter.  The
    deliveries of a lane end in the order of their numbers, so where each lane stands is all that
    has to be remembered.  The first pending delivery of a lane is reported whenever more of its
    attempts have failed.

    Args:
        endpoint, tenant, only: see `outbox.operations.deliveries.queries.list_deliveries`; a status
            is that of the last attempt, and times do not apply.
    """

    def __init__(self, *, endpoint: str | None, tenant: str | None, only: DeliveryFilter) -> None:
        self._endpoint = endpoint
        self._tenant = tenant
        self._only = only
        self._types = [pattern.parse(text) for text in only.types]
        self._endpoint_ids: list[UUID] | None = None
        self._ends: dict[int, _End] | None = None

    async def poll(self, connection: Connection[Any], schema: str) -> list[DeliveryRow]:
        """What has happened since the last poll, in this order; the first one finds nothing.

        Raises:
            NotFound: no endpoint ever had this name.
        """
        with map_errors(schema):
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                await connection.execute(PLAN_BY_INDEX)
                if self._endpoint_ids is None or self._endpoint is None:
                    # An endpoint keeps its id when it is renamed.
                    of_tenant = self._tenant if self._endpoint is None else None
                    self._endpoint_ids = await find_endpoint_ids(
                        connection, self._endpoint, of_tenant
                    )
                states = await connection.fetch(READ_LANE_ENDS, self._endpoint_ids or [])
                if self._ends is None:
                    self._ends = {
                        each["lane_id"]: _End(
                            each["acked_seq"], each["floor_batch"], each["attempts"]
                        )
                        for each in states
                    }
                    return []
                rows = await self._read_ended(connection, states, self._ends)
        return sorted(filter(self._is_selected, rows), key=lambda row: row.at)

    async def _read_ended(
        self, connection: Connection[Any], states: list[Any], ends: dict[int, _End]
    ) -> list[DeliveryRow]:
        moved = []
        for each in states:
            end = ends.setdefault(each["lane_id"], _End(0, 0, 0))
            reported = end.attempts if end.seq == each["acked_seq"] else 0
            fails = each["attempts"] > reported
            if each["acked_seq"] > end.seq or fails:
                moved.append((each, end, each["acked_seq"] + fails))
        if not moved:
            return []
        of_each = max(POLLED_DELIVERIES_MAX // len(moved), 1)
        places = await connection.fetch(
            READ_ENDED,
            [each["lane_id"] for each, _, _ in moved],
            [end.from_batch for _, end, _ in moved],
            [end.seq for _, end, _ in moved],
            [to_seq for _, _, to_seq in moved],
            of_each,
        )
        states_of = {each["lane_id"]: each for each, _, _ in moved}
        for place in places:
            state = states_of[place["lane_id"]]
            if place["seq"] <= state["acked_seq"]:
                ends[place["lane_id"]] = _End(place["seq"], place["batch"], 0)
            else:
                ends[place["lane_id"]] = ends[place["lane_id"]]._replace(attempts=state["attempts"])
        return await read_rows(connection, places)

    def _is_selected(self, row: DeliveryRow) -> bool:
        only = self._only
        return (
            only.includes(row)
            and only.tenant in (None, row.tenant)
            and (only.status is None or only.status.includes(row.status))
            and (
                not self._types
                or (row.type is not None and any(each.fullmatch(row.type) for each in self._types))
            )
        )
