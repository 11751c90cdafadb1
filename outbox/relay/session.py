"""A session of a replica: from its registration to its release or the loss of the database.

All tasks run in one task group.  Any failure ends the group and closes requests
in flight; the next session starts from the tables.  No replica runs with only
some of its tasks.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import structlog

from outbox.relay.registration import Registration, SessionConnections
from outbox.relay.session_parts import build_session
from outbox.store.connection.secrets import Vault

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from outbox.config import Settings
    from outbox.destinations.broker import BrokerFactory
    from outbox.destinations.interface import Transport
    from outbox.relay.cluster.connections import Connections
    from outbox.relay.companion import Companion
    from outbox.relay.delivery.telemetry import DeliveryTelemetry
    from outbox.relay.registration import Registered
    from outbox.relay.session_state import RunningSession

log = structlog.get_logger("outbox.relay")

QUIET_SHARE, HAND_OVER_MIN_S = 0.8, 1.0
"""Share of `drain_s` for requests in flight; the rest is for releasing endpoints.  The
whole shutdown gets at least `HAND_OVER_MIN_S`, since the database may be slow."""
CANCEL_MAX_S = 1.0
"""Limit for cancelled background tasks to end."""


class Session:
    """A registered replica.

    Args:
        former: labels of this process's earlier replicas, see `Registration`.
        clock: steady seconds for the lease; wall-clock time comes from the database.
        wall: this machine's clock in epoch seconds, for comparison with the database's.
        rng: the source of the label, and of the jitter of retries and probes.
        telemetry: receives logs, metrics and traces of deliveries.
        on_registered: called after the registration.
        companion: a process beside the relay, whose problems are journalled.
    """

    def __init__(
        self,
        settings: Settings,
        transport: Transport,
        brokers: BrokerFactory | None,
        connections: Connections,
        name: str,
        version: str,
        former: list[str],
        clock: Callable[[], float],
        wall: Callable[[], float],
        rng: random.Random,
        telemetry: DeliveryTelemetry,
        on_registered: Callable[[], object],
        companion: Companion | None,
    ) -> None:
        self._settings = settings
        self._transport = transport
        self._brokers = brokers
        self._connections = connections
        self._opened = SessionConnections(connections)
        self._clock = clock
        self._wall = wall
        self._rng = rng
        self._telemetry = telemetry
        self._on_registered = on_registered
        self._companion = companion
        self._vault = Vault.from_settings(settings)
        self._registration = Registration(
            settings, connections, self._opened, self._vault, name, version, former, clock, rng
        )
        self._released = False
        self.running: RunningSession | None = None
        """Readiness and gauges; None: the replica is not registered yet."""

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set and all endpoints are released.

        Raises:
            ExceptionGroup: of asyncpg's errors, OSError or Fenced, if the session
                ended for another reason.
            OutboxError: the database cannot be used.
        """
        try:
            registered = await self._registration.register_unless(stop)
            if registered is not None:
                try:
                    await self._work(registered, stop)
                except Exception:
                    # After the release, a terminated connection loses nothing.
                    if not self._released:
                        raise
        finally:
            self._opened.terminate()

    async def _work(self, registered: Registered, stop: asyncio.Event) -> None:
        settings, me = self._settings, registered.replica_id
        log.info("replica registered", replica=me, lease_s=settings.lease_s)
        parts = build_session(
            settings, registered, self._connections, self._transport,
            self._brokers, self._vault, self._telemetry, self._clock, self._wall,
            self._rng, self._companion,
        )  # fmt: skip
        self._telemetry.meters.begin()
        self.running = parts.running
        self._on_registered()
        async with asyncio.TaskGroup() as tasks:
            cut = tasks.create_task(self._opened.terminate_at_end())
            delivering = tasks.create_task(parts.dispatcher.run())
            background = [
                tasks.create_task(each) for each in (self._opened.watch(), *parts.background)
            ]
            working = [
                tasks.create_task(parts.ownership.run()),
                tasks.create_task(parts.sequencer.run()),
            ]
            await stop.wait()
            log.info("draining", at_most_s=settings.drain_s)
            loop = asyncio.get_running_loop()
            quiet_by = loop.time() + settings.drain_s * QUIET_SHARE
            stopped_by = loop.time() + max(settings.drain_s, HAND_OVER_MIN_S)
            # Terminated, not cancelled: a cancelled transaction waits for its rollback.
            too_late = loop.call_at(stopped_by, self._opened.terminate)
            parts.dispatcher.stop(e.id for e in parts.dispatcher.endpoints())
            parts.ownership.stop()
            parts.sequencer.stop()
            await asyncio.wait(working)
            with suppress(TimeoutError):
                async with asyncio.timeout_at(quiet_by):
                    await parts.ownership.drain()
            # Requests in flight are closed before another replica may send them again.
            delivering.cancel()
            await asyncio.wait([delivering])
            await parts.recorder.flush()
            await parts.recorder.checkpoint()
            await parts.sequencer.release_leadership()
            await parts.replicas.release_all(me, f"replica {me}")
            self._released = True
            await parts.replicas.wake_all()
            for task in background:
                task.cancel()
            left_s = (stopped_by - loop.time()) / 2
            await asyncio.wait(background, timeout=min(left_s, CANCEL_MAX_S))
            # A COMMIT that hangs keeps its locks after its task has ended.
            await parts.replicas.terminate_busy_sessions(registered.label)
            too_late.cancel()
            cut.cancel()
