"""Metadata in headers, for bodies that are the payload alone, with a signature of its own.

`webhook-signature` covers the body.  What the envelope has in its body is in headers here:

    X-Delivery, X-Event, X-Event-Id, X-Lane, X-Sequence, X-Previous-Sequence
    X-Event-Time            when the event was published (RFC 3339)
    X-Event-Tenant, X-Event-Key, X-Replay-Of, X-Backfill, X-Lane-Ends     if there is one

`webhook-metadata-signature` has the same form and keys as `webhook-signature`.  It signs

    metadata.{webhook-id}.{webhook-timestamp}.{lines}

where the lines are `name:value` of Content-Type, of these headers without their prefix in the order
of `METADATA_NAMES`, and of the attributes of a CloudEvent in the order of `ATTRIBUTES`.  They are
joined by line feeds, the names are in lower case, and absent ones are left out.  It cannot be the
signature of any body: there, a number stands where this text has an id.

Texts of users are percent-encoded as in the HTTP binding of CloudEvents.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import unquote_to_bytes

from outbox.core.messages.envelope import rfc3339

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox.core.model.delivery import Delivery
    from outbox.core.model.response import Headers

SIGNATURE_HEADER = "webhook-metadata-signature"
SIGNED_ID = "metadata."
"""Precedes the id in what is signed."""
CONTENT_TYPE = "content-type"
METADATA_NAMES = (
    "delivery",
    "event",
    "event-id",
    "event-time",
    "event-tenant",
    "event-key",
    "lane",
    "sequence",
    "previous-sequence",
    "replay-of",
    "backfill",
    "lane-ends",
)
"""The signed headers after Content-Type, without their prefix."""
ATTRIBUTE_PREFIX = "ce-"
ATTRIBUTES = (
    "specversion",
    "id",
    "source",
    "type",
    "time",
    "subject",
    "partitionkey",
    "lane",
    "lanesequence",
    "previoussequence",
    "eventid",
    "tenant",
    "encodedkey",
    "encodedtenant",
    "traceparent",
    "tracestate",
    "replayof",
    "backfill",
    "laneends",
)
"""The signed attributes of a CloudEvent in binary mode."""

_ATTRIBUTE_HEADERS = tuple(ATTRIBUTE_PREFIX + name for name in ATTRIBUTES)
_ENCODED = re.compile(rb'[^!-~]|["%]')


def metadata_headers(delivery: Delivery, *, lane_ends: bool) -> Headers:
    """The headers, without prefix, that bodies with metadata do not need."""
    headers = [("Event-Time", rfc3339(delivery.published_at))]
    if delivery.tenant is not None:
        headers.append(("Event-Tenant", encode_text(delivery.tenant)))
    if delivery.key is not None:
        headers.append(("Event-Key", encode_text(delivery.key)))
    if delivery.replay_of is not None:
        headers.append(("Replay-Of", "{}/{}".format(*delivery.replay_of)))
    if delivery.backfill_id is not None:
        headers.append(("Backfill", str(delivery.backfill_id)))
    if lane_ends:
        headers.append(("Lane-Ends", "true"))
    return tuple(headers)


def signed_text(headers: Mapping[str, str], prefix: str) -> bytes:
    """The lines that are signed.

    Args:
        headers: the request's headers, with lower-case names.
        prefix: begins the names of the headers that describe a delivery, in lower case.
    """
    named = [(CONTENT_TYPE, headers.get(CONTENT_TYPE))]
    named += [(name, headers.get(prefix + name)) for name in METADATA_NAMES]
    named += [(name, headers.get(name)) for name in _ATTRIBUTE_HEADERS]
    lines = [f"{name}:{value}" for name, value in named if value is not None]
    return "\n".join(lines).encode("utf-8", "surrogateescape")


def encode_text(text: str) -> str:
    """Percent-encode what a header value cannot have (CloudEvents HTTP binding, 3.1.3.2)."""
    return _ENCODED.sub(lambda found: b"%%%02X" % ord(found[0]), text.encode()).decode("ascii")


def decode_text(value: str) -> str:
    """Decode a value of `encode_text`.

    Raises:
        ValueError: it is not percent-encoded UTF-8.
    """
    return unquote_to_bytes(value).decode()
