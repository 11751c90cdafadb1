"""The process of the API: its listeners, until it is to end."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from outbox.api_settings import for_api
from outbox.core.model.cloud_metadata_ranges import network_warnings
from outbox.network.egress import SETTING
from outbox.store.connection import dsn
from outbox.store.connection.current_settings import CurrentSettings
from outbox.web.serving import listen
from outbox_api import receivers, server
from outbox_api.in_flight import InFlight

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from socket import socket

    from outbox.config import Settings
    from outbox.web.address import Address

log = structlog.get_logger("outbox.api")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
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
        name: (address, await listen(address))
        for name in _LISTENERS
        if (address := getattr(settings, name)) is not None
    }
    async with serving(for_api(settings), listeners):
        await stop.wait()


@asynccontextmanager
async def serving(
    settings: Settings, listeners: Mapping[str, tuple[Address, list[socket]]]
) -> AsyncIterator[None]:
    """Serve while the context lasts.

    Args:
        listeners: addresses and sockets, by the setting of each listener.

    Raises:
        OutboxError: the DSN is invalid.
    """
    address = dsn.from_settings(settings)
    for warning in (*address.warnings, *network_warnings(SETTING, settings.allow_networks)):
        log.warning(warning)
    current = CurrentSettings(settings, address)
    requests = InFlight()
    async with AsyncExitStack() as stack:
        for name, (at, sockets) in listeners.items():
            running = _LISTENERS[name](current, at, sockets, requests=requests)
            await stack.enter_async_context(running)
        yield
