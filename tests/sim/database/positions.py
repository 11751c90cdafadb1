"""Positions of snapshots of the application."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.position import Position
from tests.sim.stores.timeline import incarnation_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from uuid import UUID

    from outbox.core.model.int_ranges import Range
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database


def take_position(db: Database, tx: Transaction) -> tuple[Position, Collection[UUID]] | None:
    """The position of a snapshot, and the events that it contains, whose ids may be given again.

    None: the database was restored, and no relay has noticed it yet.
    """
    incarnation, newest = incarnation_of(db, tx), db.batches[-1]
    if incarnation is None:
        return None
    gaps = db.open_gaps(tx)
    unsequenced = (
        i for i in db.outbox_ids if i > newest.high or any(lo <= i <= hi for lo, hi in gaps)
    )
    seen = tuple(_ranges(unsequenced))
    position = Position(incarnation, 0, newest.batch, newest.high, newest.at, seen)
    return position, frozenset(event.event_id for event in db.outbox.values())


def _ranges(ids: Iterable[int]) -> list[Range]:
    found: list[Range] = []
    for i in ids:
        if found and found[-1][1] == i - 1:
            found[-1] = (found[-1][0], i)
        else:
            found.append((i, i))
    return found
