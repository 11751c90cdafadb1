"""Check of recent payloads: what receivers may read as something else than was published."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox_doctor.check import check, warning

if TYPE_CHECKING:
    from outbox_doctor.check import DoctorContext, Results

EVENTS_READ = 1_000
STORED_BYTES_MAX = 65_536
"""Larger payloads are not read: they would be decompressed."""

# Of the newest events.
#   twice: a string that begins and ends as an object or an array does.
#   rounded: those with a number that a double may not represent exactly.
#   unreadable: those with a number or a depth that parsers refuse.
READ_RECENT = r"""
WITH recent AS MATERIALIZED (
    SELECT type, payload,
           CASE WHEN jsonb_typeof(payload) = 'string'
                THEN left(payload #>> '{}', 100) ~ '^\s*(\{\s*["}]|\[\s*[]["{0-9tfn-])'
                 AND right(payload #>> '{}', 100) ~ '[]}]\s*$' ELSE false END AS is_twice
      FROM (SELECT type, payload FROM outbox ORDER BY id DESC LIMIT $1) newest
     WHERE pg_column_size(payload) < $2)
SELECT count(*) AS events,
       count(*) FILTER (WHERE is_twice) AS twice,
       (array_agg(DISTINCT type) FILTER (WHERE is_twice))[1:3] AS types,
       count(*) FILTER (WHERE payload @? '$.** ? (@ > 9007199254740991 || @ < -9007199254740991)')
           AS rounded,
       count(*) FILTER (WHERE payload @? '$.** ? (@ > 1.7976931348623157e308
                                               || @ < -1.7976931348623157e308)'
                           OR payload @? 'strict $.**{1024} ? (@.type() == "array"
                                                               || @.type() == "object")')
           AS unreadable
  FROM recent
"""


@check("payloads", passed="receivers can read the payloads of recent events")
async def recent_payloads(context: DoctorContext) -> Results:
    """Payloads that are encoded twice, and numbers that receivers round or refuse.

    A driver that serializes parameters of the type jsonb makes a JSON string of JSON text.
    """
    row = await context.db.fetchrow(READ_RECENT, EVENTS_READ, STORED_BYTES_MAX)
    of = f"of the last {row['events']} events with JSON"
    if row["twice"]:
        yield warning(
            f"{row['twice']} {of} have a payload that is a string with the text of an object or "
            f"an array, such as {', '.join(row['types'])}: encoded twice?",
            "publish with relay.publish_text, whose payload is text, or give the driver the object "
            "itself; filters and receivers get a string until then",
        )
    if row["unreadable"]:
        yield warning(
            f"{row['unreadable']} {of} have a number beyond the range of a double, or more than "
            "1024 levels, which most receivers refuse",
            "publish such a number as text",
        )
    elif row["rounded"]:
        yield warning(
            f"{row['rounded']} {of} have a number beyond 2^53, which receivers round that read "
            "numbers as doubles, such as those in JavaScript",
            "publish it as text, or let these receivers read the text of the payload",
        )
