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
STATEMENT_TIMEOUT_S, LOCK_TIMEOUT_S = 30.0, 10.0
"""Maximum duration of a statement, and of a wait for a lock in it; the cursor row is locked for
milliseconds only."""
TENANT_STATEMENT_TIMEOUT_S, TENANT_LOCK_TIMEOUT_S = 5.0, 2.0
"""Those times for tokens of tenants and for receivers, except in long requests."""

# ------------------------------------------------------------ concurrency
TOKEN_REQUESTS_MAX = CLIENT_CONNECTIONS_MAX // 8
"""Requests of a token, or of all tokens of a tenant, from their heads until the last bytes of their
responses are written."""
ADDRESS_REQUESTS_MAX = CLIENT_CONNECTIONS_MAX // 2
"""Larger than that of a token: behind a proxy all clients have one address."""
REQUESTS_MAX, LONG_MAX = 4, 2
"""Requests of a listener that are processed at a time, from the parsing of the body until the
response is encoded: each has a connection to the database.  And the share that long requests
(minutes) may use."""
LARGE_BODIES_MAX = 2
"""Bodies of more than `REQUEST_BODY_BYTES_MAX` that are parsed and processed at a time: their
values may take 33 times their size.  Others wait for one of the connections to the database."""
TENANT_REQUESTS_MAX, TENANT_LONG_MAX, TENANT_LARGE_BODIES_MAX = 4, 2, 2
"""Those numbers for the tokens of all tenants together, and for receivers: they have connections of
their own, so that they do not wait for operators, nor operators for them."""
SHARE = 4
"""A tenant has at most one in so many of these, and at least one; see `outbox_api.slots`."""
WAITING_MAX, WAIT_RETRY_S = 16, 1.0
"""Requests of a tenant that wait for its share, and Retry-After beyond that."""
IN_FLIGHT_BYTES_MAX = 24 * MIB
"""Bytes that the process holds for clients: bodies until they are parsed, and responses until they
are read."""
RESPONSE_PART_BYTES = 16 * 1024
"""Bytes of a response that are written at a time: what a connection holds twice."""
IN_FLIGHT_RETRY_S = 1.0
"""Retry-After of a request that is refused because others are in flight."""
