"""/v1/events and /v1/trace: publish, search and trace events."""

from __future__ import annotations

from dataclasses import fields, replace
from datetime import datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Annotated, Any, ClassVar
from uuid import UUID

import orjson
from pydantic import Field, model_validator

from outbox.core.model.event import check_text, deliver_at
from outbox.core.model.json_values import encode_json
from outbox.drivers.connections import open_connection
from outbox.errors import InvalidEvent, UsageError
from outbox.operations import quotas
from outbox.operations.criteria import Criteria
from outbox.operations.events import idempotency_keys as once
from outbox.operations.events import queries as events
from outbox.operations.events.queries import EventRow
from outbox.operations.pages import PAGE_BYTES_MAX
from outbox.operations.rows import ID_MAX
from outbox.producers.event import Event, encode_events, numbered
from outbox.producers.publishing import publish_encoded
from outbox.producers.tracing import traced
from outbox_api import route, tenancy
from outbox_api.field_types import ContentType, EventType, Name, OnceKey, OrderingKey, Tenant, Text
from outbox_api.limits import PAYLOAD_BODY_BYTES_MAX, REQUEST_EVENTS_MAX
from outbox_api.problem import Problem, ProblemKind
from outbox_api.redaction import redactor_for
from outbox_api.request_parsing import Base64, IdPaging, Seconds, Time, TimeOrAge
from outbox_api.route import (
    Call,
    Headers,
    NoQuery,
    Page,
    PageOf,
    Reply,
    RequestModel,
    ResponseModel,
    TenantAccess,
    TypePatterns,
    at_most,
    id_cursor,
)
from outbox_doctor.trace import queries as trace
from outbox_doctor.trace.model import TraceReport

if TYPE_CHECKING:
    from collections.abc import Sequence


TRACED_EVENTS_MAX = 100
COUNTED_EVENTS_MAX = 100
"""Maximum of events in a page whose deliveries are counted."""
IDEMPOTENCY_KEY = "Idempotency-Key"

# ---------------------------------------------------------------- publishing


class NewEvent(RequestModel):
    """A new event."""

    example: ClassVar = {
        "type": "order.paid",
        "key": "order-9",
        "payload": {"order": 9, "total": 120},
    }

    type: EventType
    payload: Any = Field(default_factory=dict)
    """Any JSON.  Numbers have 64 bits; send longer ones as strings."""
    payload_base64: Base64 | None = None
    """A payload that is not JSON, in Base64, instead of `payload`."""
    content_type: ContentType | None = None
    """Content type of `payload_base64`, such as image/png."""
    key: OrderingKey | None = None
    """Ordering key: events with the same key are delivered in order."""
    tenant: Tenant | None = None
    """Deliver to this tenant's endpoints only."""
    once: OnceKey | None = None
    """Idempotency key: publish only if the key is unused.  At most 512 bytes, and with a token of a
    tenant at most 478."""
    once_for: Seconds | None = None
    """Lifetime of the idempotency key; default: 30 days."""
    expires_in: Seconds | None = None
    """Dead-letter undelivered events after this time."""
    deliver_at: Time | None = None
    """Publish at this time."""
    headers: Headers[str] | None = None
    """Headers of the delivery."""

    @model_validator(mode="after")
    def _one_payload(self) -> NewEvent:
        if (self.payload_base64 is None) is not (self.content_type is None):
            raise ValueError("send payload_base64 together with content_type")
        if self.payload_base64 is not None and "payload" in self.model_fields_set:
            raise ValueError("send either payload or payload_base64")
        return self


class NewEvents(RequestModel):
    """Several events, published atomically."""

    example: ClassVar = {
        "events": [
            {"type": "order.shipped", "key": "order-9", "once": "shipped-9"},
            {"type": "invoice.due", "payload": {"order": 9}, "deliver_at": "2030-01-31T12:00:00Z"},
        ]
    }
    list_field = "events"

    events: Annotated[tuple[NewEvent, ...], at_most(REQUEST_EVENTS_MAX, at_least=1)]
    """They are published in this order."""

    @model_validator(mode="before")
    @classmethod
    def _without_an_event(cls, values: Any) -> Any:
        if any(name in NewEvent.model_fields for name in values):
            raise ValueError("send the fields of one event, or events, not both")
        return values


class Published(ResponseModel):
    """Result of publishing one event."""

    id: UUID | None
    """Id of the event; with a used idempotency key, the id of the earlier event.  Null: the key
    was claimed without an event."""
    already: bool
    """Whether the idempotency key was already used, and nothing was published."""


