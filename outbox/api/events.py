"""/v1/events and /v1/trace: publishing, and finding what became of it."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

from pydantic import AwareDatetime, Field, model_validator

from outbox.api import tenancy
from outbox.api.redaction import teller
from outbox.api.request_parsing import Paging, Seconds, When, moment
from outbox.api.route import ID_MAX, Call, For, Model, Page, PageOf, Reply, Route, Shown, id_cursor
from outbox.api.schemas import joined
from outbox.errors import InvalidEvent, NotFound, UsageError
from outbox.operations import (
    dead_letter_filter,
    events,
    find_event,
    trace,
)
from outbox.operations import (
    idempotency_keys as once,
)
from outbox.operations.dead_letter_filter import endpoint_ids
from outbox.operations.event_trace import Delivery, Fate, Story
from outbox.operations.events import EventRow, Wanted
from outbox.operations.views.trace import traced
from outbox.producers.publish import Event, publish_many

if TYPE_CHECKING:
    from collections.abc import Sequence

EVENTS_MAX = 1000
"""In one request, which is one transaction."""
STORIES_MAX = 100
IDEMPOTENCY_KEY = "Idempotency-Key"

# ---------------------------------------------------------------- publishing


class NewEvent(Model):
    """An event, by the names of `outbox publish`."""

    type: str
    payload: Any = Field(default_factory=dict)
    """Any JSON.  Numbers have 64 bits; what needs more digits goes as a text."""
    key: str | None = None
    """Events with the same key keep their order."""
    tenant: str | None = None
    """Only for this tenant's endpoints."""
    once: str | None = None
    """Publish nothing when this key was taken before, for whatever event."""
    once_for: Seconds | None = None
    """Keep that key for so long; 30 days where it is not said."""
    expires_in: Seconds | None = None
    """Not worth sending after so long."""
    deliver_at: AwareDatetime | None = None
    """Publish it then."""
    headers: dict[str, str] | None = None
    """Sent along."""


class NewEvents(NewEvent):
    """One event, or `{"events": [one, another]}`: all of them are published, or none."""

    many = "events"

    type: str = ""
    events: Annotated[tuple[NewEvent, ...], Field(min_length=1, max_length=EVENTS_MAX)] | None = (
        None
    )
    """Instead of one, so many in this order."""

    @model_validator(mode="after")
    def _one_or_many(self) -> NewEvents:
        said = self.model_fields_set
        if self.events is not None and said != {"events"}:
            raise ValueError("say one event, or events, not both")
        if self.events is None and "type" not in said:
            raise ValueError("type: is missing")
        return self


class Published(Shown):
    """What became of one event."""

    id: UUID | None
    """The event's; of a once key that was taken, the one that was published for it.  None:
    that was claimed, and nothing was published for it."""
    already: bool
    """True: its once key was taken, and nothing was published now."""


class ManyPublished(Shown):
    """What became of each, in the order of the request."""

    events: list[Published]


async def _publish(call: Call[Any, NewEvents]) -> Reply:
    body = call.body
    key = call.headers.get(IDEMPOTENCY_KEY)
    if body.events is not None and key is not None:
        raise UsageError(f"{IDEMPOTENCY_KEY}: is for one event; of many each has its own once")
    if key is not None and body.once is not None:
        raise UsageError(f"say {IDEMPOTENCY_KEY} or once, not both")
    given = [body] if body.events is None else body.events
    wanted = [_event(call, each, each.once if key is None else key) for each in given]
    try:
        async with call.db.transaction(isolation="read_committed"):
            ids = await publish_many(call.db, wanted, schema=call.schema)
    except InvalidEvent as error:
        if body.events is not None:
            raise
        # Of one, its number tells nothing.
        raise UsageError(str(error).removesuffix(" (event 1)")) from None
    taken = await _taken(call, [e.once for e, id_ in zip(wanted, ids, strict=True) if id_ is None])
    told = [
        {"id": event_id or taken.get(each.once or ""), "already": event_id is None}
        for each, event_id in zip(wanted, ids, strict=True)
    ]
    status = 201 if any(ids) else 200
    return Reply(told[0] if body.events is None else {"events": told}, status)


def _event(call: Call[Any, Any], said: NewEvent, once_key: str | None) -> Event:
    return Event(
        type=said.type,
        payload=said.payload,
        key=said.key,
        tenant=tenancy.forced(call.tenant, said.tenant),
        once=None if once_key is None else tenancy.once_key(call.tenant, once_key),
        once_for=said.once_for,
        expires_in=said.expires_in,
        deliver_at=said.deliver_at,
        headers=said.headers,
    )


