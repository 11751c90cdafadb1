"""`outbox adopt plan`: what an adoption would make of a table's rows.  It only reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from outbox.store.connection.connect import map_errors
from outbox.store.sql.type_match import SUBSCRIBERS, TYPE_MATCHES
from outbox_adopt.adoption import find_adoption
from outbox_adopt.source_sql import SourceSql
from outbox_adopt.source_table import check_mapping, read_source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncpg import Connection

    from outbox_adopt.mapping import SourceMapping

PLANNED_TYPES_MAX = 50
FAULT_EXAMPLES_MAX = 3

COUNT_ROWS = """
SELECT count(*) AS rows, count(*) FILTER (WHERE {pending}) AS pending,
       count(*) FILTER (WHERE NOT coalesce({pending}, false) AND NOT coalesce({sent}, false))
           AS other
  FROM {table} l
"""

# Types of pending rows; of all rows, if the table does not show which are pending.
READ_TYPES = """
SELECT {name} AS name, {type} AS type, count(*) AS rows
  FROM {table} l WHERE {pending} GROUP BY 1, 2 ORDER BY 3 DESC, 1 LIMIT {limit}
"""

# What the pending rows become.  Of rows with one idempotency key the first one counts.
READ_EVENTS = """
WITH converted AS MATERIALIZED (
    SELECT source_id, e, event_fault(e) AS fault
      FROM (SELECT {id} AS source_id, {event} AS e FROM {table} l WHERE {pending} OFFSET 0) each)
SELECT count(*) FILTER (WHERE fault IS NULL) AS events,
       count(*) FILTER (WHERE (e).key IS NULL AND fault IS NULL) AS without_key,
       count(DISTINCT (e).key) AS keys,
       count((e).once) - count(DISTINCT (e).once) AS duplicates,
       (SELECT coalesce(jsonb_object_agg(fault, f), '{{}}') FROM (
            SELECT fault, jsonb_build_object(
                       'rows', count(*), 'ids', (array_agg(source_id))[:{examples}]) AS f
              FROM converted WHERE fault IS NOT NULL GROUP BY fault) faults)::text AS faults
  FROM converted
"""

READ_EXAMPLES = """
SELECT source_id, (e).type AS type, (e).key AS key, (e).tenant AS tenant,
       left(coalesce((e).payload::text, encode((e).body, 'hex')), 200) AS payload,
       (e).headers::text AS headers
  FROM (SELECT {id} AS source_id, {event} AS e FROM {table} l WHERE {pending}
         ORDER BY {ordering} LIMIT {examples}) each
"""

# Endpoints whose subscriptions match event types, and the types that none matches.
READ_SUBSCRIBERS = f"""
WITH o AS (SELECT DISTINCT type FROM unnest($1::text[]) AS t(type)),
s AS MATERIALIZED (
    SELECT e.name, s.types FROM endpoint e JOIN {SUBSCRIBERS} s ON s.endpoint_id = e.id),
matching AS MATERIALIZED (SELECT s.name, o.type FROM s, o WHERE {TYPE_MATCHES})
SELECT array(SELECT DISTINCT name FROM matching ORDER BY name) AS endpoints,
       array(SELECT type FROM o EXCEPT SELECT type FROM matching ORDER BY type) AS unmatched
