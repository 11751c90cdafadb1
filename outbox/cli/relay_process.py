"""The relay's process: the relay, and what goes along with it.

signals ──▶ relay ──▶ metrics and traces ──▶ the health listener, OTLP
                  └─▶ systemd
"""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import structlog

import outbox
from outbox.api.server import running as admin
from outbox.cli.common import warn, warn_of_networks
from outbox.cli.systemd import Supervisor
from outbox.destinations.http.egress import SETTING, EgressPolicy
from outbox.destinations.http.router import Outbound
from outbox.relay.cluster.connections import Connections
from outbox.relay.delivery.telemetry import Observer
from outbox.relay.relay import Relay, default_name
from outbox.store.connection import dsn
from outbox.telemetry.exporters import exporting
from outbox.telemetry.meters import Meters
from outbox.telemetry.prometheus import Page
from outbox.web import health
from outbox.web.serving import serving

if TYPE_CHECKING:
    from aiohttp import web

    from outbox.config import Settings
    from outbox.telemetry.exporters import Exporting

log = structlog.get_logger("outbox.relay")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
YOUNG_OBJECTS_MAX = 10_000
"""So many more objects than before, and garbage is collected."""


async def run(settings: Settings) -> None:
    """Run a relay until it is told to stop.

    Raises:
        OutboxError: it cannot run.
    """
    address = dsn.of(settings)
    for warning in address.warnings:
        warn(warning)
    warn_of_networks(SETTING, settings.allow_networks)
    name = default_name()
    telemetry = exporting(name, outbox.__version__)
    meters = Meters(time.time(), settings.metrics_endpoints_max)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(telemetry.close)
        transport = Outbound(
            EgressPolicy(settings.allow_networks),
            proxy=settings.leaves_by,
            kind=settings.transport,
        )
        stack.push_async_callback(transport.aclose)
        relay = Relay(
            settings,
            transport,
            Connections(address, settings),
            name=name,
            observer=Observer(meters, telemetry.tracing),
        )
        if settings.health is not None:
            where = await stack.enter_async_context(
                serving(_health(relay, telemetry), settings.health)
            )
            log.info("health and metrics", url=where.url)
        if settings.admin is not None:
            await stack.enter_async_context(admin(settings, settings.admin))
        if settings.receivers is not None:
            # Imported here: most relays have no such listener.
            from outbox.api import receivers

            await stack.enter_async_context(receivers.running(settings, settings.receivers))
        # What has been imported stays: collecting garbage need not go through it again and again.
        gc.collect()
        gc.freeze()
        # A delivery makes hundreds of objects and no cycles: looking for those so often as is
        # usual took 4 % of the time.
        gc.set_threshold(YOUNG_OBJECTS_MAX, *gc.get_threshold()[1:])
        await _deliver(relay, telemetry)


async def _deliver(relay: Relay, telemetry: Exporting) -> None:
    """Deliver until a signal says to stop; a second one stops at once."""
    supervisor = Supervisor()
    task = asyncio.current_task()
    assert task is not None
    stopping = over = False

    def stop() -> None:
        nonlocal stopping
        if stopping and not over:
            task.cancel()
        stopping = True
        supervisor.stopping()
        relay.stop()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop)
    failed: Exception | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            beside = [
                tasks.create_task(telemetry.push(lambda: relay.snapshot(time.time()))),
                tasks.create_task(supervisor.follow(relay)),
            ]
            try:
                await relay.run()
            except Exception as error:
                failed = error  # As it is, and not in a group.
            finally:
                for each in beside:
                    each.cancel()
    except asyncio.CancelledError:
        if not stopping:
            raise
    finally:
        # What is left is bounded, and nothing is in flight any more.
        over = True
    if failed is not None:
        raise failed


def _health(relay: Relay, telemetry: Exporting) -> web.Application:
    page = Page(telemetry.resource.attributes)

    def why_not_ready() -> str | None:
        condition = relay.condition()
        return None if condition.ready else condition.to_anybody

    async def metrics(accept: str) -> tuple[bytes, str]:
        snapshot = await relay.snapshot(time.time())
        return await asyncio.to_thread(page.render, snapshot, accept)

    return health.application(why_not_ready, metrics)
