"""Requests that deliver an event to an endpoint: as they would be sent now, and as they were sent.

Nothing is sent, and no request is stored.
"""

from __future__ import annotations

from base64 import b64encode
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from outbox.core.brokers.message import messages_of
from outbox.core.messages import signed_metadata
from outbox.core.messages.batch import prepare_request
from outbox.core.messages.message import encode_body
from outbox.core.messages.signature import SIGNATURE_HEADER
from outbox.core.model.delivery import Delivery
from outbox.core.model.destination import is_stream
from outbox.core.model.headers import EndpointHeaders, parse_lines
from outbox.core.model.ids import lane_name
from outbox.core.model.message_format import MessageFormat
from outbox.core.model.response import UNREACHABLE_FAILURES
from outbox.errors import Conflict, NotFound
from outbox.operations.events import queries as events
from outbox.operations.lane_history import READ_PREVIOUS
from outbox.operations.rows import parse_json
from outbox.operations.trace.model import RebuiltRequest
from outbox.operations.trace.queries import (
    NO_BATCH,
    READ_DELIVERIES,
    READ_SEQUENCED,
    trace_events,
)
from outbox.store.connection.connect import map_errors
from outbox.store.delivery.endpoints import find_endpoint, read_endpoints
from outbox.store.retention.erasure import PLAN_BY_INDEX
from outbox.store.sql.expressions import PAYLOAD_BYTES, epoch_s

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from asyncpg import Connection, Record

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.model.message_format import FormatName
    from outbox.operations.trace.model import (
        EventTrace,
        TracedAttempt,
        TracedDelivery,
        TraceReport,
    )
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

# The values that an endpoint's settings had before each change since a time, the last change first.
READ_FORMER_SETTINGS = """
SELECT (SELECT jsonb_object_agg(key, value -> 0) FROM jsonb_each(data -> 'changes')) AS former
  FROM journal
 WHERE endpoint_id = $1 AND kind = 'endpoint_updated' AND at > $2
 ORDER BY id DESC
"""

MASKED = "***"
REBUILT_MAX = 20
"""Deliveries of a trace whose requests are rebuilt, the last ones: each takes several reads."""
_SIGNATURES = {SIGNATURE_HEADER, signed_metadata.SIGNATURE_HEADER}
"""A signature would let its reader send the request."""


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
class _Place:
    """What a delivery has besides its event."""

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
    place = found or _Place(lane_name(endpoint.id, 1, 0))
    return RequestPreview(
        endpoint=endpoint.name,
        event_id=str(event["event_id"]),
        is_sequenced=found is not None,
        **_build(endpoint, event, place, 1, now),
    )


async def add_requests(
    connection: Connection[Any], schema: str, trace: EventTrace, *, vault: Vault
) -> EventTrace:
    """Add the last request of each traced delivery, as it is built from the event and from the
    settings that the endpoint had then.

    Settings follow from the journal.  A relay applies a change within a second, so a request of
    that second may have been another one.
    """
    outbox_id = trace.event.outbox_id
    with map_errors(schema):
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            await connection.execute(PLAN_BY_INDEX)
            event = await connection.fetchrow(READ_CONTENT, outbox_id)
            if event is None or event["erased_at"] is not None:
                return trace
            ids = {each.endpoint_id for each in trace.deliveries}
            endpoints = {each.id: each for each in await read_endpoints(connection, ids, vault)}
            rows = await connection.fetch(
                READ_DELIVERIES, outbox_id, await _find_batch(connection, outbox_id), list(ids)
            )
            places = {(row["lane"], row["sequence"]): row for row in rows}
            deliveries: list[TracedDelivery] = []
            for n, each in enumerate(reversed(trace.deliveries)):
                row, endpoint = places.get((each.lane, each.sequence)), endpoints[each.endpoint_id]
                last = _last_sent(each, endpoint)
                if n < REBUILT_MAX and last and row is not None and endpoint.problem is None:
                    each = replace(
                        each, request=await _rebuild(connection, endpoint, event, row, last)
                    )
                deliveries.append(each)
    return replace(trace, deliveries=tuple(reversed(deliveries)))


