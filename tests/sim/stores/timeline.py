"""The timeline of the server, which the simulated server does not report."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.sim.database.connection import Connection
    from tests.sim.database.engine import Transaction
    from tests.sim.database.tables import Database


async def read_timeline(connection: Connection) -> int | None:
    return await connection.call(report_timeline)


def report_timeline(db: Database, tx: Transaction) -> int | None:
    return None