"""


@dataclass(frozen=True, slots=True)
class TypeConversion:
    """A type of the adopted table, and the event type that it becomes."""

    name: str | None
    type: str | None
    rows: int


@dataclass(frozen=True, slots=True)
class Fault:
    """A reason for which rows would be rejected."""

    fault: str
    rows: int
    ids: tuple[str, ...]
    """Ids of some of them."""


@dataclass(frozen=True, slots=True)
class ExampleEvent:
    """The event of one row."""

    source_id: str
    type: str | None
    key: str | None
    tenant: str | None
    payload: str | None
    """Its first 200 characters."""
    headers: Mapping[str, str] | None


@dataclass(frozen=True, slots=True)
class AdoptionPlan:
    """What an adoption would make of a table's rows now."""

    table: str
    phase: str | None
    """The phase of an adoption that has begun; None: none has."""
    rows: int
    pending: int | None
    """The number of pending rows; None: the table does not show which rows are pending."""
    neither: int
    """Rows that are neither pending nor sent by the mapping; they are left alone."""
    events: int
    without_key: int
    keys: int
    duplicates: int
    """Rows that have the idempotency key of another one."""
    types: tuple[TypeConversion, ...]
    collisions: tuple[str, ...]
    """Event types that more than one name becomes."""
    faults: tuple[Fault, ...]
    examples: tuple[ExampleEvent, ...]
    receives_shadow: tuple[str, ...]
    """Endpoints whose subscriptions match the events of the dual run."""
    unmatched: tuple[str, ...]
    """Event types that no endpoint's subscription matches."""

    @property
    def rejected(self) -> int:
        """Pending rows of which no event can be made."""
        return sum(each.rows for each in self.faults)


async def plan_adoption(
    connection: Connection[Any], schema: str, table: str, mapping: SourceMapping
) -> AdoptionPlan:
    """Read what an adoption would make of a table's rows, in one snapshot.

    Raises:
        UsageError, NotFound, CannotRun: the table or the mapping is invalid.
        SchemaMissing, DatabaseUnavailable: as in `map_errors`.
    """
    with map_errors(schema, "operator"):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            source = await read_source(connection, table)
            await check_mapping(connection, source, mapping)
            current = await find_adoption(connection, schema, table)
            return await _read(
                connection,
                SourceSql(0, schema, source, mapping),
                current.phase if current else None,
            )


async def _read(connection: Connection[Any], sql: SourceSql, phase: str | None) -> AdoptionPlan:
    has_column = sql.mapping.sent_column is not None
    parts = {
        "table": sql.source.name,
        "pending": sql.pending("l"),
        "sent": sql.sent("l") if has_column else "NOT (" + sql.pending("l") + ")",
        "id": sql.id("l"),
        "event": sql.event("l"),
        "name": sql.source_type("l"),
        "type": sql.event_type("l"),
        "ordering": sql.column("l", sql.mapping.ordering),
        "limit": PLANNED_TYPES_MAX,
        "examples": FAULT_EXAMPLES_MAX,
    }
    counts = await connection.fetchrow(COUNT_ROWS.format(**parts))
    types = await connection.fetch(READ_TYPES.format(**parts))
    events = await connection.fetchrow(READ_EVENTS.format(**parts))
    examples = await connection.fetch(READ_EXAMPLES.format(**parts))
    conversions = tuple(TypeConversion(**dict(row)) for row in types)
    names: dict[str | None, int] = {}
    for each in conversions:
        names[each.type] = names.get(each.type, 0) + 1
    event_types = [each.type for each in conversions if each.type]
    shadow = await connection.fetchrow(READ_SUBSCRIBERS, [f"shadow.{each}" for each in event_types])
    real = await connection.fetchrow(READ_SUBSCRIBERS, event_types)
    return AdoptionPlan(
        table=sql.source.name,
        phase=phase,
        rows=counts["rows"],
        pending=counts["pending"] if sql.mapping.has_pending else None,
        neither=counts["other"],
        events=events["events"],
        without_key=events["without_key"],
        keys=events["keys"],
        duplicates=events["duplicates"],
        types=conversions,
        collisions=tuple(sorted(name for name, n in names.items() if name and n > 1)),
        faults=tuple(
            Fault(text, fault["rows"], tuple(fault["ids"]))
            for text, fault in orjson.loads(events["faults"]).items()
        ),
        examples=tuple(
            ExampleEvent(**{**dict(row), "headers": orjson.loads(row["headers"] or "null")})
            for row in examples
        ),
        receives_shadow=tuple(shadow["endpoints"]),
        unmatched=tuple(real["unmatched"]),
    )
