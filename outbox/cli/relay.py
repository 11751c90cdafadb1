"""`outbox relay`: the sidecar."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from outbox.cli import relay_process
from outbox.cli.logs import configure
from outbox.config import load

if TYPE_CHECKING:
    from collections.abc import Callable


@click.command(
    epilog="""\b
Examples:
  outbox relay --dsn postgresql://localhost/app
  OUTBOX_ALLOW_NETWORKS=127.0.0.0/8 outbox relay      deliver to this machine, too
  outbox relay --health 127.0.0.1:9090                metrics for Prometheus, probes
  outbox relay --admin 127.0.0.1:8080                 with the HTTP API: /openapi.json

Metrics are at /metrics of --health. With OTEL_EXPORTER_OTLP_ENDPOINT they are also
pushed by OTLP, and so are traces, from the producer's transaction to the receiver;
OTEL_TRACES_SAMPLER=parentbased_traceidratio with OTEL_TRACES_SAMPLER_ARG=0.01 keeps one
of a hundred.

SIGTERM (or Ctrl-C) ends what is in flight, for at most OUTBOX_DRAIN_S seconds,
and hands everything over; a second one stops at once. Nothing is lost either
way: what was not acknowledged is sent again, with the same number.
"""
)
@click.option("--config", metavar="FILE", help="Settings; default: ./outbox.toml.")
@click.option(
    "--schema", "schema_name", metavar="NAME", help="Schema of the outbox; default: relay."
)
@click.option(
    "--dsn", metavar="DSN", help="The database; better set as OUTBOX_DSN, which ps hides."
)
@click.option(
    "--lease",
    "lease_s",
    metavar="SECONDS",
    help="After so long without a sign of life others take over; default: 5.",
)
@click.option("--drain", "drain_s", metavar="SECONDS", help="At most so long to stop; default: 15.")
@click.option(
    "--notify/--no-notify",
    default=None,
    help="LISTEN for producers (default), or look each OUTBOX_POLL_S seconds alone.",
)
@click.option(
    "--admin",
    metavar="HOST:PORT",
    help="Serve the HTTP API there, for tokens of `outbox token`; default: nowhere.",
)
@click.option(
    "--allow-networks",
    metavar="RANGES",
    help="Private networks that may be delivered to, such as 127.0.0.0/8,10.0.0.0/8.",
)
@click.option(
    "--proxy",
    metavar="URL",
    help="Deliver by https through this proxy; better set as OUTBOX_PROXY, which ps hides.",
)
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Serve /healthz, /readyz and /metrics there, to everybody who can reach it.",
)
@click.option(
    "--receivers",
    metavar="HOST:PORT",
    help="Let receivers fetch there what they are missing; see outbox endpoint fetch-token.",
)
@click.option(
    "--tenant-in-flight-max",
    metavar="N",
    help="Requests open at once to one tenant's endpoints; default: no limit.",
)
@click.option(
    "--tenant-rate",
    "tenant_rate_per_s",
    metavar="N",
    help="Requests begun in a second for one tenant; default: no limit.",
)
@click.option("--log-format", metavar="FORMAT", help="json, console, or auto (default).")
@click.option("--log-level", metavar="LEVEL", help="debug, info (default), warning or error.")
def command(config: str | None, **flags: Any) -> None:
    """Run the relay: deliver what is published.

    Run it beside the application, as one process or as many: they share the
    endpoints among themselves, and each takes over from one that died.
    """
    settings = load(flags, config=config)
    configure(settings)
    _allow_many_sockets()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(relay_process.run(settings))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """uvloop's, where there is one: its sockets and timers cost a fraction."""
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _allow_many_sockets() -> None:
    """As many open files as the system lets us have: every kept connection is one."""
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
