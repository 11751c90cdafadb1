"""Checks of recent payloads: what receivers may read as something else than was published."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from outbox.operations.doctor.check import check, warning

if TYPE_CHECKING:
    from outbox.operations.doctor.check import DoctorContext, Results

EVENTS_READ = 1_000
TEXTS_READ = 100

# Of the newest events.
#   rounded: those with a number that a double may not represent exactly.
#   unreadable: those with a number or a depth that parsers refuse.
#   texts: payloads that are a string, and may be the text of an object or array.
READ_RECENT = """
WITH recent AS MATERIALIZED (
    SELECT payload FROM outbox WHERE payload IS NOT NULL ORDER BY id DESC LIMIT $1)
SELECT count(*) AS events,
       count(*) FILTER (WHERE payload @? '$.** ? (@ > 9007199254740991 || @ < -9007199254740991)')
           AS rounded,
       count(*) FILTER (WHERE payload @? '$.** ? (@ > 1.7976931348623157e308
                                               || @ < -1.7976931348623157e308)'
                           OR payload @? 'strict $.**{1024}') AS unreadable,
       array(SELECT payload #>> '{}' FROM recent
              WHERE jsonb_typeof(payload) = 'string' AND length(payload #>> '{}') <= 65536
                AND left(ltrim(payload #>> '{}'), 1) IN ('{', '[') LIMIT $2) AS texts
  FROM recent
"""


@check("payloads", passed="receivers can read the payloads of recent events")
async def recent_payloads(context: DoctorContext) -> Results:
    """Payloads that are encoded twice, and numbers that receivers round or refuse."""
    row = await context.db.fetchrow(READ_RECENT, EVENTS_READ, TEXTS_READ)
    of = f"of the last {row['events']} events with JSON"
    if twice := sum(map(_is_json, row["texts"])):
        at_least = "at least " if twice == TEXTS_READ else ""
        yield warning(
            f"{at_least}{twice} {of} have a payload that is a string, and its text is JSON itself: "
            "encoded twice?",
            "publish with relay.publish_text, whose payload is a text parameter, or hand the "
            "driver the value instead of its text",
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


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
