"""Check of headers: requests that some servers refuse because of the size of their headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outbox.core.model.headers import WIDELY_ACCEPTED_BYTES
from outbox_doctor.check import check, warning

if TYPE_CHECKING:
    from outbox_doctor.check import DoctorContext, Results

EVENTS_READ = 1_000

# Bytes of each endpoint's headers on the wire.  Of an encrypted value: those of its text, without a
# nonce of 12 and a tag of 16 bytes.
HEADER_BYTES = r"""
SELECT e.name, sum(octet_length(h.key) + 4 + CASE jsonb_typeof(h.value)
           WHEN 'string' THEN octet_length(h.value #>> '{}')
           ELSE octet_length(rtrim(split_part(h.value ->> 'sealed', ':', 3), '=')) * 3 / 4 - 28
           END) AS bytes
  FROM endpoint e CROSS JOIN LATERAL jsonb_each(e.headers) AS h
 WHERE e.state <> 'removed' AND e.url ~* '^https?://'
 GROUP BY e.id HAVING octet_length(e.headers::text) >= $1 ORDER BY e.name COLLATE "C"
"""
MAY_READ = "SELECT has_column_privilege('endpoint', 'headers', 'SELECT')"
# Of the newest events.
EVENT_HEADER_BYTES = """
SELECT count(*) AS events, count(*) FILTER (WHERE bytes >= $2) AS large
  FROM (SELECT octet_length(headers::text) AS bytes FROM outbox ORDER BY id DESC LIMIT $1) newest
"""


@check("headers", passed="no headers are larger than what usual servers accept")
async def sizes(context: DoctorContext) -> Results:
    """Headers of endpoints and recent events are within the limits of usual servers."""
    limit = WIDELY_ACCEPTED_BYTES
    action = (
        "shorten them, or let the receiver accept more: maxHttpHeaderSize of Tomcat, "
        "requestHeaderSize of Jetty, server.max-request-field-size of lighttpd"
    )
    row = await context.db.fetchrow(EVENT_HEADER_BYTES, EVENTS_READ, limit)
    if row["large"]:
        yield warning(
            f"{row['large']} of the last {row['events']} events have headers of {limit} bytes or "
            "more; Jetty, lighttpd and Tomcat refuse requests with 8 KiB of headers, the relay's "
            "included",
            action,
        )
    if not await context.db.fetchval(MAY_READ):
        return  # Headers of endpoints may be credentials, which readers do not see.
    for row in await context.db.fetch(HEADER_BYTES, limit):
        if row["bytes"] >= limit:
            yield warning(
                f'the headers of endpoint "{row["name"]}" have {row["bytes"]} bytes; Jetty, '
                "lighttpd and Tomcat refuse requests with 8 KiB of headers, the relay's included",
                action,
            )
