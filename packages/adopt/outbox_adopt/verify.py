"""`outbox adopt verify`: the proof that the adopted table and the outbox agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.sql_names import quote_literal
from outbox.store.connection.connect import map_errors
from outbox_adopt.adoption import PLAN_BY_HASH, count_states, require_adoption
from outbox_adopt.source_table import ORDERED_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from asyncpg import Connection

    from outbox_adopt.adoption import Adoption

EXAMPLES_MAX = 5

# Rows of the ledger whose event retention has kept.
_KEPT = """
    SELECT a.source_id, a.state, a.backlog, a.event_id, o.id AS outbox_id, o.type, o.key, o.tenant,
           o.payload, o.body, o.headers
      FROM adopted_row a LEFT JOIN outbox o ON o.event_id = a.event_id
     WHERE a.adoption = {adoption} AND a.event_id IS NOT NULL
       AND a.recorded_at > coalesce((SELECT min(created_at) FROM outbox), 'infinity')
"""

# Each query returns the ids of violating rows.
MISSING_IN_LEDGER = """
SELECT {id} AS source_id FROM {table} l
 WHERE {ordering} > {boundary} AND NOT EXISTS (
       SELECT FROM adopted_row a WHERE a.adoption = {adoption} AND a.source_id = {id})
"""
NOT_PUBLISHED = f"SELECT source_id FROM ({_KEPT}) k WHERE outbox_id IS NULL"
DIFFERENT = f"""
SELECT k.source_id
  FROM (SELECT {{id}} AS source_id, {{event}} AS e FROM {{table}} l OFFSET 0) s
  JOIN ({_KEPT}) k USING (source_id)
 WHERE k.outbox_id IS NOT NULL AND (k.payload IS NOT NULL OR k.body IS NOT NULL)
   AND ROW(CASE k.state WHEN 'rehearsed' THEN 'shadow.' ELSE '' END || (s.e).type,
           (s.e).key, (s.e).tenant, (s.e).payload, (s.e).body, (s.e).headers)
       IS DISTINCT FROM ROW(k.type, k.key, k.tenant, k.payload, k.body, k.headers)
"""
MISORDERED = f"""
SELECT source_id FROM (
    SELECT k.source_id, k.outbox_id, max(k.outbox_id) OVER (
               PARTITION BY k.key ORDER BY {{ordering}}, k.source_id
               ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
      FROM ({_KEPT}) k JOIN {{table}} l ON {{id}} = k.source_id
     WHERE k.backlog AND k.key IS NOT NULL) ordered
 WHERE outbox_id < before
"""
LEDGER_STATE = "SELECT source_id FROM adopted_row WHERE adoption = {adoption} AND {condition}"

SUMMARY = """
SELECT count(*) AS violations, (array_agg(source_id ORDER BY source_id))[:{examples}] AS ids
  FROM ({query}) violating
"""


@dataclass(frozen=True, slots=True)
class AdoptionCheck:
    """One check, with its violations."""

    name: str
    guarantee: str
    violations: int
    ids: tuple[str, ...]
    """Ids of some violating rows of the adopted table."""
    action: str | None
    """What to do if there are violations."""


@dataclass(frozen=True, slots=True)
class AdoptionReport:
    """The state of an adoption, and its checks."""

    table: str
    phase: str
    began_at: datetime
    cut_over_at: datetime | None
    rows: dict[str, int]
    """The ledger's rows by state."""
    checks: tuple[AdoptionCheck, ...]

    @property
    def violations(self) -> int:
        """The number of violations."""
        return sum(each.violations for each in self.checks)


async def verify_adoption(connection: Connection[Any], schema: str, table: str) -> AdoptionReport:
    """Compare the adopted table, the ledger and the outbox, in one snapshot.

    Events that retention has dropped are not compared.

    Raises:
        NotFound, SchemaMissing, DatabaseUnavailable: as in `require_adoption`.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_HASH)
            adoption = await require_adoption(connection, schema, table)
            checks = []
            for name, guarantee, query, action in _checks(adoption):
                found = await connection.fetchrow(
                    SUMMARY.format(query=query, examples=EXAMPLES_MAX)
                )
                bad = found["violations"]
                ids = tuple(found["ids"] or ())
                checks.append(AdoptionCheck(name, guarantee, bad, ids, action if bad else None))
            rows = await count_states(connection, adoption)
    return AdoptionReport(
        adoption.table, adoption.phase, adoption.began_at, adoption.cut_over_at, rows, tuple(checks)
    )


def _checks(adoption: Adoption) -> Iterator[tuple[str, str, str, str]]:
    """Name, guarantee, query of the violating rows and action of each check."""
    sql, mapping = adoption.sql, adoption.sql.mapping
    ordering = sql.column("l", mapping.ordering)
    kind = sql.source.type(mapping.ordering)
    parts = {
        "adoption": adoption.id,
        "table": sql.source.name,
        "id": sql.id("l"),
        "event": sql.event("l"),
        "ordering": ordering,
    }
    corrected = f"correct the rows, then run: outbox adopt cut-over {adoption.table}"
    if adoption.boundary is not None and kind in ORDERED_TYPES:
        boundary = f"{quote_literal(adoption.boundary)}::{kind}"
        yield (
            "recorded",
            "every row since the dual run began is in the ledger",
            MISSING_IN_LEDGER.format(**parts, boundary=boundary),
            "such rows were written without triggers (session_replication_role, COPY of a "
            "restore): insert them again",
        )
    if adoption.phase in ("cut_over", "held", "returning") and mapping.has_pending:
        yield (
            "hidden",
            "no pending row is left to the old poller, but for rejected ones",
            sql.unhandled(),
            f"run: outbox adopt cut-over {adoption.table}",
        )
    yield (
        "lost",
        "every published row has its event in the outbox",
        NOT_PUBLISHED.format(**parts),
        "do not go on; keep both tables",
    )
    yield (
        "sent once",
        "the old poller sent no row after its event was published",
        LEDGER_STATE.format(**parts, condition="sent_too"),
        "stop the old poller; consumers got these events twice",
    )
    if not mapping.sent_deleted:
        yield (
            "content",
            "type, key, tenant, payload and headers of each event are those of its row",
            DIFFERENT.format(**parts),
            "rows were changed after they were published, or the mapping was changed",
        )
        yield (
            "order",
            "events of the backlog with one key are in the order of the table",
            MISORDERED.format(**parts),
            "do not go on; keep both tables",
        )
    yield (
        "converted",
        "no row is rejected",
        LEDGER_STATE.format(**parts, condition="state = 'rejected'"),
        corrected,
    )
