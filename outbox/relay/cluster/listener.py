"""The listener: turns notifications into rings, on a connection of its own.

Notifications only make things quicker; nothing depends on one arriving.  So a
lost connection is opened again here, without disturbing anything else, and
after every LISTEN everybody is woken: read first, then wait.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from outbox.errors import OutboxError
from outbox.store.channels import OWNERS_SUFFIX, RECONFIGURED
from outbox.store.connection.connect import TROUBLE, in_one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from asyncpg import Connection

    from outbox.relay.wake_event import Bell

log = structlog.get_logger("outbox.listener")

HEARTBEAT_MIN_S, HEARTBEAT_MAX_S = 5.0, 15.0
HEARTBEAT_TIMEOUT_S = 5.0
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.1, 5.0


class Listener:
    """Listens until cancelled.

    Args:
        connect: opens the connection.
        producers: rung when events were published or endpoints changed.
        on_change: called when endpoints changed, or something may have been missed.
        on_news: called with what other replicas tell, and the backend that told it.
        own_pids: the backends by which this replica tells others.
        poll_s: events that nobody heard of are found after so long anyhow; so the
            connection is tried no more often than that, within bounds.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection[Any]]],
        schema: str,
        producers: Bell,
        on_change: Callable[[], None],
        on_news: Callable[[str, int], None],
        own_pids: Collection[int],
        poll_s: float,
    ) -> None:
        self._connect = connect
        self._schema = schema
        self._producers = producers
        self._on_change = on_change
        self._on_news = on_news
        self._own_pids = own_pids
        self._heartbeat_s = max(HEARTBEAT_MIN_S, min(poll_s, HEARTBEAT_MAX_S))
        self._wanted = True
        self._changed = asyncio.Event()

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

    def hear_producers(self, *, wanted: bool) -> None:
        """Only who sequences needs to be woken by producers; the others are spared."""
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
                await connection.add_listener(self._schema + OWNERS_SUFFIX, self._heard_owners)
            self._on_change()
            listens = False
            while not lost:
                self._changed.clear()
                # It may be another one before the server has answered.
                wanted = self._wanted
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                    if wanted and not listens:
                        await connection.add_listener(self._schema, self._heard)
                        self._producers.ring()
                    elif listens and not wanted:
                        await connection.remove_listener(self._schema, self._heard)
                listens = wanted
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._heartbeat_s):
                        await self._changed.wait()
                        continue
                # A half-open connection hears nothing, for ever.
                await connection.fetchval("SELECT 1", timeout=HEARTBEAT_TIMEOUT_S)
        finally:
            connection.terminate()

    def _heard(self, *_: object) -> None:
        self._producers.ring()

    def _heard_owners(self, _connection: object, pid: int, _channel: str, payload: object) -> None:
        if payload == RECONFIGURED:
            self._on_change()
        elif pid not in self._own_pids:
            self._on_news(str(payload), pid)
