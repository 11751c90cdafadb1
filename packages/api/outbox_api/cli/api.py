"""`outbox api`: serve the API, its page and the receivers in a process of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from outbox.config import load
from outbox.errors import UsageError
from outbox.event_loop import allow_many_sockets, loop_factory
from outbox.telemetry.logs import configure
from outbox_api import process


@click.command(
    epilog="""\b
Examples:
  outbox api --admin 127.0.0.1:8080              the API and its page
  outbox api --receivers 127.0.0.1:8090          missing events for receivers
  outbox relay --admin 127.0.0.1:8080            a relay that starts the API beside it

It needs a role of its own: outbox migrate --api ROLE, then OUTBOX_API_DSN with that
role. Any number of these processes may run, on any machine that reaches the database;
relays need none of them. Test deliveries to endpoints are sent from this process.

The first SIGTERM (or Ctrl-C) ends it after the requests that it works on.
"""
)
@click.option("--config", metavar="FILE", help="Settings file; default: ./outbox.toml.")
@click.option(
    "--schema", "schema_name", metavar="NAME", help="Schema of the outbox tables; default: relay."
)
@click.option(
    "--dsn",
    "api_dsn",
    metavar="DSN",
    help="Database DSN; prefer OUTBOX_API_DSN, because ps shows flags.",
)
@click.option(
    "--admin",
    metavar="HOST:PORT",
    help="Serve the API and its page at this address, for tokens of `outbox token`.",
)
@click.option(
    "--receivers",
    metavar="HOST:PORT",
    help="Serve missing events to receivers at this address; see outbox endpoint fetch-token.",
)
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Serve /healthz, /readyz and /metrics at this address, without authentication.",
)
@click.option(
    "--allow-networks",
    metavar="RANGES",
    help="Private networks that endpoints may be in, such as 127.0.0.0/8,10.0.0.0/8.",
)
@click.option(
    "--proxy",
    metavar="URL",
    help="Forward proxy for test deliveries; prefer OUTBOX_PROXY, because ps shows flags.",
)
@click.option(
    "--log-format",
    metavar="FORMAT",
    help="json, console, or auto (default): console on a terminal.",
)
@click.option(
    "--log-level",
    metavar="LEVEL",
    help="Minimum log level: debug, info (default), warning or error.",
)
def command(config: str | None, **flags: Any) -> None:
    """Serve the HTTP API, its page, and missing events for receivers."""
    settings = load(flags, config=config)
    if settings.admin is None and settings.receivers is None:
        raise UsageError("there is nothing to serve: add --admin HOST:PORT or --receivers")
    configure(settings)
    allow_many_sockets()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(process.run(settings))
