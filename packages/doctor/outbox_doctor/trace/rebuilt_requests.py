"""Requests as they were sent: built again from an event and from the settings of its endpoint then.

Nothing is sent, and no request is stored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from outbox.core.messages.compat_signature import CompatSigner
from outbox.core.model.destination import is_stream
from outbox.core.model.endpoint_settings import SETTINGS
from outbox.core.model.headers import EndpointHeaders
from outbox.core.model.message_format import MessageFormat
from outbox.core.model.response import UNREACHABLE_FAILURES
from outbox.operations.events.deliveries import READ_DELIVERIES, find_batch
from outbox.operations.preview import (
    MASKED,
    READ_CONTENT,
    build_request,
    read_place,
    signature_headers,
)
from outbox.operations.rows import parse_json
from outbox.store.connection.connect import map_errors
from outbox.store.delivery.endpoints import read_endpoints
from outbox.store.retention.erasure import PLAN_BY_INDEX
from outbox_doctor.trace.model import RebuiltRequest
from outbox_doctor.trace.queries import trace_events

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from asyncpg import Connection, Record

    from outbox.core.delivery.endpoint import Endpoint
    from outbox.core.model.message_format import FormatName
    from outbox.store.connection.secrets import Vault
    from outbox_doctor.trace.model import EventTrace, TracedAttempt, TracedDelivery, TraceReport

# The values that an endpoint's settings had before each change since a time, the last change first.
READ_FORMER_SETTINGS = """
SELECT (SELECT jsonb_object_agg(key, value -> 0) FROM jsonb_each(data -> 'changes'))
       || coalesce(data -> 'former', '{}') AS former
  FROM journal
 WHERE endpoint_id = $1 AND kind = 'endpoint_updated' AND at > $2
 ORDER BY id DESC
"""

REBUILT_MAX = 20
"""Deliveries of a trace whose requests are rebuilt, the last ones: each takes several reads."""


async def trace_with_requests(
    connection: Connection[Any], schema: str, /, text: str, *, vault: Vault | None, **options: Any
) -> TraceReport:
    """Trace events, with the requests of their deliveries if there is a vault; see
    `outbox_doctor.trace.queries.trace_events`.
    """
    report = await trace_events(connection, schema, text, **options)
    if vault is None:
        return report
    events = [await add_requests(connection, schema, each, vault=vault) for each in report.events]
    return replace(report, events=events)


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
                READ_DELIVERIES, outbox_id, await find_batch(connection, outbox_id), list(ids)
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
    place = await read_place(connection, row)
    if "lanes" in former:
        # It was not known then that the lane would end.
        place = replace(place, ends=False)
    at = sent.started_at.timestamp()
    endpoint = _as_of(endpoint, former)
    built = build_request(endpoint, event, place, sent.attempt, at)
    left_out = signature_headers(endpoint)
    built["headers"] = tuple(each for each in built["headers"] if each[0].lower() not in left_out)
    return RebuiltRequest(sent.attempt, **built)


def _last_sent(delivery: TracedDelivery, endpoint: Endpoint) -> TracedAttempt | None:
    """The last attempt, if a request was sent; a broker's may have failed before anything was."""
    last = delivery.attempts[-1] if delivery.attempts else None
    if last is None or (is_stream(endpoint.url) and last.outcome != "delivered"):
        return None
    return None if (last.response or {}).get("failure") in UNREACHABLE_FAILURES else last


async def _former_settings(
    connection: Connection[Any], endpoint: Endpoint, at: datetime
) -> dict[str, Any]:
    """The settings that were changed since, as they were."""
    former: dict[str, Any] = {}
    for row in await connection.fetch(READ_FORMER_SETTINGS, endpoint.id, at):
        former |= parse_json(row["former"]) or {}
    return former


def _as_of(endpoint: Endpoint, former: Mapping[str, Any]) -> Endpoint:
    """The endpoint with former settings that say how a request looks."""
    own = endpoint.headers.own
    if (names := former.get("headers")) is not None:
        own = () if names == "none" else tuple((each, MASKED) for each in names.split())
    batch_max = endpoint.batch_max
    if (limit := former.get("batch_max")) is not None:
        batch_max = int(limit) if limit.isdecimal() else None
    prefix = former.get("header_prefix", endpoint.headers.prefix)
    compat = endpoint.compat
    if "compat" in former:
        compat = former["compat"] and SETTINGS["compat"].type.parse("compat", former["compat"])
    # Any key will do, because its signature is left out; the former ones may be deleted.
    signer = None if compat is None else CompatSigner(compat, [(b"", None)])
    name, source = endpoint.message_format
    changed: dict[str, Any] = {each: former[each] for each in ("method", "url") if each in former}
    return replace(
        endpoint,
        **changed,
        batch_max=batch_max,
        compat=compat,
        headers=EndpointHeaders(own, prefix, signer),
        message_format=MessageFormat(
            cast("FormatName", former.get("format", name)), former.get("source", source)
        ),
    )
