"""The ends of an adoption: `outbox adopt undo`, the way back, and `outbox adopt retire`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.model.sql_names import quote_ident
from outbox.core.model.text import count
from outbox.errors import CannotRun, Conflict
from outbox.store.connection.connect import map_errors
from outbox_adopt.adoption import (
    PLAN_BY_HASH,
    add_to_journal,
    count_states,
    require_adoption,
    require_phase,
    send_message,
    set_phase,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncpg import Connection

    from outbox_adopt.adoption import Adoption

LEDGER_BATCH = 20_000
END_POLL_S = 0.5

# Deliveries of published rows that a relay has still to make, and events without deliveries yet.
#   positions: an event above the cursor, or in an open gap.
COUNT_UNDELIVERED = """
WITH events AS MATERIALIZED (
    SELECT o.id FROM adopted_row a JOIN outbox o ON o.event_id = a.event_id
     WHERE a.adoption = $1 AND a.state = 'published'),
newest AS MATERIALIZED (SELECT high, young FROM batch ORDER BY batch DESC LIMIT 1)
SELECT (SELECT count(*) FROM events e
         WHERE NOT EXISTS (SELECT FROM newest n WHERE e.id <= n.high AND NOT n.young @> e.id)
            OR EXISTS (SELECT FROM gap g WHERE e.id BETWEEN g.lo AND g.hi))
       + (SELECT count(*) FROM events e
            JOIN delivery d ON d.outbox_id = e.id
             AND d.replay_id IS NULL AND d.backfill_id IS NULL
            JOIN lane_progress p ON p.lane_id = d.lane_id
            JOIN endpoint t ON t.id = p.endpoint_id
           WHERE d.seq > p.acked_seq AND t.state <> 'removed'
             AND NOT EXISTS (SELECT FROM attempt a
                              WHERE a.lane_id = d.lane_id AND a.batch = d.batch AND a.seq = d.seq
                                AND a.outcome = 'delivered'))
