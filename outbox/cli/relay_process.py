"""The relay's process: signals, metrics, listeners and systemd around the relay.

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
from outbox.cli.common import warn, warn_about_networks
from outbox.cli.systemd import Supervisor
from outbox.destinations.http.egress import SETTING, EgressPolicy
from outbox.destinations.http.transport import HttpTransport
from outbox.relay.cluster.connections import Connections
from outbox.relay.delivery.telemetry import DeliveryTelemetry
from outbox.relay.relay import Relay, default_name
from outbox.store.connection import dsn
from outbox.telemetry.exporters import configure_export
from outbox.telemetry.exposition_cache import ExpositionCache
from outbox.telemetry.meters import Meters
from outbox.telemetry.prometheus import PrometheusRenderer
from outbox.web import health
from outbox.web.serving import serving

if TYPE_CHECKING:
    from aiohttp import web

    from outbox.config import Settings
    from outbox.telemetry.exporters import TelemetryExport

log = structlog.get_logger("outbox.relay")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
YOUNG_OBJECTS_MAX = 10_000
"""Allocations that trigger a collection of the youngest generation."""


async def run(settings: Settings) -> None:
    """Run a relay until SIGTERM or SIGINT.

    Raises:
        OutboxError: the relay cannot run.
    """
    address = dsn.from_settings(settings)
    for warning in address.warnings:
        warn(warning)
    warn_about_networks(SETTING, settings.allow_networks)
    name = default_name()
    telemetry = configure_export(name, outbox.__version__)
    meters = Meters(time.time(), settings.metrics_endpoints_max)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(telemetry.close)
        transport = HttpTransport(
            EgressPolicy(settings.allow_networks), proxy=settings.outbound_proxy
        )
        stack.push_async_callback(transport.aclose)
        relay = Relay(
            settings,
            transport,
            Connections(address, settings),
            name=name,
            telemetry=DeliveryTelemetry(meters, telemetry.tracing),
        )
        if settings.health is not None:
            where = await stack.enter_async_context(
                serving(_health(relay, telemetry), settings.health)
            )
            log.info("health and metrics", url=where.url)
        if settings.admin is not None:
            await stack.enter_async_context(admin(settings, settings.admin))
        if settings.receivers is not None:
            # Imported here, because most relays have no receivers' listener.
            from outbox.api import receivers

            await stack.enter_async_context(receivers.running(settings, settings.receivers))
        # Imported modules are permanent: freeze them, so that collections do not scan them.
        gc.collect()
        gc.freeze()
        # A delivery allocates hundreds of objects and no cycles; with the default threshold,
        # the cycle collector took 4 % of the CPU time.
        gc.set_threshold(YOUNG_OBJECTS_MAX, *gc.get_threshold()[1:])
        await _deliver(relay, telemetry)


async def _deliver(relay: Relay, telemetry: TelemetryExport) -> None:
    """Deliver until the first stop signal drains the relay; the second cancels it."""
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
            background = [
                tasks.create_task(telemetry.push(lambda: relay.snapshot(time.time()))),
                tasks.create_task(supervisor.follow(relay)),
            ]
            try:
                await relay.run()
            except Exception as error:
                failed = error  # Raised below, not inside an ExceptionGroup.
            finally:
                for each in background:
                    each.cancel()
    except asyncio.CancelledError:
        if not stopping:
            raise
    finally:
        # The remaining clean-up is bounded and has no requests in flight: a second signal
        # must not cancel it.
        over = True
    if failed is not None:
        raise failed


def _health(relay: Relay, telemetry: TelemetryExport) -> web.Application:
    cache = ExpositionCache(
        lambda: relay.snapshot(time.time()), PrometheusRenderer(telemetry.resource.attributes)
    )

    def unready_reason() -> str | None:
        condition = relay.readiness()
        return None if condition.ready else condition.public_reason

    return health.application(unready_reason, cache.exposition)
