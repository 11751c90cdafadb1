"""The listener: turns notifications into wake events, on a connection of its own.

Notifications only reduce latency; nothing depends on their arrival.  So a lost
connection is reopened here without ending the session, and after every LISTEN all
tasks are woken: read first, then wait.

Any role that may connect can send notifications.  Wake-ups are therefore coalesced, and a
flood, which would take the event loop's time even if it were ignored, is answered by
disconnecting: until the next try the relay polls.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import structlog

from outbox.core.sequencing.batch_notifications import READ_BATCHES
from outbox.core.sequencing.tenant_pace import PASS_S
from outbox.errors import OutboxError
from outbox.store.channels import HELD, OWNERS_SUFFIX, RECONFIGURED
from outbox.store.connection.connect import CONNECTION_ERRORS, in_one_line

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from asyncpg import Connection

    from outbox.config import Settings
    from outbox.relay.wake_event import Wakeups

log = structlog.get_logger("outbox.listener")

HEARTBEAT_MIN_S, HEARTBEAT_MAX_S = 5.0, 15.0
HEARTBEAT_TIMEOUT_S = 5.0
HEARTBEAT_SHARE = 1 / 3
"""Share of the lease.  The server ends a listener that is silent for a lease."""
RECONNECT_MIN_S, RECONNECT_MAX_S = 0.1, 5.0

CHANGES_EVERY_S = 0.1
"""Notifications of changed endpoints are coalesced to one per interval."""
FLOOD_PER_S = 2_000
"""Notifications in a second above which they are a flood.  Producers notify only while the relay
sleeps, and a sequencing replica sends at most 50 a second."""
FLOOD_MIN_S, FLOOD_MAX_S = 1.0, 30.0
"""How long the relay polls after a flood; doubled while the floods continue."""
FLOOD_POLL_S = 0.002
"""Short, so that a flood does not delay live deliveries: they wait for half of it on average."""
NO_PID = 0


class Listener:
    """Listens until cancelled.

    Args:
        connect: opens the connection.
        settings: events without a notification are found after `poll_s`, so the connection is
            checked no more often, within bounds; the server ends a listener that is silent for
            `lease_s`.
        wakeups: set also when a notification may have been missed.
        on_notification: called with the payload of another replica's notification, and its backend.
        own_pids: the backends that send this replica's notifications; they are ignored.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Connection[Any]]],
        settings: Settings,
        wakeups: Wakeups,
        on_notification: Callable[[str, int], None],
        own_pids: Callable[[], Collection[int]],
    ) -> None:
        self._connect = connect
        self._schema = settings.schema_name
        self._wakeups = wakeups
        self._report_held = _Coalescer(wakeups.schedules.set, PASS_S)
        self._report_change = _Coalescer(wakeups.poll_changes, CHANGES_EVERY_S)
        self._on_notification = on_notification
        self._own_pids = own_pids
        relaxed_s = max(HEARTBEAT_MIN_S, min(settings.poll_s, HEARTBEAT_MAX_S))
        self._heartbeat_s = min(relaxed_s, settings.lease_s * HEARTBEAT_SHARE)
        self._wanted = True
        self._changed = asyncio.Event()
        # Notifications since the start of the current second.
        self._second_at = 0.0
        self._received = 0

    async def run(self) -> None:
        """Listen, and reconnect, until cancelled."""
        delay_s, flood_s = RECONNECT_MIN_S, FLOOD_MIN_S
        loop = asyncio.get_running_loop()
        try:
            while True:
                started_at = loop.time()
                try:
                    await self._listen()
                except _Flooded:
                    if loop.time() - started_at > FLOOD_MAX_S:
                        flood_s = FLOOD_MIN_S
                    log.warning(
                        "too many notifications; polling instead",
                        per_s_max=FLOOD_PER_S,
                        retry_s=flood_s,
                    )
                    await self._poll(flood_s)
                    flood_s = min(flood_s * 2, FLOOD_MAX_S)
                    continue
                except (*CONNECTION_ERRORS, OutboxError) as error:
                    log.warning(
                        "listening was interrupted", reason=in_one_line(error), retry_s=delay_s
                    )
                else:
                    log.warning("the listening connection was closed", retry_s=RECONNECT_MIN_S)
                    delay_s = RECONNECT_MIN_S
                await asyncio.sleep(delay_s)
                delay_s = min(delay_s * 2, RECONNECT_MAX_S)
        finally:
            self._report_change.cancel()
            self._report_held.cancel()

    def set_leader(self, leads: bool) -> None:
        """Listen to producers or not; only the sequencing replica needs to."""
        if leads != self._wanted:
            self._wanted = leads
            self._changed.set()

    async def _poll(self, duration_s: float) -> None:
        """Wake the tasks at a bounded rate, in place of notifications."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + duration_s
        while loop.time() < ends_at:
            self._wakeups.published.set()
            self._on_notification(READ_BATCHES, NO_PID)
            await asyncio.sleep(FLOOD_POLL_S)

    async def _listen(self) -> None:
        """Listen on one connection until it is lost.

        Raises:
            _Flooded: there are too many notifications.
        """
        connection = await self._connect()
        self._received = 0
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
            self._wakeups.poll_changes()
            listens = False
            while not lost:
                self._changed.clear()
                if self._is_flooded:
                    raise _Flooded
                # `_wanted` may change before the server responds.
                wanted = self._wanted
                async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
                    if wanted and not listens:
                        await connection.add_listener(self._schema, self._on_producer_notification)
                        self._wakeups.published.set()
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

    @property
    def _is_flooded(self) -> bool:
        return self._received > FLOOD_PER_S

    def _count(self) -> bool:
        """Count a notification; False: it is one too many, and is ignored."""
        now = asyncio.get_running_loop().time()
        if now - self._second_at >= 1:
            self._second_at, self._received = now, 0
        self._received += 1
        if self._is_flooded:
            self._changed.set()
        return not self._is_flooded

    def _on_producer_notification(
        self, _connection: object, _pid: int, _channel: str, payload: object
    ) -> None:
        if not self._count():
            return
        if payload == HELD:
            self._report_held()
        else:
            self._wakeups.published.set()

    def _on_owner_notification(
        self, _connection: object, pid: int, _channel: str, payload: object
    ) -> None:
        if not self._count():
            return
        if payload == RECONFIGURED:
            self._report_change()
        elif pid not in self._own_pids():
            self._on_notification(str(payload), pid)


class _Flooded(Exception):
    """More than `FLOOD_PER_S` notifications arrived within a second."""


class _Coalescer:
    """Calls `action` at most once per interval; calls in between are deferred to its end."""

    def __init__(self, action: Callable[[], None], every_s: float) -> None:
        self._action = action
        self._every_s = every_s
        self._next_at = 0.0
        self._deferred: asyncio.TimerHandle | None = None

    def __call__(self) -> None:
        if self._deferred is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._next_at:
            self._run()
        else:
            self._deferred = loop.call_at(self._next_at, self._run)

    def cancel(self) -> None:
        if self._deferred is not None:
            self._deferred.cancel()
            self._deferred = None

    def _run(self) -> None:
        self._deferred = None
        self._next_at = asyncio.get_running_loop().time() + self._every_s
        self._action()
