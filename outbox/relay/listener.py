"""The listener: turns notifications into rings, on a connection of its own.

Notifications only make things quicker; nothing depends on one arriving.  So a
lost connection is opened again here, without disturbing anything else, and
after every LISTEN both bells are rung: read first, then wait.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from outbox.errors import OutboxError
from outbox.store.connect import TROUBLE, in_one_line
from outbox.store.notify import OWNERS_SUFFIX, RECONFIGURED

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncpg import Connection

    from outbox.relay.bell import Bell

log = structlog.get_logger("outbox.listener")

HEARTBEAT_S = 5.0
HEARTBEAT_TIMEOUT_S = 5.0
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.1, 5.0


class Listener:
    """Listens until cancelled.

    Args:
        connect: opens the connection.
        producers: rung when events were published or endpoints changed.
        owners: rung when endpoints changed or other replicas have news.
        sequencer_pid: the backend of this replica's own sequencer, whose news
            arrives without a notification.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection[Any]]],
        schema: str,
        producers: Bell,
        owners: Bell,
        sequencer_pid: int,
    ) -> None:
        self._connect = connect
        self._schema = schema
        self._producers = producers
        self._owners = owners
        self._sequencer_pid = sequencer_pid

    async def run(self) -> None:
        """Listen, and reconnect, until cancelled."""
        delay_s = RECONNECT_MIN_S
        while True:
            try:
                await self._listen()
            except (*TROUBLE, OutboxError) as error:
                log.warning("listening was interrupted", reason=in_one_line(error), retry_s=delay_s)
            else:
                log.warning("the listening connection was closed", retry_s=RECONNECT_MIN_S)
                delay_s = RECONNECT_MIN_S
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, RECONNECT_MAX_S)

    async def _listen(self) -> None:
        """Listen on one connection until it is lost."""
        connection = await self._connect()
        lost = asyncio.Event()
        try:
            connection.add_termination_listener(lambda _: lost.set())
            async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                await connection.add_listener(self._schema, self._heard)
                await connection.add_listener(self._schema + OWNERS_SUFFIX, self._heard_owners)
            self._producers.ring()
            self._owners.ring()
            while not lost.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await lost.wait()
                        return
                # A half-open connection hears nothing, for ever.
                await connection.fetchval("SELECT 1", timeout=HEARTBEAT_TIMEOUT_S)
        finally:
            connection.terminate()

    def _heard(self, _connection: object, _pid: int, _channel: str, payload: object) -> None:
        self._producers.ring()
        if payload == RECONFIGURED:
            self._owners.ring()

    def _heard_owners(self, _connection: object, pid: int, *_: object) -> None:
        if pid != self._sequencer_pid:
            self._owners.ring()
