"""A walk down the delivery log, portion by portion, and what is shown of each delivery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outbox.core.model.ids import delivery_id
from outbox.core.model.response_policy import is_success
from outbox.operations.deliveries.model import (
    POSITION,
    DeliveryFilter,
    DeliveryPosition,
    DeliveryRow,
)
from outbox.operations.deliveries.statements import (
    READ_ROWS,
    WALK_DEAD,
    WALK_DELIVERIES,
    WALK_FAILURES,
)
from outbox.operations.pages import convert
from outbox.operations.rows import ID_MAX, RowPage, from_row

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from asyncpg import Connection, Record

SCANNED_MAX = 20_000
"""Deliveries that a page scans."""
RUNS_GROWTH = 8
"""A portion has at most so many times the runs of a lane that the one before had.  The first has as
many as the page needs if all lanes are equally busy, and each next one what is missing by then."""
_PLACE = ("lane_id", "batch", "seq", "outbox_id", "backfill_id", "copy_id")


class Walk:
    """One page of the log of some lanes.

    Args:
        lanes: their ids, and of each the batch and the number down to which it is read.
        wanted: rows of the page.
    """

    def __init__(
        self,
        lanes: Sequence[tuple[int, int, int]],
        only: DeliveryFilter,
        after: DeliveryPosition,
        wanted: int,
    ) -> None:
        self._lanes = tuple(zip(*lanes, strict=True)) or ((), (), ())
        self._only = only
        self._wanted = wanted
        self.rows: list[Record] = []
        self.position: DeliveryPosition | None = after
        """Where the next portion begins; None: nothing is left."""
        self.scanned = 0
        self.scanned_back_to: datetime | None = None

    async def read(self, connection: Connection[Any]) -> None:
        """Read portions until the page is full, `SCANNED_MAX` is reached, or nothing is left."""
        runs = -(-self._wanted // max(len(self._lanes[0]), 1)) + 1
        while self.position is not None and len(self.rows) < self._wanted:
            scans = SCANNED_MAX - self.scanned
            if not self._only.searches:
                scans = min(scans, self._wanted - len(self.rows))
            if scans <= 0:
                return
            before = self.scanned
            self._advance(await self._read_portion(connection, runs, scans), scans)
            growth = (scans - 1) // max(self.scanned - before, 1) + 1
            runs = min(runs * min(growth, RUNS_GROWTH), scans)

    async def _read_portion(
        self, connection: Connection[Any], runs: int, scans: int
    ) -> list[Record]:
        assert self.position is not None
        only = self._only
        statement = WALK_DELIVERIES
        if only.failed or (only.status is not None and not is_success(only.status.low)):
            statement = WALK_FAILURES
        if only.outcome not in (None, "pending", "delivered"):
            statement = WALK_DEAD
        found: list[Record] = await connection.fetch(
            statement,
            *filter_arguments(only),
            self._wanted - len(self.rows),
            *self._lanes,
            self.position,
            runs,
            scans,
        )
        return found

    def _advance(self, found: Sequence[Record], scans: int) -> None:
        extent = found[0]
        self.scanned += extent["scanned"]
        self.scanned_back_to = extent["at"] or self.scanned_back_to
        self.rows += [row for row in found if row["seq"] is not None]
        if extent["scanned"] == scans:
            # Not from the position of the last row: others behind it were scanned, too.
            self.position = DeliveryPosition(*(extent[f"end_{name}"] for name in POSITION))
        elif extent["reached"] is not None:
            self.position = DeliveryPosition(extent["reached"] - 1, ID_MAX, ID_MAX, ID_MAX)
        else:
            self.position = None


async def read_rows(connection: Connection[Any], places: Sequence[Record]) -> list[DeliveryRow]:
    """What a page shows of the deliveries at these places."""
    columns = [[place[name] for place in places] for name in _PLACE]
    rows = RowPage(await connection.fetch(READ_ROWS, *columns), more=False)
    return await convert(rows, _delivery)


def _delivery(row: Record) -> DeliveryRow:
    x_delivery = None
    if row["event"] is not None:
        x_delivery = delivery_id(
            row["endpoint_id"], row["outbox_id"], row["event"], row["backfill_id"]
        )
    elapsed_ms = row["elapsed_ms"]
    if elapsed_ms is not None:
        elapsed_ms = round(elapsed_ms, 3)  # It is stored with half the precision.
    return from_row(DeliveryRow, row, delivery=x_delivery, elapsed_ms=elapsed_ms)


def filter_arguments(only: DeliveryFilter) -> tuple[Any, ...]:
    """The parameters $1 to $5 of a search."""
    return only.types or None, only.tenant, only.status, only.outcome == "delivered", only.reason