class ManyPublished(ResponseModel):
    """Results in the order of the request."""

    events: list[Published]


@route.post(
    "/v1/events",
    "Publish one event, or up to 1,000 in one transaction",
    scope="publish",
    tenants=TenantAccess.NARROWED,
    body_bytes_max=PAYLOAD_BODY_BYTES_MAX,
    headers={
        IDEMPOTENCY_KEY: "Idempotency key of a single event: at most one event is published "
        "with it until the key is reset or expires. "
        "201: the event was published. 200: the key was used for the same body; `id` is the "
        "earlier event. 422: the key was used for another body; nothing is published. At most "
        "512 bytes, and with a token of a tenant at most 478.",
    },
    responses={201: Published | ManyPublished, 200: Published | ManyPublished},
)
async def _publish(call: Call[NoQuery, NewEvent | NewEvents]) -> Reply:
    body = call.body
    several = isinstance(body, NewEvents)
    key = call.headers.get(IDEMPOTENCY_KEY)
    if isinstance(body, NewEvents):
        title = f"{len(body.events)} events"
        if key is not None:
            raise UsageError(
                f"{IDEMPOTENCY_KEY}: applies to a single event; with events, set once in each"
            )
    else:
        title = body.type
        if key is not None and body.once is not None:
            raise UsageError(f"{IDEMPOTENCY_KEY}, once: are mutually exclusive")
    try:
        with traced(title):
            events_to_publish, encoded, digest = _encode(call, key)
            await _require_once_keys(call, events_to_publish)
            digests = None if digest is None else [digest]
            # In autocommit mode: a transaction would hold locks while it waits for its client.
            if call.tenant is None:
                ids = await publish_encoded(
                    await open_connection(call.db), encoded, digests=digests, schema=call.schema
                )
            else:
                ids = await call.run(
                    call.publisher.publish, call.tenant, events_to_publish, encoded, digests
                )
    except InvalidEvent as error:
        if several:
            raise
        # The index is meaningless for a single event.
        raise UsageError(str(error).removesuffix(" (event 1)")) from None
    if digest is not None and ids == [None]:
        await _require_same_body(call, events_to_publish[0].once, digest)
    taken = await _find_used(
        call, [e.once for e, id_ in zip(events_to_publish, ids, strict=True) if id_ is None]
    )
    results = [
        {"id": event_id or taken.get(each.once or ""), "already": event_id is None}
        for each, event_id in zip(events_to_publish, ids, strict=True)
    ]
    status = 201 if any(ids) else 200
    return Reply({"events": results} if several else results[0], status)


async def _require_once_keys(call: Call[Any, Any], publishing: Sequence[Event]) -> None:
    keys = [each.once for each in publishing if each.once is not None]
    if call.tenant is not None and keys:
        await call.run(quotas.require_once_keys, call.tenant, keys)


def _encode(
    call: Call[NoQuery, NewEvent | NewEvents], key: str | None
) -> tuple[list[Event], bytes, bytes | None]:
    """Encode the events of a request, and the digest of one with an Idempotency-Key."""
    body = call.body
    if isinstance(body, NewEvents):
        several = []
        for number, each in enumerate(body.events, 1):
            try:
                several.append(_event(call, each, each.once))
            except InvalidEvent as error:
                raise numbered(error, number) from None
        return several, encode_events(several), None
    event = _event(call, body, body.once if key is None else key)
    encoded = encode_events([event])
    if key is None:
        return [event], encoded, None
    return [event], encoded, _digest(event)


def _digest(event: Event) -> bytes:
    """Digest of the values of an event: the order of fields, white space and the zone of a time
    do not matter.

    It is compared for as long as the idempotency key is kept, so a later version must compute the
    same for the same body: an absent field is no part of it, nor is one that is not known yet.
    """
    # The payload by itself, because orjson limits the depth.
    encoded = event.payload
    if event.content_type is None:
        encoded = encode_json(encoded, lambda: None, sort_keys=True)
    payload = sha256(encoded).hexdigest()
    values = {each.name: getattr(event, each.name) for each in fields(event)}
    values["deliver_at"] = deliver_at(event.deliver_at)  # In UTC: the same time, the same digest.
    given = {name: value for name, value in values.items() if value is not None}
    return sha256(orjson.dumps(given | {"payload": payload}, option=orjson.OPT_SORT_KEYS)).digest()


