"""A relay with its transport, meters and health listener, in a process or in an application.

settings ──▶ connections, transport, meters ──▶ relay ──▶ health listener
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from outbox.core.model.cloud_metadata_ranges import network_warnings
from outbox.destinations.brokers import Brokers
from outbox.destinations.endpoint_validation import policy_of
from outbox.destinations.http.transport import HttpTransport
from outbox.network.egress import SETTING
from outbox.relay.cluster.connections import Connections
from outbox.relay.delivery.telemetry import DeliveryTelemetry
from outbox.relay.relay import Relay
from outbox.store.connection import dsn
from outbox.store.connection.current_settings import CurrentSettings
from outbox.telemetry.exposition_cache import ExpositionCache
from outbox.telemetry.meters import Meters
from outbox.telemetry.prometheus import PrometheusRenderer
from outbox.web import health
from outbox.web.serving import listen, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from aiohttp import web

    from outbox.config import Settings
    from outbox.relay.companion import Companion
    from outbox.telemetry.exporters import TelemetryExport
    from outbox.web.address import Address

log = structlog.get_logger("outbox.relay")


@asynccontextmanager
async def hosted_relay(
    settings: Settings,
    telemetry: TelemetryExport,
    warn: Callable[[str], None],
    *,
    name: str,
    wait_for_database: bool = False,
    companion: Companion | None = None,
) -> AsyncIterator[Relay]:
    """A relay that is not started, and its health listener, which is.

    Args:
        telemetry: where traces go, and what metrics are labelled with; the caller pushes metrics.
        warn: reports a line about the settings.
        name: the replica's name.
        wait_for_database, companion: see `Relay`.

    Raises:
        OutboxError: the DSN is invalid, or the address cannot be bound.
    """
    address = dsn.from_settings(settings)
    current = CurrentSettings(settings, address)
    for warning in (*address.warnings, *network_warnings(SETTING, settings.allow_networks)):
        warn(warning)
    async with AsyncExitStack() as stack:
        policy = policy_of(settings)
        transport = HttpTransport(
            policy, proxy=settings.outbound_proxy, idle_bytes_max=settings.buffer_bytes_max // 2
        )
        stack.push_async_callback(transport.aclose)
        brokers = Brokers(policy)
        stack.push_async_callback(brokers.aclose)
        meters = Meters(time.time(), settings.metrics_endpoints_max)
        relay = Relay(
            transport,
            Connections(current),
            name=name,
            telemetry=DeliveryTelemetry(meters, telemetry.tracing),
            brokers=brokers.connect,
            wait_for_database=wait_for_database,
            companion=companion,
        )
        if settings.health is not None:
            served = _health(settings.health, relay, telemetry)
            sockets = await listen(settings.health)
            where = await stack.enter_async_context(
                serving(served, sockets, connections_max=health.HEALTH_CONNECTIONS_MAX)
            )
            log.info("health and metrics", url=where.url)
        yield relay


def _health(address: Address, relay: Relay, telemetry: TelemetryExport) -> web.Application:
    cache = ExpositionCache(
        lambda: relay.snapshot(time.time()), PrometheusRenderer(telemetry.resource.attributes)
    )

    def unready_reason() -> str | None:
        condition = relay.readiness()
        return None if condition.ready else condition.public_reason

    def warning() -> str | None:
        condition = relay.readiness()
        return condition.public_reason if condition.ready else None

    return health.application(address, unready_reason, cache.exposition, warning)
