"""`outbox adopt status`: all adoptions, with their phases and the rows of their ledgers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.operations.rows import from_row
from outbox.store.connection.connect import map_errors

if TYPE_CHECKING:
    from datetime import datetime

    from asyncpg import Connection

LIST_ADOPTIONS = """
SELECT d.source AS table, d.phase, d.began_at, d.cut_over_at, r.rows::text AS rows
  FROM adoption d
 CROSS JOIN LATERAL (
       SELECT coalesce(jsonb_object_agg(state, n), '{}') AS rows
         FROM (SELECT state, count(*) AS n FROM adopted_row WHERE adoption = d.id
                GROUP BY state) s) r
 ORDER BY d.source
"""


@dataclass(frozen=True, slots=True)
class AdoptionRow:
    """An adoption of the list."""

    table: str
    phase: str
    began_at: datetime
    cut_over_at: datetime | None
    rows: dict[str, int]
    """The ledger's rows by state."""


async def list_adoptions(connection: Connection[Any], schema: str) -> list[AdoptionRow]:
    """All adoptions, by table.

    Raises:
        SchemaMissing, DatabaseUnavailable: as in `map_errors`.
    """
    with map_errors(schema):
        found = await connection.fetch(LIST_ADOPTIONS)
    return [from_row(AdoptionRow, row, parse=("rows",)) for row in found]
