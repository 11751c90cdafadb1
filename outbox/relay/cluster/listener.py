"""The listener: turns notifications into wake events, on a connection of its own.

Notifications only reduce latency; nothing depends on their arrival.  So a lost
connection is reopened here without ending the session, and after every LISTEN all
tasks are woken: read first, then wait.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from outbox.errors import OutboxError
from outbox.store.channels import OWNERS_SUFFIX, RECONFIGURED
from outbox.store.connection.connect import CONNECTION_ERRORS, in_one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from asyncpg import Connection

    from outbox.relay.wake_event import WakeEvent

log = structlog.get_logger("outbox.listener")

HEARTBEAT_MIN_S, HEARTBEAT_MAX_S = 5.0, 15.0
HEARTBEAT_TIMEOUT_S = 5.0
HEARTBEAT_SHARE = 1 / 3
"""Of the lease: the server ends a listener that is silent for a lease."""
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.1, 5.0


class Listener:
    """Listens until cancelled.

    Args:
        connect: opens the connection.
        producers: set when events were published or endpoints changed.
        on_change: called when endpoints changed, or a notification may have been missed.
        on_notification: called with the payload of another replica's notification, and its backend.
        own_pids: the backends that send this replica's notifications; they are ignored.
        poll_s: events without a notification are found after this time; so the
            connection is checked no more often, within bounds.
        lease_s: the server's limit for a silent listener.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection[Any]]],
        schema: str,
        producers: WakeEvent,
        on_change: Callable[[], None],
        on_notification: Callable[[str, int], None],
        own_pids: Collection[int],
        poll_s: float,
        lease_s: float,
    ) -> None:
        self._connect = connect
        self._schema = schema
        self._producers = producers
        self._on_change = on_change
        self._on_notification = on_notification
        self._own_pids = own_pids
        relaxed_s = max(HEARTBEAT_MIN_S, min(poll_s, HEARTBEAT_MAX_S))
        self._heartbeat_s = min(relaxed_s, lease_s * HEARTBEAT_SHARE)
        self._wanted = True
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Listen, and reconnect, until cancelled."""
        delay_s = RECONNECT_MIN_S
        while True:
            try:
                await self._listen()
            except (*CONNECTION_ERRORS, OutboxError) as error:
                log.warning("listening was interrupted", reason=in_one_line(error), retry_s=delay_s)
            else:
                log.warning("the listening connection was closed", retry_s=RECONNECT_MIN_S)
                delay_s = RECONNECT_MIN_S
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RECONNECT_MAX_S)

    def listen_to_producers(self, *, wanted: bool) -> None:
        """Listen to producers or not; only the sequencing replica needs to."""
        if wanted != self._wanted:
            self._wanted = wanted
            self._changed.set()

    async def _listen(self) -> None:
        """Listen on one connection until it is lost."""
        connection = await self._connect()
        lost = False

        def lose(_: object) -> None:
            nonlocal lost
            lost = True
            self._changed.set()

        try:
            connection.add_termination_listener(lose)
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                await connection.add_listener(
                    self._schema + OWNERS_SUFFIX, self._on_owner_notification
                )
            self._on_change()
            listens = False
            while not lost:
                self._changed.clear()
                # `_wanted` may change before the server responds.
                wanted = self._wanted
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                    if wanted and not listens:
                        await connection.add_listener(self._schema, self._on_producer_notification)
                        self._producers.set()
                    elif listens and not wanted:
                        await connection.remove_listener(
                            self._schema, self._on_producer_notification
                        )
                listens = wanted
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._heartbeat_s):
                        await self._changed.wait()
                        continue
                # Heartbeat: a half-open TCP connection never reports its loss.
                await connection.fetchval("SELECT 1", timeout=HEARTBEAT_TIMEOUT_S)
        finally:
            connection.terminate()

    def _on_producer_notification(self, *_: object) -> None:
        self._producers.set()

    def _on_owner_notification(
        self, _connection: object, pid: int, _channel: str, payload: object
    ) -> None:
        if payload == RECONFIGURED:
            self._on_change()
        elif pid not in self._own_pids:
            self._on_notification(str(payload), pid)
