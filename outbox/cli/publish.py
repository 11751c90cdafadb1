"""`outbox publish`: publish one event."""

from __future__ import annotations

import asyncio
import sys
from datetime import datetime
from typing import TYPE_CHECKING

import click

from outbox.cli.common import duration_s, json_option, run_connected, settings_options, warn
from outbox.cli.output import cell, echo, emit_json
from outbox.errors import UsageError
from outbox.operations.events.queries import explain_no_subscriber
from outbox.producers.publish import publish

if TYPE_CHECKING:
    from typing import Any
    from uuid import UUID

    from asyncpg import Connection

    from outbox.config import Settings

EXPLAIN_S = 5.0
"""How long the endpoints of a published event are searched."""


def time_with_zone(text: str) -> datetime:
    """Parse a time with a zone: `2027-01-31T09:00:00+01:00`, or `Z` for UTC.

    Raises:
        click.BadParameter: the text is no time, or has no zone.
    """
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f'"{text}" is not a time such as 2027-01-31T09:00:00Z') from None
    if at.utcoffset() is None:
        raise click.BadParameter(f'"{text}" has no time zone; write {text}Z or {text}+01:00')
    return at


@click.command(
    epilog="""\b
Examples:
  outbox publish order.paid --key order-7 --payload '{"order": 7}'
  jq -c . order.json | outbox publish order.paid --payload -
  outbox publish image.added --payload - --content-type image/png <logo.png
  outbox publish plan.renewed --once plan:7    at most once in 30 days
  outbox publish report.due --once report --once-for 1d
  outbox publish trial.ended --key user-7 --at 2027-01-31T09:00:00+01:00
"""
)
@click.argument("type_", metavar="TYPE")
@click.option(
    "--key", metavar="KEY", help="Ordering key: events with the same key keep their order."
)
@click.option("--payload", metavar="JSON", help="Payload; - reads stdin.  Default: {}.")
@click.option(
    "--content-type",
    metavar="TYPE",
    help="Content type of a payload that is not JSON, such as image/png.",
)
@click.option(
    "--once", metavar="KEY", help="Idempotency key: publish only if this key is not taken."
)
@click.option(
    "--once-for",
    type=duration_s,
    metavar="TIME",
    help="Retention of the idempotency key: 10m, 2h, 1d; default: 30d.",
)
@click.option(
    "--tenant", metavar="TENANT", help="Tenant of the event, which selects its endpoints."
)
@click.option(
    "--header",
    "headers",
    multiple=True,
    metavar="NAME=VALUE",
    help="Header of the event; repeatable.",
)
@click.option(
    "--expires-in",
    type=duration_s,
    metavar="TIME",
    help="Expiry, after which the event is not sent: 30s, 10m, 2h, 1d; counted from --at.",
)
@click.option(
    "--at",
    "--deliver-at",
    "deliver_at",
    type=time_with_zone,
    metavar="TIME",
    help="Delay the event until this time: 2027-01-31T09:00:00+01:00.",
)
@json_option
@settings_options
def command(
    settings: Settings,
    type_: str,
    key: str | None,
    payload: str | None,
    content_type: str | None,
    once: str | None,
    once_for: float | None,
    tenant: str | None,
    headers: tuple[str, ...],
    expires_in: float | None,
    deliver_at: datetime | None,
    as_json: bool,
) -> None:
    """Publish one event of TYPE, in a transaction of its own.

    An event with a tenant goes to the endpoints of this tenant (--tenant) and to those of
    all tenants (--all-tenants). An event without one goes to the endpoints without a tenant
    and to those of all tenants.
    """
    if payload is None and content_type is not None:
        raise UsageError("--content-type: requires --payload")
    raw = read_payload("{}" if payload is None else payload)

    async def publish_event(connection: Connection[Any]) -> tuple[UUID | None, str | None]:
        event_id = await publish(
            connection,
            type_,
            raw,
            key=key,
            tenant=tenant,
            once=once,
            once_for=once_for,
            expires_in=expires_in,
            deliver_at=deliver_at,
            headers=parse_headers(headers),
            content_type=content_type,
            autocommit=True,
            schema=settings.schema_name,
        )
        if event_id is None:
            return None, None
        try:
            async with asyncio.timeout(EXPLAIN_S):
                return event_id, await explain_no_subscriber(connection, type_, tenant)
        except TimeoutError:
            # The event is published: a command that hangs would let a script publish it again.
            connection.terminate()
            return event_id, None

    event_id, unsubscribed = run_connected(settings, publish_event, current=False)
    if as_json:
        extra = {} if deliver_at is None else {"deliver_at": deliver_at}
        emit_json({"id": event_id, "already": event_id is None, **extra})
    elif event_id is None:
        echo(f'not published: the idempotency key "{once}" was already taken')
    elif deliver_at is not None:
        echo(f"published {event_id}, due {cell(deliver_at)}")
    else:
        echo(f"published {event_id}")
    if unsubscribed is not None:
        warn(unsubscribed)


def read_payload(payload: str) -> bytes:
    """The payload's bytes; `-` reads stdin.

    Raises:
        UsageError: stdin is closed.
    """
    if payload == "-":
        if sys.stdin is None:
            raise UsageError("--payload -: stdin is closed")
        return sys.stdin.buffer.read()
    return payload.encode("utf-8", "surrogateescape")


def parse_headers(pairs: tuple[str, ...]) -> dict[str, str] | None:
    """Parse the values of --header; None if there are none.

    Raises:
        UsageError: a value is not NAME=VALUE, or a name is given twice.
    """
    headers: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f'--header: "{pair}" is not NAME=VALUE')
        if name in headers:
            raise UsageError(f'--header: "{name}" is given twice')
        headers[name] = value
    return headers or None