"""

DELETE_LEDGER = """
DELETE FROM adopted_row WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM adopted_row WHERE adoption = $1 LIMIT $2))
"""
DELETE_ADOPTION = "DELETE FROM adoption WHERE id = $1 AND phase = 'ended'"

# Rows whose event was published a short time ago: the application still writes to the table.
COUNT_RECENT = """
SELECT count(*) FROM adopted_row
 WHERE adoption = $1 AND recorded_at > clock_timestamp() - make_interval(secs => $2)
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an adoption."""

    table: str
    shown: int
    """Rows that were shown to the old poller again."""
    published: int
    """Rows whose events the relay has delivered, or will deliver."""
    rejected: int
    """Rows that were rejected, and stay pending in the old table."""
    undelivered: int = 0
    """Deliveries of published rows that the relay has still to make."""


async def undo_adoption(
    connection: Connection[Any],
    schema: str,
    table: str,
    *,
    actor: str,
    wait_s: float,
    on_waiting: Callable[[int], None],
) -> Ended:
    """Give the table back to its old poller; the way back from every phase.

    After the cut-over the new rows are held first, until the relay has delivered all events of
    earlier rows: the old poller sends later events of a key after them.  Rows for a connector
    cannot be held, so it may send some before the relay has sent earlier ones.

    Args:
        wait_s: maximum wait for these deliveries; the adoption then stays in the phase
            `returning`, and the command can be run again.
        on_waiting: called with the number of deliveries that are left.

    Raises:
        CannotRun: deliveries are left, or a lock was not granted.
        Conflict, NotFound, SchemaMissing, DatabaseUnavailable: as in `require_adoption`.
    """
    with map_errors(schema, "operator"):
        adoption = await require_adoption(connection, schema, table)
        if adoption.phase == "ended":
            await remove_ledger(connection, adoption)
            return Ended(adoption.table, 0, 0, 0)
        sql, mapping = adoption.sql, adoption.sql.mapping
        if adoption.phase == "cut_over" and mapping.has_pending:
            await send_message(
                connection,
                schema,
                [
                    require_phase(sql, "cut_over"),
                    *sql.trigger_statements("returning"),
                    set_phase(adoption.id, "returning"),
                ],
                "nothing is undone",
            )
        if adoption.phase != "dual_run" and mapping.has_pending:
            await _wait_for_deliveries(connection, adoption, wait_s, on_waiting)
        undelivered = await _count_undelivered(connection, adoption)
        states = await count_states(connection, adoption)
        await _end(
            connection,
            schema,
            adoption,
            "adoption_undone",
            actor,
            _show_statements(adoption),
        )
    shown = states.get("held", 0) + states.get("duplicate", 0)
    return Ended(
        adoption.table,
        shown if mapping.has_pending else 0,
        states.get("published", 0),
        states.get("rejected", 0),
        undelivered,
    )


async def retire_adoption(
    connection: Connection[Any], schema: str, table: str, *, actor: str, quiet_s: float
) -> Ended:
    """End an adoption after the cut-over: the application no longer writes to the table.

    Args:
        quiet_s: refuse if a row was written within this time.

    Raises:
        Conflict: rows are still written, held or rejected, or it is in another phase.
        CannotRun: a lock was not granted.
        NotFound, SchemaMissing, DatabaseUnavailable: as in `require_adoption`.
    """
    with map_errors(schema, "operator"):
        adoption = await require_adoption(connection, schema, table, "cut_over", "ended")
        states = await count_states(connection, adoption)
        if adoption.phase != "ended":
            for state in ("rejected", "held"):
                if n := states.get(state, 0):
                    raise Conflict(
                        f"{count(n, f'{state} row')} of {table}; see: outbox adopt verify {table}"
                    )
            if n := await connection.fetchval(COUNT_RECENT, adoption.id, quiet_s):
                raise Conflict(
                    f"{count(n, 'row')} of {table} {'was' if n == 1 else 'were'} written within "
                    f"{quiet_s:g} s: let the application publish with outbox first"
                )
            await _end(connection, schema, adoption, "adoption_retired", actor, [])
        else:
            await remove_ledger(connection, adoption)
    return Ended(adoption.table, 0, states.get("published", 0), 0)


def _show_statements(adoption: Adoption) -> list[str]:
    """Show the held rows to the old poller; the relay delivers those that were deleted."""
    sql, mapping = adoption.sql, adoption.sql.mapping
    if not mapping.has_pending or adoption.phase == "dual_run":
        return []
    deleted = [] if mapping.sent_deleted else [sql.publish_deleted()]
    return [*deleted, sql.show()]


async def _end(
    connection: Connection[Any],
    schema: str,
    adoption: Adoption,
    kind: str,
    actor: str,
    statements: list[str],
) -> None:
    """Remove the triggers, execute statements in the same message, and remove the ledger."""
    sql = adoption.sql
    returned = []
    if kind == "adoption_undone" and sql.mapping.publication and adoption.phase != "dual_run":
        publication = quote_ident(sql.mapping.publication)
        returned = [f"ALTER PUBLICATION {publication} ADD TABLE {sql.source.name}"]
    await send_message(
        connection,
        schema,
        [
            require_phase(sql, adoption.phase, "returning"),
            # The lock that DROP TRIGGER needs, before anything is changed.
            f"LOCK TABLE {sql.source.name} IN ACCESS EXCLUSIVE MODE",
            *sql.drop_statements(),
            *statements,
            *returned,
            set_phase(adoption.id, "ended"),
            add_to_journal(kind, actor, {"table": sql.source.name}),
        ],
        "the adoption goes on",
    )
    await remove_ledger(connection, adoption)


async def remove_ledger(connection: Connection[Any], adoption: Adoption) -> None:
    """Remove the ledger of an adoption that has ended, in batches, and then the adoption."""
    while await connection.execute(DELETE_LEDGER, adoption.id, LEDGER_BATCH) != "DELETE 0":
        pass
    await connection.execute(DELETE_ADOPTION, adoption.id)


async def _count_undelivered(connection: Connection[Any], adoption: Adoption) -> int:
    async with connection.transaction(readonly=True):
        await connection.execute(PLAN_BY_HASH)
        left: int = await connection.fetchval(COUNT_UNDELIVERED, adoption.id)
    return left


async def _wait_for_deliveries(
    connection: Connection[Any],
    adoption: Adoption,
    wait_s: float,
    on_waiting: Callable[[int], None],
) -> None:
    clock = asyncio.get_running_loop().time
    deadline = clock() + wait_s
    while left := await _count_undelivered(connection, adoption):
        on_waiting(left)
        if clock() >= deadline:
            raise CannotRun(
                f"{count(left, 'delivery')} of adopted events {'is' if left == 1 else 'are'} left "
                "after the wait; new rows are held: see outbox status, then run undo again"
            )
        await asyncio.sleep(END_POLL_S)
