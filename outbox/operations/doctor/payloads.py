"""Check of recent payloads."""

from __future__ import annotations

from outbox.operations.doctor.check import DoctorContext, Results, check, warning

EVENTS_MAX = 1000
STORED_BYTES_MAX = 65_536
"""Larger payloads are not read: they would be decompressed."""

# A string that begins and ends as an object or an array does.
ENCODED_TWICE = r"""
SELECT count(*) AS events, count(*) FILTER (WHERE is_twice) AS twice,
       (array_agg(DISTINCT type) FILTER (WHERE is_twice))[1:3] AS types
  FROM (SELECT type, CASE WHEN pg_column_size(payload) < $2 AND jsonb_typeof(payload) = 'string'
                          THEN left(payload #>> '{}', 100) ~ '^\s*(\{\s*["}]|\[\s*[]["{0-9tfn-])'
                           AND right(payload #>> '{}', 100) ~ '[]}]\s*$'
                          ELSE false END AS is_twice
          FROM (SELECT type, payload FROM outbox ORDER BY id DESC LIMIT $1) AS recent) AS e
"""


@check("payloads", passed="no recent payload is JSON that was encoded twice")
async def encoded_twice(context: DoctorContext) -> Results:
    """No recent event has a payload that is the text of an object or an array.

    A driver that serializes parameters of the type jsonb makes a JSON string of JSON text.
    """
    row = await context.db.fetchrow(ENCODED_TWICE, EVENTS_MAX, STORED_BYTES_MAX)
    if row["twice"]:
        yield warning(
            f"{row['twice']} of the last {row['events']} events have a payload that is a JSON "
            f"string with the text of an object or an array, such as {', '.join(row['types'])}: "
            "encoded twice?",
            "where they are published, write $n::text::jsonb for the payload, or give the driver "
            "the object itself; filters and receivers get a string until then",
        )