async def _require_same_body(call: Call[Any, Any], key: str | None, digest: bytes) -> None:
    """Refuse a used Idempotency-Key with another body.

    Raises:
        Problem: the key was claimed by another request.
    """
    stored = await call.run(once.read_request_digest, key or "")
    if stored not in (None, digest):
        raise Problem(
            ProblemKind.KEY_REUSED,
            f"{IDEMPOTENCY_KEY}: was used with another body, and nothing is published; "
            "use a new key for another event, or send the same body",
        )


def _event(call: Call[Any, Any], new: NewEvent, once_key: str | None) -> Event:
    # A tenant's is stored with a prefix.
    check_text("once", once_key, tenancy.once_bytes_max(call.tenant))
    return Event(
        type=new.type,
        payload=new.payload if new.payload_base64 is None else new.payload_base64,
        content_type=new.content_type,
        key=new.key,
        tenant=tenancy.resolve_tenant(call.tenant, new.tenant),
        once=None if once_key is None else tenancy.stored_key(call.tenant, once_key),
        once_for=new.once_for,
        expires_in=new.expires_in,
        deliver_at=new.deliver_at,
        headers=new.headers,
    )


async def _find_used(call: Call[Any, Any], keys: Sequence[str | None]) -> dict[str, UUID]:
    """Find the earlier events of used idempotency keys."""
    return await call.run(once.find_events, [key for key in keys if key is not None])


# ---------------------------------------------------------------- queries


class EventsQuery(IdPaging):
    key: Text | None = None
    type: TypePatterns = ()
    """Type patterns such as order.*; repeatable."""
    tenant: Name | None = None
    since: TimeOrAge | None = None
    """Published at this time or later."""
    until: TimeOrAge | None = None
    """Published before this time."""
    deliveries: bool = False
    """Count the deliveries of each event by state; only with a limit of at most 100."""


class SearchExtent(ResponseModel):
    """Extent of the search; null for tenant tokens.  A page may have few events and a `next`."""

    scanned: int | None
    scanned_back_to: datetime | None


@route.get(
    "/v1/events",
    "Search events, newest first",
    scope="read",
    tenants=TenantAccess.NARROWED,
    responses={200: PageOf(EventRow, SearchExtent)},
)
async def _list(call: Call[EventsQuery, None]) -> Page[Any]:
    query = call.query
    if query.deliveries and query.limit > COUNTED_EVENTS_MAX:
        raise UsageError(f"deliveries: needs a limit of at most {COUNTED_EVENTS_MAX}")
    found = await call.run(
        events.search_events,
        Criteria(
            types=query.type,
            tenant=tenancy.resolve_tenant(call.tenant, query.tenant),
            since=query.since,
            until=query.until,
        ),
        key=query.key,
        limit=query.limit,
        below=id_cursor(query.after, ID_MAX),
        deliveries=query.deliveries,
        owner=call.tenant,
    )
    rest: dict[str, Any] = {"scanned": None, "scanned_back_to": None}
    if call.tenant is None:
        rest = {"scanned": found.scanned, "scanned_back_to": found.scanned_back_to}
    return Page(found.events, None if found.next is None else str(found.next), rest)


class TraceQuery(RequestModel):
    endpoint: Name | None = None
    """Deliveries to this endpoint only."""
    limit: int = Field(default=5, ge=1, le=TRACED_EVENTS_MAX)
    """Maximum number of a key's events, newest first; fewer if their traces are large."""
    before: int = Field(default=ID_MAX, ge=1, le=ID_MAX)
    """Events of a key before this outbox id."""
    payload: bool = False
    """Whether payloads are included."""


@route.get(
    "/v1/trace/{id}",
    "Trace an event by id, ordering key, idempotency key or X-Delivery",
    scope="read",
    tenants=TenantAccess.NARROWED,
)
async def _trace(call: Call[TraceQuery, None]) -> TraceReport:
    query = call.query
    text = call.path["id"]
    report = await call.run(
        trace.trace_events,
        text,
        endpoint=query.endpoint,
        limit=query.limit,
        below=query.before,
        payload=query.payload,
        tenant=call.tenant,
        once_key=tenancy.stored_key(call.tenant, text),
        bytes_max=PAGE_BYTES_MAX,
    )
    redactor = await redactor_for(call)
    return replace(report, events=[redactor.redact_trace(each) for each in report.events])
