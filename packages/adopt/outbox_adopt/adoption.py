"""One adoption: its row, and the messages that change its phase."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import asyncpg
import orjson

from outbox.core.model.sql_names import quote_literal
from outbox.errors import Conflict, NotFound
from outbox.store.connection.connect import map_errors
from outbox.store.connection.lock_retry import LockRetry
from outbox.store.routing_change import ADD_TO_JOURNAL
from outbox.store.sql.message import is_aborted
from outbox_adopt.mapping import parse_mapping
from outbox_adopt.source_sql import SourceSql
from outbox_adopt.source_table import read_source

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from datetime import datetime

    from asyncpg import Connection

Phase = Literal["dual_run", "held", "cut_over", "returning", "ended"]

READ_ADOPTION = """
SELECT id, phase, mapping::text AS mapping, boundary, began_at, held_at, cut_over_at
  FROM adoption WHERE source = $1
"""

PLAN_BY_HASH = "SET LOCAL enable_nestloop = off"
"""A setting for queries about whole tables.  Without statistics, which a new ledger does not have,
the planner may choose to search one table for each row of another."""

COUNT_STATES = "SELECT state, count(*) FROM adopted_row WHERE adoption = $1 GROUP BY state"

DESCRIBED: dict[str, str] = {
    "dual_run": "dual run: the old poller delivers; events are published as shadow.*",
    "held": "cut-over begun: pending rows are held",
    "cut_over": "cut over: the relay delivers",
    "returning": "undo begun: new rows are held",
    "ended": "ended; its ledger is being removed",
}


@dataclass(frozen=True, slots=True)
class Adoption:
    """An adoption of the database."""

    id: int
    phase: Phase
    sql: SourceSql
    boundary: str | None
    """Highest value of the table's order when the dual run began."""
    began_at: datetime
    held_at: datetime | None
    cut_over_at: datetime | None

    @property
    def table(self) -> str:
        """The adopted table, quoted for SQL."""
        return self.sql.source.name


async def find_adoption(connection: Connection[Any], schema: str, table: str) -> Adoption | None:
    """Read the adoption of a table; None: there is none.

    Raises:
        OutboxError: see `read_source`.
    """
    source = await read_source(connection, table)
    row = await connection.fetchrow(READ_ADOPTION, source.name)
    if row is None:
        return None
    mapping = parse_mapping(orjson.loads(row["mapping"]))
    return Adoption(
        row["id"],
        row["phase"],
        SourceSql(row["id"], schema, source, mapping),
        row["boundary"],
        row["began_at"],
        row["held_at"],
        row["cut_over_at"],
    )


async def require_adoption(
    connection: Connection[Any], schema: str, table: str, *phases: Phase
) -> Adoption:
    """Read the adoption of a table.

    Args:
        phases: the phases in which the command can run; none: all.

    Raises:
        NotFound: there is none.
        Conflict: it is in another phase.
        OutboxError: see `read_source`.
    """
    adoption = await find_adoption(connection, schema, table)
    if adoption is None:
        raise NotFound(f"{table} is not being adopted; begin with: outbox adopt start {table} …")
    if phases and adoption.phase not in phases:
        raise Conflict(f"the adoption of {table} is in another phase: {DESCRIBED[adoption.phase]}")
    return adoption


async def count_states(connection: Connection[Any], adoption: Adoption) -> dict[str, int]:
    """The number of rows of the ledger by state."""
    return dict(await connection.fetch(COUNT_STATES, adoption.id))


def require_phase(sql: SourceSql, *phases: Phase) -> str:
    """A statement that aborts its message unless the adoption is in one of these phases."""
    return f"SELECT abort_unless(EXISTS ({sql.lock_adoption(*phases)}))"


def set_phase(adoption: int, phase: Phase, time: str | None = None) -> str:
    """A statement that changes the phase, and sets one of its times the first time."""
    at = f", {time} = coalesce({time}, clock_timestamp())" if time else ""
    return f"UPDATE adoption SET phase = {quote_literal(phase)}{at} WHERE id = {adoption}"


def add_to_journal(kind: str, actor: str, data: Mapping[str, Any]) -> str:
    """A statement that adds a journal entry."""
    return ADD_TO_JOURNAL.inline([kind, actor, None, orjson.dumps(data).decode()])


async def send_message(
    connection: Connection[Any], schema: str, statements: list[str], failure: str
) -> None:
    """Execute statements in one message, again until its locks are granted.

    Args:
        failure: what was not done otherwise, for the error.

    Raises:
        Conflict: another command has changed the phase meanwhile.
        CannotRun: a lock was not granted; nothing was changed.
        SchemaMissing, DatabaseUnavailable: as in `map_errors`.
    """
    with map_errors(schema, "operator"):
        try:
            open_observer = None if connection.reopen is None else partial(_observer, connection)
            await LockRetry(connection, open_observer).execute(statements, failure)
        except asyncpg.PostgresError as error:
            if not is_aborted(error):
                raise
            raise Conflict(
                f"{failure}: the adoption has changed meanwhile; see: outbox adopt status"
            ) from error


@asynccontextmanager
async def _observer(connection: Any) -> AsyncIterator[Any]:
    """A second connection, on which a lock's holder is found."""
    other = await connection.reopen()
    try:
        yield other
    finally:
        other.terminate()