async def _rebuild(
    connection: Connection[Any], endpoint: Endpoint, event: Record, row: Record, sent: TracedAttempt
) -> RebuiltRequest:
    """The request of an attempt.

    Args:
        row: its delivery, of `READ_DELIVERIES`.
    """
    former = await _former_settings(connection, endpoint, sent.started_at)
    place = await _place(connection, row)
    if "lanes" in former:
        # It was not known then that the lane would end.
        place = replace(place, ends=False)
    at = sent.started_at.timestamp()
    built = _build(_as_of(endpoint, former), event, place, sent.attempt, at)
    built["headers"] = tuple(
        pair for pair in built["headers"] if pair[0].lower() not in _SIGNATURES
    )
    return RebuiltRequest(sent.attempt, **built)


def _last_sent(delivery: TracedDelivery, endpoint: Endpoint) -> TracedAttempt | None:
    """The last attempt, if a request was sent; a broker's may have failed before anything was."""
    last = delivery.attempts[-1] if delivery.attempts else None
    if last is None or (is_stream(endpoint.url) and last.outcome != "delivered"):
        return None
    return None if (last.response or {}).get("failure") in UNREACHABLE_FAILURES else last


async def trace_with_requests(
    connection: Connection[Any], schema: str, /, text: str, *, vault: Vault | None, **options: Any
) -> TraceReport:
    """Trace events, with the requests of their deliveries if there is a vault; see
    `outbox.operations.trace.queries.trace_events`.
    """
    report = await trace_events(connection, schema, text, **options)
    if vault is None:
        return report
    events = [await add_requests(connection, schema, each, vault=vault) for each in report.events]
    return replace(report, events=events)


async def _former_settings(
    connection: Connection[Any], endpoint: Endpoint, at: datetime
) -> dict[str, str]:
    """The settings that were changed since, as they were."""
    former: dict[str, str] = {}
    for row in await connection.fetch(READ_FORMER_SETTINGS, endpoint.id, at):
        former |= parse_json(row["former"]) or {}
    return former


def _as_of(endpoint: Endpoint, former: Mapping[str, str]) -> Endpoint:
    """The endpoint with former settings that say how a request looks."""
    own = endpoint.headers.own
    if (names := former.get("headers")) is not None:
        own = () if names == "none" else tuple((each, MASKED) for each in names.split())
    batch_max = endpoint.batch_max
    if (limit := former.get("batch_max")) is not None:
        batch_max = int(limit) if limit.isdecimal() else None
    prefix = former.get("header_prefix", endpoint.headers.prefix)
    name, source = endpoint.message_format
    changed: dict[str, Any] = {each: former[each] for each in ("method", "url") if each in former}
    return replace(
        endpoint,
        **changed,
        batch_max=batch_max,
        headers=EndpointHeaders(own, prefix),
        message_format=MessageFormat(
            cast("FormatName", former.get("format", name)), former.get("source", source)
        ),
    )


def _build(
    endpoint: Endpoint, event: Record, place: _Place, attempt: int, at: float
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
        masked |= _SIGNATURES
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


async def _find_delivery(
    connection: Connection[Any], endpoint: Endpoint, outbox_id: int
) -> _Place | None:
    """The newest delivery of an event, also a replay or of a backfill."""
    batch = await _find_batch(connection, outbox_id)
    rows = await connection.fetch(READ_DELIVERIES, outbox_id, batch, [endpoint.id])
    return await _place(connection, rows[-1]) if rows else None


async def _find_batch(connection: Connection[Any], outbox_id: int) -> int:
    sequenced = await connection.fetchrow(READ_SEQUENCED, outbox_id)
    return NO_BATCH if sequenced is None else sequenced["batch"]


async def _place(connection: Connection[Any], row: Record) -> _Place:
    """The place of a row of `READ_DELIVERIES`."""
    lane_id, sequence, was_lane = row["lane_id"], row["sequence"], row["was_lane"]
    return _Place(
        lane=row["lane"],
        sequence=sequence,
        previous=await connection.fetchval(READ_PREVIOUS, lane_id, sequence),
        ends=await connection.fetchval(READ_LANE, lane_id, sequence),
        replay_of=None if was_lane is None else (was_lane, row["replay_seq"]),
        backfill_id=row["backfill"],
    )