async def _taken(call: Call[Any, Any], keys: Sequence[str | None]) -> dict[str, UUID]:
    """Which events were published for once keys that were taken."""
    return await once.events_of(call.db, call.schema, [key for key in keys if key is not None])


# ---------------------------------------------------------------- looking


class EventsQuery(Paging):
    key: str | None = None
    type: tuple[str, ...] = ()
    """Only of these types, such as order.*; may be given several times."""
    tenant: str | None = None
    since: When | None = None
    """Published then or later."""
    until: When | None = None
    """Published before."""


class Looked(Shown):
    """How far was looked, which a tenant is not told: a page may have few events, and go on."""

    looked_at: int | None
    looked_back_to: datetime | None


async def _list(call: Call[EventsQuery, None]) -> Page:
    query = call.query
    now = await dead_letter_filter.now(call.db)
    found = await events.find(
        call.db,
        call.schema,
        Wanted(
            query.key,
            query.type,
            tenancy.forced(call.tenant, query.tenant),
            moment(query.since, now),
            moment(query.until, now),
        ),
        limit=query.limit,
        below=id_cursor(query.after, ID_MAX),
    )
    rest: dict[str, Any] = {"looked_at": None, "looked_back_to": None}
    if call.tenant is None:
        rest = {"looked_at": found.looked_at, "looked_back_to": found.looked_back_to}
    return Page(found.events, None if found.next is None else str(found.next), rest)


class TraceQuery(Model):
    endpoint: str | None = None
    """Only what this endpoint got, or why it did not."""
    limit: int = Field(default=5, ge=1, le=STORIES_MAX)
    """Of a key's events, at most so many, the newest first."""
    before: int = Field(default=ID_MAX, ge=1, le=ID_MAX)
    """Of a key's events, those before this outbox id."""
    payload: bool = False
    """With payloads."""


DeliveryShown: Any = joined("TracedDelivery", Delivery, fate=Fate)
StoryShown: Any = joined(
    "Story", Story, deliveries=tuple[DeliveryShown, ...], diagnosis=tuple[str, ...]
)


class Traced(Shown):
    """What something stands for."""

    version: int
    found_by: str
    more: bool
    """There are older ones."""
    events: list[StoryShown]


async def _trace(call: Call[TraceQuery, None]) -> dict[str, Any]:
    query = call.query
    found = await _find(call, call.path["id"])
    only = await endpoint_ids(call.db, query.endpoint, call.tenant)
    told = [
        await trace.read(call.db, call.schema, outbox_id, endpoint_ids=only, payload=query.payload)
        for outbox_id in found.outbox_ids
    ]
    to = await teller(call)
    return traced(found, [to.story(each) for each in told])


async def _find(call: Call[TraceQuery, None], text: str) -> find_event.Found:
    """By whatever is in hand; of a tenant's token also its own once keys."""
    query, tenant = call.query, call.tenant
    try:
        return await find_event.find(
            call.db, call.schema, text, limit=query.limit, below=query.before, tenant=tenant
        )
    except NotFound:
        if tenant is None:
            raise
    own = tenancy.once_key(tenant, text)
    return await find_event.find(call.db, call.schema, own, tenant=tenant)


ROUTES = (
    Route(
        method="POST",
        path="/v1/events",
        summary="Publish one event, or up to 1,000 in one transaction",
        handler=_publish,
        scope="publish",
        tenants=For.NARROWED,
        body=NewEvents,
        headers={
            IDEMPOTENCY_KEY: "The once key of the one event: at most one event is published with "
            "it until it is reset or expires, whatever the body of a later request says. 201: it "
            "was published now. 200: it was already, and `id` is the earlier event's.",
        },
        answers={201: Published | ManyPublished, 200: Published | ManyPublished},
    ),
    Route(
        method="GET",
        path="/v1/events",
        summary="Look for events, the newest first",
        handler=_list,
        scope="read",
        tenants=For.NARROWED,
        query=EventsQuery,
        answers={200: PageOf(EventRow, Looked)},
    ),
    Route(
        method="GET",
        path="/v1/trace/{id}",
        summary="What happened to an event; by its id or key, a once key, or an X-Delivery",
        handler=_trace,
        scope="read",
        tenants=For.NARROWED,
        query=TraceQuery,
        answers={200: Traced},
    ),
)
