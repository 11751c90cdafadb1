"""The request that delivers an event to an endpoint, as it would be sent now.

Nothing is sent.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox.core.brokers.message import messages_of
from outbox.core.messages import signed_metadata
from outbox.core.messages.batch import prepare_request
from outbox.core.messages.message import encode_body
from outbox.core.messages.signature import SIGNATURE_HEADER
from outbox.core.model.delivery import Delivery
from outbox.core.model.destination import is_stream
from outbox.core.model.headers import parse_lines
from outbox.core.model.ids import lane_name
from outbox.errors import Conflict, NotFound
from outbox.operations.events import queries as events
from outbox.operations.events.deliveries import READ_DELIVERIES, find_batch
from outbox.operations.lane_history import READ_PREVIOUS
from outbox.store.connection.connect import map_errors
from outbox.store.delivery.endpoints import find_endpoint
from outbox.store.retention.erasure import PLAN_BY_INDEX
from outbox.store.sql.expressions import PAYLOAD_BYTES, epoch_s

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.store.connection.secrets import Vault

# What a delivery takes from its event.
READ_CONTENT = f"""
SELECT id, event_id, type, tenant, key, erased_at,
       {epoch_s("created_at")} AS published_at,
       {PAYLOAD_BYTES} AS payload, headers::text AS headers, content_type
  FROM outbox WHERE id = $1
"""  # noqa: S608 (constants only)

# The lane of a delivery, and whether it has ended with this sequence number.
READ_LANE = """
SELECT l.generation < e.generation AND c.last_seq = $2 AS ends
  FROM lane l JOIN endpoint e ON e.id = l.endpoint_id
 CROSS JOIN LATERAL (
       SELECT last_seq FROM lane_counter
        WHERE lane_id = l.id ORDER BY last_seq DESC LIMIT 1) c
 WHERE l.id = $1
"""

MASKED = "***"


@dataclass(frozen=True, slots=True)
class RequestPreview:
    """A request as it would be sent now."""

    endpoint: str
    event_id: str
    method: str
    url: str
    headers: tuple[tuple[str, str], ...]
    """The headers in their order.  Signatures and the values of the endpoint's own headers are
    masked."""
    is_sequenced: bool
    """Whether the lane and the numbers are those of a delivery.  Otherwise they are examples: the
    event is not sequenced yet, or the endpoint does not subscribe to it."""
    body: str | None = None
    """The body; None: it is a payload that is not JSON, in `body_base64`."""
    body_base64: str | None = None


@dataclass(frozen=True, slots=True)
class DeliveryPlace:
    """The lane and the numbers of a delivery."""

    lane: str
    sequence: int = 1
    previous: int = 0
    ends: bool = False
    replay_of: tuple[str, int] | None = None
    backfill_id: int | None = None


async def preview_request(
    connection: Connection[Any],
    schema: str,
    name: str,
    text: str,
    *,
    vault: Vault,
    now: float,
    tenant: str | None = None,
    once_key: str | None = None,
) -> RequestPreview:
    """Build the first attempt of an event's newest delivery to an endpoint, in its present format.

    Args:
        text: an event id, X-Delivery, once key, key or outbox id; of several events the newest.
        now: epoch seconds, of the signature.
        tenant: the tenant that the event must belong to; None: any.
        once_key: see `outbox.operations.events.queries.find_events`.

    Raises:
        NotFound: there is no such endpoint, or no event.
        Conflict: the event was erased.
        CannotRun: the endpoint cannot be used as it is configured.
    """
    endpoint = await find_endpoint(connection, schema, name, vault)
    match = await events.find_events(
        connection, schema, text, limit=1, tenant=tenant, once_key=once_key
    )
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            event = await connection.fetchrow(READ_CONTENT, match.outbox_ids[0])
            if event is None:
                raise NotFound("retention has dropped the event")
            if event["erased_at"] is not None:
                raise Conflict(f"event {event['event_id']} was erased")
            found = await _find_delivery(connection, endpoint, event["id"])
    place = found or DeliveryPlace(lane_name(endpoint.id, 1, 0))
    return RequestPreview(
        endpoint=endpoint.name,
        event_id=str(event["event_id"]),
        is_sequenced=found is not None,
        **build_request(endpoint, event, place, 1, now),
    )


def build_request(
    endpoint: Endpoint, event: Record, place: DeliveryPlace, attempt: int, at: float
) -> dict[str, Any]:
    """Method, URL, headers and body of a request.

    Args:
        at: epoch seconds, of the signature.
    """
    delivery = Delivery(
        endpoint_id=endpoint.id,
        lane=place.lane,
        seq=place.sequence,
        batch=0,
        outbox_id=event["id"],
        event_id=event["event_id"],
        type=event["type"],
        tenant=event["tenant"],
        key=event["key"],
        published_at=event["published_at"],
        expires_at=None,
        payload=event["payload"],
        headers=event["headers"] and event["headers"].encode(),
        replay_of=place.replay_of,
        backfill_id=place.backfill_id,
        content_type=event["content_type"],
    )
    masked = {each.lower() for each, _ in endpoint.headers.own}
    if is_stream(endpoint.url):
        (message,) = messages_of(endpoint, [delivery], place.previous)
        method, headers = "APPEND", message.headers
        try:
            body = {"body": message.body.decode()}
        except UnicodeDecodeError:
            body = {"body_base64": b64encode(message.body).decode()}
    else:
        prepared = prepare_request(
            endpoint,
            [delivery],
            place.previous,
            lane_ends=place.ends,
            in_array=endpoint.batch_max is not None,
        )
        masked |= signature_headers(endpoint)
        lines = prepared.attempt(attempt, int(at), endpoint.secrets_at(at))
        method, headers = endpoint.method, tuple(parse_lines(lines))
        body = encode_body(prepared, delivery)
    return {
        "method": method,
        "url": endpoint.url,
        "headers": tuple(
            (name, MASKED if name.lower() in masked else value) for name, value in headers
        ),
        **body,
    }


def signature_headers(endpoint: Endpoint) -> set[str]:
    """The headers with signatures, in lower case: one would let its reader send the request."""
    compat = () if endpoint.compat is None else (endpoint.compat.form.header.lower(),)
    return {SIGNATURE_HEADER, signed_metadata.SIGNATURE_HEADER, *compat}


async def _find_delivery(
    connection: Connection[Any], endpoint: Endpoint, outbox_id: int
) -> DeliveryPlace | None:
    """The newest delivery of an event, also a replay or of a backfill."""
    batch = await find_batch(connection, outbox_id)
    rows = await connection.fetch(READ_DELIVERIES, outbox_id, batch, [endpoint.id])
    return await read_place(connection, rows[-1]) if rows else None


async def read_place(connection: Connection[Any], row: Record) -> DeliveryPlace:
    """The place of a row of `READ_DELIVERIES`."""
    lane_id, sequence, was_lane = row["lane_id"], row["sequence"], row["was_lane"]
    return DeliveryPlace(
        lane=row["lane"],
        sequence=sequence,
        previous=await connection.fetchval(READ_PREVIOUS, lane_id, sequence),
        ends=await connection.fetchval(READ_LANE, lane_id, sequence),
        replay_of=None if was_lane is None else (was_lane, row["replay_seq"]),
        backfill_id=row["backfill"],
    )
