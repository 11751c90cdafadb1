"""`outbox api`: serve the API, its page and the receivers in a process of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import click
import orjson

from outbox.cli.process_options import process_options
from outbox.config import load
from outbox.errors import UsageError
from outbox.event_loop import allow_many_sockets, loop_factory
from outbox.telemetry.logs import configure
from outbox_api import process
from outbox_api.openapi import document
from outbox_api.routes import ROUTES


def _print_document(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(orjson.dumps(document(ROUTES), option=orjson.OPT_INDENT_2))  # noqa: TID251 (our own document)
        context.exit()


@click.command(
    epilog="""\b
Examples:
  outbox api --admin 127.0.0.1:8080              the API and its page
  outbox api --receivers 127.0.0.1:8090          missing events for receivers
  outbox relay --admin 127.0.0.1:8080            a relay that starts the API beside it

It needs a role of its own: outbox migrate --api ROLE, then OUTBOX_API_DSN with that
role. Any number of these processes may run, on any machine that reaches the database;
relays need none of them. Test deliveries to endpoints are sent from this process.

SIGTERM (or Ctrl-C) ends it. Requests that it works on have one second to end.
"""
)
@process_options(
    click.option(
        "--openapi",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_print_document,
        help="Print the OpenAPI document of the API, and do nothing else.",
    ),
    click.option(
        "--dsn",
        metavar="DSN",
        help="Database DSN; prefer OUTBOX_API_DSN, because ps shows flags.",
    ),
    click.option(
        "--admin",
        metavar="HOST:PORT",
        help="Serve the API and its page at this address, for tokens of `outbox token`.",
    ),
    click.option(
        "--receivers",
        metavar="HOST:PORT",
        help="Serve missing events at this address, for tokens of `outbox endpoint fetch-token`.",
    ),
)
def command(config: str | None, **flags: Any) -> None:
    """Serve the HTTP API, its page, and missing events for receivers."""
    settings = load(flags, config=config)
    if flags["dsn"] is not None:  # Flags come before variables.
        settings = settings.model_copy(update={"api_dsn": None})
    if settings.admin is None and settings.receivers is None:
        raise UsageError("there is nothing to serve: add --admin HOST:PORT or --receivers")
    configure(settings)
    allow_many_sockets()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(process.run(settings))
