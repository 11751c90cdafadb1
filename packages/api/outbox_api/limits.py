"""The limits of a request, in one place: size, depth, number, time and concurrency.

The API and the receivers' listener have a process of their own, so a request may hold its event
loop for some milliseconds.  What is limited is the memory of the process, and what one client can
take from the others.  `outbox.web.serving` limits connections, heads and the reading of responses;
`outbox_api.rate_limit` the rate of requests and failed logins.
"""

from __future__ import annotations

from outbox.web.serving import CLIENT_CONNECTIONS_MAX

MIB = 1024 * 1024

# ------------------------------------------------------------------- size
REQUEST_BODY_BYTES_MAX = 128 * 1024
"""Default limit of a request body: settings of an endpoint with CA certificates (64 KiB)."""
PAYLOAD_BODY_BYTES_MAX = MIB
"""Limit of a request body with payloads: a payload of 256 KiB (the default limit) takes up to
768 KiB if its text is escaped as \\uXXXX."""
EVENT_BYTES_MAX = 64 * 1024
"""Bytes that the fields of an event besides its payload may have.  Where `outbox migrate
--payload-bytes-max` allows larger payloads, the limit of a body is theirs in Base64 and this."""
PAYLOAD_LIMIT_KEEP_S = 10.0
"""How long the limit of payloads is kept, which is read from the database."""
CONFIG_BODY_BYTES_MAX = 2 * MIB
"""Limit of a declaration, which tokens of tenants cannot send."""

# ------------------------------------------------------------------ depth
BODY_DEPTH_MAX = 1024
"""The limit of orjson, which rejects a deeper body: it would overflow the stack of a parser."""

# ----------------------------------------------------------------- number
LIMIT, LIMIT_MAX = 100, 1000
"""Default and maximum of a page's items.  A page also ends after `PAGE_BYTES_MAX` of
`outbox.operations.pages`."""
REQUEST_EVENTS_MAX = 1000
"""Events in one request (one transaction)."""
CONFIG_ENDPOINTS_MAX = 2000
"""Endpoints of a declaration: their changes are one message to the database."""
COMMENT_CHARS_MAX = 1000
"""Bounded, because listings show it of many objects."""

# ------------------------------------------------------------------- time
REQUEST_TIMEOUT_S = 30.0
"""Default time-out of a request, its body included."""
BODY_TIMEOUT_S = 25.0
"""It is shorter than that of a request, so that the client, not the server, is named as late."""

CONNECTION_WAIT_S = 10.0
"""Maximum wait for a free or new connection to the database."""

# ------------------------------------------------------------ concurrency
TOKEN_REQUESTS_MAX = CLIENT_CONNECTIONS_MAX // 8
"""Requests of a token from their heads until the last bytes of their responses are written."""
ADDRESS_REQUESTS_MAX = CLIENT_CONNECTIONS_MAX // 2
"""Larger than that of a token: behind a proxy all clients have one address."""
REQUESTS_MAX, LONG_MAX = 4, 2
"""Requests of a listener that are processed at a time, from the parsing of the body until the
response is encoded: each has a connection to the database.  And the share that long requests
(minutes) may use."""
LARGE_BODIES_MAX = 2
"""Bodies of more than `REQUEST_BODY_BYTES_MAX` that are parsed and processed at a time: their
values may take 33 times their size.  Others wait for one of the connections to the database."""
IN_FLIGHT_BYTES_MAX = 24 * MIB
"""Bytes that the process holds for clients: bodies until they are parsed, and responses until they
are read."""
RESPONSE_PART_BYTES = 16 * 1024
"""Bytes of a response that are written at a time: what a connection holds twice."""
IN_FLIGHT_RETRY_S = 1.0
"""Retry-After of a request that is refused because others are in flight."""
