"""The process of the API: its listeners, until it is to end."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from outbox.api_settings import for_api
from outbox.core.model.cloud_metadata_ranges import network_warnings
from outbox.event_loop import STOP_SIGNALS, collect_rarely
from outbox.network.egress import SETTING
from outbox.store.connection import dsn
from outbox.store.connection.current_settings import CurrentSettings
from outbox.telemetry.api_series import add_api_series
from outbox.telemetry.exposition_cache import ExpositionCache
from outbox.telemetry.prometheus import PrometheusRenderer
from outbox.telemetry.snapshot import Snapshot
from outbox.version import __version__
from outbox.web import health
from outbox.web import serving as web_serving
from outbox_api import receivers, server
from outbox_api.shared import Shared

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from aiohttp import web

    from outbox.config import Settings
    from outbox.web.address import Address

log = structlog.get_logger("outbox.api")

PUBLIC_PROBLEM = "it cannot use the database; see the log of this API"
_LISTENERS = {"admin": server.running, "receivers": receivers.running}


async def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        OutboxError: an address cannot be bound, or the DSN is invalid.
    """
    stop = asyncio.Event()
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    listeners = {
        name: (address, await web_serving.listen(address))
        for name in _LISTENERS
        if (address := getattr(settings, name)) is not None
    }
    # An address that cannot be bound is an error before anything is served.
    sockets = None if settings.health is None else await web_serving.listen(settings.health)
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(serving(for_api(settings), listeners))
        if settings.health is not None and sockets is not None:
            served = web_serving.serving(
                _health(settings.health, shared),
                sockets,
                connections_max=health.HEALTH_CONNECTIONS_MAX,
            )
            log.info("health and metrics", url=(await stack.enter_async_context(served)).url)
        await stop.wait()


@asynccontextmanager
async def serving(
    settings: Settings, listeners: Mapping[str, tuple[Address, list[socket.socket]]]
) -> AsyncIterator[Shared]:
    """Serve while the context lasts.

    Args:
        listeners: addresses and sockets, by the setting of each listener.

    Raises:
        OutboxError: the DSN is invalid.
    """
    address = dsn.from_settings(settings)
    for warning in (*address.warnings, *network_warnings(SETTING, settings.allow_networks)):
        log.warning(warning)
    current, shared = CurrentSettings(settings, address), Shared()
    async with AsyncExitStack() as stack:
        for name, (at, sockets) in listeners.items():
            running = _LISTENERS[name](current, at, sockets, shared=shared)
            await stack.enter_async_context(running)
        collect_rarely()
        # Not in a task group: it would wrap the errors of the caller.
        watching = [asyncio.create_task(each.watch()) for each in shared.databases]
        try:
            yield shared
        finally:
            for each in watching:
                each.cancel()
            await asyncio.wait(watching)


def _health(address: Address, shared: Shared) -> web.Application:
    about = {
        "service.name": "outbox-api",
        "service.version": __version__,
        "service.instance.id": f"{socket.gethostname()}:{os.getpid()}",
    }

    async def snapshot() -> Snapshot:
        return add_api_series(Snapshot(0.0, time.time(), {}), shared.meters.to_json())

    cache = ExpositionCache(snapshot, PrometheusRenderer(about))
    return health.application(
        address, lambda: PUBLIC_PROBLEM if shared.problem else None, cache.exposition
    )
