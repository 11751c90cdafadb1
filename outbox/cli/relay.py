"""`outbox relay`: run the relay as a sidecar process."""

from __future__ import annotations

import asyncio
from typing import Any

import click

from outbox.cli import relay_process
from outbox.cli.process_options import process_options
from outbox.config import load
from outbox.event_loop import allow_many_sockets, loop_factory
from outbox.telemetry.logs import configure


@click.command(
    epilog="""\b
Examples:
  outbox relay --dsn postgresql://localhost/app
  OUTBOX_ALLOW_NETWORKS=127.0.0.0/8 outbox relay      also deliver to this machine
  outbox relay --health 127.0.0.1:9090                with metrics and probes
  outbox relay --admin 127.0.0.1:8080                 with the HTTP API

Prometheus scrapes /metrics on the --health address. OTEL_EXPORTER_OTLP_ENDPOINT also
exports metrics and traces by OTLP; a trace runs from the producer's transaction to the
receiver. To sample 1% of the traces, set OTEL_TRACES_SAMPLER=parentbased_traceidratio
and OTEL_TRACES_SAMPLER_ARG=0.01.

The first SIGTERM (or Ctrl-C) waits for requests in flight, at most --drain seconds, and
releases the endpoints to other relays. The second one stops at once. Neither loses an
event: unacknowledged deliveries are sent again with the same sequence number.
"""
)
@process_options(
    click.option(
        "--dsn", metavar="DSN", help="Database DSN; prefer OUTBOX_DSN, because ps shows flags."
    ),
    click.option(
        "--lease",
        "lease_s",
        metavar="SECONDS",
        help="Lease time-out in seconds after which another relay takes over; default: 5.",
    ),
    click.option(
        "--drain",
        "drain_s",
        metavar="SECONDS",
        help="Graceful-shutdown time-out in seconds; default: 15.",
    ),
    click.option(
        "--notify/--no-notify",
        default=None,
        help="LISTEN for new events (default), or only poll every OUTBOX_POLL_S seconds.",
    ),
    click.option(
        "--admin",
        metavar="HOST:PORT",
        help="Run `outbox api` beside it, with the API at this address; default: off.",
    ),
    click.option(
        "--receivers",
        metavar="HOST:PORT",
        help="Run `outbox api` beside it, with missing events for receivers at this address.",
    ),
    click.option(
        "--tenant-in-flight-max",
        metavar="N",
        help="Maximum concurrent requests to one tenant's endpoints; default: no limit.",
    ),
    click.option(
        "--tenant-rate",
        "tenant_rate_per_s",
        metavar="N",
        help="Maximum requests per second to one tenant's endpoints; default: no limit.",
    ),
)
def command(config: str | None, **flags: Any) -> None:
    """Run the relay, which delivers published events to their endpoints.

    Run one or more relays beside the application. They divide the endpoints among
    themselves, and take over the endpoints of a relay that has stopped.
    """
    settings = load(flags, config=config)
    configure(settings)
    allow_many_sockets()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(relay_process.run(settings))
