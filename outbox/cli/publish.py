"""`outbox publish`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from outbox.cli.common import database, duration_s, json_option, run_async, settings_options
from outbox.cli.output import emit_json
from outbox.errors import UsageError
from outbox.producer import publish

if TYPE_CHECKING:
    from outbox.config import Settings


@click.command(
    epilog="""\b
Examples:
  outbox publish order.paid --key order-7 --payload '{"order": 7}'
  jq -c . order.json | outbox publish order.paid --payload -
  outbox publish plan.renewed --once plan:7    at most once in 30 days
"""
)
@click.argument("type_", metavar="TYPE")
@click.option("--key", metavar="KEY", help="Events with the same key keep their order.")
@click.option("--payload", metavar="JSON", default="{}", help="The event's data; - reads stdin.")
@click.option("--once", metavar="KEY", help="Publish nothing when this key was taken before.")
@click.option("--tenant", metavar="TENANT", help="Only for this tenant's endpoints.")
@click.option(
    "--header", "headers", multiple=True, metavar="NAME=VALUE", help="Sent along; repeatable."
)
@click.option(
    "--expires-in",
    type=duration_s,
    metavar="TIME",
    help="Not worth sending after: 30s, 10m, 2h, 1d.",
)
@json_option
@settings_options
def command(
    settings: Settings,
    type_: str,
    key: str | None,
    payload: str,
    once: str | None,
    tenant: str | None,
    headers: tuple[str, ...],
    expires_in: float | None,
    as_json: bool,
) -> None:
    """Publish one event of TYPE, in a transaction of its own."""
    raw = _read(payload)

    async def go() -> None:
        async with database(settings, current=False) as connection:
            event_id = await publish(
                connection,
                type_,
                raw,
                key=key,
                tenant=tenant,
                once=once,
                expires_in=expires_in,
                headers=_headers(headers),
                schema=settings.schema_name,
            )
        if as_json:
            emit_json({"id": event_id, "published": event_id is not None})
        elif event_id is None:
            click.echo(f'not published: the once key "{once}" was already taken')
        else:
            click.echo(f"published {event_id}")

    run_async(go())


def _read(payload: str) -> bytes:
    if payload == "-":
        if sys.stdin is None:
            raise UsageError("--payload -: stdin is closed")
        return sys.stdin.buffer.read()
    return payload.encode("utf-8", "surrogateescape")


def _headers(pairs: tuple[str, ...]) -> dict[str, str] | None:
    headers: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UsageError(f'--header: "{pair}" is not NAME=VALUE')
        if name in headers:
            raise UsageError(f'--header: "{name}" stands there twice')
        headers[name] = value
    return headers or None
