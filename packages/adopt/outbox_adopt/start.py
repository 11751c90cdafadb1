"""`outbox adopt start`: begin the dual run, or change its mapping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg
import orjson

from outbox.core.model.sql_names import quote_literal
from outbox.errors import Conflict
from outbox.store.connection.connect import map_errors
from outbox_adopt.adoption import (
    DESCRIBED,
    add_to_journal,
    find_adoption,
    require_phase,
    send_message,
)
from outbox_adopt.end import remove_ledger
from outbox_adopt.plan import plan_adoption
from outbox_adopt.source_sql import SourceSql
from outbox_adopt.source_table import ORDERED_TYPES, read_source

if TYPE_CHECKING:
    from asyncpg import Connection

    from outbox_adopt.adoption import Adoption
    from outbox_adopt.mapping import SourceMapping
    from outbox_adopt.plan import AdoptionPlan

# The adoption's id is allocated first, because the trigger's function has it.
NEXT_ID = "SELECT nextval(pg_get_serial_sequence('adoption', 'id'))"


@dataclass(frozen=True, slots=True)
class Started:
    """The beginning of a dual run."""

    table: str
    changed: bool
    """The dual run had begun before; its mapping was changed."""
    plan: AdoptionPlan


async def start_adoption(
    connection: Connection[Any],
    schema: str,
    table: str,
    mapping: SourceMapping,
    *,
    actor: str,
    accept_collisions: bool = False,
    accept_subscribers: bool = False,
) -> Started:
    """Begin the dual run of a table; of one that has begun, change the mapping.

    Args:
        accept_collisions: let several names become one event type.
        accept_subscribers: let endpoints get the events of the dual run besides those of the
            old poller, though their subscriptions are not for these alone.

    Raises:
        UsageError, NotFound: the table or the mapping is invalid.
        Conflict: the adoption is in a later phase, or something must be accepted.
        CannotRun: a lock was not granted.
        SchemaMissing, DatabaseUnavailable: as in `map_errors`.
    """
    plan = await plan_adoption(connection, schema, table, mapping)
    if plan.collisions and not accept_collisions:
        raise Conflict(
            f"several names become the event type {plan.collisions[0]}: give each one with "
            "type_names (--type-name OLD=NEW), or --accept-collisions"
        )
    if plan.receives_shadow and not accept_subscribers:
        raise Conflict(
            f'the endpoint "{plan.receives_shadow[0]}" would get the events of the dual run, '
            "besides those of the old poller: name its types one by one, or --accept-subscribers "
            "if it is for the dual run"
        )
    with map_errors(schema, "operator"):
        found = await find_adoption(connection, schema, table)
        if found is not None and found.phase == "ended":
            await remove_ledger(connection, found)
            found = None
        if found is not None and found.phase != "dual_run":
            raise Conflict(f"the adoption of {table} has begun: {DESCRIBED[found.phase]}")
        # The plan has checked the mapping.
        source = found.sql.source if found else await read_source(connection, table)
        id_ = found.id if found else await connection.fetchval(NEXT_ID)
        sql = SourceSql(id_, schema, source, mapping)
        stored = quote_literal(orjson.dumps(mapping.as_json()).decode())
        statements = _change_mapping(found, stored) if found else _insert(sql, stored)
        statements += [
            *sql.function_statements(),
            *sql.trigger_statements("dual_run"),
            _set_boundary(sql),
            add_to_journal(
                "adoption_started", actor, {"table": source.name, "mapping": mapping.as_json()}
            ),
        ]
        try:
            await send_message(connection, schema, statements, f"{table} is not adopted")
        except asyncpg.UniqueViolationError:
            raise Conflict(f"the adoption of {table} was started meanwhile") from None
    return Started(source.name, found is not None, plan)


def _insert(sql: SourceSql, mapping: str) -> list[str]:
    return [
        "INSERT INTO adoption (id, source, phase, mapping) OVERRIDING SYSTEM VALUE "
        f"VALUES ({sql.adoption}, {quote_literal(sql.source.name)}, 'dual_run', {mapping})"
    ]


def _change_mapping(found: Adoption, mapping: str) -> list[str]:
    return [
        require_phase(found.sql, "dual_run"),
        f"UPDATE adoption SET mapping = {mapping} WHERE id = {found.id}",
        *found.sql.drop_statements(),
    ]


def _set_boundary(sql: SourceSql) -> str:
    """After the trigger's lock: no row before the boundary is missing."""
    ordering = sql.mapping.ordering
    if sql.source.type(ordering) not in ORDERED_TYPES:
        return f"UPDATE adoption SET boundary = NULL WHERE id = {sql.adoption}"
    highest = f"SELECT max({sql.column('l', ordering)})::text FROM {sql.source.name} l"
    return (
        f"UPDATE adoption SET boundary = coalesce(boundary, ({highest})) WHERE id = {sql.adoption}"
    )
